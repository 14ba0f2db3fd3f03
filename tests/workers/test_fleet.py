import os
import signal
import subprocess
import sys

import pytest

from tests.processes import alive, descendants, hosts, title, wait_until
from tests.tiny_model import write_tiny_model
from workers.checkpoint import CheckpointError
from workers.fleet import FleetError, HostDied, fleet, new_slice

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray(ray_cluster):
    """This process, connected to a Ray of which it returns the first process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_cluster.environment.items():
            patch.setenv(name, value)
        with fleet():
            yield ray_cluster.pid


def test_a_slice_loads_the_model_in_a_process_of_its_own(ray, tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    slice_ = new_slice("slice-0")
    try:
        engine = slice_.call("load", str(model))
        assert engine["parameters"]["transformer"] > 0
        assert len(hosts(ray)) == 1
        # The driver does not load what may hold the TPU.
        assert "jax" not in _modules_of_a_driver()
    finally:
        slice_.close()
    wait_until(lambda: not hosts(ray), 20, "the host's process has ended")


def _modules_of_a_driver():
    code = "import sys; import pipeline.run; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_what_a_host_raises_comes_back_as_it_is(ray, tmp_path):
    slice_ = new_slice("slice-0")
    try:
        with pytest.raises(CheckpointError, match=r"nowhere.*config\.json"):
            slice_.call("load", str(tmp_path / "nowhere"))
        with pytest.raises(RuntimeError, match="load was not called"):
            slice_.call("advance", 1)
    finally:
        slice_.close()


def test_a_killed_host_is_told_and_replaced_without_a_word_on_the_terminal(ray, capfd):
    slice_ = new_slice("slice-0")
    with pytest.raises(RuntimeError):
        slice_.call("decode", 1)
    (pid,) = hosts(ray)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HostDied, match="the host's process died") as caught:
        slice_.call("decode", 1)
    assert not caught.value.preempted
    slice_.close()
    again = new_slice("slice-0")
    with pytest.raises(RuntimeError, match="no clip is open"):
        again.call("decode", 1)
    again.close()
    assert capfd.readouterr() == ("", "")


def test_a_cluster_without_room_is_refused_with_what_it_has(ray, monkeypatch):
    monkeypatch.setattr("workers.fleet._PLACEMENT_SECONDS", 2)
    slices = []
    try:
        with pytest.raises(FleetError, match=r"no free CPU for slice-\d+ .*'CPU'"):
            for number in range((os.cpu_count() or 1) + 1):
                slices.append(new_slice(f"slice-{number}"))
        assert len(slices) == os.cpu_count()
    finally:
        for slice_ in slices:
            slice_.close()


def test_a_ray_address_without_a_cluster_is_named(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    nothing = "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"
    with pytest.raises(FleetError, match=nothing), fleet():
        pytest.fail("connected to nothing")


def test_a_killed_driver_leaves_no_process_behind():
    code = (
        "import time\nfrom workers.fleet import fleet, new_slice\n"
        "with fleet():\n slice_ = new_slice('slice-0')\n"
        " print('up', flush=True)\n time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        # Ray's agents look for their parent for a minute or two before they end.
        started = [p for p in descendants(driver.pid) if "Agent" not in title(p)]
        assert len(started) > 3
        driver.kill()
    wait_until(lambda: not any(map(alive, started)), 20, "what it started has ended")
