import hashlib
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import names, rendering
from pipeline.batch import Batch
from pipeline.events import Superseded
from pipeline.progress import make_progress
from pipeline.rendering import ClipRenderer, Pace
from pipeline.store import LocalStore, StoreError
from tests.pipeline.batches import make_batch, small_job
from tests.tiny_model import write_tiny_model
from workers.fleet import HostDied
from workers.host import Host

JOB = small_job()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host()
    host.load(str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))
    return host


class HereSlice:
    """A slice whose host is in this very process, and may die at a given call."""

    name = "here"

    def __init__(self, host, dies_at=None, after=False):
        self.calls = []
        self._host = host
        self._dies_at = dies_at
        self._after = after

    def call(self, method, *args):
        self.calls.append((method, *args))
        dies = len(self.calls) == self._dies_at
        if dies and not self._after:
            raise HostDied("killed")
        answer = getattr(self._host, method)(*args)
        if dies:
            raise HostDied("killed")
        return answer


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Every call does one step or frame; a checkpoint follows each step."""
    monkeypatch.setattr(rendering, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "CHECKPOINT_SHARE", float("inf"))


def renderer(batch, epoch=1, check=lambda: None):
    clip = batch.clips[0]
    progress = make_progress(Console(quiet=True), batch.clips, [])
    return ClipRenderer(batch, clip, epoch, check, progress)


def run(batch, slice_, epoch=1):
    one = renderer(batch, epoch)
    if not one.reuse_frames():
        one.render(slice_, {"model_hash": "0"})
    return slice_


def digests(batch, epoch):
    """Digests of all frames, in order."""
    found = (batch.store.read(names.frame("a", epoch, 0, i)) for i in range(JOB.frames))
    return [hashlib.sha256(data).hexdigest() for data in found]


@pytest.fixture(scope="module")
def expected(host, tmp_path_factory):
    batch = make_batch(str(tmp_path_factory.mktemp("whole")), [JOB])
    run(batch, HereSlice(host))
    return digests(batch, 1)


@pytest.fixture
def batch(tmp_path):
    return make_batch(str(tmp_path), [JOB])


def test_a_clip_is_rendered_to_its_decoded_event(batch, host, expected):
    run(batch, HereSlice(host))
    status = batch.log.status("a")
    assert (status.state, status.step, status.frames) == ("decoded", 4, 6)
    assert list(status.seconds) == ["text", "denoise", "decode"]
    assert status.engine == {"model_hash": "0"}
    assert status.shards == ("clips/a/shards/0001/000/shard.json",)
    assert digests(batch, 1) == expected
    # Of 4 steps, 2 layers, 2 branches and 2 heads, all but a step and a layer.
    heads = status.attention
    assert (heads.spatial + heads.temporal, heads.dense) == (12, 20)
    assert (heads.tiles, heads.all_tiles) == (20 * 9 + 12 * 7, 32 * 9)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(1, 17))
def test_a_clip_whose_host_dies_at_any_call_goes_on_to_the_same_frames(
    batch, host, expected, call, after
):
    with pytest.raises(HostDied):
        run(batch, HereSlice(host, call, after))
    done = [c["step"] for c in batch.log.status("a").checkpoints]
    before = batch.log.events("a")
    # A new driver: nothing is known to it but what the store holds.
    again = Batch.open(batch.uri)
    second = run(again, HereSlice(host), epoch=2)
    status = again.log.status("a")
    assert status.state == "decoded" and status.step == 4
    newest = 2 if status.shards[0].startswith("clips/a/shards/0002/") else 1
    assert digests(again, newest) == expected
    # Only what was not done yet was done again.
    steps = sum(c[1] for c in second.calls if c[0] == "advance")
    if newest == 2:
        assert steps == 4 - (done[-1] if done else 0)
    else:
        assert second.calls == []
    # What had happened is not touched, and frames lie in one place only.
    assert again.log.events("a")[: len(before)] == before
    shards = [n for n in again.store.list(names.shards("a")) if n.endswith(".json")]
    assert shards == [names.shard_json("a", newest, 0)]
    assert len(again.store.list(names.shards("a"))) == 7


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(batch, host, expected):
    with pytest.raises(HostDied):
        run(batch, HereSlice(host, dies_at=8))
    steps = [c["step"] for c in batch.log.status("a").checkpoints]
    newest = names.checkpoint("a", steps[-1])
    data = bytearray(batch.store.read(newest))
    data[len(data) // 2] ^= 1
    batch.store.replace(newest, bytes(data))
    second = run(batch, HereSlice(host), epoch=2)
    assert second.calls[0][0] == "resume" and second.calls[0][3] == steps[-2]
    assert digests(batch, 2) == expected


@pytest.mark.parametrize("damage", ["none", "cut", "flipped", "deleted", "no event"])
def test_embeddings_are_made_again_only_where_they_are_damaged(
    batch, host, expected, damage
):
    with pytest.raises(HostDied):
        # Killed in `begin`; or after `encode` and before its event.
        early = damage == "no event"
        run(batch, HereSlice(host, dies_at=1 if early else 2, after=early))
    name = names.text("a")
    data = bytearray(batch.store.read(name))
    data[-1] ^= 1
    if damage == "flipped":
        batch.store.replace(name, bytes(data))
    elif damage == "cut":
        batch.store.replace(name, bytes(data[:-9]))
    elif damage == "deleted":
        batch.store.delete(name)
    second = run(batch, HereSlice(host), epoch=2)
    assert second.calls[0][0] == ("begin" if damage == "none" else "encode")
    assert digests(batch, 2) == expected


def test_a_clip_without_any_whole_checkpoint_starts_over(batch, host, expected):
    with pytest.raises(HostDied):
        run(batch, HereSlice(host, dies_at=8))
    for name in batch.store.list(names.checkpoints("a")):
        batch.store.replace(name, b"")
    second = run(batch, HereSlice(host), epoch=2)
    assert [c[0] for c in second.calls[:2]] == ["begin", "advance"]
    assert digests(batch, 2) == expected


@pytest.mark.parametrize("damage", ["deleted", "cut short", "shard.json gone"])
def test_damaged_frames_are_decoded_again_from_the_last_checkpoint(
    batch, host, expected, damage
):
    run(batch, HereSlice(host))
    frame = names.frame("a", 1, 0, 3)
    if damage == "deleted":
        batch.store.delete(frame)
    elif damage == "cut short":
        batch.store.replace(frame, batch.store.read(frame)[:-9])
    else:
        batch.store.delete(names.shard_json("a", 1, 0))
    second = run(batch, HereSlice(host), epoch=2)
    assert [c[0] for c in second.calls] == ["resume"] + ["decode"] * 6
    assert batch.log.status("a").shards == (names.shard_json("a", 2, 0),)
    assert digests(batch, 2) == expected
    assert len(batch.store.list(names.shards("a"))) == 7


def test_whole_frames_are_taken_without_any_slice(batch, host):
    run(batch, HereSlice(host))
    assert run(batch, HereSlice(host), epoch=2).calls == []
    assert batch.log.status("a").state == "decoded"


def test_a_driver_that_lost_its_lease_writes_no_more(batch, host):
    def lost():
        if batch.log.status("a").step >= 2:
            raise Superseded("another driver")

    with pytest.raises(Superseded):
        renderer(batch, check=lost).render(HereSlice(host), {})
    assert batch.log.status("a").step == 2


def test_old_checkpoints_are_removed_as_new_ones_come(batch, host):
    run(batch, HereSlice(host))
    left = batch.store.list(names.checkpoints("a"))
    assert left == [names.checkpoint("a", 3), names.checkpoint("a", 4)]


def test_with_the_usual_spacing_the_last_step_has_a_checkpoint(
    batch, host, monkeypatch
):
    monkeypatch.setattr(rendering, "CALL_SECONDS", 3.0)
    monkeypatch.setattr(rendering, "CHECKPOINT_SECONDS", 10.0)
    run(batch, HereSlice(host))
    assert [c["step"] for c in batch.log.status("a").checkpoints] == [4]


@pytest.mark.parametrize(
    ("error", "reason", "retryable"),
    [
        (KeyError("x"), "KeyError: 'x'", False),
        (HostDied("killed"), "killed", False),
    ],
)
def test_a_failed_clip_says_why_and_where(batch, error, reason, retryable):
    one = renderer(batch)
    one.fail(error)
    status = batch.log.status("a")
    assert (status.state, status.reason, status.stage) == ("failed", reason, "text")
    assert status.retryable is retryable


def test_a_full_store_fails_the_clip_in_its_stage_and_it_may_be_tried_again(
    batch, host, monkeypatch
):
    write = LocalStore.create

    def full(self, name, data):
        if name.endswith("frame-000002.png"):
            raise OSError(28, "No space left on device")
        write(self, name, data)

    def explained(self, name, data):
        with self._explained(self._path(name)):
            full(self, name, data)

    monkeypatch.setattr(LocalStore, "create", explained)
    one = renderer(batch)
    with pytest.raises(Exception, match="No space left on device; free some") as caught:
        one.render(HereSlice(host), {})
    one.fail(caught.value)
    status = batch.log.status("a")
    assert (status.state, status.stage, status.retryable) == ("failed", "decode", True)
    assert batch.store.list(names.shards("a")) == []


def test_frames_that_cannot_be_read_fail_the_clip_in_decode(batch, host):
    run(batch, HereSlice(host))
    frame = names.frame("a", 1, 0, 3)
    batch.store.delete(frame)
    Path(batch.store.url(frame)).mkdir()
    one = renderer(batch, epoch=2)
    with pytest.raises(StoreError, match="cannot be read") as caught:
        one.reuse_frames()
    one.fail(caught.value)
    status = batch.log.status("a")
    assert (status.state, status.stage, status.retryable) == ("failed", "decode", True)


def test_calls_grow_to_the_time_that_they_may_take(monkeypatch):
    monkeypatch.setattr(rendering, "CALL_SECONDS", 3.0)
    pace = Pace()
    assert pace.next(50) == 1
    pace.took(20.0)  # the first call also compiles
    assert pace.next(49) == 1
    pace.took(0.5)
    assert pace.next(48) == 4
    pace.took(2.0)
    assert pace.next(44) == 6
    pace.took(3.0)
    assert pace.next(2) == 2


def test_events_are_plain_json_a_person_can_read(batch, host):
    run(batch, HereSlice(host))
    for name in batch.store.list(names.events("a")):
        event = json.loads(batch.store.read(name))
        assert event["clip"] == "a" and event["epoch"] == 1
