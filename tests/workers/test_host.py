import dataclasses
import io
import json
import os
import resource

import numpy as np
import pytest
import safetensors
from PIL import Image

from pipeline import names
from pipeline.output import StoreOutput
from pipeline.store import LocalStore, StoreError, checksum
from tests.pipeline.batches import small_job
from tests.tiny_model import write_tiny_model
from workers.host import Host

JOB = small_job()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = Host()
    host.load(str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))
    return host


@pytest.fixture(scope="module")
def frames(host):
    """The clip's frames, straight from the denoiser."""
    denoiser = host._denoiser
    state = denoiser.begin(JOB, denoiser.encode(JOB))
    return list(denoiser.decode(denoiser.advance(state, JOB.steps)[0]))


@pytest.fixture
def output(tmp_path):
    return StoreOutput(str(tmp_path / "batch"), "a", 1)


def denoise(host, output, job=JOB):
    host.encode(job, output)
    host.begin(job, output)
    host.advance(job.steps)
    return host.checkpoint()


def decode(host, count=100):
    while not (done := host.decode(count)).shard:
        pass
    return done


def stored_frames(output, epoch=1):
    store = LocalStore(output.batch)
    found = [
        store.read(names.frame("a", epoch, 0, index)) for index in range(JOB.frames)
    ]
    return [np.asarray(Image.open(io.BytesIO(data))) for data in found]


def test_frames_and_shard_json_are_those_of_the_clip(host, output, frames):
    denoise(host, output)
    assert dataclasses.astuple(decode(host)) == (
        6,
        "clips/a/shards/0001/000/shard.json",
    )
    np.testing.assert_array_equal(stored_frames(output), frames)
    store = LocalStore(output.batch)
    shard = json.loads(store.read(names.shard_json("a", 1, 0)))
    files = shard.pop("files")
    assert shard == {
        "version": 1,
        "clip": "a",
        "epoch": 1,
        "shard": 0,
        "first": 0,
        "frames": 6,
        "overlap": 0,
        "width": 30,
        "height": 28,
        "pixel_format": "rgb24",
    }
    for index, file in enumerate(files):
        data = store.read(names.frame("a", 1, 0, index))
        assert file == {
            "name": f"frame-{index:06d}.png",
            "bytes": len(data),
            "crc32c": checksum(data),
        }


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_clip_that_goes_on_from_a_checkpoint_has_the_same_frames(
    host, output, frames, step
):
    host.encode(JOB, output)
    host.begin(JOB, output)
    host.advance(step)
    written = host.checkpoint()
    assert written.name == names.checkpoint("a", step)
    data = LocalStore(output.batch).read(written.name)
    assert (written.bytes, written.crc32c) == (len(data), checksum(data))

    host.begin(dataclasses.replace(JOB, seed=8), output)
    host.resume(JOB, dataclasses.replace(output, epoch=2), step)
    host.advance(JOB.steps - step)
    decode(host)
    np.testing.assert_array_equal(stored_frames(output, epoch=2), frames)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_calls_of_any_size_write_the_same_frames(host, output, frames, count):
    host.encode(JOB, output)
    host.begin(JOB, output)
    for _ in range(JOB.steps):
        host.advance(1)
    decode(host, count)
    np.testing.assert_array_equal(stored_frames(output), frames)


def test_a_checkpoint_says_whose_it_is(host, output, tmp_path):
    written = denoise(host, output)
    with safetensors.safe_open(
        tmp_path / "batch" / written.name, framework="numpy"
    ) as file:
        assert file.metadata() == {"clip": "a", "epoch": "1", "step": "4"}


def test_embeddings_are_written_over_damaged_ones_and_told(host, output):
    store = LocalStore(output.batch)
    store.create(names.text("a"), b"half")
    written = host.encode(JOB, output)
    data = store.read(names.text("a"))
    assert dataclasses.astuple(written) == (names.text("a"), len(data), checksum(data))


def test_frames_of_an_attempt_that_died_do_not_stand_in_the_way(host, output, frames):
    denoise(host, output)
    host.decode(3)
    LocalStore(output.batch).create(names.frame("a", 1, 0, 5), b"half")
    host.resume(JOB, output, JOB.steps)
    decode(host)
    np.testing.assert_array_equal(stored_frames(output), frames)


def test_calls_out_of_order_are_refused(output):
    host = Host()
    with pytest.raises(RuntimeError, match="load"):
        host.encode(JOB, output)
    with pytest.raises(RuntimeError, match="no clip is open"):
        host.decode(1)


def test_a_full_disk_is_named_and_leaves_no_frame_behind(host, output, frames):
    denoise(host, output)
    host.decode(2)
    # No file may grow beyond some bytes: for a writer, a full disk.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(StoreError) as caught:
            host.decode(100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "frame-000002.png cannot be written: File too large; free" in str(
        caught.value
    )
    left = LocalStore(output.batch).list("")
    assert left == [names.checkpoint("a", 4), names.text("a")]
    hidden = [f for _, _, files in os.walk(output.batch) for f in files if f[0] == "."]
    assert hidden == []
    decode(host)
    np.testing.assert_array_equal(stored_frames(output), frames)
