"""What has happened to a clip, one small file after the other.

A clip's state is what its events say; nothing else is kept anywhere. Each event
is created once, numbered last + 1, and carries its writer's epoch (see
`pipeline.lease`): once a newer epoch has written to a clip, what an older one
still adds does not count.
"""

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

from pipeline import names
from pipeline.errors import RequestError
from pipeline.store import Exists, Missing, Store
from workers.output import HeadWork

_VERSION = 1
# Every event there is, and the fields that it must have.
FIELDS: dict[str, tuple[str, ...]] = {
    "queued": (),
    "started": ("slice", "resumed_from"),
    "text": ("seconds", "bytes", "crc32c"),
    "step": ("step", "of", "seconds"),
    "checkpoint": ("step", "bytes", "crc32c"),
    "decoded": ("frames", "seconds", "shards"),
    "stitched": ("video", "seconds"),
    "failed": ("reason", "stage", "retryable"),
    "retried": (),
}
_ENVELOPE = ("version", "event", "clip", "epoch", "time")


class EventError(RequestError):
    """A file among the events is none; the message names it."""


class Superseded(Exception):
    """A newer epoch has taken the clip over: this writer must stop."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened to a clip.

    Attributes:
        number: Its place among the clip's events, from 1.
        event: One of `FIELDS`.
        clip: The clip's id.
        epoch: The epoch of the driver that wrote it.
        time: When, in UTC as ISO-8601.
        data: What belongs to this kind of event (`step`, `seconds`, `reason`...).
    """

    number: int
    event: str
    clip: str
    epoch: int
    time: str
    data: dict[str, Any]

    def to_json(self) -> bytes:
        """Returns the event as its file holds it."""
        fields = {"version": _VERSION, "event": self.event, "clip": self.clip}
        fields |= {"epoch": self.epoch, "time": self.time} | self.data
        return json.dumps(fields, indent=1, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_json(cls, number: int, data: bytes) -> "Event":
        """Reads an event back; raises ValueError or TypeError if not."""
        fields = json.loads(data)
        if not isinstance(fields, dict) or any(k not in fields for k in _ENVELOPE):
            raise ValueError(f"an event has the fields {', '.join(_ENVELOPE)}")
        if fields["version"] != _VERSION or fields["event"] not in FIELDS:
            raise ValueError(
                f"version {fields['version']} event {fields['event']!r} is unknown "
                "to this version of Tilereel"
            )
        rest = {k: v for k, v in fields.items() if k not in _ENVELOPE}
        _check_fields(fields["event"], rest)
        if work := rest.get("attention"):
            if not isinstance(work, dict):
                raise TypeError("attention must be a mapping")
            HeadWork.from_json(work)
        event, clip, epoch, time = (fields[k] for k in _ENVELOPE[1:])
        if not isinstance(epoch, int) or not isinstance(time, str):
            raise TypeError("epoch must be a number and time a text")
        return cls(number, event, clip, epoch, time, rest)


@dataclasses.dataclass(frozen=True)
class ClipStatus:
    """What a clip's events add up to.

    Attributes:
        state: "queued", "rendering", "decoded", "stitched" or "failed".
        step: Denoising steps done (on the way that led here, redone ones once).
        steps: Denoising steps in all, 0 before the first is done.
        seconds: Seconds spent by phase: "text", "denoise", "decode", "stitch".
        shards: Names of the shard.json files that hold the decoded frames.
        video: Name of the published video.
        frames: Frames decoded.
        reason: Why the clip failed.
        stage: Where it failed.
        retryable: Whether running the batch again tries it again.
        checkpoints: Data of the checkpoint events that count, oldest first.
        text: Data of the newest text event that counts, empty where there is none.
        attention: What attention's heads did in these steps; None where it was dense
            throughout, or no step is done.
        engine: What the newest `started` event tells of model and machine.
        updated: Time of the newest event, "" where there is none.
        epoch: Epoch of the newest event that counts, 0 where there is none.
        known: Whether there is any event at all.
    """

    state: str = "queued"
    step: int = 0
    steps: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    shards: tuple[str, ...] = ()
    video: str = ""
    frames: int = 0
    reason: str = ""
    stage: str = ""
    retryable: bool = False
    checkpoints: tuple[dict[str, Any], ...] = ()
    text: dict[str, Any] = dataclasses.field(default_factory=dict)
    attention: HeadWork | None = None
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    updated: str = ""
    epoch: int = 0
    known: bool = False


def clip_state(events: Sequence[Event]) -> ClipStatus:
    """Decides a clip's state from its events, given in order of their numbers."""
    fields: dict[str, Any] = {}
    epoch = 0
    text: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    checkpoints: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for event in events:
        if event.epoch < epoch:
            continue
        epoch = event.epoch
        data = event.data
        match event.event:
            case "queued" | "retried":
                fields["state"] = "queued"
            case "started":
                fields |= {"state": "rendering", "engine": data.get("engine", {})}
                resumed = data["resumed_from"]
                steps = [s for s in steps if s["step"] <= resumed]
                checkpoints = [c for c in checkpoints if c["step"] <= resumed]
                seconds = {}
            case "text":
                text = data
            case "step":
                steps.append(data)
                fields["steps"] = data["of"]
            case "checkpoint":
                checkpoints.append(data)
            case "decoded":
                fields |= {
                    "state": "decoded",
                    "frames": data["frames"],
                    "shards": tuple(data["shards"]),
                }
                seconds["decode"] = data["seconds"]
            case "stitched":
                fields |= {"state": "stitched", "video": data["video"]}
                seconds["stitch"] = data["seconds"]
            case "failed":
                fields |= {
                    "state": "failed",
                    "reason": data["reason"],
                    "stage": data["stage"],
                    "retryable": data["retryable"],
                }
    if fields.get("state") != "failed":
        fields |= {"reason": "", "stage": "", "retryable": False}
    if steps:
        seconds = {"denoise": sum(s["seconds"] for s in steps)} | seconds
        fields["step"] = steps[-1]["step"]
        # The first batches' steps say nothing of attention.
        found = [s["attention"] for s in steps if s.get("attention")]
        works = [HeadWork.from_json(values) for values in found]
        fields["attention"] = sum(works[1:], works[0]) if works else None
    if text:
        seconds = {"text": text["seconds"]} | seconds
    return ClipStatus(
        **fields,
        seconds=seconds,
        checkpoints=tuple(checkpoints),
        text=text,
        updated=events[-1].time if events else "",
        epoch=epoch,
        known=bool(events),
    )


class EventLog:
    """The events of a batch's clips: read once each, appended create-once.

    Args:
        store: The batch's store.
    """

    def __init__(self, store: Store):
        self._store = store
        self._read: dict[str, list[Event]] = {}

    def events(self, clip: str) -> list[Event]:
        """Returns a clip's events in order, those included that do not count.

        Raises:
            EventError: A file among them is no event.
            StoreError: The store cannot be read.
        """
        known = self._read.setdefault(clip, [])
        last = known[-1].number if known else 0
        for name in self._store.list(names.events(clip)):
            number = names.number(name)
            if number is None or number <= last:
                continue
            try:
                known.append(Event.from_json(number, self._store.read(name)))
            except Missing:
                continue
            except (ValueError, TypeError) as error:
                raise EventError(
                    f"{self._store.url(name)} is no event: {error}; delete the file "
                    "to forget the event"
                ) from error
        known.sort(key=lambda event: event.number)
        return list(known)

    def status(self, clip: str) -> ClipStatus:
        """Returns a clip's state; raises as `events` does."""
        return clip_state(self.events(clip))

    def append(
        self,
        clip: str,
        event: str,
        epoch: int,
        only_if: Callable[[ClipStatus], bool] | None = None,
        **data: Any,
    ) -> bool:
        """Adds an event after the last one.

        Where another writer takes the number, the events are read again and it is
        decided again: an older epoch's event changes nothing and the next number
        is tried, a newer epoch's means that the clip is no longer this writer's.

        Args:
            clip: The clip's id.
            event: One of `FIELDS`.
            epoch: The writer's epoch.
            only_if: What the state must be for the event to make sense.
            **data: The event's own fields, as JSON takes them.

        Returns:
            Whether the event was added, False where `only_if` said no.

        Raises:
            Superseded: A newer epoch has written to the clip.
            StoreError: The store cannot be read or written.
        """
        _check_fields(event, data)
        while True:
            known = self.events(clip)
            status = clip_state(known)
            if status.epoch > epoch:
                raise Superseded(
                    f"clip {clip}: another driver (epoch {status.epoch}) has taken it "
                    f"over from this one (epoch {epoch})"
                )
            if only_if is not None and not only_if(status):
                return False
            number = known[-1].number + 1 if known else 1
            new = Event(number, event, clip, epoch, now(), data)
            try:
                self._store.create(names.event(clip, number), new.to_json())
            except Exists:
                continue
            return True


def _check_fields(event: str, data: dict[str, Any]) -> None:
    missing = [field for field in FIELDS[event] if field not in data]
    if missing:
        raise ValueError(f"the event {event} lacks {', '.join(missing)}")


def now() -> str:
    """Returns the time as ISO-8601 in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
