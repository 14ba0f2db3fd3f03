import subprocess

import imageio_ffmpeg
import pytest

from pipeline.errors import RequestError
from pipeline.ffmpeg import find_ffmpeg


@pytest.fixture(autouse=True)
def fresh():
    find_ffmpeg.cache_clear()
    yield
    find_ffmpeg.cache_clear()


def script(folder, *lines):
    path = folder / "ffmpeg"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def test_the_ffmpeg_found_runs_and_has_the_encoder():
    found = find_ffmpeg()
    said = subprocess.run([found.path, "-version"], capture_output=True, check=True)
    assert found.version in said.stdout.decode().splitlines()[0]


def test_the_one_on_path_is_preferred(tmp_path, monkeypatch):
    path = script(tmp_path, f'exec "{imageio_ffmpeg.get_ffmpeg_exe()}" "$@"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_ffmpeg().path == str(path)


def test_without_one_on_path_the_wheel_has_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ffmpeg().path == imageio_ffmpeg.get_ffmpeg_exe()


@pytest.mark.parametrize(
    "lines",
    [
        ["exit 1"],
        ["echo something else"],
        ['[ "$1" = -version ] && echo ffmpeg version 4.2 Copyright', "exit 0"],
    ],
    ids=["does not run", "is no ffmpeg", "has no libx264"],
)
def test_a_useless_one_on_path_is_passed_over(tmp_path, monkeypatch, lines):
    script(tmp_path, *lines)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_ffmpeg().path == imageio_ffmpeg.get_ffmpeg_exe()


def test_where_there_is_none_the_error_says_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "absent"))
    with pytest.raises(RequestError) as caught:
        find_ffmpeg()
    message = str(caught.value)
    assert "no ffmpeg on PATH" in message
    assert "absent does not run" in message
    assert "pip install imageio-ffmpeg" in message


def test_an_encoder_that_no_ffmpeg_has_is_named():
    with pytest.raises(RequestError, match="has no encoder libsilver"):
        find_ffmpeg("libsilver")
