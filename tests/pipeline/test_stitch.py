import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from PIL import Image

from pipeline import names
from pipeline.batch import Batch
from pipeline.encode import Video, check
from pipeline.errors import RequestError
from pipeline.events import EventLog
from pipeline.ffmpeg import find_ffmpeg
from pipeline.publish import publish
from pipeline.stitch import stitch_batch, stitch_clip
from pipeline.store import LocalStore, StoreError, checksum
from pipeline.verify import DamagedFrames
from tests.pipeline.batches import SPARSE
from tests.pipeline.drawn import decode_clip, draw, job, png, write_batch, write_shard

# All that a shell, a filter graph, a template or a page could trip over.
NASTY = (
    "\"q\" 'q' `id` $(touch pwned) '; rm -rf . # %{localtime} %d {{ 7 * 7 }} {% raw %}"
    "\n"
    "second line\t\\n <script>alert(1)</script> </p> & [in]scale=1:1[out], 🎬 ünïcödé "
) + "x" * 5000


@pytest.fixture
def batch(tmp_path):
    """Three clips, decoded: "a" in one shard, "b" in three, "c" of one frame."""
    jobs = [
        job("a", prompt=NASTY, attention=SPARSE),
        job("b", width=16, height=48),
        job("c", frames=1),
    ]
    batch = write_batch(tmp_path / "spring", jobs, fps="24000/1001")
    for entry, shards in zip(jobs, (1, 3, 1), strict=True):
        decode_clip(batch, entry, shards)
    return batch


def again(batch):
    """Opens the batch anew, as another process would."""
    return Batch.open(batch.uri)


def videos(batch):
    return {name: batch.store.read(name) for name in batch.store.list("videos/")}


def times(batch):
    return {p: p.stat().st_mtime_ns for p in Path(batch.uri, "videos").iterdir()}


def clip_of(batch, clip):
    return next(entry.job for entry in batch.clips if entry.job.clip == clip)


def break_frame(batch, clip, index, data=None, shard=0):
    name = names.frame(clip, 1, shard, index)
    if data is None:
        batch.store.delete(name)
    else:
        batch.store.replace(name, data)


def test_every_clip_becomes_a_checked_video(batch):
    results = stitch_batch(batch.uri)
    assert [(r.clip, r.ok, r.reason, r.frames) for r in results] == [
        ("a", True, "", 6),
        ("b", True, "", 6),
        ("c", True, "", 1),
    ]
    assert [r.video for r in results] == [f"videos/{clip}.mp4" for clip in "abc"]
    assert all(r.seconds > 0 for r in results)
    assert sorted(videos(batch)) == [
        f"videos/{clip}.{end}" for clip in "abc" for end in ("json", "mp4", "webp")
    ]
    for clip in "abc":
        entry = clip_of(batch, clip)
        video = Video(
            entry.width, entry.height, entry.frames, Fraction(24000, 1001), 18
        )
        check(Path(batch.store.url(names.video(clip))), video)
        status = again(batch).log.status(clip)
        assert status.state == "stitched"
        assert status.video == f"videos/{clip}.mp4"
        assert status.seconds["stitch"] > 0


def test_provenance_says_how_the_video_came_to_be(batch):
    stitch_batch(batch.uri, ["a"])
    said = json.loads(batch.store.read("videos/a.json"))
    assert said["machine_made"] is True
    assert said["digital_source_type"].endswith("/trainedAlgorithmicMedia")
    assert said["prompt"] == NASTY
    assert (said["batch"], said["clip"], said["seed"]) == ("spring", "a", 7)
    assert said["manifest_hash"] == batch.info["hash"]
    assert said["model"] == {"name": "demo", "hash": "feedbeef"}
    assert said["settings"]["steps"] == 20
    assert said["settings"]["fps"] == "24000/1001"
    assert said["settings"]["encode"] == {"codec": "h264", "crf": 18}
    assert said["settings"]["attention"]["density"] == 0.8
    assert said["settings"]["attention"]["achieved"] == 7 / 9
    assert said["attention"] == {
        "tiles_computed": 590,
        "tiles": 1000,
        "kinds": {"spatial": 0.5, "temporal": 0.2, "dense": 0.3},
    }
    assert said["stitched_with"]["ffmpeg"] == find_ffmpeg().version
    for package in ("jax", "ray", "apache-beam"):
        assert said["stitched_with"][package]
    assert said["rendered_with"]["jax"] == "0.10.0"
    for name in ("videos/a.mp4", "videos/a.webp"):
        data = batch.store.read(name)
        assert said["files"][name] == {
            "bytes": len(data),
            "crc32c": checksum(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    assert {"text", "denoise", "decode", "stitch"} == set(said["seconds"])


def test_no_text_of_the_manifest_runs_or_lands_in_the_video(batch, monkeypatch):
    monkeypatch.chdir(batch.uri)
    before = sorted(os.listdir("."))
    stitch_batch(batch.uri, ["a"])
    assert sorted(os.listdir(".")) == sorted([*before, "videos"])
    assert b"second line" not in batch.store.read("videos/a.mp4")


def test_a_second_run_leaves_published_videos_alone(batch):
    first = stitch_batch(batch.uri)
    before, events = times(batch), len(again(batch).log.events("a"))
    assert stitch_batch(batch.uri) == first
    assert times(batch) == before
    assert len(again(batch).log.events("a")) == events


def test_only_the_clips_asked_for_are_stitched(batch):
    results = stitch_batch(batch.uri, ["c"])
    assert [r.clip for r in results] == ["c"]
    assert sorted(videos(batch)) == [f"videos/c.{e}" for e in ("json", "mp4", "webp")]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (None, r"frame 4 \(.*/b/shards/0001/002/frame-000004.png\) is missing"),
        (b"cut", r"frame 4 .* has 3 bytes, not the \d+ that were written"),
    ],
    ids=["missing", "truncated"],
)
def test_a_bad_frame_is_named_and_the_other_clips_finish(batch, damage, words):
    break_frame(batch, "b", 4, damage, shard=2)
    results = {r.clip: r for r in stitch_batch(batch.uri)}
    assert results["a"].ok and results["c"].ok and not results["b"].ok
    status = again(batch).log.status("b")
    assert (status.state, status.stage, status.retryable) == ("failed", "stitch", True)
    assert status.reason == results["b"].reason
    assert re.search(words, status.reason)
    assert not batch.store.list("videos/b")


def test_a_wrong_size_mode_or_checksum_never_reaches_a_video(batch):
    frames = list(draw(6, 32, 24))
    files = [png(frame) for frame in frames]
    files[1] = png(draw(1, 32, 26)[0])
    files[3] = png(Image.new("RGBA", (32, 24)))
    shard = write_shard(batch.store, "a", files, epoch=2, size=(32, 24))
    spoilt = bytearray(files[5])
    spoilt[-20] ^= 255
    batch.store.replace(names.frame("a", 2, 0, 5), bytes(spoilt))
    batch.store.create(names.lease(2), b"{}")
    batch.log.append("a", "decoded", 2, frames=6, seconds=1.0, shards=[shard])
    (result,) = stitch_batch(batch.uri, ["a"])
    assert not result.ok
    for words in (
        "is 32x26 pixels, not 32x24",
        "is 8-bit RGBA, not 8-bit RGB",
        "has checksum",
        "Rendering the batch again makes them anew",
    ):
        assert words in result.reason


def test_a_clip_mended_after_its_failure_is_stitched(batch):
    name = names.frame("a", 1, 0, 2)
    good = batch.store.read(name)
    batch.store.delete(name)
    assert not stitch_batch(batch.uri, ["a"])[0].ok
    batch.store.create(name, good)
    assert stitch_batch(batch.uri, ["a"])[0].ok
    assert again(batch).log.status("a").state == "stitched"


def test_clips_that_are_not_decoded_wait(tmp_path):
    jobs = [job("a"), job("b"), job("c")]
    batch = write_batch(tmp_path / "spring", jobs)
    decode_clip(batch, jobs[0])
    batch.log.append("c", "failed", 1, reason="bad", stage="text", retryable=False)
    assert [r.clip for r in stitch_batch(batch.uri)] == ["a"]
    results = stitch_batch(batch.uri, ["b", "c"])
    assert [(r.clip, r.ok) for r in results] == [("b", False), ("c", False)]
    assert "not decoded yet: it is queued" in results[0].reason
    assert results[1].reason == "bad"
    assert again(batch).log.status("c").stage == "text"


def test_a_damaged_event_stops_its_clip_alone(batch):
    batch.store.replace(names.event("b", 2), b"{}")
    results = {r.clip: r for r in stitch_batch(batch.uri)}
    assert results["a"].ok and results["c"].ok
    assert "is no event" in results["b"].reason


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clips": ["a", "nope"]}, "has no clip 'nope'; it has a, b, c"),
        ({"runner": "Nope"}, "Beam has no runner 'Nope'"),
        ({"options": ["--direct_num_workers=x"]}, "invalid int value: 'x'"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_before_anything_starts(batch, fields, words):
    with pytest.raises(RequestError, match=words):
        stitch_batch(batch.uri, **fields)
    assert again(batch).log.status("a").state == "decoded"


def test_no_ffmpeg_is_no_fault_of_a_clip(batch, tmp_path, monkeypatch):
    find_ffmpeg.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "absent"))
    try:
        with pytest.raises(RequestError, match="no ffmpeg"):
            stitch_batch(batch.uri)
    finally:
        find_ffmpeg.cache_clear()
    assert again(batch).log.status("a").state == "decoded"


def test_a_deleted_video_is_made_anew(batch):
    stitch_batch(batch.uri)
    before = videos(batch)
    batch.store.delete("videos/a.mp4")
    assert all(r.ok for r in stitch_batch(batch.uri))
    assert videos(batch) == before


def test_a_video_moved_aside_is_made_anew(batch):
    stitch_batch(batch.uri, ["a"])
    video = Path(batch.uri, "videos", "a.mp4")
    video.rename(video.with_name("a.mp4.old"))
    assert stitch_batch(batch.uri, ["a"])[0].ok
    assert video.read_bytes() == video.with_name("a.mp4.old").read_bytes()


def test_another_video_in_its_place_is_never_overwritten(batch):
    batch.store.create("videos/a.mp4", b"someone's")
    results = {r.clip: r for r in stitch_batch(batch.uri)}
    assert "videos/a.mp4 is there already" in results["a"].reason
    assert results["b"].ok and results["c"].ok
    assert videos(batch)["videos/a.mp4"] == b"someone's"
    batch.store.delete("videos/a.mp4")
    assert stitch_batch(batch.uri, ["a"])[0].ok


def test_what_belonged_to_an_older_video_goes_with_it(batch):
    batch.store.create("videos/a.json", b'{"files": {}}')
    batch.store.create("videos/a.webp", b"old")
    assert stitch_batch(batch.uri, ["a"])[0].ok
    assert json.loads(batch.store.read("videos/a.json"))["clip"] == "a"
    assert batch.store.read("videos/a.webp")[:4] == b"RIFF"


class Killed(BaseException):
    """Stands for the end of the process: no handler of errors sees it."""


class DyingStore(LocalStore):
    """A store whose process dies before, or right after, its nth write."""

    def __init__(self, root, writes, after):
        super().__init__(root)
        self._left = writes
        self._after = after

    def _write(self, write, name, data):
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Killed
        write(name, data)
        if self._left == 0:
            raise Killed

    def create(self, name, data):
        self._write(super().create, name, data)

    def replace(self, name, data):
        self._write(super().replace, name, data)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_after_a_kill_at_any_write_the_next_run_ends_the_same(
    batch, tmp_path, writes, after
):
    store = DyingStore(Path(batch.uri), writes, after)
    dying = Batch(batch.uri, store, batch.info, batch.clips, EventLog(store))
    with pytest.raises(Killed):
        publish(dying, "a")
    assert again(batch).log.status("a").state == "decoded"
    published = videos(batch)
    assert len(published) == writes - (not after)
    assert stitch_batch(batch.uri, ["a"])[0].ok
    # What was there stays as it was, to the byte.
    assert published.items() <= videos(batch).items()
    assert len(videos(batch)) == 3


def test_a_real_kill_in_the_middle_publishes_nothing_partial(tmp_path):
    big = job("a", width=320, height=176, frames=60)
    batch = write_batch(tmp_path / "spring", [big])
    decode_clip(batch, big)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    code = f"from pipeline.stitch import stitch_batch; stitch_batch({batch.uri!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(scratch)}
    )
    deadline = time.monotonic() + 300
    try:
        while not list(scratch.glob("*/video.mp4")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert not batch.store.list("videos/")
    assert again(batch).log.status("a").state == "decoded"
    assert stitch_batch(batch.uri)[0].ok
    check(Path(batch.store.url("videos/a.mp4")), Video(320, 176, 60, Fraction(16), 18))


def test_two_stitches_of_one_clip_end_in_one_event(batch):
    first, second = again(batch), again(batch)
    publish(first, "a")
    publish(second, "a")
    stitch_clip(batch.uri, "a")
    stitch_clip(batch.uri, "a")
    kinds = [event.event for event in again(batch).log.events("a")]
    assert kinds.count("stitched") == 1 and "failed" not in kinds


def test_a_stitch_whose_frames_were_made_anew_meanwhile_fails_no_clip(
    batch, monkeypatch
):
    def made_anew_meanwhile(_, clip):
        shard = write_shard(batch.store, clip, draw(6, 32, 24), epoch=2)
        batch.store.create(names.lease(2), b"{}")
        batch.log.append(clip, "decoded", 2, frames=6, seconds=1.0, shards=[shard])
        raise DamagedFrames(["frame 3 is missing"])

    monkeypatch.setattr("pipeline.stitch.publish", made_anew_meanwhile)
    stitch_clip(batch.uri, "a")
    assert again(batch).log.status("a").state == "decoded"
    monkeypatch.undo()
    assert stitch_batch(batch.uri, ["a"])[0].ok


def test_where_no_event_can_be_written_the_log_and_the_result_say_so(
    batch, monkeypatch, caplog
):
    def full(self, name, data):
        raise StoreError(f"{name} cannot be written: No space left on device")

    monkeypatch.setattr(LocalStore, "create", full)
    with caplog.at_level(logging.ERROR):
        (result,) = stitch_batch(batch.uri, ["a"])
    assert not result.ok and "could not be written" in result.reason
    assert "No space left on device" in caplog.text


def test_an_error_that_no_one_thought_of_fails_its_clip_alone(batch):
    info = json.loads(batch.store.read(names.BATCH))
    del info["clips"][0]["encode"]["crf"]
    batch.store.replace(names.BATCH, json.dumps(info).encode())
    results = {r.clip: r for r in stitch_batch(batch.uri)}
    assert results["a"].reason == "KeyError: 'crf'"
    assert results["b"].ok and results["c"].ok


def test_a_codec_that_is_not_known_is_named(batch):
    info = json.loads(batch.store.read(names.BATCH))
    info["clips"][0]["encode"]["codec"] = "cinepak"
    batch.store.replace(names.BATCH, json.dumps(info).encode())
    (result,) = stitch_batch(batch.uri, ["a"])
    assert "codec 'cinepak' is unknown" in result.reason


@pytest.mark.slow
def test_several_processes_stitch_the_same(batch):
    options = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    results = stitch_batch(batch.uri, options=options)
    assert results and all(r.ok for r in results)
