"""Frames drawn by a program, and shards of them, as a host writes them."""

import io
import json

import numpy as np
from PIL import Image

from pipeline import names
from pipeline.store import Store, checksum


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
