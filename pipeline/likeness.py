"""How alike two pictures are, in numbers: PSNR and SSIM, frame by frame."""

import contextlib
import dataclasses
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import ffmpeg
import numpy as np
from jaxtyping import UInt8

from pipeline.errors import RequestError
from pipeline.ffmpeg_pipe import running

Pixels = UInt8[np.ndarray, "height width 3"]

# ffmpeg's filter averages over blocks of 8x8 pixels: smaller frames have none.
_LEAST_SIDE = 8


@dataclasses.dataclass(frozen=True)
class Scores:
    """How alike the frames of two renders are, frame by frame; at least one frame.

    Attributes:
        psnr: Peak signal-to-noise ratio in dB, as `frame_psnr` gives it: None for a
            frame that is identical in both, where it is infinite.
        ssim: Structural similarity, at most 1, as `SsimMeter` gives it.
    """

    psnr: tuple[float | None, ...]
    ssim: tuple[float, ...]

    @property
    def identical(self) -> int:
        """The number of frames that are identical in both."""
        return self.psnr.count(None)

    @property
    def finite(self) -> list[float]:
        """The PSNR of the frames that differ."""
        return [value for value in self.psnr if value is not None]

    @property
    def psnr_mean(self) -> float | None:
        """The mean over the frames that differ; None where none does."""
        finite = self.finite
        return math.fsum(finite) / len(finite) if finite else None

    @property
    def psnr_least(self) -> float | None:
        """The least PSNR; None where all frames are identical."""
        return min(self.finite, default=None)

    @property
    def ssim_mean(self) -> float:
        """The mean SSIM over all frames."""
        return math.fsum(self.ssim) / len(self.ssim)

    @property
    def ssim_least(self) -> float:
        """The least SSIM."""
        return min(self.ssim)

    def worst(self, most: int, apart: int) -> list[int]:
        """Returns the frames of least PSNR, worst first, of equal ones the first.

        Args:
            most: How many at most.
            apart: How many frames apart they are at least, since the neighbours of
                a bad frame look like it.

        Returns:
            Their numbers, from 0; none where all frames are identical.
        """
        ordered = sorted(
            (value, n) for n, value in enumerate(self.psnr) if value is not None
        )
        picked: list[int] = []
        for _, n in ordered:
            if len(picked) < most and all(abs(n - other) >= apart for other in picked):
                picked.append(n)
        return picked

    def to_json(self) -> dict[str, Any]:
        """Returns the figures that stand for all frames, as plain JSON."""
        return {
            "frames": len(self.psnr),
            "identical": self.identical == len(self.psnr),
            "identical_frames": self.identical,
            "psnr_mean": self.psnr_mean,
            "psnr_least": self.psnr_least,
            "ssim_mean": self.ssim_mean,
            "ssim_least": self.ssim_least,
        }


def join(every: Sequence[Scores]) -> Scores:
    """Returns the scores of several clips' frames taken together."""
    return Scores(
        tuple(value for scores in every for value in scores.psnr),
        tuple(value for scores in every for value in scores.ssim),
    )


def frame_psnr(a: Pixels, b: Pixels) -> float | None:
    """Returns a frame's PSNR in dB: 10 log10(255^2 / mean squared difference).

    The mean is over all pixels and the three colours. None where the two are
    identical, for which it is infinite.
    """
    difference = np.subtract(a, b, dtype=np.int16)
    squares = int(np.square(difference, dtype=np.int32).sum(dtype=np.int64))
    return 10 * math.log10(255**2 * a.size / squares) if squares else None


class SsimMeter:
    """The SSIM of pairs of frames, by ffmpeg's `ssim` filter. Made by `ssim_meter`.

    The filter takes SSIM (Wang et al., "Image quality assessment: from error
    visibility to structural similarity", 2004) over blocks of 8x8 pixels, one every 4
    pixels, of red, green and blue, and means them. Of the paper's two constants the
    first is 64 times smaller there: 0.001 in nearly black frames (measured), nothing
    to speak of elsewhere.
    """

    # ffmpeg is here already and is what video people quote; scikit-image would bring
    # four more packages, dm-pix JAX into the command line, the others torch.

    def __init__(
        self,
        clip: str,
        process: subprocess.Popen[bytes],
        answer: IO[bytes],
        said: Callable[[], str],
    ):
        self._clip = clip
        self._process = process
        self._answer = answer
        self._said = said

    def add(self, a: Pixels, b: Pixels) -> None:
        """Takes the next frame of both; raises `RequestError` where ffmpeg fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(a.tobytes())
            self._process.stdin.write(b.tobytes())
        except BrokenPipeError:
            raise self._failed() from None

    def finish(self) -> tuple[float, ...]:
        """Returns the SSIM of each pair; raises `RequestError` where ffmpeg fails."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.wait() != 0:
            raise self._failed()
        self._answer.seek(0)
        # "n:1 R:0.971747 G:0.973504 B:0.974978 All:0.973410 (15.752772)"
        words = self._answer.read().decode().split()
        return tuple(float(word[4:]) for word in words if word.startswith("All:"))

    def _failed(self) -> RequestError:
        self._process.wait()
        return RequestError(
            f"{self._clip}: ffmpeg cannot take the SSIM: {self._said()}"
        )


@contextlib.contextmanager
def ssim_meter(clip: str, width: int, height: int) -> Iterator[SsimMeter]:
    """Starts taking the SSIM of pairs of frames of one size.

    Args:
        clip: What to call the frames in errors.
        width: In pixels.
        height: In pixels.

    Raises:
        RequestError: The frames are too small, or there is no ffmpeg here.
    """
    if min(width, height) < _LEAST_SIDE:
        raise RequestError(
            f"{clip}: frames of {width}x{height} pixels have no SSIM, which takes at "
            f"least {_LEAST_SIDE}x{_LEAST_SIDE}"
        )
    # Both frames come through one pipe, the second below the first.
    both = ffmpeg.input(
        "pipe:", format="rawvideo", pix_fmt="rgb24", s=f"{width}x{2 * height}"
    ).split()
    # Planar RGB by name: the filter would turn to YUV by itself.
    halves = [
        both[n].crop(0, n * height, width, height).filter("format", "gbrp")
        for n in range(2)
    ]
    stream = ffmpeg.filter(halves, "ssim", stats_file="-")
    stream = stream.output("pipe:", format="null")
    with (
        tempfile.TemporaryFile() as answer,
        running(stream, stdin=subprocess.PIPE, stdout=answer) as (process, said),
    ):
        yield SsimMeter(clip, process, answer, said)
