"""The fleet: slices of hosts, each host an actor of Ray.

A slice is a placement group with one actor in each bundle; the hosts of a slice do
every call together. A slice has one host for now.
"""

import contextlib
import importlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# What passes through Ray are names and counts, so its smallest object store does
# (Ray asks for at least 75 MiB), and small shared memory, as in containers, is fine.
_OBJECT_STORE_BYTES = 80 * 2**20
_PLACEMENT_SECONDS = 60.0


class FleetError(Exception):
    """No slice can be had; the message says what is missing."""


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

    def __init__(self, name: str, group: PlacementGroup):
        self.name = name
        self._group = group
        self._hosts = [
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
            Exception: What the method raised on a host.
        """
        try:
            answers = ray.get([host.call.remote(method, *args) for host in self._hosts])
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception):
                raise cause from None
            raise
        except (RayActorError, OutOfMemoryError, WorkerCrashedError) as error:
            raise _host_died(error) from None
        return answers[0]

    def close(self) -> None:
        """Ends the hosts' processes and gives their place free."""
        for host in self._hosts:
            ray.kill(host)
        ray.util.remove_placement_group(self._group)


def new_slice(name: str) -> Slice:
    """Reserves a slice and starts its hosts; needs `fleet`.

    Raises:
        FleetError: The cluster has no room for it.
    """
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
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"address": address}
        if not address:
            options = _local(stack)
        # Ray sets a handler of its own, which ends the process without a word.
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError) as error:
            raise FleetError(
                f"no Ray cluster at RAY_ADDRESS={address}: {error}"
                if address
                else f"Ray does not start on this machine: {error}"
            ) from error
        stack.callback(ray.shutdown)
        signal.signal(signal.SIGTERM, on_terminate)
        _silence_errors()
        yield


def _local(stack: contextlib.ExitStack) -> dict[str, Any]:
    """Prepares a Ray of our own and returns the options to start it with."""
    folder = tempfile.mkdtemp(prefix="tilereel-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    tpu_logs = os.path.join(folder, "tpu-logs")
    os.mkdir(tpu_logs)
    # Ray starts its processes with this environment: set before `ray.init`.
    os.environ |= {
        # Else Ray writes ~/.ray/auth_token, and later clusters demand tokens.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray follows stale TPU logs in a shared folder.
        "TPU_LOG_DIR": tpu_logs,
    }
    return {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_temp_dir": folder,
    }


def _silence_errors() -> None:
    """Keeps Ray from printing the end of a host, which `HostDied` reports.

    `log_to_driver=False` does not cover these messages of the raylet.
    """
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def _host_died(error: Exception) -> HostDied:
    if isinstance(error, ActorDiedError) and error.preempted:
        return HostDied("the host was preempted", preempted=True)
    if isinstance(error, OutOfMemoryError):
        return HostDied("the host's process was ended for want of memory")
    return HostDied(
        "the host's process died: it was killed, perhaps for want of memory, or crashed"
    )
