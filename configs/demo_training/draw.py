"""The demo model's world: one coloured shape that moves over a plain background.

A clip is described by a sentence such as "a red circle moving left", and drawn
by signed distances, so that edges are smooth at any size.
"""

import dataclasses
import itertools

import numpy as np

COLOURS = {
    "red": (222, 44, 44),
    "green": (44, 178, 74),
    "blue": (54, 92, 232),
    "yellow": (240, 208, 48),
    "purple": (164, 70, 204),
    "white": (238, 238, 238),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
COMBINATIONS = tuple(itertools.product(COLOURS, SHAPES, DIRECTIONS))

# Never drawn for training, one for each colour: whether the model composes words
# that it never saw together is read off these.
HELD_OUT = (
    ("red", "square", "up"),
    ("green", "triangle", "left"),
    ("blue", "circle", "down"),
    ("yellow", "square", "right"),
    ("purple", "triangle", "down"),
    ("white", "circle", "left"),
)
TRAINED = tuple(c for c in COMBINATIONS if c not in HELD_OUT)

PHRASES = (
    "a {colour} {shape} moving {direction}",
    "a {colour} {shape} moves {direction}",
    "the {colour} {shape} is moving {direction}",
    "{colour} {shape} going {direction}",
)

LONGEST = 81  # frames: every path is laid so that this many fit inside the picture


@dataclasses.dataclass(frozen=True)
class Scene:
    """What one clip shows.

    `start` is the shape's centre in the first frame and `radius` its size, both as
    shares of the picture's shorter side; `speed` is in the same unit per frame.
    """

    colour: str
    shape: str
    direction: str
    background: tuple[int, int, int]
    radius: float
    speed: float
    start: tuple[float, float]

    def sentence(self, phrase: str = PHRASES[0]) -> str:
        """The clip in words."""
        return phrase.format(
            colour=self.colour, shape=self.shape, direction=self.direction
        )


def random_scene(
    rng: np.random.Generator, combination: tuple[str, str, str] | None = None
) -> Scene:
    """A scene whose whole path, for `LONGEST` frames, stays inside a square picture."""
    if combination is None:
        combination = TRAINED[rng.integers(len(TRAINED))]
    colour, shape, direction = combination
    radius = rng.uniform(0.13, 0.17)
    speed = rng.uniform(0.0055, 0.0068)
    travel = speed * (LONGEST - 1)
    start = []
    for step in DIRECTIONS[direction]:
        low = radius + (travel if step < 0 else 0)
        high = 1 - radius - (travel if step > 0 else 0)
        start.append(rng.uniform(low, high))
    return Scene(
        colour=colour,
        shape=shape,
        direction=direction,
        background=tuple(int(v) for v in rng.integers(12, 72, 3)),
        radius=radius,
        speed=speed,
        start=(start[0], start[1]),
    )


def _distance(shape: str, x: np.ndarray, y: np.ndarray, r: float) -> np.ndarray:
    """Signed distance (near the edge) from points to a shape centred at the origin."""
    if shape == "circle":
        return np.hypot(x, y) - r
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.87 * r
    # An equilateral triangle, one corner up, whose bounding box is centred.
    side = np.sqrt(3) / 2 * np.abs(x) - 0.5 * (y + r)
    return np.maximum(side, y - 0.8 * r)


def draw(scene: Scene, frames: int, size: int = 128) -> np.ndarray:
    """The clip's frames as uint8 [frames, size, size, 3]."""
    grid = np.arange(size, dtype=np.float32) + 0.5
    step_x, step_y = DIRECTIONS[scene.direction]
    moved = scene.speed * np.arange(frames, dtype=np.float32)
    centre_x = (scene.start[0] + step_x * moved) * size
    centre_y = (scene.start[1] + step_y * moved) * size
    x = grid[None, None, :] - centre_x[:, None, None]
    y = grid[None, :, None] - centre_y[:, None, None]
    inside = np.clip(0.5 - _distance(scene.shape, x, y, scene.radius * size), 0, 1)
    background = np.asarray(scene.background, np.float32)
    colour = np.asarray(COLOURS[scene.colour], np.float32)
    picture = background + inside[..., None] * (colour - background)
    return np.rint(picture).astype(np.uint8)
