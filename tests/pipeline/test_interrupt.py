"""Ctrl-C to a whole render, at moments from its first to its last."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes import alive, descendants, wait_until
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
MANIFEST = """
version: 1
batch: spring
model: ./tiny
output: ./renders
defaults: {size: 30x28, steps: 12, guidance: 3.0, frames: 21}
clips:
  - {id: first, prompt: "a red circle"}
  - {id: second, prompt: "red a circle", seed: 2}
"""
# Calls of one step or frame, each of which is told.
RENDER = """
import sys
sys.argv[0] = "tilereel"
from pipeline import progress, rendering
rendering.CALL_SECONDS = 0.0
progress._LINE_SECONDS = 0.0
from pipeline.__main__ import main
main()
"""
SOON = 120


@pytest.fixture
def manifest(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "spring.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture
def temporary():
    # Not within tmp_path: Ray keeps sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ctrl-c-") as folder:
        yield Path(folder)


def start(manifest, temporary, code=RENDER):
    """Starts a render as a terminal does: in a group of processes of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, "render", str(manifest)],
        cwd=ROOT,
        env=kept | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def interrupted(process, said, temporary):
    """Sends Ctrl-C to the whole group; checks how the render ends, returns all said."""
    below = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    said += process.communicate(timeout=SOON)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    wait_until(lambda: not any(map(alive, below)), 10, f"no children of {below}")
    assert os.listdir(temporary) == []
    return said


@pytest.mark.ray
def test_ctrl_c_at_any_time_stops_cleanly_and_the_same_command_goes_on(
    manifest, temporary
):
    for moment in (
        "starting Ray",
        "loading the model",
        "first: step 3 of 12",
        "first: frame 9 of 21",
        "first: making the video",
    ):
        process = start(manifest, temporary)
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if moment in line:
                break
        said = interrupted(process, said, temporary)
        assert moment in said
        assert "Interrupted. What is done is kept: run the same command again" in said
    process = start(manifest, temporary)
    said, _ = process.communicate(timeout=SOON)
    assert process.returncode == 0, said
    assert "first: step 0" not in said and "second: done, 21 frames" in said
    assert os.listdir(temporary) == []


def test_ctrl_c_while_python_imports_is_no_traceback(manifest, temporary):
    # From when our own code runs.
    code = "print('here', flush=True)\n" + "from pipeline.__main__ import main\nmain()"
    for seconds in (0.03, 0.1, 0.2, 0.4):
        process = start(manifest, temporary, code)
        assert process.stdout is not None
        said = process.stdout.readline()
        time.sleep(seconds)
        said = interrupted(process, said, temporary)
        assert "Interrupted" in said
