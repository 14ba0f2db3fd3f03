"""Makes one clip's video of its frames and puts it in the store, once and whole."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from pipeline import names
from pipeline.batch import Batch, BatchClip
from pipeline.encode import EncodeError, Video, encode
from pipeline.provenance import provenance, speaks_of
from pipeline.sheet import contact_sheet, pick, thumbnail
from pipeline.store import Exists, Store, StoreError
from pipeline.verify import list_frames, read_frames


def publish(batch: Batch, clip: str) -> None:
    """Makes a clip's video, contact sheet and provenance and puts them in the store.

    A run after a kill finds what the first has published to be the same bytes, and
    goes on.

    Args:
        batch: The clip's batch.
        clip: The clip's id; its frames are decoded.

    Raises:
        DamagedFrames: Frames are missing or damaged.
        EncodeError: The video could not be made, or is not what was planned.
        RequestError: There is no ffmpeg here.
        StoreError: The store cannot be read or written, or holds another video.
    """
    start = time.monotonic()
    entry = next(entry for entry in batch.clips if entry.job.clip == clip)
    status = batch.log.status(clip)
    video, sheet = _make(batch.store, entry, status.shards)
    seconds = time.monotonic() - start
    _create(batch.store, names.video(clip), video)
    _put(batch.store, names.sheet(clip), sheet, keep=lambda old: old == sheet)
    made = {names.video(clip): video, names.sheet(clip): sheet}
    _put(
        batch.store,
        names.provenance(clip),
        provenance(batch, entry, status, made, seconds),
        # One from before a kill differs in its timings alone, and they are right.
        keep=lambda old: speaks_of(old, made),
    )


def _make(
    store: Store, entry: BatchClip, shards: tuple[str, ...]
) -> tuple[bytes, bytes]:
    """Returns a clip's video and contact sheet, in one pass over its frames."""
    job = entry.job
    size = (job.width, job.height)
    if entry.encode["codec"] != "h264":
        raise EncodeError(
            f"codec {entry.encode['codec']!r} is unknown to this version of Tilereel, "
            "which encodes h264 only"
        )
    video = Video(*size, job.frames, entry.fps, entry.encode["crf"])
    files = list_frames(store, job.clip, shards, job.frames, size)
    shown = set(pick(job.frames))
    thumbnails: list[Image.Image] = []

    def frames() -> Iterator[bytes]:
        for index, pixels in enumerate(read_frames(store, files, size)):
            if index in shown:
                thumbnails.append(thumbnail(pixels, size))
            yield pixels

    with tempfile.TemporaryDirectory(prefix="tilereel-") as folder:
        path = Path(folder, "video.mp4")
        encode(frames(), video, path)
        return path.read_bytes(), contact_sheet(thumbnails)


def _create(store: Store, name: str, data: bytes) -> None:
    """Publishes a file once; that it is there already, the same, is no error."""
    try:
        store.create(name, data)
    except Exists:
        if store.read(name) != data:
            raise StoreError(
                f"{store.url(name)} is there already and is not what the clip's frames "
                "make: move it away, or delete it, to have it made anew"
            ) from None


def _put(store: Store, name: str, data: bytes, keep: Callable[[bytes], bool]) -> None:
    """Publishes what belongs to a video; what belonged to an older one must go."""
    try:
        store.create(name, data)
    except Exists:
        if not keep(store.read(name)):
            store.replace(name, data)
