"""What does sparse attention change for the demo model? Prints a table.

    python -m tests.benchmarks.sparse_attention [--clips 12] [--frames 81]
        [--tolerance 0.1 0.2]

Renders the same clips dense and sparse, as the plan has them, and compares: tiles
skipped, PSNR of the frames against the dense ones, what the scorer reads off the frames
(as in tests/benchmarks/demo_model.py), and the median time of a clip's denoising.
"""

import argparse
import dataclasses
import random
import time

import numpy as np

from configs.demo_training import draw, score
from pipeline.manifest import Manifest
from pipeline.plan import make_plan
from tests.benchmarks.demo_model import FIRST_SEED, MODEL, job
from workers.denoiser import Denoiser
from workers.job import ClipJob, SparseAttention


def planned(frames: int, tolerance: float) -> SparseAttention | None:
    """The attention that the demo model's clips have by default."""
    clip = {"id": "clip", "prompt": "a", "frames": frames}
    whole = {"version": 1, "batch": "b", "model": "demo", "clips": [clip]}
    whole["attention"] = {"tolerance": tolerance}
    return make_plan(Manifest.model_validate(whole)).clips[0].job.attention


def render(denoiser: Denoiser, asked: ClipJob) -> tuple[np.ndarray, float, float]:
    """A clip's frames, the share of tiles skipped, and the seconds of denoising."""
    state = denoiser.begin(asked, denoiser.encode(asked))
    start = time.monotonic()
    state, work = denoiser.advance(state, asked.steps)
    seconds = time.monotonic() - start
    skipped = 1 - work.tiles / work.all_tiles if work else 0.0
    return np.stack(list(denoiser.decode(state))), skipped, seconds


def psnr(frames: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio of whole clips, in dB."""
    error = ((frames.astype(float) - reference) ** 2).mean()
    return 10 * np.log10(255**2 / error) if error else np.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=12)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--tolerance", type=float, nargs="+", default=[0.1, 0.2])
    arguments = parser.parse_args()
    denoiser = Denoiser.load(MODEL)
    combinations = list(draw.TRAINED)
    random.Random(0).shuffle(combinations)
    jobs = [
        job(combinations[i % len(combinations)], FIRST_SEED + i, arguments.frames)
        for i in range(arguments.clips)
    ]
    print("| tolerance | tiles skipped | PSNR, least | mean | read right | seconds |")
    print("|---|---|---|---|---|---|")
    reference = []
    for tolerance in (None, *arguments.tolerance):
        attention = tolerance and planned(arguments.frames, tolerance)
        made = [
            render(denoiser, dataclasses.replace(one, attention=attention))
            for one in jobs
        ]
        frames, skipped, seconds = zip(*made, strict=True)
        reference = reference or frames
        ratios = [psnr(x, y) for x, y in zip(frames, reference, strict=True)]
        right = [
            score.score(x) == combinations[i % len(combinations)]
            for i, x in enumerate(frames)
        ]
        print(
            f"| {tolerance or 'dense'} | {np.mean(skipped):.1%} | {min(ratios):.1f} "
            f"| {np.mean(ratios):.1f} | {np.mean(right):.0%} "
            f"| {np.median(seconds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
