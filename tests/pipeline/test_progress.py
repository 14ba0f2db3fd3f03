import dataclasses
import io
import re

import pytest
from rich.console import Console

from pipeline import progress
from pipeline.events import ClipStatus
from pipeline.progress import Estimate, LiveProgress, PlainProgress, duration
from tests.pipeline.batches import make_batch, small_job, work
from workers.output import HeadWork


@pytest.fixture
def clips(tmp_path):
    jobs = [small_job("a", steps=10, frames=20), small_job("b", steps=10, frames=20)]
    return make_batch(str(tmp_path), jobs).clips


@pytest.fixture
def written():
    return io.StringIO()


@pytest.fixture
def plain(clips, written):
    return PlainProgress(Console(file=written, width=200), clips, [])


@pytest.fixture
def live(clips, written):
    return LiveProgress(
        Console(file=written, width=200, force_terminal=True), clips, []
    )


def lines(written):
    """What was written, each line without its date."""
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert all(re.match(date, line) for line in written.getvalue().splitlines())
    return [re.sub(date, "", line) for line in written.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_durations_are_said_as_a_person_would(seconds, text):
    assert duration(seconds) == text


def test_nothing_is_known_before_a_step_that_did_not_compile(clips):
    estimate = Estimate(clips)
    assert estimate.left("a") is None
    estimate.stepped("a", 1, 30.0)
    assert estimate.left("a", step=1) is None
    estimate.stepped("a", 1, 1.0)
    assert estimate.left("a", step=2) is not None


def test_time_left_follows_from_the_last_steps_and_frames(clips):
    estimate = Estimate(clips)
    estimate.stepped("a", 1, 30.0)  # it also compiled
    estimate.stepped("a", 2, 4.0)
    estimate.stepped("b", 1, 30.0)  # and so did this, of another size
    # 5 steps of 2 s, and decoding at a fifth of the whole: 20 s / 4.
    assert estimate.left("a", step=5) == pytest.approx(10 + 5)
    estimate.decoded("a", 1, 30.0)
    assert estimate.left("a", step=10, frames=1) == pytest.approx(5 * 19 / 20)
    estimate.decoded("a", 4, 2.0)
    assert estimate.left("a", step=10, frames=5) == pytest.approx(7.5)
    # The next clip is like this one.
    assert estimate.left("b") == pytest.approx(20 + 10)


def test_a_clip_that_only_decodes_has_a_time_left_once_frames_are_there(clips):
    estimate = Estimate(clips)
    assert estimate.left("a", step=10) is None
    estimate.decoded("a", 1, 9.0)
    estimate.decoded("a", 9, 0.9)
    assert estimate.left("a", step=10, frames=10) == pytest.approx(1.0)


def test_a_log_file_gets_dated_lines_with_the_time_left(plain, written, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    plain.phase("a", "text")
    plain.steps("a", 0)
    plain.steps("a", 1, 1, 60.0)
    plain.steps("a", 5, 4, 8.0)
    plain.frames("a", 1, 1, 9.0)
    plain.frames("a", 10, 9, 0.9)
    plain.phase("a", "stitch")
    assert lines(written) == [
        "a: reading the prompt",
        "a: step 0 of 10",
        "a: step 1 of 10",
        "a: step 5 of 10, 15 s left (batch: 40 s)",
        "a: frame 1 of 20, 4.8 s left (batch: 30 s)",
        "a: frame 10 of 20, 1.0 s left (batch: 23 s)",
        "a: making the video",
    ]


def test_a_log_file_is_not_flooded(plain, written):
    plain.steps("a", 0)
    for step in range(1, 11):
        plain.steps("a", step, 1, 1.0)
    assert lines(written) == ["a: step 0 of 10"]


def test_the_end_of_a_clip_is_told_in_one_line(plain, written):
    seconds = {"text": 0.1, "denoise": 12.34, "decode": 4.0, "stitch": 1.0}
    done = ClipStatus("stitched", frames=20, video="videos/a.mp4", seconds=seconds)
    plain.ended("a", done)
    sparse = dataclasses.replace(done, attention=HeadWork(**work(590)))
    plain.ended("a", sparse)
    plain.ended("b", ClipStatus("failed", reason="no room", stage="decode"))
    assert lines(written) == [
        "a: done, 20 frames (text 0.1 s, denoise 12 s, decode 4.0 s, stitch 1.0 s): "
        "videos/a.mp4",
        "a: done, 20 frames (text 0.1 s, denoise 12 s, decode 4.0 s, stitch 1.0 s), "
        "41% of tiles skipped: videos/a.mp4",
        "b: failed in decode: no room",
    ]


def test_what_a_manifest_says_is_no_markup(live, written):
    with live:
        live.note("[bold]x[/nonsense]")
    assert "[bold]x[/nonsense]" in written.getvalue()


def test_a_terminal_keeps_the_line_of_each_clip_and_loses_the_bars(live, written):
    with live:
        live.steps("a", 1, 1, 60.0)
        live.steps("a", 5, 4, 8.0)
        live._bars.refresh()
        assert "step 5 of 10" in written.getvalue()
        assert "15 s left" in written.getvalue()
        live.ended("a", ClipStatus("stitched", frames=20, video="videos/a.mp4"))
        live._bars.refresh()
        assert "1 of 2 clips" in written.getvalue()
    assert "a: done, 20 frames" in written.getvalue()
    # The cursor is shown again.
    assert written.getvalue().count("\x1b[?25h") == 1
