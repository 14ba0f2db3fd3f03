"""The plan: what a manifest comes to, before anything starts."""

import dataclasses
import functools
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from kernels import chip
from kernels.tiles import TileShape, TileTable, TokenGrid
from pipeline import names
from pipeline.document import Document, Fault
from pipeline.errors import RequestError
from pipeline.manifest import Attention, Clip, Encode, Manifest, parse_size, parse_tile
from pipeline.models import ModelLocation, Shape, find_model, missing_weights
from pipeline.schema import faults_error
from pipeline.tiles import best_tile
from workers.job import ClipJob, SparseAttention

DEFAULT_OUTPUT = "renders"
# Where a manifest says none. Of 81 frames, the first one takes 0.09 and a tile's width
# along the diagonal some 0.05; the rest is the band's.
DEFAULT_DENSITY = 0.38
# 4,096 along each side, far beyond any useful tile.
MOST_TILES = 2**24

_HEADINGS = (
    *("clip", "size", "frames", "fps"),
    *("latents", "tokens", "windows", "steps", "PFLOP"),
)
_TILE_HEADINGS = ("clip", "tile", "density", "achieved", "band", "tiles", "of all")


@dataclasses.dataclass(frozen=True)
class PlannedClip:
    """One clip, as it will be rendered.

    Attributes:
        job: Everything that decides its pixels.
        priority: Larger ones are rendered first.
        fps: Frames per second, exact.
        latent_frames: Latent frames that are denoised.
        tokens: Tokens of the transformer, over all latent frames.
        windows: Runs of latent frames that are denoised by themselves.
        cost: Work of its denoising, in TFLOP: an estimate before heads are profiled,
            which takes all heads for sparse where they may be.
        table: The tiles of its sparse heads; None where all heads are dense.
        unfit: Why it is dense though the manifest leaves that open, else "".
        encode: How its video is encoded.
    """

    job: ClipJob
    priority: int
    fps: Fraction
    latent_frames: int
    tokens: int
    windows: int
    cost: float
    table: TileTable | None
    unfit: str
    encode: Encode


@dataclasses.dataclass(frozen=True)
class Plan:
    """A batch, ready to be rendered. Made by `make_plan`.

    Attributes:
        batch: The batch's name.
        manifest: The manifest as understood: every clip has all its settings.
        model: The model's folder, name and preset.
        output: Where the batch's folder goes: an absolute path.
        clips: The clips in the order in which they are dealt: by priority, then the
            costliest first, then as in the manifest.
    """

    batch: str
    manifest: Manifest
    model: ModelLocation
    output: str
    clips: list[PlannedClip]


def make_plan(
    manifest: Manifest,
    output: str | None = None,
    folder: Path = Path(),
    document: Document | None = None,
) -> Plan:
    """Plans a manifest.

    Args:
        manifest: What to render.
        output: Where the batch's folder goes, instead of what the manifest says; a
            relative path counts from the current folder.
        folder: The manifest's own folder, from which its relative paths count.
        document: What the manifest was read from, for errors to name its lines.

    Raises:
        RequestError: There is no such model, the output is of an unknown kind, or
            clips cannot have the density that the manifest gives.
    """
    model = find_model(manifest.model, folder)
    understood = manifest.understood(model.settings)
    clips = [_plan_clip(clip, understood, model.shape) for clip in understood.clips]
    said = understood.attention
    if said.density is not None or said.tile is not None:
        _refuse_unfit(clips, said, document)
    clips.sort(key=lambda clip: (-clip.priority, -clip.cost))
    return Plan(
        batch=manifest.batch,
        manifest=understood,
        model=model,
        output=_output(manifest, output, folder),
        clips=clips,
    )


def _refuse_unfit(
    clips: list[PlannedClip], said: Attention, document: Document | None
) -> None:
    """Refuses a density or tiles that the manifest gives and clips cannot have."""
    given = [name for name in ("density", "tile") if getattr(said, name) is not None]
    unfit = {
        index: f"{clip.job.clip}: {clip.unfit}; give what it can have, or leave "
        f"{' and '.join(f'`{name}`' for name in given)} out to have such clips dense"
        for index, clip in enumerate(clips)
        if clip.unfit
    }
    if unfit and document is None:
        raise RequestError("\n".join(f"clip {words}" for words in unfit.values()))
    if unfit and document is not None:
        place = ("attention", *given) if len(given) == 1 else ("attention",)
        faults = [
            Fault(
                document.line(place),
                place,
                f"clip on line {document.line(('clips', index))}, {words}",
            )
            for index, words in unfit.items()
        ]
        raise faults_error(document, faults)


def _output(manifest: Manifest, output: str | None, folder: Path) -> str:
    if output is None and manifest.output is not None:
        chosen, base = manifest.output, folder
    else:
        chosen, base = output or DEFAULT_OUTPUT, Path()
    if "://" in chosen:
        raise RequestError(
            f"output {chosen}: this version writes to local folders only; give a path"
        )
    return os.path.abspath(base / os.path.expanduser(chosen))


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain JSON, for programs."""
    root = f"{plan.output}/{plan.batch}"
    return {
        "batch": plan.batch,
        "model": {
            "name": plan.model.name,
            "path": str(plan.model.path),
            "missing": missing_weights(plan.model),
        },
        "output": root,
        "report": f"{root}/{names.REPORT}",
        "tflop": sum(clip.cost for clip in plan.clips),
        "clips": [
            {
                **dataclasses.asdict(clip.job),
                "tiles": _tiles_json(clip),
                "priority": clip.priority,
                "fps": str(clip.fps),
                "crop": {
                    "left": (clip.job.render_width - clip.job.width) // 2,
                    "top": (clip.job.render_height - clip.job.height) // 2,
                },
                "latent_frames": clip.latent_frames,
                "tokens": clip.tokens,
                "windows": clip.windows,
                "tflop": clip.cost,
                "encode": clip.encode.model_dump(mode="json"),
                "video": f"{root}/{names.video(clip.job.clip)}",
            }
            for clip in plan.clips
        ],
    }


def _tiles_json(clip: PlannedClip) -> dict[str, Any]:
    """Returns what a sparse head of a clip computes, or why there is none."""
    if clip.table is None:
        return {"dense": clip.unfit or "as the manifest says"}
    return {
        "density": clip.table.density,
        "computed": clip.table.tiles,
        "all": clip.table.all_tiles,
    }


def plan_table(plan: Plan) -> str:
    """Returns a plan as a person is shown it: as wide as it is, nothing cut off."""
    root = f"{plan.output}/{plan.batch}"
    count = f"{len(plan.clips)} clip{'s' * (len(plan.clips) != 1)}"
    lines = [f"Batch {plan.batch}: {count}, in this order", ""]
    rows = [_HEADINGS, *(row for clip in plan.clips for row in _rows(clip))]
    lines += [*_aligned(rows), ""]
    if tiles := [_tile_row(clip) for clip in plan.clips if clip.table]:
        tolerance = plan.manifest.attention.tolerance
        lines += [
            "Tiles that a sparse head computes. PFLOP above count these, and are an "
            "estimate:",
            "heads are profiled while rendering, and those whose error is over "
            f"{tolerance:g} are",
            "dense and cost more.",
            "",
            *_aligned([_TILE_HEADINGS, *tiles]),
            "",
        ]
    lines += [note for clip in plan.clips for note in _notes(clip, plan.model)]
    lines += [
        f"Model {plan.model.name}: {plan.model.path}",
        f"Videos: {root}/{names.video('CLIP')}",
        f"Report: {root}/{names.REPORT}",
    ]
    if missing := missing_weights(plan.model):
        lines.append(f"The model is not whole: {missing}")
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Returns a table's lines: the first two columns stand left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [row[n].ljust(widths[n]) for n in range(2)]
        right = [row[n].rjust(widths[n]) for n in range(2, len(row))]
        lines.append("  ".join(left + right).rstrip())
    return lines


def _tile_row(clip: PlannedClip) -> tuple[str, ...]:
    table, attention = clip.table, clip.job.attention
    assert table is not None and attention is not None
    return (
        clip.job.clip,
        str(table.tile),
        f"{attention.density:g}",
        f"{table.density:.3f}",
        f"{table.band:,}",
        f"{table.tiles:,}",
        f"{table.all_tiles:,}",
    )


def _rows(clip: PlannedClip) -> list[tuple[str, ...]]:
    """Returns a clip's row, and a second one where more is rendered than asked for."""
    job = clip.job
    asked = f"{job.width}x{job.height}", str(job.frames)
    rendered = f"{job.render_width}x{job.render_height}", str(job.render_frames)
    rest = (
        str(clip.fps),
        str(clip.latent_frames),
        f"{clip.tokens:,}",
        str(clip.windows),
        str(job.steps),
        _count(clip.cost / 1000),
    )
    rows: list[tuple[str, ...]] = [(job.clip, *asked, *rest)]
    if rendered != asked:
        more = (
            "" if r == a else f"of {r}" for a, r in zip(asked, rendered, strict=True)
        )
        rows.append(("", *more, *("" for _ in rest)))
    return rows


def _count(number: float) -> str:
    """Writes a number with three digits at least, and never with an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _notes(clip: PlannedClip, model: ModelLocation) -> list[str]:
    """Returns in words what a clip's render has beyond what was asked for."""
    job, notes = clip.job, []
    if clip.unfit:
        notes.append(f"{job.clip}: dense, since {clip.unfit}")
    across, down = job.render_width - job.width, job.render_height - job.height
    if across or down:
        notes.append(
            f"{job.clip}: rendered at {job.render_width}x{job.render_height}, cropped "
            f"to {job.width}x{job.height} from the centre"
        )
    if cut := job.render_frames - job.frames:
        rendered = f"{job.render_frames} frames are rendered"
        notes.append(f"{job.clip}: {rendered}, {cut} cut off the end")
    native = model.preset.native_frames
    if job.render_frames > native:
        notes.append(
            f"{job.clip}: longer than the {native} frames that the model was trained on"
        )
    return notes


def next_multiple(number: int, of: int) -> int:
    """Returns the least multiple of `of` that is not below `number`."""
    return -(-number // of) * of


def default_tile(grid: TokenGrid, density: float, heads: int) -> TileShape:
    """Returns the shape of a clip's tiles where a manifest says none.

    Large tiles keep a TPU's matrix units fed, so that long clips get those that cost
    least there; in short clips they would leave nothing to skip.

    Raises:
        ValueError: No large tiles will do.
    """
    if grid.tokens >= 16_384:
        return best_tile(grid, density, heads)
    side = 256 if grid.tokens >= 4_096 else 64
    return TileShape(side, side)


# Most clips of a batch are alike.
@functools.lru_cache(maxsize=64)
def _tiles(
    density: float | None,
    tile: str | None,
    rounding: Literal["tile", "exact"],
    grid: TokenGrid,
    heads: int,
    head_dim: int,
) -> TileTable:
    """Returns the tiles of a clip's sparse heads.

    Raises:
        ValueError: The clip cannot have the density, names the least; or no kernel
            can hold the tiles.
    """
    density = density or DEFAULT_DENSITY
    if tile is None:
        shape = default_tile(grid, density, heads)
    else:
        shape = TileShape(*parse_tile(tile))
    if (found := TileTable(grid, shape, 0).all_tiles) > MOST_TILES:
        raise ValueError(
            f"{grid.tokens:,} tokens are {found:,} tiles of {shape}, and the most are "
            f"{MOST_TILES:,}"
        )
    table = TileTable.within(density, grid, shape, rounding)
    # Tiles that are not for a TPU's kernel go through XLA, wherever they are rendered.
    if chip.serves(shape):
        chip.check(table, heads, head_dim)
    return table


def _sparse(
    settings: Attention, table: TileTable, steps: int, layers: int
) -> SparseAttention:
    """Returns how a clip's heads attend, of its steps and the model's layers."""
    return SparseAttention(
        band=table.band,
        tile=(table.tile.queries, table.tile.keys),
        rounding=table.rounding,
        density=settings.density or DEFAULT_DENSITY,
        achieved=table.density,
        # As it is written: 0.1 of 30 steps are 3, and in floats a bit more.
        dense_steps=math.ceil(Fraction(str(settings.dense_steps)) * steps),
        dense_layers=min(settings.dense_layers, layers),
        tolerance=settings.tolerance,
    )


def _plan_clip(clip: Clip, manifest: Manifest, shape: Shape) -> PlannedClip:
    settings: dict[str, Any] = dict(clip)
    width, height = parse_size(settings["size"])
    render_width = next_multiple(width, shape.pixels)
    render_height = next_multiple(height, shape.pixels)
    # The first latent frame stands for one pixel frame, each later one for several.
    render_frames = 1 + next_multiple(settings["frames"] - 1, shape.frames)
    latent_frames = 1 + (render_frames - 1) // shape.frames
    per_frame = (render_width // shape.pixels) * (render_height // shape.pixels)
    tokens = latent_frames * per_frame
    branches = 2 if settings["guidance"] > 1 else 1
    steps = settings["steps"]
    table, attention, unfit = None, None, ""
    said = manifest.attention
    if said.kinds == "auto":
        try:
            grid = TokenGrid(latent_frames, per_frame)
            heads = branches * shape.heads
            how = said.density, said.tile, said.rounding
            table = _tiles(*how, grid, heads, shape.head_dim)
            attention = _sparse(said, table, steps, shape.layers)
        except ValueError as error:
            unfit = str(error)
    job = ClipJob(
        clip=clip.id,
        prompt=clip.prompt,
        negative_prompt=settings["negative_prompt"],
        seed=settings["seed"],
        width=width,
        height=height,
        frames=settings["frames"],
        render_width=render_width,
        render_height=render_height,
        render_frames=render_frames,
        steps=steps,
        guidance=settings["guidance"],
        flow_shift=settings["flow_shift"],
        sampler=settings["sampler"],
        attention=attention,
    )
    return PlannedClip(
        job=job,
        priority=settings["priority"],
        fps=settings["fps"],
        latent_frames=latent_frames,
        tokens=tokens,
        windows=1,
        cost=branches * _denoise_tflop(shape, tokens, steps, attention),
        table=table,
        unfit=unfit,
        encode=manifest.encode,
    )


def _denoise_tflop(
    shape: Shape, tokens: int, steps: int, attention: SparseAttention | None
) -> float:
    """Returns the work of all steps of one branch, in TFLOP."""
    dense = forward_tflop(shape, tokens)
    if attention is None:
        return dense * steps
    sparse_layers = shape.layers - attention.dense_layers
    sparse = forward_tflop(shape, tokens, sparse_layers * (1 - attention.achieved))
    return dense * attention.dense_steps + sparse * (steps - attention.dense_steps)


def forward_tflop(shape: Shape, tokens: int, skipped: float = 0.0) -> float:
    """Returns the work of one forward of the transformer, in TFLOP.

    Counted are, for each block, the products of self-attention over all pairs of
    tokens, and the linear layers on the tokens: four of self-attention, two of
    cross-attention, two feed-forward.

    Args:
        shape: The model's size.
        tokens: Tokens of the clip.
        skipped: How many layers' worth of self-attention is skipped.
    """
    attention = 4 * tokens**2 * shape.dim * (shape.layers - skipped)
    linear = 2 * tokens * (6 * shape.dim**2 + 2 * shape.dim * shape.ffn_dim)
    return (attention + linear * shape.layers) / 1e12
