"""Renders by the command in processes of their own, killed at their worst moments."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import names
from pipeline.batch import Batch
from tests.processes import hosts, wait_until
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
MANIFEST = """version: 1
batch: spring
model: {model}
output: ./renders
defaults: {{size: 30x28, steps: 2, guidance: 3.0}}
attention: {{density: 0.7, tolerance: 10, tile: 16x16}}
clips:
  - {{id: first, prompt: "a red circle", frames: 61, priority: 1}}
  - {{id: long, prompt: "red a circle", frames: 61, steps: 40, seed: 2}}
"""
# The command, with calls of one step or frame, and a checkpoint after each step, so
# that a small clip has many moments to be killed in.
RENDER = """
from pipeline import cli, rendering
rendering.CALL_SECONDS = 0.0
rendering.CHECKPOINT_SECONDS = 0.0
rendering.CHECKPOINT_SHARE = float("inf")
cli.main()
"""
SOON = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def manifest(tmp_path, model):
    path = tmp_path / "spring.yaml"
    path.write_text(MANIFEST.format(model=model))
    return path


@pytest.fixture
def start(ray_cluster):
    """Starts a render of a manifest, in a group of processes of its own."""
    started = []

    def run(manifest):
        process = subprocess.Popen(
            [sys.executable, "-c", RENDER, "render", str(manifest)],
            cwd=ROOT,
            env=os.environ | ray_cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def end(process):
    """Waits for a render to end; returns its exit status and what it wrote."""
    out, err = process.communicate(timeout=SOON)
    return process.returncode, out, err


def status(root, clip="long"):
    try:
        return Batch.open(str(root)).log.status(clip)
    except Exception:
        return None


def comes_to(root, step):
    """Waits until the long clip has come to a step."""

    def there():
        found = status(root)
        return found is not None and found.step >= step

    wait_until(there, SOON, f"step {step}")


def frames(root, clip):
    """Digests of a clip's frames, in order."""
    batch = Batch.open(str(root))
    (shard,) = batch.log.status(clip).shards
    folder = shard.rpartition("/")[0]
    found = [n for n in batch.store.list(folder) if n.endswith(".png")]
    return [hashlib.sha256(batch.store.read(name)).hexdigest() for name in found]


def files(root, clip):
    """Every file of a finished clip, and the moment it was written."""
    store = Batch.open(str(root)).store
    found = store.list(f"{names.CLIPS}{clip}/") + store.list(f"{names.VIDEOS}{clip}.")
    return {name: os.stat(store.url(name)).st_mtime_ns for name in found}


def test_a_render_killed_again_and_again_ends_with_the_frames_of_one_that_was_not(
    start, ray_cluster, manifest, model, tmp_path
):
    other = tmp_path / "whole" / "spring.yaml"
    other.parent.mkdir()
    other.write_text(MANIFEST.format(model=model))
    code, out, err = end(start(other))
    assert (code, err) == (0, ""), out
    expected = frames(other.parent / "renders" / "spring", "long")
    assert len(expected) == 61

    root = tmp_path / "renders" / "spring"
    # The driver is killed between two steps of the second clip ...
    driver = start(manifest)
    comes_to(root, 5)
    driver.kill()
    driver.communicate()
    killed_at = Batch.open(str(root)).log.status("long").checkpoints[-1]["step"]
    assert 4 <= killed_at < 40

    # ... then the host of the next one, while it denoises ...
    driver = start(manifest)
    comes_to(root, killed_at + 4)
    # (it is held there, or it might be done before the others have had their turn)
    driver.send_signal(signal.SIGSTOP)
    # (a second one is told that this one is at it, and leaves)
    code, out, err = end(start(manifest))
    assert (code, out) == (2, "")
    assert f"process {driver.pid} on" in err
    # (the process that stitches is not held)
    log = Batch.open(str(root)).log
    wait_until(lambda: log.status("first").state == "stitched", SOON, "a video")
    for pid in hosts(ray_cluster.pid):
        os.kill(pid, signal.SIGKILL)
    driver.send_signal(signal.SIGCONT)
    comes_to(root, 40)
    # ... and this driver, too, while it decodes.
    folder = names.shards("long")
    store = Batch.open(str(root)).store
    wait_until(lambda: len(store.list(folder)) > 3, SOON, "some frames")
    driver.kill()
    out, err = driver.communicate()
    assert "long: the host's process died" in out
    assert err == ""
    assert not [name for name in store.list(folder) if name.endswith("shard.json")]
    before = files(root, "first")

    code, out, err = end(start(manifest))
    assert (code, err) == (0, "")
    assert "2 of 2 clips done" in out
    assert frames(root, "long") == expected
    assert files(root, "first") == before
    events = Batch.open(str(root)).log.events("long")
    resumed = [e.data["resumed_from"] for e in events if e.event == "started"]
    assert len(resumed) == 4
    assert resumed[0] == 0 and killed_at <= resumed[1] < resumed[2] and resumed[3] == 40
