"""What a person sees of a render: bars on a terminal, dated lines in a log file."""

import abc
import datetime
import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from pipeline.attention import percent, skipped
from pipeline.batch import BatchClip
from pipeline.events import ClipStatus

# Until a clip has been decoded: decoding takes about this share of a clip's time
# (measured: a fifth for the demo model, less for the large ones).
_DECODE_SHARE = 0.2
# A log file gets a line about a clip under way at most this often.
_LINE_SECONDS = 30.0
_PHASES = ("text", "denoise", "decode", "stitch")


class _Rate:
    """Seconds per unit of work, from the last calls of a kind."""

    def __init__(self):
        self._compiled = False
        self._last: deque[float] = deque(maxlen=5)

    def learn(self, seconds: float) -> None:
        if self._compiled:
            self._last.append(seconds)
        self._compiled = True

    def value(self) -> float | None:
        """Returns the lower median, None while nothing is known."""
        ordered = sorted(self._last)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


class Estimate:
    """Guesses the time left from the calls so far.

    A clip's cost stands for its denoising; frames cost by their pixels. The first
    call of each kind also compiles and does not count, and of the last ones the lower
    median does, since clips of another size compile again.

    Args:
        clips: All clips of the batch.
    """

    def __init__(self, clips: Sequence[BatchClip]):
        self._clips = {clip.job.clip: clip for clip in clips}
        self._denoise = _Rate()
        self._decode = _Rate()

    def stepped(self, clip: str, steps: int, seconds: float) -> None:
        """Learns that some denoising steps of a clip took some seconds."""
        entry = self._clips[clip]
        share = entry.cost * steps / entry.job.steps
        self._denoise.learn(seconds / share)

    def decoded(self, clip: str, frames: int, seconds: float) -> None:
        """Learns that some frames of a clip took some seconds to decode."""
        self._decode.learn(seconds / (frames * _pixels(self._clips[clip])))

    def left(self, clip: str, step: int = 0, frames: int = 0) -> float | None:
        """Returns the seconds that a clip still takes; None while unknown.

        Args:
            clip: The clip's id.
            step: Denoising steps done.
            frames: Frames decoded.
        """
        entry = self._clips[clip]
        job = entry.job
        denoise = self._denoise.value()
        if denoise is None and step < job.steps:
            return None
        whole = entry.cost * (denoise or 0.0)
        decode = self._decode.value()
        if decode is None:
            if denoise is None:
                return None
            rest = whole * _DECODE_SHARE / (1 - _DECODE_SHARE)
            rest *= 1 - frames / job.frames
        else:
            rest = decode * _pixels(entry) * (job.frames - frames)
        return whole * (1 - step / job.steps) + rest


class Progress(abc.ABC):
    """Follows a batch; `make_progress` chooses how it is shown.

    Safe to be told things by several threads. Use as a context manager.

    Args:
        console: Where to show it.
        clips: All clips of the batch.
        finished: Ids of those that were finished before.
    """

    def __init__(
        self, console: Console, clips: Sequence[BatchClip], finished: Sequence[str]
    ):
        self._console = console
        self._clips = {clip.job.clip: clip for clip in clips}
        self._finished = set(finished)
        self._done: dict[str, tuple[int, int]] = dict.fromkeys(self._clips, (0, 0))
        self._rendered = set(finished)
        self._estimate = Estimate(clips)
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Shows a message that stays."""

    def phase(self, clip: str, phase: str) -> None:
        """Shows that a clip has come to "text" or "stitch"."""
        with self._lock:
            if phase == "stitch":
                self._rendered.add(clip)
            self._show(clip, phase)

    def steps(self, clip: str, step: int, new: int = 0, seconds: float = 0.0) -> None:
        """Shows how many denoising steps are done; `new` of them in `seconds`."""
        with self._lock:
            if new:
                self._estimate.stepped(clip, new, seconds)
            self._done[clip] = (step, 0)
            self._show(clip, "denoise")

    def frames(self, clip: str, done: int, new: int = 0, seconds: float = 0.0) -> None:
        """Shows how many frames are decoded; `new` of them in `seconds`."""
        with self._lock:
            if new:
                self._estimate.decoded(clip, new, seconds)
            self._done[clip] = (self._clips[clip].job.steps, done)
            self._show(clip, "decode")

    def ended(self, clip: str, status: ClipStatus) -> None:
        """Shows that a clip is stitched or has failed."""
        with self._lock:
            self._finished.add(clip)
            self._rendered.add(clip)
            self._close(clip, summary(clip, status))

    @abc.abstractmethod
    def _show(self, clip: str, phase: str) -> None:
        """Shows how far a clip is, in a phase."""

    @abc.abstractmethod
    def _close(self, clip: str, text: str) -> None:
        """Shows a clip's last line."""

    def _clip_left(self, clip: str) -> float | None:
        return self._estimate.left(clip, *self._done[clip])

    def _batch_left(self) -> float | None:
        total = 0.0
        for clip in self._clips:
            if clip not in self._rendered:
                left = self._clip_left(clip)
                if left is None:
                    return None
                total += left
        return total

    def _how_far(self, clip: str, phase: str) -> str:
        job = self._clips[clip].job
        step, frames = self._done[clip]
        if phase == "denoise":
            return f"step {step} of {job.steps}"
        if phase == "decode":
            return f"frame {frames} of {job.frames}"
        return {"text": "reading the prompt", "stitch": "making the video"}[phase]


class LiveProgress(Progress):
    """Bars at the foot of a terminal: one per clip under way, one for the batch."""

    def __init__(
        self, console: Console, clips: Sequence[BatchClip], finished: Sequence[str]
    ):
        super().__init__(console, clips, finished)
        self._bars = Bars(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[how]}"),
            TextColumn("{task.fields[left]}", style="cyan"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._batch = self._bars.add_task("batch", total=1, how="", left="")

    def __enter__(self) -> Self:
        self._bars.start()
        self._show_batch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """Shows a message above the bars."""
        self._console.print(text, markup=False, highlight=False)

    def _show(self, clip: str, phase: str) -> None:
        if clip not in self._tasks:
            self._tasks[clip] = self._bars.add_task(
                escape(clip), total=1, how="", left=""
            )
        left = None if phase in ("text", "stitch") else self._clip_left(clip)
        self._bars.update(
            self._tasks[clip],
            completed=self._share(clip),
            how=self._how_far(clip, phase),
            left="" if left is None else f"{duration(left)} left",
        )
        self._show_batch()

    def _close(self, clip: str, text: str) -> None:
        if clip in self._tasks:
            self._bars.remove_task(self._tasks.pop(clip))
        self.note(text)
        self._show_batch()

    def _show_batch(self) -> None:
        left = self._batch_left()
        costs = {name: entry.cost for name, entry in self._clips.items()}
        done = sum(cost * self._share(name) for name, cost in costs.items())
        self._bars.update(
            self._batch,
            completed=done / sum(costs.values()),
            how=f"{len(self._finished)} of {len(self._clips)} clips",
            left="" if not left else f"{duration(left)} left",
        )

    def _share(self, clip: str) -> float:
        """Returns how much of a clip's rendering is done, from 0 to 1."""
        if clip in self._rendered:
            return 1.0
        step, frames = self._done[clip]
        job = self._clips[clip].job
        denoised = (1 - _DECODE_SHARE) * step / job.steps
        return denoised + _DECODE_SHARE * frames / job.frames


class PlainProgress(Progress):
    """Dated lines: every change of phase, and now and then how far a clip is."""

    def __init__(
        self, console: Console, clips: Sequence[BatchClip], finished: Sequence[str]
    ):
        super().__init__(console, clips, finished)
        self._last: dict[str, tuple[str, datetime.datetime]] = {}

    def note(self, text: str) -> None:
        """Writes a message as a line."""
        time = _clock().strftime("%Y-%m-%d %H:%M:%S")
        self._console.print(
            f"{time} {text}", markup=False, highlight=False, soft_wrap=True
        )

    def _show(self, clip: str, phase: str) -> None:
        before, since = self._last.get(clip, ("", _clock()))
        quiet = (_clock() - since).total_seconds() < _LINE_SECONDS
        if before == phase and quiet:
            return
        self._last[clip] = (phase, _clock())
        text = f"{clip}: {self._how_far(clip, phase)}"
        if phase in ("denoise", "decode"):
            left, batch = self._clip_left(clip), self._batch_left()
            if left is not None:
                text += f", {duration(left)} left"
            if batch is not None and len(self._clips) > 1:
                text += f" (batch: {duration(batch)})"
        self.note(text)

    def _close(self, clip: str, text: str) -> None:
        self.note(text)


def make_progress(
    console: Console, clips: Sequence[BatchClip], finished: Sequence[str]
) -> Progress:
    """Returns bars for a terminal, lines for anything else."""
    kind = LiveProgress if console.is_terminal else PlainProgress
    return kind(console, clips, finished)


def summary(clip: str, status: ClipStatus) -> str:
    """Returns one line about a clip that has ended."""
    if status.state == "failed":
        return f"{clip}: failed in {status.stage}: {status.reason}"
    spent = ", ".join(
        f"{phase} {duration(status.seconds[phase])}"
        for phase in _PHASES
        if phase in status.seconds
    )
    work = status.attention
    sparse = f", {percent(skipped(work))} of tiles skipped" if work else ""
    return f"{clip}: done, {status.frames} frames ({spent}){sparse}: {status.video}"


def duration(seconds: float) -> str:
    """Returns seconds as a person would say them: "0.4 s", "3 min 20 s", "2 h 05 min".

    >>> duration(200)
    '3 min 20 s'
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _clock() -> datetime.datetime:
    return datetime.datetime.now().astimezone()


def _pixels(clip: BatchClip) -> int:
    return clip.job.render_width * clip.job.render_height
