"""Stitches each clip in the background as soon as its frames are decoded."""

import queue
import threading

from pipeline.batch import Batch
from pipeline.progress import Progress
from pipeline.rendering import explain, forget_checkpoints
from pipeline.report import write_report


class Stitcher:
    """A thread that stitches clips in the order given, and keeps the report current.

    Args:
        batch: The clips' batch.
        epoch: The driver's epoch.
        progress: Told when a clip's video is begun and when it is done.
    """

    def __init__(self, batch: Batch, epoch: int, progress: Progress):
        # A batch of its own: the log of events is read by one thread only.
        self._batch = Batch.open(batch.uri)
        self._epoch = epoch
        self._progress = progress
        self._work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        # As a daemon it never keeps an interrupted process from ending: what it
        # publishes, it publishes at once or not at all.
        self._thread = threading.Thread(target=self._run, name="stitch", daemon=True)
        self._thread.start()

    def stitch(self, clip: str) -> None:
        """Queues a clip whose frames are decoded."""
        self._work.put(clip)

    def report(self) -> None:
        """Queues a new report, for a clip that ended without a video."""
        self._work.put("")

    def finish(self) -> None:
        """Waits until all that was queued is done."""
        self._work.put(None)
        self._thread.join()

    def abandon(self, seconds: float) -> None:
        """Starts no more, and waits some seconds for what is under way."""
        self._stopping.set()
        self._work.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (clip := self._work.get()) is not None and not self._stopping.is_set():
            try:
                if clip:
                    self._stitch(clip)
                write_report(self._batch.uri)
            # There is no one in this thread to raise to. What could not be written
            # is found again by the next run.
            except Exception as error:  # noqa: BLE001
                self._progress.note(f"{clip or 'report'}: {explain(error)}")

    def _stitch(self, clip: str) -> None:
        self._progress.phase(clip, "stitch")
        try:
            # Beam takes seconds to import: not before the first clip is there.
            from pipeline.stitch import stitch_batch

            stitch_batch(self._batch.uri, [clip])
        except Exception as error:  # noqa: BLE001 - it becomes the clip's reason
            self._batch.log.append(
                clip,
                "failed",
                self._epoch,
                only_if=lambda status: status.state == "decoded",
                reason=explain(error),
                stage="stitch",
                retryable=True,
            )
        status = self._batch.log.status(clip)
        if status.state == "stitched":
            forget_checkpoints(self._batch, clip)
        self._progress.ended(clip, status)
