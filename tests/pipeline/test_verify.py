import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline import names
from pipeline.store import LocalStore, checksum
from pipeline.verify import DamagedFrames, list_frames, read_frames
from tests.pipeline.drawn import draw, png, write_shard

SIZE = (20, 12)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def frames():
    return draw(6, *SIZE)


def read(store, shards, count=6, size=SIZE):
    """Returns the frames as the stitch gets them: list, then read."""
    files = list_frames(store, "a", shards, count, size)
    pixels = list(read_frames(store, files, size))
    return np.stack([np.frombuffer(p, np.uint8).reshape(12, 20, 3) for p in pixels])


def change(store, shard, **fields):
    """Writes other fields into a shard.json."""
    store.replace(shard, json.dumps(json.loads(store.read(shard)) | fields).encode())


def put(store, shard, index, data):
    """Puts a file, with its right length and checksum, in a frame's place."""
    fields = json.loads(store.read(shard))
    record = fields["files"][index]
    record |= {"bytes": len(data), "crc32c": checksum(data)}
    store.replace(shard, json.dumps(fields).encode())
    store.replace(names.frame("a", 1, 0, index), data)


def test_frames_come_back_as_they_were(store, frames):
    shard = write_shard(store, "a", frames)
    assert (read(store, [shard]) == frames).all()


def test_shards_in_any_order_make_one_clip(store, frames):
    shards = [
        write_shard(store, "a", frames[4:], number=2, first=4),
        write_shard(store, "a", frames[:1], number=0, first=0),
        write_shard(store, "a", frames[1:4], number=1, first=1),
    ]
    assert (read(store, shards) == frames).all()


def test_listing_reads_no_frame(store, frames):
    shard = write_shard(store, "a", frames)
    store.delete(names.frame("a", 1, 0, 3))
    assert len(list_frames(store, "a", [shard], 6, SIZE)) == 6


def test_a_missing_frame_is_named(store, frames):
    shard = write_shard(store, "a", frames)
    store.delete(names.frame("a", 1, 0, 3))
    with pytest.raises(DamagedFrames, match=r"^frame 3 \(.*/frame-000003.png\) is mis"):
        read(store, [shard])


def test_a_frame_cut_short_is_named(store, frames):
    shard = write_shard(store, "a", frames)
    name = names.frame("a", 1, 0, 2)
    data = store.read(name)
    store.replace(name, data[:100])
    with pytest.raises(DamagedFrames, match=f"frame 2 .* has 100 bytes, .*{len(data)}"):
        read(store, [shard])


def test_a_frame_of_another_checksum_is_named(store, frames):
    shard = write_shard(store, "a", frames)
    name = names.frame("a", 1, 0, 5)
    data = bytearray(store.read(name))
    data[-30] ^= 1
    store.replace(name, bytes(data))
    with pytest.raises(DamagedFrames, match="frame 5 .* has checksum"):
        read(store, [shard])


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (draw(1, 20, 14)[0], "is 20x14 pixels, not 20x12"),
        (Image.new("L", SIZE), "is 8-bit grey, not 8-bit RGB"),
        (Image.new("P", SIZE), "is 1-bit palette"),
        (Image.new("RGBA", SIZE), "is 8-bit RGBA"),
        (Image.new("I;16", SIZE), "is 16-bit grey"),
        (Image.new("1", SIZE), "is 1-bit grey"),
    ],
    ids=["size", "L", "P", "RGBA", "I;16", "1"],
)
def test_a_frame_of_another_size_or_mode_is_named(store, frames, image, words):
    shard = write_shard(store, "a", frames)
    put(store, shard, 1, png(image))
    with pytest.raises(DamagedFrames, match=rf"frame 1 .* {words}"):
        read(store, [shard])


@pytest.mark.parametrize("data", [b"", b"GIF89a" + b"\0" * 50, b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_is_no_png_is_named(store, frames, data):
    shard = write_shard(store, "a", frames)
    put(store, shard, 0, data)
    with pytest.raises(DamagedFrames, match="frame 0 .* is no PNG file"):
        read(store, [shard])


def test_a_png_whose_writer_stopped_halfway_is_named(store, frames):
    shard = write_shard(store, "a", frames)
    data = store.read(names.frame("a", 1, 0, 4))
    put(store, shard, 4, data[: len(data) // 2])
    with pytest.raises(DamagedFrames, match="frame 4 .* cannot be decoded"):
        read(store, [shard])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_escapes_as_no_other_error(tmp_path_factory, data):
    """With a right checksum over it, damage is found by decoding or is harmless."""
    store = LocalStore(tmp_path_factory.mktemp("damage"))
    good = png(draw(1, *SIZE)[0])
    shard = write_shard(store, "a", [good], size=SIZE)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(at, len(good)))
    put(store, shard, 0, bytes(bad[:cut]))
    try:
        pixels = list(
            read_frames(store, list_frames(store, "a", [shard], 1, SIZE), SIZE)
        )
    except DamagedFrames as error:
        assert str(error).startswith("frame 0 (")
    else:
        assert len(pixels[0]) == 20 * 12 * 3


def test_every_bad_frame_is_named_and_none_after_the_first_is_used(store, frames):
    shard = write_shard(store, "a", frames)
    store.delete(names.frame("a", 1, 0, 2))
    store.replace(names.frame("a", 1, 0, 4), b"cut")
    files = list_frames(store, "a", [shard], 6, SIZE)
    good = read_frames(store, files, SIZE)
    assert [next(good), next(good)] == [frame.tobytes() for frame in frames[:2]]
    with pytest.raises(DamagedFrames, match=r"frame 2 .*; frame 4 .* has 3 bytes"):
        next(good)


def test_hundreds_of_bad_frames_make_a_short_message(store):
    frames = [png(draw(1, *SIZE)[0])] * 300
    shard = write_shard(store, "a", frames, size=SIZE)
    for index in range(300):
        store.delete(names.frame("a", 1, 0, index))
    with pytest.raises(DamagedFrames, match="frame 7 .* is missing; and 292 more$"):
        read(store, [shard], 300)


def test_a_missing_shard_is_named(store, frames):
    shards = [
        write_shard(store, "a", frames[:3]),
        write_shard(store, "a", frames[3:], number=1, first=3),
    ]
    store.delete(shards[1])
    with pytest.raises(DamagedFrames, match="/001/shard.json is missing$"):
        read(store, shards)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "its version is 2, not 1"),
        ({"clip": "b"}, "its clip is 'b', not 'a'"),
        ({"width": 22}, "its width is 22, not 20"),
        ({"height": None}, "its height is None, not 12"),
        ({"pixel_format": "rgba"}, "its pixel_format is 'rgba'"),
        ({"overlap": 4}, "its overlap is 4, not 0"),
        ({"frames": 5}, "lists 6 files for 5 frames"),
        ({"first": 1}, "'frame-000000.png' stands where 'frame-000001.png' must"),
        ({"first": -1}, "stands where"),
        ({"files": "none"}, "is damaged"),
        ({"files": [{"name": "../../../../etc/passwd"}]}, "stands where"),
        ({"files": None}, "is damaged"),
    ],
    ids=str,
)
def test_a_shard_that_says_something_else_is_refused(store, frames, fields, words):
    shard = write_shard(store, "a", frames)
    change(store, shard, **fields)
    with pytest.raises(DamagedFrames, match=words):
        read(store, [shard])


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"first": 0', b"\xff"])
def test_a_shard_that_is_no_shard_is_refused(store, frames, data):
    shard = write_shard(store, "a", frames)
    store.replace(shard, data)
    with pytest.raises(DamagedFrames, match="shard .*shard.json: it is damaged"):
        read(store, [shard])


def test_frames_that_no_shard_holds_are_named(store, frames):
    shards = [
        write_shard(store, "a", frames[:2]),
        write_shard(store, "a", frames[3:5], number=1, first=3),
    ]
    words = "^no shard holds frame 2; no shard holds frame 5$"
    with pytest.raises(DamagedFrames, match=words):
        read(store, shards)


def test_frames_twice_or_beyond_the_end_are_named(store, frames):
    shards = [
        write_shard(store, "a", frames),
        write_shard(store, "a", frames[5:], number=1, first=5),
    ]
    with pytest.raises(DamagedFrames, match="frame 5 is in more than one shard"):
        read(store, shards)
    with pytest.raises(DamagedFrames, match="frame 5 is beyond the clip's last"):
        read(store, shards[:1], 5)


def test_no_shards_means_no_frames(store):
    with pytest.raises(DamagedFrames, match="no shard holds frame 0"):
        read(store, [])
