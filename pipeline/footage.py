"""What there is to compare of two renders: their common clips, frame by frame.

Frames of two batches are read from their shards, where nothing is lost; their videos
stand in where either has no frames left.
"""

import contextlib
import dataclasses
import functools
import itertools
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

import ffmpeg
import numpy as np

from pipeline import names
from pipeline.batch import Batch, find_batches
from pipeline.errors import RequestError
from pipeline.events import ClipStatus
from pipeline.ffmpeg_pipe import running
from pipeline.likeness import Pixels
from pipeline.verify import DamagedFrames, list_frames, read_frames
from workers.job import ClipJob

_Frames = Generator[Pixels, None, None]


@dataclasses.dataclass(frozen=True)
class Footage:
    """The frames of one clip in one render.

    Attributes:
        where: Where they lie, for a person: a path.
        read: Yields them in order, anew each time it is called. Raises `RequestError`
            where they are damaged, `StoreError` where the store cannot be read.
    """

    where: str
    read: Callable[[], _Frames]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A clip in both renders.

    Attributes:
        clip: Its id; of two files, their names.
        source: What is compared: "frames" (lossless) or "videos".
        a: The first render's.
        b: The second render's.
        prompt: The clip's prompt in the first, "" where it is not known.
        settings: Names of the settings in which the two differ.
    """

    clip: str
    source: str
    a: Footage
    b: Footage
    prompt: str = ""
    settings: tuple[str, ...] = ()

    def frames(self) -> Generator[tuple[Pixels, Pixels], None, None]:
        """Yields each frame in both renders, in order.

        Raises:
            RequestError: The two have another size or number, or cannot be read.
            StoreError: The store cannot be read.
        """
        with (
            contextlib.closing(self.a.read()) as read_a,
            contextlib.closing(self.b.read()) as read_b,
        ):
            for n, (a, b) in enumerate(itertools.zip_longest(read_a, read_b)):
                if a is None or b is None:
                    more_a, more_b = (sum(1 for _ in read) for read in (read_a, read_b))
                    counts = (
                        n + (a is not None) + more_a,
                        n + (b is not None) + more_b,
                    )
                    raise self.unlike(*(f"{count} frames" for count in counts))
                if a.shape != b.shape:
                    sizes = (f"{x.shape[1]}x{x.shape[0]} pixels" for x in (a, b))
                    raise self.unlike(*(f"frames of {size}" for size in sizes))
                yield a, b

    def unlike(self, a: str, b: str) -> RequestError:
        """Returns the error that says what the two have, where that must be equal."""
        return RequestError(
            f"{self.clip}: {self.a.where} has {a}, {self.b.where} has {b}; only as "
            "many frames of the same size can be compared"
        )


def find_pairs(a: str, b: str) -> tuple[list[Pair], dict[str, str]]:
    """Finds what two renders have in common.

    Args:
        a: A batch's folder, an output that holds one batch, or a video file.
        b: The same of the other render.

    Returns:
        The clips to compare, at least one, in the first batch's order; and why others
        are not compared, by their ids.

    Raises:
        RequestError: There is nothing to compare, or a clip was asked for in another
            size or length in each.
        StoreError: The store cannot be read.
    """
    for place in (a, b):
        if "://" not in place and not Path(place).exists():
            raise RequestError(
                f"{place} is not there; give a batch's folder or a video file"
            )
    files = [Path(place).is_file() for place in (a, b)]
    if all(files):
        video_a, video_b = (
            Footage(x, functools.partial(_read_video, Path(x))) for x in (a, b)
        )
        label = " / ".join(dict.fromkeys(Path(x).stem for x in (a, b)))
        return [Pair(label, "videos", video_a, video_b)], {}
    if any(files):
        file, folder = (a, b) if files[0] else (b, a)
        raise RequestError(
            f"{file} is a file and {folder} is none; give two batches' folders or two "
            "video files"
        )
    return _common_clips(_open(a), _open(b))


def _open(output: str) -> Batch:
    found = find_batches(output)
    if len(found) > 1:
        raise RequestError(
            f"{output} holds {len(found)} batches; give the folder of one of them: "
            f"{', '.join(found)}"
        )
    return Batch.open(found[0])


def _common_clips(a: Batch, b: Batch) -> tuple[list[Pair], dict[str, str]]:
    jobs_a, jobs_b = ({c.job.clip: c.job for c in batch.clips} for batch in (a, b))
    pairs, left_out = [], {}
    for clip in dict.fromkeys(_order(a) + _order(b)):
        if clip not in jobs_a or clip not in jobs_b:
            left_out[clip] = f"only {(a if clip in jobs_a else b).uri} has it"
            continue
        found = _footage(a, b, clip)
        if isinstance(found, str):
            left_out[clip] = found
            continue
        jobs = (jobs_a[clip], jobs_b[clip])
        fields = [field.name for field in dataclasses.fields(ClipJob)]
        differ = [f for f in fields if getattr(jobs[0], f) != getattr(jobs[1], f)]
        pair = Pair(clip, *found, jobs[0].prompt, tuple(differ))
        has = [f"{j.frames} frames of {j.width}x{j.height} pixels" for j in jobs]
        if has[0] != has[1]:
            raise pair.unlike(*has)
        pairs.append(pair)
    if not pairs:
        reasons = "; ".join(f"{clip}: {reason}" for clip, reason in left_out.items())
        raise RequestError(f"{a.uri} and {b.uri} have no clip to compare: {reasons}")
    return pairs, left_out


def _order(batch: Batch) -> list[str]:
    """Returns the clips' ids in the manifest's order."""
    return [fields["id"] for fields in batch.info["manifest"]["clips"]]


def _footage(a: Batch, b: Batch, clip: str) -> tuple[str, Footage, Footage] | str:
    """Returns what to read of a clip that both have, or why there is nothing."""
    both = [(batch, batch.log.status(clip)) for batch in (a, b)]
    for batch, status in both:
        if not _rendered(status):
            return f"in {batch.uri} it is {status.state}"
    stored_a, stored_b = (_stored(batch, clip, status) for batch, status in both)
    if stored_a and stored_b:
        return "frames", stored_a, stored_b
    # Never frames against a video: its encoding would pass for a difference.
    video_a, video_b = (_video(batch, status) for batch, status in both)
    if video_a and video_b:
        return "videos", video_a, video_b
    holdings = [(stored_a, video_a), (stored_b, video_b)]
    said = [
        f"{batch.uri} has {'its frames' if s else 'its video' if v else 'neither'}"
        for (batch, _), (s, v) in zip(both, holdings, strict=True)
    ]
    return f"it takes frames in both or videos in both, but {' and '.join(said)}"


def _rendered(status: ClipStatus) -> bool:
    """Tells whether the frames that the events name are the clip's newest."""
    failed_later = status.state == "failed" and status.stage == "stitch"
    return status.state in ("decoded", "stitched") or failed_later


def _stored(batch: Batch, clip: str, status: ClipStatus) -> Footage | None:
    """Returns a clip's frames in the store; None where someone has deleted them."""
    there = batch.store.list(names.shards(clip))
    if not set(there) & set(status.shards):
        return None
    where = batch.store.url(names.shards(clip).rstrip("/"))
    return Footage(where, functools.partial(_read_shards, batch, clip, status.shards))


def _video(batch: Batch, status: ClipStatus) -> Footage | None:
    if not status.video or status.video not in batch.store.list(status.video):
        return None
    where = batch.store.url(status.video)
    return Footage(where, functools.partial(_read_video, Path(where)))


def _read_shards(batch: Batch, clip: str, shards: tuple[str, ...]) -> _Frames:
    job = next(entry.job for entry in batch.clips if entry.job.clip == clip)
    size = (job.width, job.height)
    try:
        files = list_frames(batch.store, clip, shards, job.frames, size)
        for pixels in read_frames(batch.store, files, size):
            yield np.frombuffer(pixels, np.uint8).reshape(job.height, job.width, 3)
    except DamagedFrames as error:
        raise RequestError(
            f"clip {clip} of {batch.uri}: {error}. Delete its shards to have its "
            "video compared"
        ) from error


def _read_video(path: Path) -> _Frames:
    """Yields a video's frames, each once, whatever the file says of their times."""
    stream = ffmpeg.input(f"file:{path.absolute()}")["v:0"]
    # One tick a frame, and each frame as it comes: at a constant rate, which is what
    # pictures get by default, the first was doubled (seen).
    stream = stream.filter("settb", "1/25").filter("setpts", "N")
    stream = stream.filter("scale", flags="bicubic+accurate_rnd+full_chroma_int")
    stream = stream.filter("format", "rgb24")
    # PPM: each frame says its size, which a raw one does not.
    stream = stream.output(
        "pipe:",
        format="image2pipe",
        vcodec="ppm",
        fps_mode="passthrough",
        enc_time_base="1/25",
    )
    frames = 0
    with running(stream, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as (
        process,
        said,
    ):
        assert process.stdout is not None
        while (frame := _read_ppm(process.stdout)) is not None:
            frames += 1
            yield frame
        if process.wait() != 0 or not frames:
            raise RequestError(f"{path} cannot be read as a video: {said()}")


def _read_ppm(pipe: IO[bytes]) -> Pixels | None:
    """Returns the next frame; None at the end, or where the last one is cut short."""
    header = [pipe.readline() for _ in range(3)]
    if header[0] != b"P6\n" or header[2] != b"255\n":
        return None
    width, height = map(int, header[1].split())
    data = pipe.read(width * height * 3)
    if len(data) < width * height * 3:
        return None
    return np.frombuffer(data, np.uint8).reshape(height, width, 3)
