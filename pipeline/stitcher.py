"""Stitches each clip in the background as soon as its frames are decoded.

A thread of the driver hands the clips one by one to a helper process, this module
run as a program. Beam takes seconds to import and cannot be interrupted; a process
can be ended at any moment, since what it publishes appears at once or not at all.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO

from pipeline.batch import Batch
from pipeline.progress import Progress
from pipeline.rendering import explain, forget_checkpoints
from pipeline.report import write_report


class Stitcher:
    """Stitches clips in the order given, and keeps the report current.

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
        self._helper = _Helper(batch.uri)
        self._thread = threading.Thread(target=self._run, name="stitch")
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
        """Starts no more, and gives what is under way some seconds to end."""
        self._stopping.set()
        self._work.put(None)
        self._thread.join(seconds)
        self._helper.kill()
        self._thread.join()

    def _run(self) -> None:
        with self._helper:
            while (clip := self._work.get()) is not None:
                if self._stopping.is_set():
                    return
                try:
                    if clip:
                        self._stitch(clip)
                    write_report(self._batch.uri)
                # There is no one in this thread to raise to. What could not be
                # written is found again by the next run.
                except Exception as error:
                    self._progress.note(f"{clip or 'report'}: {explain(error)}")

    def _stitch(self, clip: str) -> None:
        self._progress.phase(clip, "stitch")
        fault = self._helper.stitch(clip)
        if self._stopping.is_set():
            return
        if fault:
            self._batch.log.append(
                clip,
                "failed",
                self._epoch,
                only_if=lambda status: status.state == "decoded",
                reason=fault,
                stage="stitch",
                retryable=True,
            )
        status = self._batch.log.status(clip)
        if status.state == "stitched":
            forget_checkpoints(self._batch, clip)
        self._progress.ended(clip, status)


class _Helper:
    """The process that stitches, started with its first clip."""

    def __init__(self, batch_uri: str):
        self._command = [sys.executable, "-m", "pipeline.stitcher", batch_uri]
        self._lock = threading.Lock()
        self._killed = False
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._end()

    def stitch(self, clip: str) -> str:
        """Has a clip stitched; returns what kept it from being tried, "" if nothing.

        How the stitch itself went is in the clip's events.
        """
        process = self._ready()
        if process is None or process.stdin is None or process.stdout is None:
            return "the driver was stopping"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(clip) + "\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                return json.loads(answer)
        return self._end()

    def kill(self) -> None:
        """Ends the process and its ffmpeg at once, and starts no other."""
        with self._lock:
            self._killed = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ready(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._process is None and not self._killed:
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_end` closes
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                    # Ctrl-C in the terminal is for the driver to act upon.
                    start_new_session=True,
                )
            return self._process

    def _end(self) -> str:
        """Lets the process end, and returns how it did where there was one."""
        with self._lock:
            process, errors = self._process, self._errors
            self._process = self._errors = None
        if process is None or errors is None:
            return ""
        process.communicate()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        errors.close()
        return f"the process that makes videos ended ({process.returncode}) {last}"


def serve(batch_uri: str) -> None:
    """Stitches the clips named on standard input, one a line, and answers each.

    A line is a clip's id as JSON; the answer is a text as JSON, "" or what kept the
    stitch from being tried.
    """
    from pipeline.stitch import stitch_batch

    # Libraries that print must not answer in our place.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        fault = ""
        try:
            stitch_batch(batch_uri, [json.loads(line)])
        except Exception as error:
            fault = explain(error)
        answers.write(json.dumps(fault) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
