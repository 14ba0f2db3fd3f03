"""How far batches are, read from the store alone; and putting failed clips back."""

import dataclasses
import json
import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline import names
from pipeline.attention import percent, skipped
from pipeline.batch import Batch, find_batches
from pipeline.errors import RequestError
from pipeline.events import ClipStatus, Superseded
from pipeline.lease import Holder, current_epoch, read_holder
from pipeline.progress import duration
from pipeline.store import StoreError

_WATCH_SECONDS = 2.0
_PHASES = ("text", "denoise", "decode", "stitch")
_STYLES = {"stitched": "green", "failed": "red", "queued": "dim"}


@dataclasses.dataclass(frozen=True)
class BatchStatus:
    """How far a batch is.

    Attributes:
        batch: The batch.
        clips: Each clip's state by its id, in dealing order.
        holder: Who drives it, or drove it last; None where no one ever did.
        running: Whether that driver is taken for alive.
        report: Whether there is an index.html.
    """

    batch: Batch
    clips: dict[str, ClipStatus]
    holder: Holder | None
    running: bool
    report: bool

    @classmethod
    def read(cls, batch: Batch) -> "BatchStatus":
        """Reads a batch's status; raises `RequestError` or `StoreError`."""
        holder = read_holder(batch.store)
        return cls(
            batch=batch,
            clips={c.job.clip: batch.log.status(c.job.clip) for c in batch.clips},
            holder=holder,
            running=holder is not None and holder.alive(),
            report=names.REPORT in batch.store.list(names.REPORT),
        )

    @property
    def exit_status(self) -> int:
        """1 where a clip has failed, else 0."""
        return int(any(s.state == "failed" for s in self.clips.values()))

    @property
    def ended(self) -> bool:
        """Whether every clip is stitched or has failed."""
        return all(s.state in ("stitched", "failed") for s in self.clips.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the status as plain JSON, for programs."""
        clips = []
        for clip, status in self.clips.items():
            fields = dataclasses.asdict(status)
            for internal in ("known", "checkpoints", "engine"):
                fields.pop(internal)
            clips.append({"clip": clip} | fields)
        driver = dataclasses.asdict(self.holder) if self.holder else {}
        return {
            "batch": self.batch.name,
            "uri": self.batch.uri,
            "driver": driver | {"running": self.running},
            "clips": clips,
            "report": self.batch.store.url(names.REPORT) if self.report else "",
        }

    def __rich__(self) -> RenderableType:
        """Returns what a person is shown: the table, reasons, and where things are.

        Print it with `soft_wrap`: then paths, which are to be copied, stay whole.
        """
        parts: list[RenderableType] = [_headline(self), _table(self)]
        for clip, status in self.clips.items():
            if status.state == "failed":
                line = Text(f"{clip} failed in {status.stage}: ", style="red")
                parts.append(line.append(status.reason, style="default"))
        if hint := _hint(self):
            parts.append(Text(hint))
        if self.report:
            url = self.batch.store.url(names.REPORT)
            parts.append(Text(f"Report: {url}"))
        return Group(*parts)


def show(output: str, *, as_json: bool, watch: bool, console: Console) -> int:
    """Shows the batches at an output: a batch's own folder, or one that holds some.

    Args:
        output: Path or URI.
        as_json: As JSON on one console, for programs.
        watch: Again and again, until every clip has ended.
        console: Where to show it.

    Returns:
        The exit status: 1 where a clip has failed, else 0.

    Raises:
        RequestError: There is no batch, or the store cannot be read.
    """
    try:
        batches = [Batch.open(uri) for uri in find_batches(output)]
        read = [BatchStatus.read(batch) for batch in batches]
        if watch and console.is_terminal and not as_json:
            with Live(Group(*read), console=console, auto_refresh=False) as live:
                while not all(status.ended for status in read):
                    time.sleep(_WATCH_SECONDS)
                    read = [BatchStatus.read(batch) for batch in batches]
                    live.update(Group(*read), refresh=True)
        else:
            _print(read, as_json, console)
            while watch and not all(status.ended for status in read):
                time.sleep(_WATCH_SECONDS)
                before = read
                read = [BatchStatus.read(batch) for batch in batches]
                if [s.clips for s in read] != [s.clips for s in before]:
                    _print(read, as_json, console)
    except StoreError as error:
        raise RequestError(str(error)) from error
    return max(status.exit_status for status in read)


def print_batch(batch: Batch, console: Console) -> int:
    """Prints the end of a render; returns 0 where all is stitched, else 1."""
    status = BatchStatus.read(batch)
    console.print(status, soft_wrap=True)
    return int(any(s.state != "stitched" for s in status.clips.values()))


def retry(output: str, *, clip: str | None, console: Console) -> int:
    """Puts failed clips back, so that the batch's next render takes them up.

    A driver that runs meanwhile takes them up by itself.

    Args:
        output: A batch's folder, or one that holds some.
        clip: The id of the only one to put back; None for all that have failed.
        console: Where to say what was put back.

    Returns:
        The exit status, 0.

    Raises:
        RequestError: There is no such batch or clip, the clip has not failed, or a
            driver has taken the batch over at this very moment.
    """
    try:
        batches = [Batch.open(uri) for uri in find_batches(output)]
        if clip is not None:
            batches = [b for b in batches if _has(b, clip)]
            if not batches:
                raise RequestError(f"no batch at {output} has a clip {clip}")
        for batch in batches:
            _put_back(batch, clip, console)
    except (StoreError, Superseded) as error:
        raise RequestError(str(error)) from error
    return 0


def _put_back(batch: Batch, only: str | None, console: Console) -> None:
    epoch = current_epoch(batch.store)
    back = []
    for clip in [only] if only else [entry.job.clip for entry in batch.clips]:
        added = batch.log.append(
            clip, "retried", epoch, only_if=lambda status: status.state == "failed"
        )
        if added:
            back.append(clip)
        elif only:
            state = batch.log.status(clip).state
            raise RequestError(f"clip {clip} has not failed: it is {state}")
    if not back:
        text = f"{batch.name}: no clip has failed"
    elif BatchStatus.read(batch).running:
        text = f"{batch.name}: put back {', '.join(back)}; its driver takes them up"
    else:
        text = (
            f"{batch.name}: put back {', '.join(back)}; render its manifest again to "
            "have them rendered"
        )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _has(batch: Batch, clip: str) -> bool:
    return any(entry.job.clip == clip for entry in batch.clips)


def _print(statuses: list[BatchStatus], as_json: bool, console: Console) -> None:
    if as_json:
        content = {"batches": [status.to_json() for status in statuses]}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(*statuses, sep="\n", soft_wrap=True)


def _headline(status: BatchStatus) -> Text:
    clips = status.clips.values()
    done = sum(s.state == "stitched" for s in clips)
    failed = sum(s.state == "failed" for s in clips)
    text = f"{status.batch.name}: {done} of {len(clips)} clips done"
    if failed:
        text += f", {failed} failed"
    if status.running and status.holder is not None:
        text += f"; process {status.holder.pid} on {status.holder.host} renders it"
    return Text(text, style="bold")


def _table(status: BatchStatus) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("clip", overflow="fold", min_width=8)
    table.add_column("state", min_width=8)
    table.add_column("frames", justify="right")
    table.add_column("tiles skipped", justify="right")
    for phase in _PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    table.add_column("video", overflow="fold", min_width=5)
    for clip, found in status.clips.items():
        seconds = (found.seconds.get(phase) for phase in _PHASES)
        table.add_row(
            clip,
            Text(_state(found, status.running), style=_STYLES.get(found.state, "")),
            str(found.frames or ""),
            percent(skipped(found.attention)) if found.attention else "",
            *("" if s is None else duration(s) for s in seconds),
            found.video,
        )
    return table


def _state(status: ClipStatus, running: bool) -> str:
    """Returns a clip's state in words, with how far it is."""
    if status.state != "rendering":
        return status.state
    how = f" step {status.step} of {status.steps}" if status.steps else ""
    return f"rendering{how}" if running else f"stopped{' at' if how else ''}{how}"


def _hint(status: BatchStatus) -> str:
    """Returns what a person can do next, "" where there is nothing to do."""
    if status.running:
        return ""
    failed = [s for s in status.clips.values() if s.state == "failed"]
    if any(not s.retryable for s in failed):
        uri = status.batch.uri
        return (
            "When what made them fail is mended, put them back with `tilereel retry "
            f"{uri}` and render the manifest again."
        )
    if failed or not status.ended:
        return "Render the manifest again to go on."
    return ""
