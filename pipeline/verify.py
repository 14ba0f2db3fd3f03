"""Reads the frames of a clip from its shards, each checked before it is used.

A shard is a folder of PNG files with a shard.json, written last, that says which
frames it holds and how many bytes, with which checksum, each of them has.
"""

import dataclasses
import io
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from pipeline import names
from pipeline.store import Missing, Store, checksum

_VERSION = 1
_PNG = b"\x89PNG\r\n\x1a\n"
_KINDS = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGBA"}
_MOST_NAMED = 8


class DamagedFrames(Exception):
    """Frames are missing or not what they should be; the message names them."""

    def __init__(self, faults: Sequence[str]):
        named = list(faults[:_MOST_NAMED])
        if len(faults) > len(named):
            named.append(f"and {len(faults) - len(named)} more")
        super().__init__("; ".join(named))


@dataclasses.dataclass(frozen=True)
class FrameFile:
    """Where one frame lies and what its bytes must be.

    Attributes:
        index: Its number in the clip, from 0.
        name: Its name in the store.
        size: Its length in bytes.
        crc32c: The checksum of its bytes, eight hexadecimal digits.
    """

    index: int
    name: str
    size: int
    crc32c: str


def list_frames(
    store: Store, clip: str, shards: Sequence[str], frames: int, size: tuple[int, int]
) -> list[FrameFile]:
    """Lists a clip's frames as its shards promise them, without reading any.

    Args:
        store: The batch's store.
        clip: The clip's id.
        shards: Names of the shard.json files.
        frames: How many frames the clip must have.
        size: (width, height) that its frames must have, in pixels.

    Returns:
        Every frame of the clip, in order.

    Raises:
        DamagedFrames: A shard is missing, damaged or of another clip, or the shards
            together do not hold each frame exactly once.
        StoreError: The store cannot be read.
    """
    found: dict[int, FrameFile] = {}
    faults = []
    for shard in shards:
        try:
            files = _read_shard(store, shard, clip, size)
        except Missing:
            faults.append(f"shard {store.url(shard)} is missing")
            continue
        except ValueError as error:
            faults.append(f"shard {store.url(shard)}: {error}")
            continue
        for file in files:
            if file.index in found:
                faults.append(f"frame {file.index} is in more than one shard")
            elif file.index >= frames:
                faults.append(f"frame {file.index} is beyond the clip's last")
            found[file.index] = file
    if faults:
        raise DamagedFrames(faults)
    missing = [index for index in range(frames) if index not in found]
    if missing:
        raise DamagedFrames([f"no shard holds frame {index}" for index in missing])
    return [found[index] for index in range(frames)]


def read_frames(
    store: Store, files: Sequence[FrameFile], size: tuple[int, int]
) -> Iterator[bytes]:
    """Yields each frame's pixels, once all of it has been found right.

    After the first fault no more frames are yielded, but all that follow are still
    checked, so that the error names every bad frame of the clip at once.

    Args:
        store: The batch's store.
        files: What `list_frames` gave.
        size: (width, height) in pixels.

    Yields:
        Raw pixels, rgb24: height x width x 3 bytes, row by row from the top.

    Raises:
        DamagedFrames: Frames are missing, of another length, checksum, size or pixel
            format than they must be, or no PNG that can be decoded.
        StoreError: The store cannot be read.
    """
    faults = []
    for file in files:
        try:
            pixels = _read_frame(store, file, size)
        except ValueError as error:
            faults.append(f"frame {file.index} ({store.url(file.name)}) {error}")
            continue
        if not faults:
            yield pixels
    if faults:
        raise DamagedFrames(faults)


def _read_frame(store: Store, file: FrameFile, size: tuple[int, int]) -> bytes:
    try:
        data = store.read(file.name)
    except Missing:
        raise ValueError("is missing") from None
    if len(data) != file.size:
        raise ValueError(
            f"has {len(data)} bytes, not the {file.size} that were written"
        )
    found = checksum(data)
    if found != file.crc32c:
        raise ValueError(f"has checksum {found}, not {file.crc32c} as it was written")
    _check_header(data, size)
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            return image.tobytes()
    # Pillow reports damage of different parts of a PNG by different exceptions.
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def _check_header(data: bytes, size: tuple[int, int]) -> None:
    """Refuses what is no 8-bit RGB PNG of a size (PNG, third edition, 11.2.1)."""
    if not data.startswith(_PNG) or data[12:16] != b"IHDR" or len(data) < 26:
        raise ValueError("is no PNG file")
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    if (width, height) != size:
        raise ValueError(f"is {width}x{height} pixels, not {size[0]}x{size[1]}")
    if (depth, kind) != (8, 2):
        name = _KINDS.get(kind, f"colour type {kind}")
        raise ValueError(f"is {depth}-bit {name}, not 8-bit RGB")


def _read_shard(
    store: Store, shard: str, clip: str, size: tuple[int, int]
) -> list[FrameFile]:
    """Reads a shard.json; raises ValueError where it is not what it must be."""
    data = store.read(shard)
    try:
        fields = json.loads(data)
        first, count = int(fields["first"]), int(fields["frames"])
        files = [_file_of(shard, first + n, f) for n, f in enumerate(fields["files"])]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"it is damaged ({error!r})") from error
    width, height = size
    expected = {
        "version": _VERSION,
        "clip": clip,
        "overlap": 0,
        "width": width,
        "height": height,
        "pixel_format": "rgb24",
    }
    for key, value in expected.items():
        if fields.get(key) != value:
            raise ValueError(f"its {key} is {fields.get(key)!r}, not {value!r}")
    if first < 0 or count != len(files):
        raise ValueError(
            f"it lists {len(files)} files for {count} frames from frame {first}"
        )
    return files


def _file_of(shard: str, index: int, fields: dict[str, Any]) -> FrameFile:
    name = names.frame_file(index)
    if fields["name"] != name:
        raise ValueError(f"file {fields['name']!r} stands where {name!r} must")
    folder = shard.rpartition("/")[0]
    return FrameFile(index, f"{folder}/{name}", fields["bytes"], fields["crc32c"])
