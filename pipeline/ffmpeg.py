"""Finds the ffmpeg program that encodes videos and counts their frames."""

import dataclasses
import functools
import shutil
import subprocess

import imageio_ffmpeg

from pipeline.errors import RequestError

_ANSWER_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Ffmpeg:
    """An ffmpeg program that runs here.

    Attributes:
        path: Where it lies.
        version: What it calls its version, as "7.1.2" or "n9.0.2-17-g2a571b6068".
    """

    path: str
    version: str


@functools.cache
def find_ffmpeg(encoder: str = "libx264") -> Ffmpeg:
    """Finds an ffmpeg that has an encoder: on PATH, else in the imageio-ffmpeg wheel.

    Some systems' own ffmpeg is built without libx264; it is passed over.

    Args:
        encoder: The encoder's name, as `ffmpeg -encoders` lists it.

    Raises:
        RequestError: There is none; the message says what was tried and what to do.
    """
    tried = []
    for look in (_on_path, _in_wheel):
        try:
            path = look()
            found = Ffmpeg(path, _version(path))
            if encoder not in _encoders(path):
                raise LookupError(f"{path} has no encoder {encoder}")
        except LookupError as error:
            tried.append(str(error))
        else:
            return found
    raise RequestError(
        f"no ffmpeg that can encode with {encoder}: {'; '.join(tried)}. Install one "
        "(`pip install imageio-ffmpeg`, or your system's ffmpeg package)"
    )


def _on_path() -> str:
    path = shutil.which("ffmpeg")
    if path is None:
        raise LookupError("there is no ffmpeg on PATH")
    return path


def _in_wheel() -> str:
    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError:
        raise LookupError("the imageio-ffmpeg wheel has no ffmpeg inside") from None


def _version(path: str) -> str:
    words = _ask(path, "-version").split(maxsplit=3)
    if len(words) < 3 or words[:2] != ["ffmpeg", "version"]:
        raise LookupError(f"{path} is no ffmpeg")
    return words[2]


def _encoders(path: str) -> set[str]:
    """Returns the names of its encoders: the second word of each line of the list."""
    lines = _ask(path, "-hide_banner", "-encoders").splitlines()
    return {line.split()[1] for line in lines if len(line.split()) > 1}


def _ask(path: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LookupError(f"{path} does not run ({error})") from error
    return done.stdout.decode(errors="replace")
