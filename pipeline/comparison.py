"""Two renders, compared: what came of each clip, and of all.

A pair of frames at a time is read and measured, so that memory does not grow with a
clip's length.
"""

import contextlib
import dataclasses
import itertools
from typing import Any

from pipeline.footage import Pair
from pipeline.likeness import Scores, frame_psnr, join, ssim_meter


@dataclasses.dataclass(frozen=True)
class ClipResult:
    """What came of comparing a clip.

    Attributes:
        pair: What was compared.
        width: Of its frames, in pixels.
        height: Of its frames, in pixels.
        scores: How alike they are.
    """

    pair: Pair
    width: int
    height: int
    scores: Scores

    def to_json(self) -> dict[str, Any]:
        """Returns all figures, those of each frame too, as plain JSON."""
        worst = self.scores.worst(1, 1)
        values = zip(self.scores.psnr, self.scores.ssim, strict=True)
        return {
            "clip": self.pair.clip,
            "compared": self.pair.source,
            "width": self.width,
            "height": self.height,
            "settings_differ": list(self.pair.settings),
            **self.scores.to_json(),
            "worst_frame": worst[0] if worst else None,
            "per_frame": [
                {"frame": n, "psnr": psnr, "ssim": ssim, "identical": psnr is None}
                for n, (psnr, ssim) in enumerate(values)
            ],
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two renders, compared.

    Attributes:
        a: The first, as it was given.
        b: The second.
        clips: What came of each clip that both have, at least one.
        left_out: Why a clip was not compared, by its id.
    """

    a: str
    b: str
    clips: tuple[ClipResult, ...]
    left_out: dict[str, str]

    @property
    def all(self) -> Scores:
        """The scores of all clips' frames taken together."""
        return join([clip.scores for clip in self.clips])

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain JSON."""
        return {
            "a": self.a,
            "b": self.b,
            "clips": [clip.to_json() for clip in self.clips],
            "all": self.all.to_json(),
            "not_compared": self.left_out,
        }


def compare_clip(pair: Pair) -> ClipResult:
    """Compares a clip's frames, one pair after the other.

    Raises:
        RequestError: The two have another size or length, or cannot be read.
        StoreError: The store cannot be read.
    """
    psnr = []
    with contextlib.ExitStack() as stack:
        frames = stack.enter_context(contextlib.closing(pair.frames()))
        # Both have a frame at least, or reading them raises.
        first = next(frames)
        height, width, _ = first[0].shape
        meter = stack.enter_context(ssim_meter(pair.clip, width, height))
        for a, b in itertools.chain([first], frames):
            meter.add(a, b)
            psnr.append(frame_psnr(a, b))
        scores = Scores(tuple(psnr), meter.finish())
    return ClipResult(pair, width, height, scores)
