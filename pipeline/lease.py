"""Who drives a batch: one process at a time, and how the next one takes over.

A driver holds the newest file under lease/. Taking over means creating the file
of the next epoch, which only one process can do. A lease is free when its driver
released it, when its driver is known to be dead (recorded on this very machine,
and no process of that number and start time lives), or when its driver has given
no sign of life for `EXPIRY_SECONDS`; the last compares clocks, so machines that
share an output must agree on the time to within some seconds.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from pipeline import names
from pipeline.errors import RequestError
from pipeline.events import Superseded, now
from pipeline.store import Exists, Missing, Store, StoreError

HEARTBEAT_SECONDS = 10.0
EXPIRY_SECONDS = 60.0

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Holder:
    """What the newest lease says of the process that drives, or drove, the batch.

    Attributes:
        epoch: The lease's number; events and shards of this driver carry it.
        host: Its machine's name, for people.
        machine: Its machine and process namespace, for comparison.
        pid: Its process number there.
        started: When the process started, as its kernel counts; "" where unknown.
        seen: Its last sign of life, in UTC as ISO-8601.
        released: Whether it has stopped by itself.
    """

    epoch: int
    host: str
    machine: str
    pid: int
    started: str
    seen: str
    released: bool

    def to_json(self) -> bytes:
        """Returns the lease as its file holds it."""
        fields = {"version": _VERSION} | dataclasses.asdict(self)
        return json.dumps(fields, indent=1).encode() + b"\n"

    def age(self) -> float:
        """Returns the seconds since its last sign of life."""
        seen = datetime.datetime.fromisoformat(self.seen)
        return (datetime.datetime.now(datetime.UTC) - seen).total_seconds()

    def alive(self) -> bool:
        """Tells whether the driver must be taken for running."""
        if self.released:
            return False
        if self.started and self.machine == _machine():
            return _start_of(self.pid) == self.started
        return self.age() < EXPIRY_SECONDS


class LeaseHeld(RequestError):
    """Another driver runs the batch."""


class Lease:
    """The right to drive a batch, kept alive in the background until released.

    Made by `take`.

    Attributes:
        epoch: What this driver's events, checkpoints and shards carry.
    """

    def __init__(self, store: Store, holder: Holder):
        self.epoch = holder.epoch
        self._store = store
        self._holder = holder
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="lease-heartbeat", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises `Superseded` once another driver has taken the batch over."""
        if self._lost.is_set():
            raise Superseded(
                f"another driver has taken the batch over from this one (epoch "
                f"{self.epoch}), which stops here and leaves everything to it"
            )

    def release(self) -> None:
        """Gives the batch free for the next driver at once."""
        self._stop.set()
        self._thread.join()
        if not self._lost.is_set():
            # Where this cannot be written, the end of the process says the same.
            with contextlib.suppress(StoreError):
                self._write(released=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if _newest(self._store) > self.epoch:
                    self._lost.set()
                    return
                self._write(released=False)
            except StoreError:
                # A full or absent disk: whoever works on the batch meets it as
                # well and says so. Being superseded shows at the next beat.
                continue

    def _write(self, released: bool) -> None:
        self._holder = dataclasses.replace(self._holder, seen=now(), released=released)
        self._store.replace(names.lease(self.epoch), self._holder.to_json())


def take(store: Store) -> Lease:
    """Makes this process the batch's driver.

    Raises:
        LeaseHeld: Another one is; the message says which and what to do.
        StoreError: The store cannot be read or written.
    """
    while True:
        holder = read_holder(store)
        if holder is not None and holder.alive():
            raise LeaseHeld(
                f"another driver renders this batch: process {holder.pid} on "
                f"{holder.host}, last seen {max(holder.age(), 0):.0f} s ago; wait for "
                "it or stop it (Ctrl-C there). If it is dead, this command works "
                f"{EXPIRY_SECONDS:.0f} s after its last sign of life"
            )
        mine = Holder(
            epoch=(holder.epoch if holder else 0) + 1,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            seen=now(),
            released=False,
        )
        try:
            store.create(names.lease(mine.epoch), mine.to_json())
        except Exists:
            continue
        return Lease(store, mine)


def read_holder(store: Store) -> Holder | None:
    """Returns what the newest lease says, None where there never was one.

    Raises:
        RequestError: The lease file is damaged.
        StoreError: The store cannot be read.
    """
    epoch = _newest(store)
    if epoch == 0:
        return None
    name = names.lease(epoch)
    try:
        fields: dict[str, Any] = json.loads(store.read(name))
        if fields.pop("version") != _VERSION:
            raise ValueError("its version is unknown to this version of Tilereel")
        holder = Holder(**fields)
        datetime.datetime.fromisoformat(holder.seen)
    except Missing:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"{store.url(name)} is no lease: {error}; if no one renders this batch, "
            "delete the file"
        ) from error
    return holder


def current_epoch(store: Store) -> int:
    """Returns the newest epoch, for who writes without a lease; at least 1."""
    return max(_newest(store), 1)


def _newest(store: Store) -> int:
    return max((names.number(n) or 0 for n in store.list(names.LEASES)), default=0)


def _machine() -> str:
    """Names the running kernel and process namespace: where a pid has a meaning."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str:
    """Returns when a live process started, in its kernel's ticks; "" if unknown.

    A process that is dead and not yet collected by its parent counts as none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name, in parentheses, may itself hold blanks and parentheses; after it
    # follow the state and, as the 22nd field in all, the start (proc(5)).
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
