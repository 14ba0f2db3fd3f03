"""The page of a comparison: a chart of each clip, and its worst frames side by side."""

import base64
import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from pipeline.batch import versions
from pipeline.comparison import ClipResult, Comparison
from pipeline.errors import RequestError
from pipeline.likeness import Pixels

_TEMPLATE = "compare.html.j2"
_MOST_WORST = 3
# Half a second at 16 frames a second.
_APART = 8
# Three such pictures side by side fill the page on a screen of double density.
_LONGEST_SIDE = 640
# As small as this, pictures stay exact; of large ones that would make 20 MB a batch.
_LOSSLESS_SIDE = 320
_QUALITY = 90
_MOST_AMPLIFIED = 64
_TICK_STEPS = (0.5, 1, 2, 5, 10, 20, 50)
_MOST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Shown:
    """A frame in both renders, as pictures for the page: data URIs.

    Attributes:
        index: Its number in the clip, from 0.
        psnr: Its PSNR in dB.
        ssim: Its SSIM.
        a: The first render's.
        b: The second render's.
        difference: Their absolute difference, times `factor`.
        factor: By how much it is amplified, a power of two.
    """

    index: int
    psnr: float | None
    ssim: float
    a: str
    b: str
    difference: str
    factor: int


def check_page(path: Path) -> None:
    """Refuses, before any work, a place where no page can be written.

    Raises:
        RequestError: It is no name of a page, or its folder is not there.
    """
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise RequestError(f"--html {path}: give a file whose name ends in .html")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--html {path}: there is no folder {path.parent}")


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes a comparison's page, over one that may be there.

    The frames that it shows are read once more: which ones are worst is known only
    when all have been measured.

    Raises:
        RequestError: The page cannot be written, or the frames no longer be read.
        StoreError: The store cannot be read.
    """
    page = render_page(comparison).encode(errors="replace")
    try:
        path.write_bytes(page)
    except OSError as error:
        raise RequestError(
            f"--html {path} cannot be written: {error.strerror}"
        ) from error


def render_page(comparison: Comparison) -> str:
    """Returns the page's HTML, which needs nothing from elsewhere."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["decibels"] = decibels
    clips = [
        {
            "id": clip.pair.clip,
            "pair": clip.pair,
            "width": clip.width,
            "height": clip.height,
            "scores": clip.scores,
            "chart": chart(clip.scores.psnr),
            "shown": _shown(clip),
        }
        for clip in comparison.clips
    ]
    return environment.get_template(_TEMPLATE).render(
        a=comparison.a,
        b=comparison.b,
        clips=clips,
        every=comparison.all,
        left_out=comparison.left_out,
        small_side=_LOSSLESS_SIDE,
        version=versions().get("tilereel", ""),
    )


def decibels(psnr: float | None) -> str:
    """Returns a PSNR in words; None stands for identical frames."""
    return "identical" if psnr is None else f"{psnr:.2f} dB"


def amplify(a: Pixels, b: Pixels) -> tuple[Pixels, int]:
    """Returns the absolute difference of two frames, made visible, and its factor.

    The factor is the largest power of two, up to 64, that leaves 99.9% of the values
    within what a pixel can show.
    """
    difference = np.abs(np.subtract(a, b, dtype=np.int16))
    most = max(1.0, float(np.percentile(difference, 99.9)))
    factor = min(_MOST_AMPLIFIED, 2 ** int(math.log2(255 / most)))
    return np.minimum(difference * factor, 255).astype(np.uint8), factor


def chart(psnr: Sequence[float | None]) -> dict[str, Any]:
    """Lays out a line chart of PSNR per frame, on a square of 100 by 100.

    Args:
        psnr: As in `pipeline.likeness.Scores`.

    Returns:
        "ticks": (place from the top, label) of each; "line" and "identical": the data
        of SVG paths, the latter along the top where frames are identical. Empty where
        all of them are.
    """
    finite = [value for value in psnr if value is not None]
    if not finite:
        return {}
    least, most = min(finite), max(finite)
    step = next(
        (s for s in _TICK_STEPS if most - least <= s * _MOST_STEPS), _TICK_STEPS[-1]
    )
    low = math.floor(least / step) * step
    steps = max(1, math.ceil((most - low) / step))
    whole = steps * step
    heights = [
        None if value is None else 100 - 100 * (value - low) / whole for value in psnr
    ]
    return {
        "ticks": [
            (100 - 100 * n / steps, f"{low + n * step:g}") for n in range(steps + 1)
        ],
        "line": _path(heights),
        "identical": _path([0.0 if y is None else None for y in heights]),
    }


def _shown(clip: ClipResult) -> list[Shown]:
    """Returns the worst frames, worst first: a few, and apart from each other."""
    scores = clip.scores
    worst = scores.worst(_MOST_WORST, _APART)
    shown = {}
    with contextlib.closing(clip.pair.frames()) as frames:
        for n, (a, b) in zip(range(max(worst, default=-1) + 1), frames, strict=False):
            if n in worst:
                difference, factor = amplify(a, b)
                shown[n] = Shown(
                    index=n,
                    psnr=scores.psnr[n],
                    ssim=scores.ssim[n],
                    a=_picture(a),
                    b=_picture(b),
                    difference=_picture(difference),
                    factor=factor,
                )
    return [shown[n] for n in worst]


def _picture(frame: Pixels) -> str:
    """Returns a frame as a data URI, made smaller where it is large."""
    image = Image.fromarray(frame)
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    exact = max(image.size) <= _LOSSLESS_SIDE
    image.save(data, "WEBP", quality=_QUALITY, lossless=exact)
    return f"data:image/webp;base64,{base64.b64encode(data.getvalue()).decode()}"


def _path(heights: Sequence[float | None]) -> str:
    """Returns an SVG path over 100 from left to right, broken where there is None."""
    last = max(1, len(heights) - 1)
    parts = []
    runs = itertools.groupby(enumerate(heights), key=lambda point: point[1] is None)
    for gap, run in runs:
        if not gap:
            points = [f"{100 * n / last:.2f} {y:.2f}" for n, y in run]
            # A lone point is a line of no length, which round ends make a dot.
            parts.append(f"M{'L'.join(points)}" + "h0" * (len(points) == 1))
    return "".join(parts)
