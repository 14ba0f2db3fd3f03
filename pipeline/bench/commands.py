"""`tilereel bench`: what parts of this version take. Light: see `pipeline.cli`."""

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.console import console
from pipeline.errors import RequestError

if TYPE_CHECKING:
    from kernels.tiles import TileShape, TokenGrid
    from pipeline.bench.v6e import Clip

app = typer.Typer(
    help="Measure parts of Tilereel.", no_args_is_help=True, rich_markup_mode=None
)


class _Target(StrEnum):
    V6E = "v6e"
    CPU = "cpu"


_TILES = ["2048x2048", "3328x1536", "4096x4096"]


@app.callback()
def bench() -> None:
    """Measure parts of Tilereel."""


@app.command()
def attention(
    target: Annotated[
        _Target,
        typer.Option(help="v6e: by its compiler, without one; cpu: by this machine's."),
    ] = _Target.V6E,
    tile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERIESxKEYS",
            help=f"A shape of tiles; may be given often. v6e: else {' '.join(_TILES)}.",
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            metavar="FRAMESxROWSxCOLUMNS",
            help="Tokens of the clip to reckon with. v6e: else 21x45x80.",
        ),
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Of its sparse heads. v6e: else 0.38.")
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="v6e: measure our kernels alone, in many shapes of tiles, and keep "
            "what each costs in configs/tiles, for plans to choose from.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compare ways to attend: ours sparse and dense, and other people's."""
    if target is _Target.CPU:
        if tile or clip or search or density is not None:
            raise RequestError(
                "--tile, --clip, --density and --search are for --target v6e; on a CPU "
                "the cases are fixed"
            )
        _cpu(as_json)
        return
    from kernels.tiles import TileShape
    from pipeline.bench.v6e import Clip

    shapes = [_tile(text) for text in tile or ([] if search else _TILES)]
    reckoned = Clip(
        Clip.grid if clip is None else _grid(clip),
        Clip.density if density is None else density,
    )
    _v6e([TileShape(*shape) for shape in shapes], reckoned, search, as_json)


def _v6e(shapes: "list[TileShape]", clip: "Clip", search: bool, as_json: bool) -> None:
    from pipeline.bench import v6e
    from pipeline.bench.search import SHAPES
    from pipeline.bench.search import search as find
    from pipeline.tiles import best_tile

    shapes = shapes or list(SHAPES)
    try:
        for shape in shapes:
            if not search:
                clip.table(shape)  # refused before compiling for minutes
    except ValueError as error:
        raise RequestError(str(error)) from error
    found = find(shapes, _say) if search else v6e.measure(shapes, _say)
    if as_json:
        said = v6e.as_json(found, clip)
        typer.echo(json.dumps(said, indent=1))
        return
    console().print(v6e.report(found, clip))
    if search:
        chosen = best_tile(clip.grid, clip.density)
        typer.echo(f"plans take tiles of {chosen} for this clip")


def _cpu(as_json: bool) -> None:
    import dataclasses

    from pipeline.bench import cpu

    found = {}
    for name, case in cpu.CASES.items():
        _say(f"timing {name}")
        found[name] = cpu.measure(case)
    if as_json:
        said = {
            name: dataclasses.asdict(one)
            | {
                "sparse_over_dense": one.sparse_over_dense,
                "ours_over_flex": one.ours_over_flex,
            }
            for name, one in found.items()
        }
        typer.echo(json.dumps({"target": "cpu", "cases": said}, indent=1))
        return
    for one in found.values():
        console().print(cpu.report(one))


def _tile(text: str) -> tuple[int, int]:
    from pipeline.manifest import parse_tile

    try:
        queries, keys = parse_tile(text)
    except ValueError as error:
        raise RequestError(f"--tile: {error}") from error
    if queries % 128 or keys % 128:
        raise RequestError(f"--tile {text}: on a TPU both sides are multiples of 128")
    return queries, keys


def _grid(text: str) -> "TokenGrid":
    from kernels.tiles import TokenGrid

    sides = text.split("x")
    if len(sides) != 3 or not all(
        s.isascii() and s.isdigit() and int(s) for s in sides
    ):
        raise RequestError(
            f"--clip {text!r} is no clip; give FRAMESxROWSxCOLUMNS of its latent "
            "tokens, as 21x45x80"
        )
    frames, rows, columns = map(int, sides)
    return TokenGrid(frames, rows * columns)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
