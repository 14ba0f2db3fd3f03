"""The report: one page that shows a batch's clips, from the store alone."""

import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import jinja2

from pipeline import names
from pipeline.attention import setting_words, work_words
from pipeline.batch import Batch, BatchClip, versions
from pipeline.events import ClipStatus, EventError
from pipeline.progress import duration

_TEMPLATE = "report.html.j2"
# In the order in which they happen; the page has a colour for each.
_PHASES = ("text", "denoise", "decode", "stitch")
_STATES = {
    "stitched": "done",
    "failed": "failed",
    "decoded": "decoded, to be stitched",
    "rendering": "rendering",
    "queued": "queued",
}
# Browsers keep a few dozen players at most; the other videos load when played.
_MOST_PRELOADED = 24


def write_report(batch_uri: str) -> str:
    """Writes a batch's index.html anew: prompts, videos, timings, failures.

    The page needs nothing but the videos and contact sheets that lie beside it.

    Args:
        batch_uri: The batch's root, OUTPUT/BATCH.

    Returns:
        Where the page lies: a path or a URI.

    Raises:
        RequestError: There is no such batch.
        StoreError: The store cannot be read or written.
    """
    batch = Batch.open(batch_uri)
    batch.store.replace(names.REPORT, render_page(batch).encode())
    return batch.store.url(names.REPORT)


def render_page(batch: Batch) -> str:
    """Returns the page's HTML; every text of the manifest in it is escaped."""
    there = set(batch.store.list("videos/"))
    clips = [_clip(batch, entry, there) for entry in batch.clips]
    order = [fields["id"] for fields in batch.info["manifest"]["clips"]]
    clips.sort(key=lambda clip: order.index(clip["id"]))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["duration"] = duration
    now = datetime.datetime.now(datetime.UTC)
    return environment.get_template(_TEMPLATE).render(
        batch=batch.name,
        model=batch.info["model"],
        manifest_hash=batch.info["hash"],
        clips=clips,
        counts=_counts(clips),
        phases=_phases([clip["status"] for clip in clips]),
        attention=_attention([clip["status"] for clip in clips]),
        footage=sum(clip["length"] for clip in clips if clip["video"]),
        engine=next((c["engine"] for c in clips if c["engine"]), {}),
        version=versions().get("tilereel", ""),
        written=now.strftime("%Y-%m-%d %H:%M UTC"),
        most_preloaded=_MOST_PRELOADED,
    )


def _clip(batch: Batch, entry: BatchClip, there: set[str]) -> dict[str, Any]:
    """Returns what the page shows of a clip."""
    job = entry.job
    try:
        status = batch.log.status(job.clip)
    except EventError as error:
        status = ClipStatus(state="failed", reason=str(error), stage="events")
    video = names.video(job.clip)
    sheet = names.sheet(job.clip)
    state = _STATES[status.state]
    if status.state == "rendering" and status.steps:
        state = f"rendering, step {status.step} of {status.steps}"
    return {
        "id": job.clip,
        "prompt": job.prompt,
        "status": status,
        "kind": status.state,
        "state": state,
        "width": job.width,
        "height": job.height,
        "length": float(job.frames / entry.fps),
        "video": video if status.state == "stitched" and video in there else "",
        "sheet": sheet if status.state == "stitched" and sheet in there else "",
        "provenance": names.provenance(job.clip),
        "phases": _phases([status]),
        "attention": _attention([status]),
        "engine": status.engine,
        "settings": _settings(entry),
    }


def _settings(entry: BatchClip) -> dict[str, str]:
    """Returns a clip's settings by the names that people read."""
    job = entry.job
    settings = {"Size": f"{job.width} × {job.height}, {_frames(job.frames)}"}
    cropped = (job.width, job.height) != (job.render_width, job.render_height)
    if cropped or job.frames != job.render_frames:
        settings["Rendered as"] = (
            f"{job.render_width} × {job.render_height}, {_frames(job.render_frames)}"
        )
    return settings | {
        "Frame rate": f"{_rate(entry.fps)} fps",
        "Seed": str(job.seed),
        "Steps": f"{job.steps}, {job.sampler}",
        "Guidance": f"{job.guidance:g}",
        "Flow shift": f"{job.flow_shift:g}",
        "Attention": setting_words(job.attention),
        "Negative prompt": job.negative_prompt or "none",
        "Encoding": f"{entry.encode['codec']}, crf {entry.encode['crf']}",
    }


def _phases(statuses: list[ClipStatus]) -> list[tuple[str, float, float]]:
    """Returns (phase, seconds, percent of all) of clips taken together."""
    seconds = {
        phase: sum(status.seconds.get(phase, 0.0) for status in statuses)
        for phase in _PHASES
    }
    whole = sum(seconds.values())
    return [(p, s, 100 * s / whole) for p, s in seconds.items() if s > 0]


def _attention(statuses: list[ClipStatus]) -> str:
    """Returns in words what attention's heads did, clips taken together."""
    begun = [status for status in statuses if status.step]
    works = [status.attention for status in begun if status.attention]
    if not works:
        return "dense, no tile skipped" if begun else ""
    words = work_words(sum(works[1:], works[0]))
    if dense := len(begun) - len(works):
        words += f"; beside {dense} clip{'s' * (dense != 1)} dense throughout"
    return words


def _counts(clips: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns (kind, words) for each state that clips are in, best first."""
    kinds = [clip["kind"] for clip in clips]
    return [
        (kind, f"{kinds.count(kind)} {words}")
        for kind, words in _STATES.items()
        if kind in kinds
    ]


def _rate(fps: Fraction) -> str:
    return str(fps) if fps.denominator == 1 else f"{float(fps):.3f} ({fps})"


def _frames(number: int) -> str:
    return f"{number} frame" if number == 1 else f"{number} frames"
