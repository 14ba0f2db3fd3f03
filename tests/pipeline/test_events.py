import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import names
from pipeline.events import Event, EventError, EventLog, Superseded, clip_state
from pipeline.store import LocalStore
from tests.pipeline.batches import work
from workers.output import HeadWork


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def log(store):
    return EventLog(store)


def start(log, clip="a", epoch=1, resumed_from=0, engine=None):
    log.append(
        clip, "started", epoch, slice="0", resumed_from=resumed_from, engine=engine
    )


def step(log, step, seconds=1.0, epoch=1):
    log.append("a", "step", epoch, step=step, of=10, seconds=seconds)


def checkpoint(log, step):
    log.append("a", "checkpoint", 1, step=step, bytes=3, crc32c="0")


def decode(log, epoch=1):
    log.append("a", "decoded", epoch, frames=5, seconds=2.0, shards=["s"])


def test_events_are_numbered_from_one_and_read_back(store, log):
    log.append("a", "queued", 1)
    log.append("a", "text", 1, seconds=0.5, bytes=3, crc32c="0")
    assert store.list("clips/") == [names.event("a", 1), names.event("a", 2)]
    first, second = EventLog(store).events("a")
    assert (first.number, first.event, first.clip, first.epoch) == (1, "queued", "a", 1)
    assert second.data == {"seconds": 0.5, "bytes": 3, "crc32c": "0"}
    stored = json.loads(store.read(names.event("a", 2)))
    assert stored["version"] == 1 and stored["time"].endswith("+00:00")


def test_a_clip_without_events_is_queued_and_unknown(log):
    status = log.status("a")
    assert status.state == "queued" and not status.known


def test_what_heads_did_is_that_of_the_steps_that_count(log):
    start(log)
    log.append("a", "step", 1, step=1, of=4, seconds=1.0, attention=None)
    assert log.status("a").attention is None
    for number, tiles in ((2, 600), (3, 1000)):
        log.append(
            "a", "step", 1, step=number, of=4, seconds=1.0, attention=work(tiles)
        )
    log.append("a", "started", 2, slice="slice-0", resumed_from=2)
    log.append("a", "step", 2, step=4, of=4, seconds=1.0, attention=work(700, 4))
    found = log.status("a").attention
    assert (found.tiles, found.all_tiles) == (1300, 2000)
    assert (found.spatial, found.temporal, found.dense) == (100, 40, 60)
    # Unknown of one step, it is unknown of both.
    assert (found.profiled, found.online) == (150, None)


def test_the_states_follow_the_life_of_a_clip(log):
    log.append("a", "queued", 1)
    assert log.status("a").state == "queued"
    start(log)
    assert log.status("a").state == "rendering"
    log.append("a", "text", 1, seconds=0.5, bytes=3, crc32c="0")
    step(log, 4, 2.0)
    step(log, 10, 3.0)
    checkpoint(log, 10)
    status = log.status("a")
    assert (status.step, status.steps) == (10, 10)
    assert status.checkpoints == ({"step": 10, "bytes": 3, "crc32c": "0"},)
    decode(log)
    assert log.status("a").state == "decoded"
    log.append("a", "stitched", 1, video="videos/a.mp4", seconds=1.5)
    status = log.status("a")
    assert status.state == "stitched" and status.video == "videos/a.mp4"
    assert status.frames == 5 and status.shards == ("s",)
    expected = {"text": 0.5, "denoise": 5.0, "decode": 2.0, "stitch": 1.5}
    assert status.seconds == expected


def test_steps_done_twice_after_a_resume_count_once(log):
    start(log)
    step(log, 5, 5.0)
    checkpoint(log, 5)
    step(log, 9, 4.0)
    checkpoint(log, 9)
    start(log, epoch=2, resumed_from=5)
    status = log.status("a")
    assert status.step == 5 and status.seconds["denoise"] == 5.0
    assert [c["step"] for c in status.checkpoints] == [5]
    step(log, 10, 6.0, epoch=2)
    assert log.status("a").seconds["denoise"] == 11.0


def test_a_failure_keeps_its_reason_until_the_clip_is_put_back(log):
    start(log)
    log.append("a", "failed", 1, reason="no room", stage="decode", retryable=True)
    status = log.status("a")
    assert (status.state, status.reason, status.stage) == (
        "failed",
        "no room",
        "decode",
    )
    assert status.retryable
    log.append("a", "retried", 1)
    status = log.status("a")
    assert (status.state, status.reason, status.retryable) == ("queued", "", False)


def test_an_older_epoch_counts_up_to_the_takeover_and_not_after(log, store):
    start(log)
    step(log, 3)
    start(log, epoch=2, resumed_from=3)
    # What the old driver had decided before it noticed, forced past its check.
    late = Event(4, "decoded", "a", 1, "t", {"frames": 5, "seconds": 1, "shards": []})
    store.create(names.event("a", 4), late.to_json())
    status = log.status("a")
    assert status.state == "rendering" and status.step == 3
    with pytest.raises(Superseded, match="epoch 2"):
        step(log, 4, epoch=1)
    step(log, 4, epoch=2)
    assert log.status("a").step == 4


def test_a_conflict_is_decided_again_on_what_the_other_wrote(store):
    mine, other = EventLog(store), EventLog(store)
    mine.append("a", "failed", 1, reason="x", stage="text", retryable=False)

    def failed(status):
        return status.state == "failed"

    assert other.append("a", "retried", 1, only_if=failed)
    assert not mine.append("a", "retried", 1, only_if=failed)
    assert [e.event for e in mine.events("a")] == ["failed", "retried"]


def test_many_writers_lose_no_event_and_share_no_number(store):
    def write():
        log = EventLog(store)
        for _ in range(10):
            log.append("a", "queued", 1)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [e.number for e in EventLog(store).events("a")]
    assert numbers == list(range(1, 41))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"version": 1, "event": "queued"}',
        b'{"version":1,"event":"exploded","clip":"a","epoch":1,"time":"t"}',
        b'{"version":1,"event":"text","clip":"a","epoch":1,"time":"t"}',
        b'{"version":1,"event":"checkpoint","clip":"a","epoch":1,"time":"t","step":1}',
        b'{"version":9,"event":"queued","clip":"a","epoch":1,"time":"t"}',
        b'{"version":1,"event":"queued","clip":"a","epoch":"1","time":"t"}',
    ],
)
def test_a_damaged_event_is_named(store, log, content):
    store.create(names.event("a", 1), content)
    with pytest.raises(EventError, match=r"0001\.json is no event: .*delete the file"):
        log.status("a")


def test_stray_files_beside_the_events_do_no_harm(store, log):
    store.create("clips/a/state/notes.txt", b"hello")
    log.append("a", "queued", 1)
    assert [e.event for e in log.events("a")] == ["queued"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "started", "queued"]), st.integers(1, 4))
    )
)
def test_events_that_do_not_count_change_nothing(kinds):
    data = {
        "step": {"step": 1, "of": 2, "seconds": 1.0},
        "started": {"slice": "0", "resumed_from": 0},
        "queued": {},
    }
    events = [
        Event(n, kind, "a", epoch, str(n), data[kind])
        for n, (kind, epoch) in enumerate(kinds, 1)
    ]
    counting, newest = [], 0
    for event in events:
        if event.epoch >= newest:
            counting.append(event)
            newest = event.epoch
    all_of_them, those = clip_state(events), clip_state(counting)
    assert (all_of_them.state, all_of_them.step) == (those.state, those.step)
    assert all_of_them.seconds == those.seconds


@pytest.mark.parametrize("broken", ["x", {"tiles": 1}, work(5) | {"tiles": "5"}])
def test_heads_work_that_is_none_is_refused_by_the_event_s_name(store, broken):
    log = EventLog(store)
    log.append("a", "queued", 1)
    log.append("a", "step", 1, step=1, of=4, seconds=1.0, attention=broken)
    with pytest.raises(EventError, match=r"state/0002\.json"):
        EventLog(store).status("a")


def test_heads_work_of_a_later_version_is_read(store):
    log = EventLog(store)
    log.append("a", "queued", 1)
    later = work(5) | {"new": 3}
    log.append("a", "step", 1, step=1, of=4, seconds=1.0, attention=later)
    assert EventLog(store).status("a").attention == HeadWork.from_json(work(5))
