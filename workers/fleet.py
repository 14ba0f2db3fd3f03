"""The fleet: slices of hosts, each host an actor of Ray.

A slice is a placement group with one actor in each bundle; the hosts of a slice do
every call together. A slice has one host for now.

Ray is imported by `fleet` and not before, since it reads its environment then.
"""

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# What passes through Ray are names and counts, so its smallest object store does
# (Ray asks for at least 75 MiB), and small shared memory, as in containers, is fine.
_OBJECT_STORE_BYTES = 80 * 2**20
_PLACEMENT_SECONDS = 60.0
# Ray gives its own parts 15 s to start, which a busy machine may well exceed; the
# next time they are in the machine's memory already.
_START_ATTEMPTS = 3
# One for the life of the process, since Ray reads it once.
_TOKEN = secrets.token_hex(32)


class FleetError(Exception):
    """No slice can be had, or Ray itself fails; the message says what is missing."""


class HostDied(Exception):
    """A host's process is gone, and with it the slice; its clip can go on elsewhere.

    Attributes:
        preempted: Whether the machine was taken away, so that it is no one's fault.
    """

    def __init__(self, reason: str, preempted: bool = False):
        super().__init__(reason, preempted)
        self.preempted = preempted

    def __str__(self) -> str:
        return self.args[0]


class _HostActor:
    """Runs `workers.host.Host` in a process of its own.

    The import is in here, so that the driver never loads jax: one process of a
    machine may hold its TPU, and it is this one.
    """

    def __init__(self):
        self._host: Any = None

    def call(self, method: str, *args: Any) -> Any:
        # Not when the actor is made: there, an error would pass for its death.
        if self._host is None:
            self._host = importlib.import_module("workers.host").Host()
        return getattr(self._host, method)(*args)


class Slice:
    """Hosts that work as one. Made by `new_slice`.

    Attributes:
        name: For events and messages.
    """

    def __init__(self, name: str, group: "PlacementGroup"):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.name = name
        self._group = group
        self._hosts: list[Any] = [
            ray.remote(_HostActor)
            .options(
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            )
            .remote()
            for bundle in range(group.bundle_count)
        ]

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of `workers.host.Host` on all hosts; returns the first's.

        Raises:
            HostDied: A host's process ended before it answered.
            FleetError: Ray itself failed, which no other clip would fare better with.
            Exception: What the method raised on a host.
        """
        import ray
        from ray.exceptions import (
            OutOfMemoryError,
            RayActorError,
            RayError,
            RayTaskError,
            WorkerCrashedError,
        )

        try:
            answers = ray.get([host.call.remote(method, *args) for host in self._hosts])
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception):
                raise cause from None
            raise
        except (OutOfMemoryError, RayActorError, WorkerCrashedError) as error:
            raise _host_died(error) from None
        except RayError as error:
            raise FleetError(f"the Ray cluster fails: {error}") from error
        return answers[0]

    def close(self) -> None:
        """Ends the hosts' processes and gives their place free.

        Where the cluster is gone, so are they.
        """
        import ray
        from ray.exceptions import RayError

        for host in self._hosts:
            with contextlib.suppress(RayError):
                ray.kill(host)  # pyright: ignore[reportArgumentType]
        with contextlib.suppress(RayError):
            ray.util.remove_placement_group(self._group)


def new_slice(name: str) -> Slice:
    """Reserves a slice and starts its hosts; needs `fleet`.

    Raises:
        FleetError: The cluster has no room for it, or fails.
    """
    from ray.exceptions import RayError

    try:
        return _new_slice(name)
    except RayError as error:
        raise FleetError(f"the Ray cluster fails: {error}") from error


def _new_slice(name: str) -> Slice:
    import ray

    group = ray.util.placement_group([{"CPU": 1}], strategy="STRICT_SPREAD")
    if not group.wait(_PLACEMENT_SECONDS):
        ray.util.remove_placement_group(group)
        raise FleetError(
            f"the Ray cluster has no free CPU for {name} since "
            f"{_PLACEMENT_SECONDS:.0f} s; it has {ray.cluster_resources()}"
        )
    return Slice(name, group)


@contextlib.contextmanager
def fleet() -> Iterator[None]:
    """Connects to Ray: the cluster at RAY_ADDRESS, else one started here and ended.

    Ray's own output stays out of this process's.

    Raises:
        FleetError: No connection to the cluster at RAY_ADDRESS.
    """
    with contextlib.ExitStack() as stack:
        # `log_to_driver=False` leaves what the raylet says of a dead host, which is
        # told as `HostDied`: lines that match this are not printed.
        os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."
        address = os.environ.get("RAY_ADDRESS", "")
        options = _elsewhere(address) if address else _here(stack)
        import ray

        stack.callback(ray.shutdown)
        try:
            _connect(options, attempts=1 if address else _START_ATTEMPTS)
        # Ray raises Exception itself where a part of it does not start in time.
        except Exception as error:
            where = f"at RAY_ADDRESS={address}" if address else "on this machine"
            raise FleetError(f"Ray does not start {where}: {error}") from error
        yield


def _connect(options: dict[str, Any], attempts: int) -> None:
    """Calls `ray.init`, quietly; more than once where Ray may be slow to start."""
    import ray

    # Ray sets a handler of its own, which ends the process without a word.
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        while True:
            attempts -= 1
            try:
                ray.init(**options, log_to_driver=False, logging_level=logging.CRITICAL)
                break
            except Exception:
                ray.shutdown()
                if not attempts:
                    raise
    finally:
        signal.signal(signal.SIGTERM, on_terminate)


def _elsewhere(address: str) -> dict[str, Any]:
    """Returns the options to connect to a cluster, once something answers there.

    Ray itself tries for minutes, and writes to the terminal meanwhile.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
        except OSError as error:
            raise FleetError(
                f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); unset "
                "RAY_ADDRESS to render on this machine"
            ) from error
    return {"address": address}


def _here(stack: contextlib.ExitStack) -> dict[str, Any]:
    """Prepares a Ray of our own and returns the options to start it with."""
    folder = tempfile.mkdtemp(prefix="tilereel-")
    stack.callback(_remove, folder)
    tpu_logs = os.path.join(folder, "tpu-logs")
    os.mkdir(tpu_logs)
    # Ray starts its processes with this environment.
    changed = {
        # Ray listens on all interfaces, and who can talk to it can run code here. A
        # token of this process's own keeps others out, and saves Ray from making
        # one in ~/.ray/auth_token that later clusters would demand.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray gives hosts the priority of a background job (nice 15).
        "RAY_worker_niceness": "0",
        # Else it warns on the terminal of what a later version will do.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Else Ray follows stale TPU logs in a shared folder.
        "TPU_LOG_DIR": tpu_logs,
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    stack.callback(_restore, before)
    return {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_temp_dir": folder,
    }


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _remove(folder: str) -> None:
    """Removes Ray's folder; the last of its processes may still write to it."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.2)


def _host_died(error: Exception) -> HostDied:
    from ray.exceptions import ActorDiedError, OutOfMemoryError

    if isinstance(error, ActorDiedError) and error.preempted:
        return HostDied("the host was preempted", preempted=True)
    if isinstance(error, OutOfMemoryError):
        return HostDied("the host's process was ended for want of memory")
    return HostDied(
        "the host's process died: it was killed, perhaps for want of memory, or crashed"
    )
