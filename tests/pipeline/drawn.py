"""Batches without a model: frames drawn by a program, written as a host does."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline import names
from pipeline.batch import Batch
from pipeline.store import LocalStore, Store, checksum
from tests.pipeline.batches import work
from workers.job import ClipJob


def draw(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Returns frames of a dot that moves over a gradient.

    Returns:
        uint8 [frames, height, width, 3].
    """
    y, x = np.mgrid[:height, :width]
    base = np.stack([x * 200 / width, y * 200 / height, 0 * x + 20 * (seed % 10)], -1)
    drawn = []
    for t in range(frames):
        frame = base.copy()
        centre = (t + 0.5) * width / frames
        near = (x - centre) ** 2 + (y - height / 2) ** 2 < (min(width, height) / 4) ** 2
        frame[near] = [230, 60, 40]
        drawn.append(frame)
    return np.stack(drawn).round().astype(np.uint8)


def png(image: np.ndarray | Image.Image) -> bytes:
    """Returns a frame [height, width, 3] as a PNG file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return data.getvalue()


def write_shard(
    store: Store,
    clip: str,
    frames: np.ndarray | list[bytes],
    *,
    epoch: int = 1,
    number: int = 0,
    first: int = 0,
    size: tuple[int, int] | None = None,
) -> str:
    """Writes frames and their shard.json; returns the name of the latter.

    Args:
        store: The batch's store.
        clip: The clip's id.
        frames: uint8 [frames, height, width, 3], or the bytes of each file.
        epoch: The shard's epoch.
        number: The shard's number.
        first: Number of its first frame in the clip.
        size: (width, height) to claim, where the frames are bytes.
    """
    if isinstance(frames, np.ndarray):
        size = (frames.shape[2], frames.shape[1])
        frames = [png(frame) for frame in frames]
    assert size is not None
    files = []
    for n, data in enumerate(frames):
        store.create(names.frame(clip, epoch, number, first + n), data)
        name = names.frame_file(first + n)
        files.append({"name": name, "bytes": len(data), "crc32c": checksum(data)})
    fields = {
        "version": 1,
        "clip": clip,
        "epoch": epoch,
        "shard": number,
        "first": first,
        "frames": len(files),
        "overlap": 0,
        "width": size[0],
        "height": size[1],
        "pixel_format": "rgb24",
        "files": files,
    }
    name = names.shard_json(clip, epoch, number)
    store.create(name, json.dumps(fields).encode())
    return name


def job(clip: str, **fields: Any) -> ClipJob:
    """Returns a clip of 6 frames of 32x24; `fields` change what is to be changed."""
    plain: dict[str, Any] = {
        "prompt": f"a red dot for {clip}",
        "negative_prompt": "",
        "seed": 7,
        "width": 32,
        "height": 24,
        "frames": 6,
        "steps": 20,
        "guidance": 3.0,
        "flow_shift": 3.0,
        "sampler": "unipc",
    }
    plain |= fields
    rendered = {
        "render_width": -(-plain["width"] // 16) * 16,
        "render_height": -(-plain["height"] // 16) * 16,
        "render_frames": -(-(plain["frames"] - 1) // 4) * 4 + 1,
    }
    return ClipJob(clip=clip, **(rendered | plain))


def write_batch(
    root: Path, jobs: list[ClipJob], fps: str = "16", crf: int = 18
) -> Batch:
    """Writes the batch.json of some clips and opens the batch."""
    clips = [
        {
            "job": dataclasses.asdict(one),
            "priority": 0,
            "fps": fps,
            "encode": {"codec": "h264", "crf": crf},
            "cost": 1.0,
        }
        for one in jobs
    ]
    info = {
        "version": 1,
        "batch": root.name,
        "hash": "0123456789abcdef" * 4,
        "manifest": {"clips": [{"id": one.clip} for one in jobs]},
        "model": "demo",
        "clips": clips,
        "versions": {},
    }
    LocalStore(root).create(names.BATCH, json.dumps(info).encode())
    return Batch.open(str(root))


def decode_clip(batch: Batch, job: ClipJob, shards: int = 1, seed: int = 0) -> None:
    """Writes a clip's drawn frames and the events up to `decoded`, as a run does."""
    frames = draw(job.frames, job.width, job.height, seed)
    engine = {"model_hash": "feedbeef", "jax": "0.10.0", "device": "cpu"}
    batch.log.append(job.clip, "queued", 1)
    batch.log.append(
        job.clip, "started", 1, slice="slice-0", resumed_from=0, engine=engine
    )
    batch.log.append(job.clip, "text", 1, seconds=0.5, bytes=3, crc32c="0")
    batch.log.append(
        job.clip,
        "step",
        1,
        step=job.steps,
        of=job.steps,
        seconds=9.25,
        attention=work(590) if job.attention else None,
    )
    parts = np.array_split(np.arange(job.frames), shards)
    written = [
        write_shard(batch.store, job.clip, frames[part], number=n, first=int(part[0]))
        for n, part in enumerate(parts)
    ]
    batch.log.append(
        job.clip, "decoded", 1, frames=job.frames, seconds=1.75, shards=written
    )
