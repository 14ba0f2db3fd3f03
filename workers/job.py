"""What one clip asks of a slice, as plain data."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class SparseAttention:
    """How a clip's sparse heads attend, as fixed in its plan.

    Attributes:
        band: The farthest that a query looks beside the first frame, in tokens.
        tile: Queries and keys of a tile.
        rounding: "tile" or "exact"; see `kernels.tiles.TileTable`.
        density: The density asked for, by which the band was chosen.
        achieved: The density that this band has.
        dense_steps: First steps in which all heads are dense.
        dense_layers: First layers in which all heads are dense.
        tolerance: The largest relative error of a sparse head; see
            `kernels.profiling.choose`.
        samples: Queries that this error is measured at.
    """

    band: int
    tile: tuple[int, int]
    rounding: Literal["tile", "exact"]
    density: float
    achieved: float
    dense_steps: int
    dense_layers: int
    tolerance: float
    samples: int = 64


@dataclasses.dataclass(frozen=True)
class ClipJob:
    """One clip: everything that decides its pixels, and what a plan said of it.

    Plain JSON both ways: `dataclasses.asdict(job)` and `ClipJob.from_json(d)`.

    Attributes:
        clip: The clip's id.
        prompt: What to show.
        negative_prompt: What guidance steers away from.
        seed: Seeds the noise.
        width: Width asked for, in pixels.
        height: Height asked for, in pixels.
        frames: Number of frames asked for.
        render_width: Width that the model renders, a multiple of 16 pixels.
        render_height: Height that the model renders, a multiple of 16 pixels.
        render_frames: Number of frames that the model renders, 4k + 1.
        steps: Denoising steps.
        guidance: Guidance scale; at 1.0 or less only the prompt's branch runs.
        flow_shift: Shift of the noise schedule.
        sampler: "unipc" or "euler".
        attention: How its sparse heads attend; None where all heads are dense.

    The rendered frames are cropped from the centre, `(render - asked) // 2` from
    the top left, and cut to the first `frames`.
    """

    clip: str
    prompt: str
    negative_prompt: str
    seed: int
    width: int
    height: int
    frames: int
    render_width: int
    render_height: int
    render_frames: int
    steps: int
    guidance: float
    flow_shift: float
    sampler: str
    attention: SparseAttention | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ClipJob":
        """Reads a job back; the first ones had no attention, and were dense."""
        rest = dict(fields)
        attention = rest.pop("attention", None)
        if attention is not None:
            tile = tuple(attention["tile"])
            attention = SparseAttention(**(attention | {"tile": tile}))
        return cls(**rest, attention=attention)
