"""`tilereel compare`: two renders frame by frame, as a table, as JSON and as a page."""

import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pipeline.compare_page import check_page, decibels, write_page
from pipeline.comparison import Comparison, compare_clip
from pipeline.errors import RequestError
from pipeline.footage import find_pairs
from pipeline.likeness import Scores
from pipeline.store import StoreError


def show(a: str, b: str, *, as_json: bool, html: Path | None, console: Console) -> None:
    """Compares two renders and shows how alike they are.

    Args:
        a: A batch's folder, an output that holds one batch, or a video file.
        b: The same of the other render.
        as_json: As one JSON object, for programs.
        html: Where to write a page with the worst frames; nowhere if None.
        console: Where to show it.

    Raises:
        RequestError: There is nothing to compare, a clip has another size or length
            in each, frames are damaged, or the page cannot be written.
    """
    if html is not None:
        check_page(html)
    try:
        pairs, left_out = find_pairs(a, b)
        quiet = as_json or not console.is_terminal
        shown = track(
            pairs, "Comparing", console=console, transient=True, disable=quiet
        )
        clips = tuple(compare_clip(pair) for pair in shown)
        result = Comparison(a, b, clips, left_out)
        if html is not None:
            write_page(result, html)
    except StoreError as error:
        raise RequestError(str(error)) from error
    if as_json:
        said = json.dumps(
            result.to_json(), indent=1, ensure_ascii=False, allow_nan=False
        )
    else:
        console.print(_table(result))
        said = "\n".join(
            [f"{clip} is not compared: {why}" for clip, why in left_out.items()]
            + [
                f"Page: {html.absolute()}"
                if html
                else "`--html FILE` writes a page with the worst frames side by side."
            ]
        )
    console.print(said, markup=False, highlight=False, soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("clip", overflow="fold", min_width=8)
    for name in ("frames", "identical", "compared"):
        table.add_column(name, justify="right")
    for name in ("PSNR mean", "PSNR least", "SSIM mean", "SSIM least", "worst frame"):
        table.add_column(name, justify="right")
    for clip in comparison.clips:
        worst = "".join(map(str, clip.scores.worst(1, 1)))
        table.add_row(clip.pair.clip, *_cells(clip.scores, clip.pair.source), worst)
    if len(comparison.clips) > 1:
        table.add_section()
        table.add_row("all clips", *_cells(comparison.all, ""))
    return table


def _cells(scores: Scores, source: str) -> tuple[str, ...]:
    return (
        str(len(scores.psnr)),
        str(scores.identical or ""),
        source,
        decibels(scores.psnr_mean),
        decibels(scores.psnr_least),
        f"{scores.ssim_mean:.4f}",
        f"{scores.ssim_least:.4f}",
    )
