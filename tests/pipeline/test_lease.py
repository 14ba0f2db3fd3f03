import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipeline import lease, names
from pipeline.errors import RequestError
from pipeline.events import Superseded
from pipeline.store import LocalStore

TAKE = """
import sys, time
from pathlib import Path
from pipeline import lease
from pipeline.store import LocalStore
held = lease.take(LocalStore(Path(sys.argv[1])))
print(held.epoch, flush=True)
time.sleep(60)
"""


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def take_elsewhere(store):
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(store.root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_released_lease_is_free_at_once(store):
    for epoch in (1, 2):
        held = lease.take(store)
        assert held.epoch == epoch == lease.current_epoch(store)
        held.check()
        held.release()


def test_a_second_driver_is_told_who_runs_the_batch(store):
    held = lease.take(store)
    with pytest.raises(lease.LeaseHeld, match=f"process {os.getpid()} on .*Ctrl-C"):
        lease.take(store)
    held.release()


def test_a_killed_driver_is_replaced_at_once_on_the_same_machine(store):
    process, epoch = take_elsewhere(store)
    try:
        with pytest.raises(lease.LeaseHeld, match=f"process {process.pid} "):
            lease.take(store)
        # Dead, but not yet collected by its parent: as good as gone.
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        held = lease.take(store)
        assert held.epoch == epoch + 1
        held.release()
    finally:
        process.kill()
        process.communicate()


def test_a_number_given_to_another_process_is_not_taken_for_the_driver(store):
    lease.take(store).release()
    holder = lease.read_holder(store)
    assert holder is not None
    revived = dataclasses.replace(holder, released=False, started="1")
    assert not revived.alive()
    assert dataclasses.replace(holder, released=False).alive()


@pytest.mark.parametrize(("age", "alive"), [(5, True), (600, False)])
def test_on_another_machine_the_age_decides(store, age, alive):
    lease.take(store).release()
    holder = lease.read_holder(store)
    assert holder is not None
    seen = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
    elsewhere = dataclasses.replace(
        holder, machine="elsewhere", seen=seen.isoformat(), released=False
    )
    assert elsewhere.alive() is alive


def test_the_heartbeat_shows_and_the_old_driver_notices_a_takeover(store, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    held = lease.take(store)
    before = lease.read_holder(store)
    assert before is not None
    deadline = time.monotonic() + 10
    while (after := lease.read_holder(store)) is None or after.seen <= before.seen:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.01)
    newer = dataclasses.replace(before, epoch=2)
    store.create(names.lease(2), newer.to_json())
    held._thread.join(timeout=10)
    with pytest.raises(Superseded, match="taken the batch over"):
        held.check()
    held.release()
    assert lease.read_holder(store) == newer


def test_of_two_that_take_over_at_once_one_is_told_of_the_other(store):
    lease.take(store).release()
    taken, refused = [], []
    start = threading.Barrier(4)

    def race():
        start.wait()
        try:
            taken.append(lease.take(store))
        except lease.LeaseHeld:
            refused.append(1)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 3 and taken[0].epoch == 2
    taken[0].release()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"version": 2}'])
def test_a_damaged_lease_is_named(store, content):
    store.create(names.lease(1), content)
    with pytest.raises(
        RequestError, match=r"0001\.json is no lease: .*delete the file"
    ):
        lease.take(store)
