"""The stitch: a Beam job that makes videos of the clips whose frames are decoded.

Its elements are names of clips, never frames. A clip's video is published before
the event that says so, and all names can be written once only, so a bundle that
Beam runs again, or a run after a kill, changes nothing that is done.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from pipeline import names
from pipeline.batch import Batch
from pipeline.encode import EncodeError
from pipeline.errors import RequestError
from pipeline.events import ClipStatus, EventError, Superseded
from pipeline.ffmpeg import find_ffmpeg
from pipeline.lease import current_epoch
from pipeline.publish import publish
from pipeline.store import Store, StoreError
from pipeline.verify import DamagedFrames

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StitchResult:
    """How it went with one clip.

    Attributes:
        clip: The clip's id.
        ok: Whether its video is published.
        reason: Why not, "" where it is.
        video: Name of the video in the store, "" where there is none.
        frames: Frames in the video, 0 where there is none.
        seconds: How long making it took, 0 where there is none.
    """

    clip: str
    ok: bool
    reason: str = ""
    video: str = ""
    frames: int = 0
    seconds: float = 0.0


def stitch_batch(
    batch_uri: str,
    clips: Sequence[str] | None = None,
    runner: str = "FnApiRunner",
    options: Sequence[str] | None = None,
) -> list[StitchResult]:
    """Makes and publishes the videos of a batch's clips whose frames are decoded.

    Clips whose video is published are left alone. A clip that cannot be stitched
    gets a `failed` event with the reason and never stops the others.

    Args:
        batch_uri: The batch's root, OUTPUT/BATCH.
        clips: Ids of the clips to stitch; None for all that are decoded.
        runner: Name of the Beam runner.
        options: Beam's options, as on its command line ("--name=value").

    Returns:
        A result for each of these clips, in the batch's order.

    Raises:
        RequestError: There is no such batch, clip, runner or option, or no ffmpeg.
        StoreError: The store cannot be read.
    """
    batch = Batch.open(batch_uri)
    known = [entry.job.clip for entry in batch.clips]
    unknown = [clip for clip in clips or () if clip not in known]
    if unknown:
        raise RequestError(
            f"batch {batch.name} has no clip {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(known)}"
        )
    asked = [clip for clip in known if clips is None or clip in clips]
    standing = {clip: _standing(batch, clip) for clip in asked}
    wanted = [clip for clip, (stage, _) in standing.items() if stage == "wanted"]
    if wanted:
        # A missing one is no fault of any clip.
        find_ffmpeg()
        _run_beam(batch.uri, wanted, runner, options or ())
        standing |= {clip: _standing(batch, clip) for clip in wanted}
    return [
        result
        for stage, result in standing.values()
        if stage != "waiting" or clips is not None
    ]


def stitch_clip(batch_uri: str, clip: str) -> None:
    """Makes and publishes the video of one clip and adds the event that says so.

    What is wrong with the clip becomes its `failed` event, or a line in the log
    where even that cannot be written.

    Args:
        batch_uri: The batch's root, OUTPUT/BATCH.
        clip: The clip's id; its frames are decoded.

    Raises:
        RequestError: There is no such batch.
        StoreError: The batch cannot be read.
    """
    start = time.monotonic()
    batch = Batch.open(batch_uri)
    shards: tuple[str, ...] = ()
    try:
        shards = batch.log.status(clip).shards
        publish(batch, clip)
        seconds = round(time.monotonic() - start, 3)
        event = {"event": "stitched", "video": names.video(clip), "seconds": seconds}
    except DamagedFrames as error:
        event = _failed(f"{error}. Rendering the batch again makes them anew")
    except (EncodeError, StoreError, RequestError, EventError) as error:
        event = _failed(str(error))
    # One bad clip, whatever is bad about it, must not stop the others.
    except Exception as error:
        _log.exception("clip %s met an error that none should meet", clip)
        event = _failed(f"{type(error).__name__}: {error}")
    try:
        batch.log.append(
            clip,
            epoch=current_epoch(batch.store),
            # Of frames made anew meanwhile, this stitch has nothing to say.
            only_if=lambda status: (
                status.shards == shards and _stitchable(batch.store, clip, status)
            ),
            **event,
        )
    except (StoreError, EventError, Superseded) as error:
        _log.error("clip %s: %s: %s", clip, event.get("reason", "is stitched"), error)


def _standing(batch: Batch, clip: str) -> tuple[str, StitchResult]:
    """Tells where a clip stands: "waiting", "wanted" or "ended", and the result."""
    try:
        status = batch.log.status(clip)
    except EventError as error:
        return "ended", StitchResult(clip, False, str(error))
    if _stitchable(batch.store, clip, status):
        reason = status.reason or (
            "how the stitch went could not be written to the store; the log says more"
        )
        return "wanted", StitchResult(clip, False, reason)
    if status.state == "stitched":
        seconds = status.seconds["stitch"]
        done = StitchResult(clip, True, "", status.video, status.frames, seconds)
        return "ended", done
    reason = status.reason or f"its frames are not decoded yet: it is {status.state}"
    return "waiting", StitchResult(clip, False, reason)


def _stitchable(store: Store, clip: str, status: ClipStatus) -> bool:
    if status.state == "stitched":
        # Someone may have deleted the video to have it made anew.
        return names.video(clip) not in store.list(names.video(clip))
    failed_here = status.state == "failed" and status.stage == "stitch"
    return status.state == "decoded" or failed_here


def _failed(reason: str) -> dict[str, Any]:
    return {"event": "failed", "reason": reason, "stage": "stitch", "retryable": True}


def _run_beam(
    batch_uri: str, clips: Sequence[str], runner: str, options: Sequence[str]
) -> None:
    beam = _import_beam()
    words = io.StringIO()
    try:
        # Beam's options end the process where they do not parse.
        with contextlib.redirect_stderr(words):
            flags = beam.options.pipeline_options.PipelineOptions(list(options))
            flags.get_all_options()
        pipeline = beam.Pipeline(runner=runner, options=flags)
    except SystemExit:
        last = words.getvalue().strip().rpartition("\n")[2]
        raise RequestError(f"Beam does not take {' '.join(options)}: {last}") from None
    except ValueError as error:
        raise RequestError(f"Beam has no runner {runner!r}: {error}") from error
    with pipeline:
        _ = (
            pipeline
            | "Clips" >> beam.Create(list(clips))
            | "Spread" >> beam.Reshuffle()
            | "Stitch" >> beam.Map(functools.partial(stitch_clip, batch_uri))
        )


def _import_beam() -> ModuleType:
    """Imports Beam, which takes seconds, where it is first needed.

    On the way Beam warns of clients that are not there, for services that nothing
    here uses; that warning is kept from the terminal.
    """
    root = logging.getLogger()

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("apitools not found")

    root.addFilter(other)
    try:
        import apache_beam
        import apache_beam.options.pipeline_options
    finally:
        root.removeFilter(other)
    return apache_beam
