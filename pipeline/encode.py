"""Frames in, a video file out, and the proof that all of them are in it.

ffmpeg ends with status 0 where its input is cut short, so an encoded file counts
for nothing until its frames have been decoded and counted (`check`).
"""

import dataclasses
import subprocess
import tempfile
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import ffmpeg

from pipeline.ffmpeg import find_ffmpeg

_MOST_WORDS = 600
# Frames' times are compared in this part of a frame; finer, and ffmpeg's 32-bit time
# base would be too small for 240 fps over a denominator of 9999.
_TICKS = 500


class EncodeError(Exception):
    """A video could not be made, or is not what it must be; the message says why."""


@dataclasses.dataclass(frozen=True)
class Video:
    """What a video must be.

    Attributes:
        width: Width in pixels, even.
        height: Height in pixels, even.
        frames: Number of frames, at least 1.
        fps: Frames per second, exact.
        crf: x264's constant rate factor: 0 (lossless) to 51.
    """

    width: int
    height: int
    frames: int
    fps: Fraction
    crf: int

    def __post_init__(self):
        if self.width % 2 or self.height % 2 or min(self.width, self.height) < 2:
            raise EncodeError(
                f"{self.width}x{self.height}: H.264 in yuv420p needs an even width and "
                "an even height, since one colour sample stands for 2x2 pixels"
            )
        if self.frames < 1 or self.fps <= 0 or not 0 <= self.crf <= 51:
            raise EncodeError(
                f"{self.frames} frames at {self.fps} fps with crf {self.crf}: at least "
                "one frame, a positive rate and a crf from 0 to 51 are needed"
            )


@dataclasses.dataclass(frozen=True)
class Flag:
    """One setting of ffmpeg and why it is there.

    Attributes:
        place: What it belongs to: "input", "output", or a filter's name.
        name: The option's name, without its dash.
        value: Its value; {width}, {height}, {fps} and {crf} stand for the video's
            own. Nothing else of a manifest ever comes near a command.
        reason: Why it is there.
    """

    place: str
    name: str
    value: str
    reason: str


# Filters run in this order. Colour needs both the filters and the output's flags:
# with either alone, ffmpeg 5 to 9 leave tags out.
FILTERS = ("scale", "format", "setparams")
FLAGS = (
    Flag("input", "format", "rawvideo", "frames come through a pipe, already checked"),
    Flag("input", "pix_fmt", "rgb24", "the pixel format of the frames in the store"),
    Flag(
        "input",
        "s",
        "{width}x{height}",
        "raw pixels carry no size (as video_size, ffmpeg-python garbles a string)",
    ),
    Flag("input", "framerate", "{fps}", "before the input, or it would be taken as 25"),
    Flag("scale", "out_color_matrix", "bt709", "the default is BT.601: wrong greens"),
    Flag("scale", "out_range", "tv", "what every player expects of H.264"),
    Flag(
        "scale",
        "flags",
        "bicubic+accurate_rnd+full_chroma_int+full_chroma_inp",
        "rounds right and averages all four pixels of a colour sample: without, flat "
        "primaries come out up to 1/255 uneven (measured)",
    ),
    Flag("format", "pix_fmts", "yuv420p", "the one format that every player takes"),
    Flag("setparams", "color_primaries", "bt709", "tags the frames themselves"),
    Flag("setparams", "color_trc", "bt709", "tags the frames themselves"),
    Flag(
        "output",
        "r",
        "{fps}",
        "else ffmpeg guesses: 3 frames at 102/25 fps came out at 49/12 (seen)",
    ),
    Flag("output", "c:v", "libx264", "H.264 plays everywhere, browsers included"),
    Flag("output", "crf", "{crf}", "even quality, whatever the content"),
    Flag(
        "output",
        "preset",
        "medium",
        "slow takes twice the time for 0.4% (measured on 81 frames of 416x240)",
    ),
    Flag("output", "g", "48", "a key frame every 2 to 3 s: seeking stays quick"),
    Flag("output", "threads", "4", "x264's result depends on the number of threads"),
    Flag("output", "color_range", "tv", "tags the stream"),
    Flag("output", "colorspace", "bt709", "tags the stream"),
    Flag("output", "color_primaries", "bt709", "tags the stream"),
    Flag("output", "color_trc", "bt709", "tags the stream"),
    Flag("output", "movflags", "+faststart", "playing starts before all is loaded"),
    Flag("output", "fflags", "+bitexact", "the same frames give the same file"),
    Flag("output", "flags:v", "+bitexact", "the same frames give the same file"),
    Flag("output", "map_metadata", "-1", "nothing is in the file by accident"),
    Flag("output", "metadata", "comment=machine-made", "says so wherever it goes"),
    Flag("output", "format", "mp4", "named, so that no file name decides it"),
)
_QUIET = ("-hide_banner", "-nostdin", "-loglevel", "error", "-xerror")


def command(video: Video, path: Path) -> list[str]:
    """Returns the ffmpeg command, as a list for exec, that encodes raw rgb24 frames.

    Args:
        video: What to make.
        path: Where to; it is overwritten.
    """
    stream = ffmpeg.input("pipe:", **_options("input", video))
    for place in FILTERS:
        stream = stream.filter(place, **_options(place, video))
    stream = stream.output(_file(path), **_options("output", video))
    return stream.global_args(*_QUIET, "-y").compile(cmd=find_ffmpeg().path)


def encode(frames: Iterable[bytes], video: Video, path: Path) -> None:
    """Encodes frames to a file, one after the other, and checks the file.

    Args:
        frames: Raw rgb24 pixels of each frame, height x width x 3 bytes. What their
            iterator raises ends the encoder and is passed on.
        video: What to make of them.
        path: Where to; it is overwritten. Whole only when this returns.

    Raises:
        EncodeError: ffmpeg failed, or the frames are not those of `video`.
        RequestError: There is no ffmpeg here.
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command(video, path),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=words,
        )
        assert process.stdin is not None
        try:
            written = _write(frames, video, process.stdin)
            status = process.wait()
        finally:
            # Where an error is on its way, a file that is cut short must not follow.
            process.kill()
            process.wait()
        if status != 0:
            raise EncodeError(f"ffmpeg failed (status {status}): {_last(words)}")
    if written != video.frames:
        raise EncodeError(f"{written} frames came, not {video.frames}")
    check(path, video)


def check(path: Path, video: Video) -> None:
    """Decodes a whole video and compares it with what it must be.

    Raises:
        EncodeError: It cannot be decoded, or its frames' number, size or rate differ.
        RequestError: There is no ffmpeg here.
    """
    fine = 1 / (video.fps * _TICKS)
    stream = ffmpeg.input(_file(path)).output(
        "pipe:", format="framecrc", map="0:v:0", enc_time_base=str(fine)
    )
    arguments = stream.global_args(*_QUIET).compile(cmd=find_ffmpeg().path)
    with tempfile.TemporaryFile() as words:
        done = subprocess.run(
            arguments,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
        )
        if done.returncode != 0:
            raise EncodeError(f"the encoded video cannot be decoded: {_last(words)}")
    size = base = ""
    times = []
    for line in done.stdout.decode().splitlines():
        if line.startswith("#dimensions 0:"):
            size = line.split()[-1]
        elif line.startswith("#tb 0:"):
            base = line.split()[-1]
        elif not line.startswith("#"):
            # stream, decoding time, presentation time, duration, bytes, checksum
            times.append(int(line.split(",")[2]))
    if (len(times), size) != (video.frames, f"{video.width}x{video.height}"):
        raise EncodeError(
            f"the encoded video has {len(times)} frames of {size or 'no size'}, not "
            f"{video.frames} of {video.width}x{video.height}"
        )
    if base != str(fine) or times != [n * _TICKS for n in range(video.frames)]:
        raise EncodeError(f"the encoded video's frames do not come at {video.fps} fps")


def _options(place: str, video: Video) -> dict[str, Any]:
    numbers = dataclasses.asdict(video)
    return {f.name: f.value.format(**numbers) for f in FLAGS if f.place == place}


def _file(path: Path) -> str:
    """Names a file so that no part of its path is taken for a protocol or option."""
    return f"file:{path.absolute()}"


def _write(frames: Iterable[bytes], video: Video, pipe: IO[bytes]) -> int:
    """Writes frames to ffmpeg and closes the pipe; returns how many were taken."""
    written = 0
    try:
        with pipe:
            for pixels in frames:
                if len(pixels) != video.width * video.height * 3:
                    raise EncodeError(
                        f"frame {written} has {len(pixels)} bytes, not those of "
                        f"{video.width}x{video.height} pixels"
                    )
                pipe.write(pixels)
                written += 1
    except BrokenPipeError:
        # ffmpeg has ended early; its status and its words say why.
        return written
    return written


def _last(words: IO[bytes]) -> str:
    """Returns the end of what ffmpeg said."""
    words.seek(0)
    text = words.read().decode(errors="replace").strip()
    return text[-_MOST_WORDS:] or "it gave no reason"
