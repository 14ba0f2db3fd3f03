"""The plan: what a manifest comes to, before anything starts."""

import dataclasses
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from pipeline import names
from pipeline.errors import RequestError
from pipeline.manifest import Clip, Encode, Manifest, parse_size
from pipeline.models import ModelLocation, Shape, find_model, missing_weights
from workers.job import ClipJob

DEFAULT_OUTPUT = "renders"

_HEADINGS = (
    *("clip", "size", "frames", "fps"),
    *("latents", "tokens", "windows", "steps", "PFLOP"),
)


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
        cost: Work of its denoising, in TFLOP.
        encode: How its video is encoded.
    """

    job: ClipJob
    priority: int
    fps: Fraction
    latent_frames: int
    tokens: int
    windows: int
    cost: float
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
    manifest: Manifest, output: str | None = None, folder: Path = Path()
) -> Plan:
    """Plans a manifest.

    Args:
        manifest: What to render.
        output: Where the batch's folder goes, instead of what the manifest says; a
            relative path counts from the current folder.
        folder: The manifest's own folder, from which its relative paths count.

    Raises:
        RequestError: There is no such model, or the output is of an unknown kind.
    """
    model = find_model(manifest.model, folder)
    understood = manifest.understood(model.settings)
    clips = [
        _plan_clip(clip, understood.encode, model.shape) for clip in understood.clips
    ]
    clips.sort(key=lambda clip: (-clip.priority, -clip.cost))
    return Plan(
        batch=manifest.batch,
        manifest=understood,
        model=model,
        output=_output(manifest, output, folder),
        clips=clips,
    )


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


def plan_table(plan: Plan) -> str:
    """Returns a plan as a person is shown it: as wide as it is, nothing cut off."""
    root = f"{plan.output}/{plan.batch}"
    rows = [_HEADINGS, *(row for clip in plan.clips for row in _rows(clip))]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADINGS))]
    count = f"{len(plan.clips)} clip{'s' * (len(plan.clips) != 1)}"
    lines = [f"Batch {plan.batch}: {count}, in this order", ""]
    for row in rows:
        # Names and sizes stand left, numbers right.
        left = [row[n].ljust(widths[n]) for n in range(2)]
        right = [row[n].rjust(widths[n]) for n in range(2, len(row))]
        lines.append("  ".join(left + right).rstrip())
    lines.append("")
    lines += [note for clip in plan.clips for note in _notes(clip, plan.model)]
    lines += [
        f"Model {plan.model.name}: {plan.model.path}",
        f"Videos: {root}/{names.video('CLIP')}",
        f"Report: {root}/{names.REPORT}",
    ]
    if missing := missing_weights(plan.model):
        lines.append(f"The model is not whole: {missing}")
    return "\n".join(lines)


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


def _plan_clip(clip: Clip, encode: Encode, shape: Shape) -> PlannedClip:
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
        steps=settings["steps"],
        guidance=settings["guidance"],
        flow_shift=settings["flow_shift"],
        sampler=settings["sampler"],
    )
    return PlannedClip(
        job=job,
        priority=settings["priority"],
        fps=settings["fps"],
        latent_frames=latent_frames,
        tokens=tokens,
        windows=1,
        cost=forward_tflop(shape, tokens) * branches * job.steps,
        encode=encode,
    )


def forward_tflop(shape: Shape, tokens: int) -> float:
    """Returns the work of one forward of the transformer, in TFLOP.

    Counted are, for each block, the products of self-attention over all pairs of
    tokens, and the linear layers on the tokens: four of self-attention, two of
    cross-attention, two feed-forward.
    """
    attention = 4 * tokens**2 * shape.dim
    linear = 2 * tokens * (6 * shape.dim**2 + 2 * shape.dim * shape.ffn_dim)
    return (attention + linear) * shape.layers / 1e12
