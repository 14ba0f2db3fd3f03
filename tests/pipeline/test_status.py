import io
import json
import threading
import time

import pytest
from rich.console import Console

from pipeline import lease, names, status
from pipeline.batch import find_batches
from pipeline.errors import RequestError
from pipeline.status import retry, show
from tests.pipeline.batches import make_batch, small_job, work


@pytest.fixture
def batch(tmp_path):
    """A batch of four clips in four states."""
    jobs = [small_job(clip) for clip in ("done", "half", "bad", "new")]
    batch = make_batch(str(tmp_path / "out" / "spring"), jobs)
    log = batch.log
    for clip in ("done", "half", "bad"):
        log.append(clip, "queued", 1)
        log.append(clip, "started", 1, slice="slice-0", resumed_from=0, engine={})
    log.append("done", "step", 1, step=4, of=4, seconds=12.0, attention=work(590))
    log.append("done", "decoded", 1, frames=6, seconds=4.0, shards=["s"])
    log.append("done", "stitched", 1, video="videos/done.mp4", seconds=1.0)
    log.append("half", "step", 1, step=2, of=4, seconds=6.0)
    log.append(
        "bad", "failed", 1, reason="not [finite]", stage="denoise", retryable=False
    )
    return batch


def shown(call, width=160, terminal=None):
    file = io.StringIO()
    code = call(Console(file=file, width=width, force_terminal=terminal))
    return code, file.getvalue()


def show_it(output, as_json=False, watch=False):
    return shown(
        lambda console: show(output, as_json=as_json, watch=watch, console=console)
    )


def test_a_status_says_where_each_clip_is_and_what_to_do(batch):
    code, text = show_it(batch.uri)
    assert code == 1
    assert "spring: 1 of 4 clips done, 1 failed" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["done"][1:4] == ["stitched", "6", "41%"]
    assert rows["done"][-1] == "videos/done.mp4"
    assert " ".join(rows["half"][1:]) == "stopped at step 2 of 4 6.0 s"
    assert rows["new"][1:] == ["queued"]
    assert "bad failed in denoise: not [finite]" in text
    assert f"`tilereel retry {batch.uri}`" in text


def test_paths_stay_whole_on_a_narrow_terminal(batch):
    batch.store.create(names.REPORT, b"")
    _, text = shown(
        lambda console: show(batch.uri, as_json=False, watch=False, console=console),
        width=40,
    )
    assert f"Report: {batch.uri}/index.html\n" in text
    assert f"`tilereel retry {batch.uri}`" in text


def test_a_running_driver_is_named_and_nothing_is_to_be_done(batch):
    held = lease.take(batch.store)
    try:
        _, text = show_it(batch.uri)
    finally:
        held.release()
    assert "; process " in text and "renders it" in text
    assert "rendering step 2 of 4" in text
    assert "retry" not in text


def test_an_output_may_hold_several_batches(batch, tmp_path):
    other = make_batch(str(tmp_path / "out" / "autumn"), [small_job("a")])
    (tmp_path / "out" / "notes").mkdir()
    assert find_batches(str(tmp_path / "out")) == [other.uri, batch.uri]
    _, text = show_it(str(tmp_path / "out"))
    assert "spring: 0 of 1" in text and "spring: 1 of 4" in text


def test_programs_get_json(batch):
    code, text = show_it(batch.uri, as_json=True)
    assert code == 1
    (found,) = json.loads(text)["batches"]
    assert (found["batch"], found["uri"]) == ("spring", batch.uri)
    assert found["driver"] == {"running": False}
    clips = {clip["clip"]: clip for clip in found["clips"]}
    assert [clip["state"] for clip in clips.values()] == [
        "stitched",
        "rendering",
        "failed",
        "queued",
    ]
    assert clips["half"]["step"] == 2
    assert clips["half"]["attention"] is None
    assert clips["done"]["attention"] == work(590)
    assert clips["bad"]["reason"] == "not [finite]"


def test_a_folder_without_a_batch_is_refused(tmp_path):
    with pytest.raises(RequestError, match="holds no batch"):
        show_it(str(tmp_path))
    with pytest.raises(RequestError, match="not to gs://"):
        show_it("gs://bucket/x")


def test_damage_is_named_and_not_shown_as_progress(batch):
    batch.store.replace(names.event("half", 2), b"{")
    with pytest.raises(RequestError, match=r"half/state/0002\.json is no event"):
        show_it(batch.uri)
    batch.store.replace(names.BATCH, b"{}")
    with pytest.raises(RequestError, match=r"batch\.json is damaged"):
        show_it(batch.uri)


@pytest.mark.parametrize("terminal", [False, True])
def test_watching_ends_when_every_clip_has_ended(batch, monkeypatch, terminal):
    monkeypatch.setattr(status, "_WATCH_SECONDS", 0.02)

    def finish():
        time.sleep(0.3)
        for clip in ("half", "new"):
            batch.log.append(clip, "stitched", 1, video="v", seconds=1.0)

    thread = threading.Thread(target=finish)
    thread.start()
    code, text = shown(
        lambda console: show(batch.uri, as_json=False, watch=True, console=console),
        terminal=terminal,
    )
    thread.join()
    assert code == 1
    assert "1 of 4 clips done" in text and "3 of 4 clips done" in text


def test_a_retry_puts_back_what_failed_and_nothing_else(batch):
    _, text = shown(lambda console: retry(batch.uri, clip=None, console=console))
    assert text.startswith("spring: put back bad; render its manifest again")
    states = [batch.log.status(c.job.clip).state for c in batch.clips]
    assert states == ["stitched", "rendering", "queued", "queued"]
    _, text = shown(lambda console: retry(batch.uri, clip=None, console=console))
    assert text == "spring: no clip has failed\n"


def test_a_retry_of_one_clip_is_refused_where_it_has_not_failed(batch, tmp_path):
    quiet = Console(quiet=True)
    with pytest.raises(RequestError, match="clip half has not failed: it is rendering"):
        retry(batch.uri, clip="half", console=quiet)
    with pytest.raises(RequestError, match="no batch at .* has a clip nothing"):
        retry(str(tmp_path / "out"), clip="nothing", console=quiet)
    assert retry(str(tmp_path / "out"), clip="bad", console=quiet) == 0
    assert batch.log.status("bad").state == "queued"


def test_a_running_driver_takes_up_what_is_put_back(batch):
    held = lease.take(batch.store)
    _, text = shown(lambda console: retry(batch.uri, clip=None, console=console))
    held.release()
    assert "its driver takes them up" in text
