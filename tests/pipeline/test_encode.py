import os
import re
import subprocess
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import encode as encode_module
from pipeline.encode import FLAGS, EncodeError, Video, check, command, encode
from pipeline.ffmpeg import find_ffmpeg
from tests.pipeline.drawn import draw


def make(path, frames, fps=Fraction(16), crf=18):
    """Encodes frames [frames, height, width, 3] and returns what was asked for."""
    video = Video(frames.shape[2], frames.shape[1], len(frames), fps, crf)
    encode((frame.tobytes() for frame in frames), video, path)
    return video


def decode(path, shape, pixel_format="rgb24"):
    """Returns what a careful player gets out of a file, as uint8 of a shape.

    Without accurate_rnd, ffmpeg's own way back to RGB rounds down.
    """
    careful = ("-sws_flags", "accurate_rnd+full_chroma_int", "-pix_fmt", pixel_format)
    done = subprocess.run(
        [
            find_ffmpeg().path,
            "-v",
            "error",
            "-i",
            path,
            *careful,
            "-f",
            "rawvideo",
            "-",
        ],
        check=True,
        capture_output=True,
    )
    return np.frombuffer(done.stdout, np.uint8).reshape(shape)


def flat(colour, frames=3, size=32):
    return np.broadcast_to(np.uint8(colour), (frames, size, size, 3))


def describe(path):
    """Returns what ffmpeg says about a file (it wants an output and fails)."""
    done = subprocess.run(
        [find_ffmpeg().path, "-hide_banner", "-i", path],
        check=False,
        capture_output=True,
    )
    return done.stderr.decode()


def boxes(data):
    """Returns the top boxes of an MP4 file in order: name -> (offset, size)."""
    found, at = {}, 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        found[data[at + 4 : at + 8].decode()] = (at, size)
        at += size
    return found


def test_green_is_converted_by_bt709(tmp_path):
    path = tmp_path / "a.mp4"
    make(path, flat((0, 170, 0)))
    luma = decode(path, (3, 32 * 32 * 3 // 2), "yuv420p")[:, : 32 * 32]
    assert (luma == 120).all()


@pytest.mark.parametrize(
    "colour",
    [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]
    + [(255, 0, 255), (0, 170, 0)]
    + [(grey,) * 3 for grey in (0, 1, 17, 64, 128, 200, 254, 255)],
)
def test_flat_colours_come_back(tmp_path, colour):
    path = tmp_path / "a.mp4"
    make(path, flat(colour))
    mean = decode(path, (3, 32, 32, 3)).mean(axis=(0, 1, 2))
    # 8-bit limited-range YUV has about 2/255 between neighbouring values.
    assert np.abs(mean - colour).max() <= 2


def test_a_moving_picture_comes_back(tmp_path):
    frames = draw(24, 128, 96)
    path = tmp_path / "a.mp4"
    make(path, frames)
    error = decode(path, frames.shape).astype(float) - frames
    # Measured: 35.6 dB (sharp red edges lose colour resolution in yuv420p) and 0.12;
    # with BT.601's matrix on one side both are far worse.
    assert 10 * np.log10(255**2 / (error**2).mean()) > 34
    assert abs(error.mean()) < 0.25


def test_all_colour_tags_are_there(tmp_path):
    path = tmp_path / "a.mp4"
    make(path, draw(3, 64, 64))
    # ffmpeg prints one name where matrix, primaries and transfer are all the same.
    assert re.search(r"h264 \(High\).*yuv420p\(tv, bt709[,)]", describe(path))
    data = path.read_bytes()
    # nclx (ISO 14496-12): primaries, transfer and matrix 1 (BT.709), limited range.
    at = data.index(b"colrnclx") + 8
    assert data[at : at + 7] == bytes([0, 1, 0, 1, 0, 1, 0])


def test_playing_can_start_before_all_is_loaded(tmp_path):
    path = tmp_path / "a.mp4"
    make(path, draw(10, 64, 64))
    found = boxes(path.read_bytes())
    assert found["ftyp"] == (0, found["ftyp"][1])
    assert found["moov"][0] < found["mdat"][0]


def test_the_file_says_that_a_machine_made_it(tmp_path):
    path = tmp_path / "a.mp4"
    make(path, draw(1, 16, 16))
    assert re.search(r"comment +: machine-made", describe(path))


@pytest.mark.parametrize(
    "fps",
    ["16", "24", "24000/1001", "30000/1001", "120", "1/2", "102/25", "2399759/9999"],
)
def test_the_rate_is_exact(tmp_path, fps):
    path = tmp_path / "a.mp4"
    video = make(path, draw(7, 16, 16), Fraction(fps))
    check(path, video)
    said = re.search(r"([\d.]+) fps", describe(path))
    assert said and float(said[1]) == pytest.approx(float(Fraction(fps)), abs=0.005)


@pytest.mark.parametrize("size", [(2, 2), (16, 16), (2, 128), (130, 6)])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_tiny_sizes_and_single_frames_work(tmp_path, size, frames):
    path = tmp_path / "a.mp4"
    make(path, draw(frames, *size))
    assert decode(path, (frames, size[1], size[0], 3)).shape[0] == frames


@pytest.mark.parametrize("crf", [0, 51])
def test_the_ends_of_the_quality_scale_work(tmp_path, crf):
    make(tmp_path / "a.mp4", draw(5, 64, 48), crf=crf)


def test_better_quality_is_closer(tmp_path):
    frames = draw(5, 64, 64)
    errors = []
    for crf in (10, 40):
        make(tmp_path / "a.mp4", frames, crf=crf)
        decoded = decode(tmp_path / "a.mp4", frames.shape)
        errors.append(np.abs(decoded.astype(int) - frames).mean())
    assert errors[0] < errors[1]


def test_the_same_frames_give_the_same_file(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        make(tmp_path / name, draw(20, 64, 64))
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@settings(max_examples=15, deadline=None)
@given(
    width=st.integers(1, 40).map(lambda n: 2 * n),
    height=st.integers(1, 40).map(lambda n: 2 * n),
    frames=st.integers(1, 12),
    fps=st.fractions(min_value=1, max_value=240, max_denominator=9999),
)
def test_any_even_size_length_and_rate_works(
    tmp_path_factory, width, height, frames, fps
):
    path = tmp_path_factory.mktemp("any") / "a.mp4"
    make(path, draw(frames, width, height), fps)


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 15},
        {"height": 17},
        {"width": 0},
        {"height": -2},
        {"frames": 0},
        {"fps": Fraction(0)},
        {"crf": -1},
        {"crf": 52},
    ],
    ids=str,
)
def test_what_cannot_be_encoded_is_refused(fields):
    good = {"width": 16, "height": 16, "frames": 1, "fps": Fraction(16), "crf": 18}
    with pytest.raises(EncodeError, match=str(next(iter(fields.values())))):
        Video(**(good | fields))


def test_too_few_and_too_many_frames_are_refused(tmp_path):
    frames = [frame.tobytes() for frame in draw(5, 16, 16)]
    for count in (4, 6):
        video = Video(16, 16, count, Fraction(16), 18)
        with pytest.raises(EncodeError, match=f"5 frames came, not {count}"):
            encode(frames, video, tmp_path / "a.mp4")


def test_a_frame_cut_short_is_refused_before_ffmpeg_sees_it(tmp_path):
    frames = [frame.tobytes() for frame in draw(5, 16, 16)]
    frames[2] = frames[2][:-1]
    with pytest.raises(EncodeError, match="frame 2 has 767 bytes"):
        encode(frames, Video(16, 16, 5, Fraction(16), 18), tmp_path / "a.mp4")


def test_an_error_among_the_frames_ends_the_encoder_and_is_passed_on(tmp_path):
    def frames():
        yield from (frame.tobytes() for frame in draw(3, 16, 16))
        raise LookupError("frame 3 is gone")

    before = children()
    with pytest.raises(LookupError, match="frame 3 is gone"):
        encode(frames(), Video(16, 16, 5, Fraction(16), 18), tmp_path / "a.mp4")
    assert children() == before


def children():
    return {
        pid
        for pid in filter(str.isdigit, os.listdir("/proc"))
        if parent_of(pid) == os.getpid()
    }


def parent_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_where_ffmpeg_cannot_write_its_reason_is_shown(tmp_path):
    frames = (frame.tobytes() for frame in draw(90, 256, 256))
    video = Video(256, 256, 90, Fraction(16), 18)
    with pytest.raises(EncodeError, match=r"ffmpeg failed.*No such file"):
        encode(frames, video, tmp_path / "absent" / "a.mp4")


def test_a_full_disk_is_an_error(tmp_path):
    (tmp_path / "a.mp4").symlink_to("/dev/full")
    frames = (frame.tobytes() for frame in draw(5, 64, 64))
    with pytest.raises(EncodeError, match="No space left"):
        encode(frames, Video(64, 64, 5, Fraction(16), 18), tmp_path / "a.mp4")


def test_a_video_cut_short_does_not_pass_the_check(tmp_path):
    path = tmp_path / "a.mp4"
    video = make(path, draw(60, 64, 64))
    data = path.read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 20):
        path.write_bytes(data[:length])
        with pytest.raises(
            EncodeError, match="cannot be decoded|has \\d+ frames of 64x64, not"
        ):
            check(path, video)


def test_another_video_does_not_pass_the_check(tmp_path):
    path = tmp_path / "a.mp4"
    make(path, draw(5, 16, 16))
    for width, frames in [(32, 5), (16, 4), (16, 6)]:
        video = Video(width, 16, frames, Fraction(16), 18)
        with pytest.raises(EncodeError, match="has 5 frames of 16x16, not"):
            check(path, video)
    for fps in (Fraction(24), Fraction(16000, 1001)):
        with pytest.raises(EncodeError, match=f"do not come at {fps} fps"):
            check(path, Video(16, 16, 5, fps, 18))


def test_many_frames_pass_through_in_bounded_memory(tmp_path):
    def frames():
        for n in range(200):
            yield np.full((256, 256, 3), n, np.uint8).tobytes()

    tracemalloc.start()
    try:
        encode(frames(), Video(256, 256, 200, Fraction(16), 30), tmp_path / "a.mp4")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * 256 * 256 * 3


def test_a_path_full_of_surprises_is_only_a_path(tmp_path):
    folder = tmp_path / "a b:c %d;[x]'\"$(touch y)|é"
    folder.mkdir()
    make(folder / "-y%03d.mp4", draw(2, 16, 16))
    assert os.listdir(folder) == ["-y%03d.mp4"]


def test_a_command_holds_numbers_and_fixed_words_only(tmp_path):
    video = Video(1280, 720, 81, Fraction(24000, 1001), 18)
    path = tmp_path / "a.mp4"
    arguments = command(video, path)
    assert arguments[-2:] == ["-xerror", "-y"]
    assert f"file:{path}" in arguments
    assert arguments.index("-framerate") < arguments.index("-i")
    assert {"24000/1001", "1280x720", "18"} <= set(arguments)


def test_every_flag_has_a_reason_and_stands_once():
    places = [(flag.place, flag.name) for flag in FLAGS]
    assert len(set(places)) == len(places)
    assert all(len(flag.reason) > 8 for flag in FLAGS)
    known = {"input", "output", *encode_module.FILTERS}
    assert {flag.place for flag in FLAGS} == known
