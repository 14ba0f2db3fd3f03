"""Does the demo model show what it is asked for? Prints a table.

    python -m tests.benchmarks.demo_model [--clips 66] [--frames 33]

Renders clips through the product's own denoiser, with seeds that training never used,
and reads colour, shape and direction off the frames (configs/demo_training/score.py).
Three runs: combinations seen in training, combinations held out of it, and no text
(embeddings zeroed), which must fall to chance.
"""

import argparse
import random
from pathlib import Path

import numpy as np

from configs.demo_training import draw, score
from workers.denoiser import Denoiser
from workers.job import ClipJob

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"
FIRST_SEED = 1_000_000
WORDS = ("colour", "shape", "direction")


def job(combination: tuple[str, str, str], seed: int, frames: int) -> ClipJob:
    """The clip of a combination, with the demo preset's settings."""
    colour, shape, direction = combination
    return ClipJob(
        clip="clip",
        prompt=f"a {colour} {shape} moving {direction}",
        negative_prompt="",
        seed=seed,
        width=128,
        height=128,
        frames=frames,
        render_width=128,
        render_height=128,
        render_frames=frames,
        steps=20,
        guidance=3.0,
        flow_shift=3.0,
        sampler="unipc",
    )


def hits(
    denoiser: Denoiser,
    combinations: list[tuple[str, str, str]],
    frames: int,
    zero_text: bool,
) -> np.ndarray:
    """Whether each clip's colour, shape and direction are right, [clips, 3]."""
    result = np.zeros((len(combinations), 3), bool)
    for i, combination in enumerate(combinations):
        asked = job(combination, FIRST_SEED + i, frames)
        text = denoiser.encode(asked)
        if zero_text:
            text = {name: np.zeros_like(x) for name, x in text.items()}
        state, _ = denoiser.advance(denoiser.begin(asked, text), asked.steps)
        seen = score.score(np.stack(list(denoiser.decode(state))))
        if seen is not None:
            result[i] = np.array(seen) == np.array(combination)
    return result


def scorer_is_right(clips: int = 300) -> float:
    """Share of drawn clips, of all combinations, that the scorer reads right."""
    rng = np.random.default_rng(FIRST_SEED)
    right = 0
    for i in range(clips):
        combination = draw.COMBINATIONS[i % len(draw.COMBINATIONS)]
        clip = draw.draw(draw.random_scene(rng, combination), 33)
        right += score.score(clip) == combination
    return right / clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--clips", type=int, default=len(draw.TRAINED))
    parser.add_argument("--frames", type=int, default=33)
    arguments = parser.parse_args()
    denoiser = Denoiser.load(arguments.model)
    trained = list(draw.TRAINED)
    random.Random(0).shuffle(trained)  # any number of clips samples all words
    runs = (
        ("trained combinations", trained, arguments.clips, False),
        ("held-out combinations", list(draw.HELD_OUT), arguments.clips // 2, False),
        ("text zeroed", trained, arguments.clips // 2, True),
    )
    print(f"scorer on drawn clips: {scorer_is_right():.1%} right")
    print(f"| {arguments.frames} frames | clips | {' | '.join(WORDS)} | all three |")
    print("|---|---|---|---|---|---|")
    for name, combinations, clips, zero_text in runs:
        chosen = [combinations[i % len(combinations)] for i in range(clips)]
        right = hits(denoiser, chosen, arguments.frames, zero_text)
        shares = [*right.mean(0), right.all(1).mean()]
        cells = " | ".join(f"{share:.0%}" for share in shares)
        print(f"| {name} | {clips} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
