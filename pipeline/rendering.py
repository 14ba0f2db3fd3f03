"""One clip on one slice, from its prompt or its checkpoint to frames in the store."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

from pipeline import names
from pipeline.batch import Batch, BatchClip
from pipeline.events import ClipStatus
from pipeline.output import StoreOutput
from pipeline.progress import Progress
from pipeline.store import Missing, StoreError, checksum
from pipeline.verify import DamagedFrames, list_frames, read_frames
from workers.output import Advanced, Decoded, Written

# A call to a host cannot be interrupted: it is sized to take about this long.
CALL_SECONDS = 3.0
# What a kill may cost: work since the last checkpoint. One is written after this
# many seconds of denoising, or later where writing takes so long that it would
# come to more than a twentieth of the time; and always after the last step.
CHECKPOINT_SECONDS = 10.0
CHECKPOINT_SHARE = 0.05


class SliceLike(Protocol):
    """What rendering needs of a `workers.fleet.Slice`."""

    name: str

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of `workers.host.Host`."""
        ...


class Pace:
    """Sizes calls: how many steps, or frames, take about `CALL_SECONDS`."""

    def __init__(self):
        self._units = 0
        self._next = 1

    def next(self, left: int) -> int:
        """Returns how many of the units that are left the next call should do."""
        self._units = min(left, self._next)
        return self._units

    def took(self, seconds: float) -> None:
        """Learns from the last call; grows by a factor of four at most."""
        fitting = int(CALL_SECONDS * self._units / max(seconds, 1e-6))
        self._next = max(1, min(fitting, 4 * self._units))


class ClipRenderer:
    """Renders one clip of a batch on a slice, going on from what is in the store.

    Args:
        batch: The clip's batch.
        clip: The clip.
        epoch: The driver's epoch.
        check: Called between calls; raises where the driver must stop.
        progress: Told how far the clip is.
    """

    def __init__(
        self,
        batch: Batch,
        clip: BatchClip,
        epoch: int,
        check: Callable[[], None],
        progress: Progress,
    ):
        self._batch = batch
        self._clip = clip
        self._id = clip.job.clip
        self._epoch = epoch
        self._check = check
        self._progress = progress
        self.stage = "text"

    def render(self, slice_: SliceLike, engine: dict[str, Any]) -> None:
        """Renders the clip to its `decoded` event.

        Frames that are whole in the store are taken as they are; else the clip goes
        on from its newest whole checkpoint.

        Args:
            slice_: Where to render it; has the model loaded.
            engine: What the model's host told of itself, for the `started` event.

        Raises:
            HostDied: The slice is gone; a new one can go on.
            Superseded: Another driver has taken over.
            Exception: What made the clip fail, in the stage named by `stage`.
        """
        self.stage = "text"
        job = self._clip.job
        output = StoreOutput(self._batch.uri, self._id, self._epoch)
        status = self._batch.log.status(self._id)
        step = self._newest_checkpoint(status)
        self._append("started", slice=slice_.name, resumed_from=step, engine=engine)
        if step:
            self.stage = "denoise"
            slice_.call("resume", job, output, step)
        else:
            if not self._is_whole(names.text(self._id), status.text):
                self._encode(slice_, output)
            self.stage = "denoise"
            slice_.call("begin", job, output)
        self._denoise(slice_, step)
        self.stage = "decode"
        self._decode(slice_)

    def reuse_frames(self) -> bool:
        """Takes a shard that is whole already; returns whether there was one."""
        self.stage = "decode"
        status = self._batch.log.status(self._id)
        for shard in self._shards():
            job = self._clip.job
            size = (job.width, job.height)
            try:
                files = list_frames(
                    self._batch.store, self._id, [shard], job.frames, size
                )
                for _ in read_frames(self._batch.store, files, size):
                    self._check()
            except DamagedFrames:
                continue
            seconds = status.seconds.get("decode", 0.0)
            self._append("decoded", frames=job.frames, seconds=seconds, shards=[shard])
            return True
        return False

    def fail(self, error: Exception) -> None:
        """Ends the clip with an error's reason.

        What the store could not take may well be taken next time; any other error
        is the clip's own and would come again.
        """
        self._append(
            "failed",
            reason=explain(error),
            stage=self.stage,
            retryable=isinstance(error, StoreError),
        )

    def give_up(self, reason: str) -> None:
        """Ends the clip after its hosts have died too often."""
        self._append("failed", reason=reason, stage=self.stage, retryable=True)

    def _encode(self, slice_: SliceLike, output: StoreOutput) -> None:
        self._progress.phase(self._id, "text")
        start = time.monotonic()
        written: Written = slice_.call("encode", self._clip.job, output)
        self._append(
            "text",
            seconds=round(time.monotonic() - start, 3),
            bytes=written.bytes,
            crc32c=written.crc32c,
        )

    def _denoise(self, slice_: SliceLike, step: int) -> None:
        job = self._clip.job
        pace = Pace()
        since, cost = 0.0, 0.0
        self._progress.steps(self._id, step)
        while step < job.steps:
            self._check()
            count = pace.next(job.steps - step)
            done: Advanced = slice_.call("advance", count)
            seconds = done.seconds
            pace.took(seconds)
            step += count
            since += seconds
            self._append(
                "step",
                step=step,
                of=job.steps,
                seconds=round(seconds, 3),
                attention=done.attention and dataclasses.asdict(done.attention),
            )
            self._progress.steps(self._id, step, count, seconds)
            due = since >= max(CHECKPOINT_SECONDS, cost / CHECKPOINT_SHARE)
            if due or step == job.steps:
                start = time.monotonic()
                written: Written = slice_.call("checkpoint")
                self._append(
                    "checkpoint",
                    step=step,
                    bytes=written.bytes,
                    crc32c=written.crc32c,
                )
                self._forget_checkpoints()
                since, cost = 0.0, time.monotonic() - start

    def _decode(self, slice_: SliceLike) -> None:
        frames = self._clip.job.frames
        pace = Pace()
        start = time.monotonic()
        done = Decoded(0, "")
        self._progress.frames(self._id, 0)
        while not done.shard:
            self._check()
            count = pace.next(frames - done.frames)
            before = time.monotonic()
            done = slice_.call("decode", count)
            seconds = time.monotonic() - before
            pace.took(seconds)
            self._progress.frames(self._id, done.frames, count, seconds)
        self._append(
            "decoded",
            frames=done.frames,
            seconds=round(time.monotonic() - start, 3),
            shards=[done.shard],
        )
        self._forget_shards(done.shard)

    def _newest_checkpoint(self, status: ClipStatus) -> int:
        """Returns the step of the newest checkpoint that is whole, else 0."""
        for data in reversed(status.checkpoints):
            if self._is_whole(names.checkpoint(self._id, data["step"]), data):
                return data["step"]
        return 0

    def _is_whole(self, name: str, written: dict[str, Any]) -> bool:
        """Returns whether a file is there as the event of its writing says."""
        try:
            found = self._batch.store.read(name)
        except Missing:
            return False
        told = (written.get("bytes"), written.get("crc32c"))
        return (len(found), checksum(found)) == told

    def _shards(self) -> list[str]:
        """Returns the names of all shard.json files of the clip, newest first."""
        found = self._batch.store.list(names.shards(self._id))
        return [name for name in reversed(found) if name.endswith("/shard.json")]

    def _forget_checkpoints(self) -> None:
        """Keeps the newest two: the second for the case that the first is damaged."""
        steps = [c["step"] for c in self._batch.log.status(self._id).checkpoints[-2:]]
        keep = {names.checkpoint(self._id, step) for step in steps}
        for name in self._batch.store.list(names.checkpoints(self._id)):
            if name not in keep:
                self._batch.store.delete(name)

    def _forget_shards(self, shard: str) -> None:
        """Removes what earlier epochs have left of the frames."""
        keep = shard.rpartition("/")[0] + "/"
        for name in self._batch.store.list(names.shards(self._id)):
            if not name.startswith(keep):
                self._batch.store.delete(name)

    def _append(self, event: str, **data: Any) -> None:
        self._check()
        self._batch.log.append(self._id, event, self._epoch, **data)


def forget_checkpoints(batch: Batch, clip: str) -> None:
    """Removes the checkpoints of a clip whose video is published."""
    for name in batch.store.list(names.checkpoints(clip)):
        batch.store.delete(name)


def explain(error: Exception) -> str:
    """Returns an error's message, led by its kind where it is not one of ours."""
    kind = type(error)
    if kind.__module__.partition(".")[0] in ("pipeline", "workers"):
        return str(error)
    return f"{kind.__name__}: {error}"
