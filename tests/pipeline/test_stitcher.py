import os
import signal
import threading

import pytest
from rich.console import Console

from pipeline import names
from pipeline.progress import make_progress
from pipeline.stitcher import Stitcher
from tests.pipeline import drawn
from tests.processes import descendants, title, wait_until


@pytest.fixture
def batch(tmp_path):
    batch = drawn.write_batch(tmp_path / "spring", [drawn.job("a"), drawn.job("b")])
    drawn.decode_clip(batch, drawn.job("a"))
    drawn.decode_clip(batch, drawn.job("b"))
    return batch


@pytest.fixture
def stitcher(batch):
    progress = make_progress(Console(quiet=True), batch.clips, [])
    stitcher = Stitcher(batch, 1, progress)
    yield stitcher
    stitcher.abandon(0)


def helpers():
    """The processes that stitch, and all of theirs."""
    found = [p for p in descendants(os.getpid()) if "pipeline.stitcher" in title(p)]
    return found + [child for p in found for child in descendants(p)]


def test_clips_are_stitched_by_one_process_which_then_ends(batch, stitcher):
    stitcher.stitch("a")
    wait_until(lambda: len(helpers()) > 0, 60, "a process that stitches")
    (first, *_) = helpers()
    stitcher.stitch("b")
    wait_until(lambda: batch.log.status("a").state == "stitched", 60, "a is stitched")
    assert first in helpers() or batch.log.status("b").state == "stitched"
    stitcher.finish()
    assert [batch.log.status(clip).state for clip in "ab"] == ["stitched"] * 2
    assert helpers() == []
    assert batch.store.read(names.REPORT)


def test_a_killed_process_fails_its_clip_alone_and_another_takes_the_next(
    batch, stitcher
):
    stitcher.stitch("a")
    wait_until(lambda: len(helpers()) > 0, 60, "a process that stitches")
    os.kill(helpers()[0], signal.SIGKILL)
    stitcher.stitch("b")
    stitcher.finish()
    status = batch.log.status("a")
    assert (status.state, status.stage, status.retryable) == ("failed", "stitch", True)
    assert status.reason.startswith("the process that makes videos ended (-9)")
    assert batch.log.status("b").state == "stitched"


def test_what_is_abandoned_leaves_no_process_and_no_event(batch, stitcher):
    stitcher.stitch("a")
    stitcher.stitch("b")
    wait_until(lambda: len(helpers()) > 0, 60, "a process that stitches")
    before = len(batch.log.events("a"))
    stitcher.abandon(0)
    assert helpers() == []
    assert len(batch.log.events("a")) == before
    assert [t.name for t in threading.enumerate() if t.name == "stitch"] == []


def test_a_clip_that_is_none_fails_nothing_else(batch, stitcher):
    # No command can ask for it; the process must live on all the same.
    assert "has no clip 'z'" in stitcher._helper.stitch("z")
    stitcher.stitch("a")
    stitcher.finish()
    assert batch.log.status("a").state == "stitched"
