"""Renders a batch: deals its clips to a slice and goes on from whatever is there.

Everything that must last is in the store, so this process may be killed at any
moment; the next run of the same command takes the lease over and goes on.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from rich.console import Console

from pipeline import lease, names
from pipeline.batch import Batch, BatchClip, begin
from pipeline.errors import RequestError
from pipeline.events import Superseded
from pipeline.ffmpeg import find_ffmpeg
from pipeline.plan import Plan
from pipeline.progress import Progress, duration, make_progress
from pipeline.rendering import ClipRenderer, forget_checkpoints
from pipeline.status import print_batch
from pipeline.stitcher import Stitcher
from pipeline.store import StoreError
from workers import fleet
from workers.checkpoint import CheckpointError

# A clip whose host dies this often is given up for this run.
MAX_ATTEMPTS = 3
# After Ctrl-C, how long a video that is nearly done may take to be done.
_LAST_STITCH_SECONDS = 5.0
# A second Ctrl-C within this time is taken for the same one (make and some shells
# pass it on to a process that has had it from the terminal).
_SAME_INTERRUPT_SECONDS = 1.0

DONE, FAILED, INTERRUPTED = 0, 1, 130


def render(plan: Plan, *, console: Console) -> int:
    """Renders and stitches all clips of a plan that are not done yet.

    Args:
        plan: What to render.
        console: Where progress and the final table are shown.

    Returns:
        The exit status: 0 where all clips are done, 1 where some failed or the store
        gave out, 130 where it was interrupted.

    Raises:
        RequestError: Nothing was begun: the output cannot be written, another
            manifest has the batch's name, another driver runs it, or the model or
            ffmpeg is missing.
    """
    with _interruptible(console):
        try:
            find_ffmpeg()
            batch, held = _take(plan)
            try:
                _Run(batch, held, str(plan.model.path), console).run()
            finally:
                held.release()
            return print_batch(batch, console)
        except KeyboardInterrupt:
            _say(
                console,
                "Interrupted. What is done is kept: run the same command again to go "
                "on from there.",
            )
            return INTERRUPTED
        except (StoreError, Superseded, fleet.FleetError) as error:
            _say(
                console,
                f"Stopped: {error}. What is done is kept: the same command goes on "
                "from there.",
            )
            return FAILED


def _take(plan: Plan) -> tuple[Batch, lease.Lease]:
    """Finds or begins the batch and makes this process its driver."""
    try:
        batch = begin(plan)
        return batch, lease.take(batch.store)
    except StoreError as error:
        raise RequestError(str(error)) from error


class _Run:
    """One driver's work on a batch, under its lease."""

    def __init__(self, batch: Batch, held: lease.Lease, model: str, console: Console):
        self._batch = batch
        self._lease = held
        self._model = model
        self._console = console
        self._attempts: dict[str, int] = {}

    def run(self) -> None:
        """Renders and stitches what is left; raises as `render` handles it."""
        self._batch.store.sweep()
        done, waiting = self._take_stock()
        clips = len(self._batch.clips)
        if len(done) == clips and self._has_report():
            return
        with make_progress(self._console, self._batch.clips, done) as progress:
            if done:
                progress.note(f"{len(done)} of {clips} clips are done already")
            self._work(waiting, progress)
            # What was put back while the last videos were made.
            while self._next() is not None:
                self._work([], progress)

    def _work(self, waiting: list[str], progress: Progress) -> None:
        """Renders what wants rendering; stitches that, and the clips waiting for it."""
        stitcher = Stitcher(self._batch, self._lease.epoch, progress)
        try:
            stitcher.report()
            for clip in waiting:
                stitcher.stitch(clip)
            with _Model(self._model, self._batch, progress) as model:
                while (clip := self._next()) is not None:
                    self._render(clip, model, progress, stitcher)
            stitcher.finish()
        except BaseException:
            stitcher.abandon(_LAST_STITCH_SECONDS)
            raise

    def _take_stock(self) -> tuple[list[str], list[str]]:
        """Queues new clips; returns those that are done and those to be stitched.

        A clip whose video someone has deleted is stitched again.
        """
        videos = set(self._batch.store.list(names.VIDEOS))
        done, waiting = [], []
        for clip in (entry.job.clip for entry in self._batch.clips):
            status = self._batch.log.status(clip)
            if not status.known:
                self._batch.log.append(clip, "queued", self._lease.epoch)
            if status.state == "stitched" and status.video in videos:
                forget_checkpoints(self._batch, clip)
                done.append(clip)
            elif status.state in ("decoded", "stitched"):
                waiting.append(clip)
        return done, waiting

    def _has_report(self) -> bool:
        return names.REPORT in self._batch.store.list(names.REPORT)

    def _next(self) -> BatchClip | None:
        """Returns the first clip that wants rendering, in dealing order.

        The events are asked each time, so that a clip put back by `tilereel retry`
        meanwhile is seen.
        """
        for clip in self._batch.clips:
            status = self._batch.log.status(clip.job.clip)
            again = status.state == "failed" and status.retryable
            if status.state in ("queued", "rendering"):
                return clip
            if again and status.epoch < self._lease.epoch:
                return clip
        return None

    def _render(
        self, clip: BatchClip, model: "_Model", progress: Progress, stitcher: Stitcher
    ) -> None:
        """Brings one clip to its `decoded` or `failed` event, or dies trying once."""
        name = clip.job.clip
        renderer = ClipRenderer(
            self._batch, clip, self._lease.epoch, self._lease.check, progress
        )
        try:
            if not renderer.reuse_frames():
                slice_, engine = model.ready()
                renderer.render(slice_, engine)
            stitcher.stitch(name)
            return
        except fleet.HostDied as death:
            model.drop()
            if not death.preempted:
                self._attempts[name] = self._attempts.get(name, 0) + 1
            if self._attempts.get(name, 0) < MAX_ATTEMPTS:
                progress.note(f"{name}: {death}; starting it again")
                return
            renderer.give_up(f"{death} ({MAX_ATTEMPTS} times with this clip)")
        except (Superseded, RequestError, fleet.FleetError):
            raise
        except Exception as error:
            renderer.fail(error)
        progress.ended(name, self._batch.log.status(name))
        stitcher.report()


class _Model:
    """The model, loaded on a slice; neither it nor Ray is started before its need."""

    def __init__(self, path: str, batch: Batch, progress: Progress):
        self._path = path
        self._batch = batch
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._connected = False
        self._slice: fleet.Slice | None = None
        self._engine: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self._progress.note("stopping")
        self._stack.close()

    def ready(self) -> tuple[fleet.Slice, dict[str, Any]]:
        """Returns a slice that holds the model, and what it tells of itself.

        Raises:
            RequestError: The folder is not a whole model, or not the one that the
                batch was begun with.
            FleetError: No slice can be had, or it dies of the model each time.
        """
        if not self._connected:
            self._progress.note("starting Ray")
            self._stack.enter_context(fleet.fleet())
            self._stack.callback(self.drop)
            self._connected = True
        for _ in range(MAX_ATTEMPTS):
            if self._slice is None:
                self._slice = fleet.new_slice("slice-0")
                try:
                    self._load(self._slice)
                except fleet.HostDied:
                    self.drop()
                    continue
            return self._slice, self._engine
        raise fleet.FleetError(
            f"the host's process died {MAX_ATTEMPTS} times while loading the model "
            f"{self._path}; see that there is enough memory for it"
        )

    def drop(self) -> None:
        """Gives up the slice; the next `ready` starts a new one."""
        if self._slice is not None:
            self._slice.close()
            self._slice = None

    def _load(self, slice_: fleet.Slice) -> None:
        self._progress.note(f"loading the model {self._path}")
        start = time.monotonic()
        try:
            self._engine = slice_.call("load", self._path)
        except CheckpointError as error:
            raise RequestError(f"the model does not load: {error}") from error
        found = self._engine["model_hash"]
        for clip in self._batch.clips:
            engine = self._batch.log.status(clip.job.clip).engine
            if engine and engine["model_hash"] != found:
                raise RequestError(
                    f"the model in {self._path} has changed: clip {clip.job.clip} was "
                    f"begun with {engine['model_hash'][:12]}, this is {found[:12]}; "
                    "put the old files back, or give the batch another name"
                )
        self._progress.note(f"model loaded in {duration(time.monotonic() - start)}")


@contextlib.contextmanager
def _interruptible(console: Console) -> Iterator[None]:
    """Makes Ctrl-C, and what a scheduler sends instead, one KeyboardInterrupt.

    So that tidying up is not itself interrupted, it is raised once. A second Ctrl-C
    ends the process on the spot, which harms nothing that is in the store.
    """
    interrupted: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.append(time.monotonic())
        if len(interrupted) == 1:
            raise KeyboardInterrupt
        if interrupted[-1] - interrupted[0] > _SAME_INTERRUPT_SECONDS:
            console.show_cursor()
            os._exit(INTERRUPTED)

    signals = [signal.SIGINT, signal.SIGTERM]
    # Under nohup a closed terminal is no reason to stop.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
