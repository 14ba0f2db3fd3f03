"""What runs on this machine, as /proc tells it."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def _stat(pid: int) -> list[str]:
    """State, parent, group and what follows, [] of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Tells whether a process runs; one dead and not collected does not."""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in "ZX"


def title(pid: int) -> str:
    """Returns a process's command line, blanks between the arguments."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace").strip()


def descendants(pid: int) -> list[int]:
    """Returns the living children of a process, theirs, and so on."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    parents = {p: int(stat[1]) for p in pids if (stat := _stat(p))}
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        children = [p for p, above in parents.items() if above == parent and alive(p)]
        found += children
        todo += children
    return found


def hosts(pid: int) -> list[int]:
    """Returns the processes of Ray host actors that descend from a process."""
    return [p for p in descendants(pid) if title(p).startswith("ray::_HostActor")]


def wait_until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits until something holds; fails with `what` after some seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not after {seconds} s: {what}"
        time.sleep(0.02)
