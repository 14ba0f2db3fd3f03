import base64
import html.parser
import io
import json
import math
import re
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from pipeline import cli, names
from pipeline.compare import show
from pipeline.compare_page import amplify, chart, render_page
from pipeline.comparison import Comparison, compare_clip
from pipeline.errors import RequestError
from pipeline.ffmpeg import find_ffmpeg
from pipeline.footage import Footage, Pair, find_pairs
from pipeline.likeness import frame_psnr
from pipeline.stitch import stitch_clip
from tests.pipeline.drawn import draw, job, write_batch, write_shard

NASTY = "<script>alert(1)</script> \"q\" 'q' </dd> &amp; {{ 7 * 7 }} 🎬"


def noisy(frames, amplitude, seed=0):
    """Returns uint8 frames, each with uniform noise up to its own amplitude."""
    noise = np.random.default_rng(seed).uniform(-1, 1, frames.shape)
    scaled = noise * np.reshape(amplitude, (-1, 1, 1, 1))
    return (frames + scaled).clip(0, 255).round().astype(np.uint8)


def footage(frames, where="there"):
    return Footage(where, lambda: (frame for frame in frames))


def pair(a, b, clip="clip"):
    return Pair(clip, "frames", footage(a, "left"), footage(b, "right"))


def decode(batch, clip, frames):
    """Writes a clip's frames in two shards, with the events up to `decoded`."""
    half = len(frames) // 2
    written = [
        write_shard(batch.store, clip, part, number=n, first=n * half)
        for n, part in enumerate((frames[:half], frames[half:]))
    ]
    batch.log.append(clip, "queued", 1)
    batch.log.append(
        clip, "decoded", 1, frames=len(frames), seconds=1.0, shards=written
    )


def make_batch(root, clips, **fields):
    """Writes a batch; `clips` holds each one's frames, None where it is queued."""
    jobs = [
        job(clip, **fields)
        if frames is None
        else job(
            clip,
            frames=len(frames),
            height=frames.shape[1],
            width=frames.shape[2],
            **fields,
        )
        for clip, frames in clips.items()
    ]
    batch = write_batch(root, jobs)
    for clip, frames in clips.items():
        if frames is not None:
            decode(batch, clip, frames)
    return batch


def run(a, b, as_json=False, html=None):
    file = io.StringIO()
    console = Console(file=file, width=160)
    show(str(a), str(b), as_json=as_json, html=html, console=console)
    return file.getvalue()


def compared(a, b):
    pairs, left_out = find_pairs(str(a), str(b))
    return Comparison(str(a), str(b), tuple(map(compare_clip, pairs)), left_out)


def rows(text):
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def encode(path, frames, *options, rate="16"):
    """Encodes frames without loss, so that they can be known again."""
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", rate, "-i", "-"]
    command = [find_ffmpeg().path, "-loglevel", "error", *raw, "-c:v", "ffv1"]
    command += ["-pix_fmt", "bgr0", *options, str(path)]
    subprocess.run(command, input=frames.tobytes(), check=True)
    return path


@pytest.fixture(scope="module")
def renders(tmp_path_factory):
    """Two batches: a clip that differs, one that does not, one only in each."""
    frames = draw(20, 32, 24)
    amplitude = np.full(20, 4.0)
    amplitude[:2] = 0
    amplitude[13] = 30
    clips_a = {"moved": frames, "same": draw(6, 32, 24), "left": draw(2, 16, 16)}
    clips_b = {
        "moved": noisy(frames, amplitude),
        "same": draw(6, 32, 24),
        "right": None,
    }
    root = tmp_path_factory.mktemp("renders")
    make_batch(root / "a" / "spring", clips_a, prompt=NASTY)
    make_batch(root / "b" / "spring", clips_b, prompt=NASTY, guidance=9.0)
    return root / "a" / "spring", root / "b" / "spring"


# Two batches


def test_common_clips_are_compared_and_the_others_named(renders):
    a, b = renders
    said = run(a, b)
    found = rows(said)
    assert "left is not compared: only " + str(a) + " has it" in said
    assert "right is not compared: only " + str(b) + " has it" in said
    assert found["same"][1:4] == ["6", "6", "frames"]
    assert found["same"][4:] == ["identical", "identical", "1.0000", "1.0000"]
    assert found["moved"][:4] == ["moved", "20", "2", "frames"]
    assert found["moved"][-1] == "13"
    assert found["all"][:4] == ["all", "clips", "26", "8"]
    assert "`--html FILE`" in said


def test_the_json_has_every_frame_and_no_infinity(renders):
    frames_a = draw(20, 32, 24)

    def no_constant(name):
        raise AssertionError(f"{name} is no JSON")

    said = json.loads(run(*renders, as_json=True), parse_constant=no_constant)
    assert (said["a"], said["b"]) == tuple(map(str, renders))
    moved, same = said["clips"]
    assert (moved["clip"], moved["compared"]) == ("moved", "frames")
    assert (moved["frames"], moved["width"], moved["height"]) == (20, 32, 24)
    assert moved["settings_differ"] == ["guidance"]
    each = moved["per_frame"]
    assert [frame["frame"] for frame in each] == list(range(20))
    assert each[1] == {"frame": 1, "psnr": None, "ssim": 1.0, "identical": True}
    finite = [frame["psnr"] for frame in each[2:]]
    assert not any(frame["identical"] for frame in each[2:])
    assert moved["psnr_least"] == min(finite) == each[13]["psnr"]
    assert moved["psnr_mean"] == pytest.approx(np.mean(finite), rel=1e-12)
    assert moved["ssim_mean"] == pytest.approx(np.mean([f["ssim"] for f in each]))
    assert (moved["worst_frame"], moved["identical_frames"]) == (13, 2)
    stored = noisy(frames_a, [0, 0] + [4.0] * 11 + [30] + [4.0] * 6)[13]
    error = np.mean((stored.astype(float) - frames_a[13]) ** 2)
    assert each[13]["psnr"] == pytest.approx(10 * np.log10(255**2 / error), rel=1e-12)
    assert same["identical"] and same["psnr_mean"] is None
    assert same["worst_frame"] is None and same["ssim_least"] == 1.0
    assert said["all"]["frames"] == 26 and set(said["not_compared"]) == {
        "left",
        "right",
    }


def test_an_output_that_holds_one_batch_stands_for_it(renders, tmp_path):
    a, b = shutil.copytree(renders[0], tmp_path / "a" / "spring"), renders[1]
    assert [clip.pair.clip for clip in compared(a.parent, b).clips] == ["moved", "same"]
    write_batch(a.parent / "summer", [job("x")])
    with pytest.raises(RequestError, match="holds 2 batches; give the folder of one"):
        find_pairs(str(a.parent), str(b))


@pytest.mark.parametrize(
    ("shape", "has"),
    [((20, 24, 40), "20 frames of 40x24"), ((7, 24, 32), "7 frames of 32x24")],
)
def test_clips_of_another_size_or_length_are_refused(renders, tmp_path, shape, has):
    frames, height, width = shape
    other = make_batch(tmp_path / "c", {"moved": draw(frames, width, height)})
    with pytest.raises(RequestError) as refused:
        find_pairs(str(renders[0]), other.uri)
    said = str(refused.value)
    assert said.startswith("moved: ")
    assert "20 frames of 32x24 pixels" in said and f"{has} pixels" in said
    assert str(renders[0]) in said and other.uri in said


def test_clips_that_are_not_rendered_are_named(renders, tmp_path):
    other = make_batch(tmp_path / "c", {"moved": None, "same": draw(6, 32, 24)})
    found = compared(renders[0], other.uri)
    assert [clip.pair.clip for clip in found.clips] == ["same"]
    assert found.left_out["moved"] == f"in {other.uri} it is queued"


def test_frames_of_a_clip_begun_anew_are_not_taken(renders, tmp_path):
    other = make_batch(tmp_path / "c", {"moved": draw(20, 32, 24)})
    other.log.append("moved", "started", 2, slice="s", resumed_from=0, engine={})
    with pytest.raises(RequestError, match="have no clip to compare: moved: in .*rend"):
        find_pairs(str(renders[0]), other.uri)


def test_frames_of_a_clip_whose_stitch_failed_are_compared(renders, tmp_path):
    other = make_batch(tmp_path / "c", {"same": draw(6, 32, 24)})
    fields = {"reason": "disk full", "retryable": True}
    other.log.append("same", "failed", 1, stage="stitch", **fields)
    (clip,) = compared(renders[0], other.uri).clips
    assert clip.scores.identical == 6


def test_nothing_in_common_is_refused(tmp_path):
    for clip in ("x", "y"):
        make_batch(tmp_path / clip, {clip: draw(2, 16, 16)})
    with pytest.raises(RequestError, match="no clip to compare: x: only .* y: only "):
        find_pairs(str(tmp_path / "x"), str(tmp_path / "y"))


def test_a_damaged_frame_is_named(renders, tmp_path):
    a, b = renders[0], shutil.copytree(renders[1], tmp_path / "b")
    (shard,) = b.glob("clips/moved/shards/0001/001")
    shard.joinpath("frame-000012.png").write_bytes(b"no")
    with pytest.raises(
        RequestError, match="clip moved of .*: frame 12 .* Delete its sh"
    ):
        compared(a, b)


def remove_frames(root, clip):
    for file in root.glob(f"clips/{clip}/shards/**/*"):
        if file.is_file():
            file.unlink()


def test_videos_stand_in_where_either_has_no_frames_left(tmp_path):
    frames = draw(6, 32, 24)
    for name, amplitude in (("a", 0), ("b", 40)):
        batch = make_batch(tmp_path / name, {"x": noisy(frames, [amplitude] * 6)})
        stitch_clip(batch.uri, "x")
    a, b = tmp_path / "a", tmp_path / "b"
    (lossless,) = compared(a, b).clips
    remove_frames(b, "x")
    (found,) = compared(a, b).clips
    assert (lossless.pair.source, found.pair.source) == ("frames", "videos")
    assert found.pair.a.where.endswith("a/videos/x.mp4")
    assert found.scores != lossless.scores and len(found.scores.psnr) == 6
    # As near as H.264 at crf 18 lets them be: it keeps noise to within some percent.
    assert found.scores.psnr_mean == pytest.approx(lossless.scores.psnr_mean, abs=4)
    assert compared(a, a).clips[0].scores.identical == 6


def test_frames_are_never_compared_with_a_video(tmp_path):
    frames = draw(6, 32, 24)
    a, b = (make_batch(tmp_path / name, {"x": frames}) for name in "ab")
    stitch_clip(b.uri, "x")
    remove_frames(tmp_path / "b", "x")
    with pytest.raises(RequestError) as refused:
        find_pairs(a.uri, b.uri)
    assert f"{a.uri} has its frames and {b.uri} has its video" in str(refused.value)
    b.store.delete(names.video("x"))
    with pytest.raises(RequestError, match=f"{b.uri} has neither"):
        find_pairs(a.uri, b.uri)


# Two videos


def test_two_videos_are_compared_by_all_their_frames(tmp_path):
    frames = draw(9, 32, 24)
    other = noisy(frames, [0, 0, 0, 0, 9, 0, 0, 0, 0])
    a = encode(tmp_path / "a.mkv", frames)
    b = encode(tmp_path / "b.mkv", other)
    (clip,) = compared(a, b).clips
    assert clip.pair.clip == "a / b" and clip.pair.source == "videos"
    assert clip.scores.psnr == tuple(map(frame_psnr, frames, other))
    assert clip.scores.worst(1, 1) == [4]


@pytest.mark.parametrize("rate", ["1", "16", "24000/1001", "25", "60", "240"])
def test_each_frame_of_a_video_counts_once_at_any_rate(tmp_path, rate):
    frames = noisy(draw(9, 32, 24), [20] * 9)
    for name in ("a.mkv", "b.avi", "c.mov"):
        path = encode(tmp_path / name, frames, rate=rate)
        found = list(find_pairs(str(path), str(path))[0][0].a.read())
        assert np.array_equal(found, frames), name


def test_each_frame_of_a_video_of_uneven_rate_counts_once(tmp_path):
    frames = noisy(draw(12, 32, 24), [20] * 12)
    uneven = ["-vf", "settb=1/1000,setpts=N*N*37", "-enc_time_base", "1/1000"]
    path = encode(tmp_path / "a.mkv", frames, *uneven, "-fps_mode", "passthrough")
    found = list(find_pairs(str(path), str(path))[0][0].a.read())
    assert np.array_equal(found, frames)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((9, 24, 40), ("frames of 32x24 pixels", "frames of 40x24 pixels")),
        ((5, 24, 32), ("has 9 frames", "has 5 frames")),
        ((14, 24, 32), ("has 9 frames", "has 14 frames")),
    ],
)
def test_videos_of_another_size_or_length_are_refused(tmp_path, shape, words):
    frames, height, width = shape
    a = encode(tmp_path / "a.mkv", draw(9, 32, 24))
    b = encode(tmp_path / "b.mkv", draw(frames, width, height))
    with pytest.raises(RequestError) as refused:
        compared(a, b)
    said = str(refused.value)
    assert f"{a} {words[0].removeprefix('has ')}" in said.replace("has ", "")
    assert words[1] in said and str(b) in said


def test_what_is_no_video_is_refused(tmp_path):
    good = encode(tmp_path / "a.mkv", draw(9, 32, 24))
    text = tmp_path / "b.mp4"
    text.write_text("no video")
    sound = tmp_path / "c.wav"
    tone = ["-f", "lavfi", "-i", "sine=d=0.1", str(sound)]
    subprocess.run([find_ffmpeg().path, "-loglevel", "error", *tone], check=True)
    for bad in (text, sound):
        for a, b in ((good, bad), (bad, good)):
            with pytest.raises(RequestError, match=f"{bad} cannot be read as a video"):
                compared(a, b)


def test_a_name_that_looks_like_a_protocol_is_a_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encode(tmp_path / "x.mkv", draw(3, 32, 24)).rename(tmp_path / "-i concat:x.mkv")
    (clip,) = compared("-i concat:x.mkv", "./-i concat:x.mkv").clips
    assert clip.scores.identical == 3


# The streaming


def test_memory_does_not_grow_with_the_clips_length():
    base = noisy(draw(1, 256, 128), [20])[0]

    def peak(length):
        sides = [
            Footage("", lambda n=n: (base + np.uint8(n * t % 7) for t in range(length)))
            for n in range(2)
        ]
        tracemalloc.start()
        compare_clip(Pair("x", "frames", sides[0], sides[1]))
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)
    short, long = peak(20), peak(200)
    # 180 more frames would be 180 * 98 kB; one frame is allowed for the numbers.
    assert long - short < base.nbytes


def test_no_process_is_left_where_frames_are_no_longer_wanted(tmp_path, monkeypatch):
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    path = encode(tmp_path / "a.mkv", noisy(draw(300, 64, 64), [50] * 300))
    monkeypatch.setattr("subprocess.Popen", Noted)
    frames = find_pairs(str(path), str(path))[0][0].frames()
    next(frames)
    running = [process for process in started if process.poll() is None]
    # All of it is 3.7 MB, which no pipe holds.
    assert len(running) == 2
    frames.close()
    assert all(process.returncode is not None for process in started)


# The page


class Page(html.parser.HTMLParser):
    """What a browser would see: elements with their attributes, and texts."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def pixels(uri):
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture
def page(renders, tmp_path):
    path = tmp_path / "page.html"
    said = run(*renders, html=path)
    assert f"Page: {path}" in said
    return Page(path.read_text())


def test_the_page_shows_the_worst_frames_side_by_side(page):
    images = page.all("img")
    assert [image["alt"] for image in images[:3]] == [
        "A, frame 13 of moved",
        "B, frame 13 of moved",
        images[2]["alt"],
    ]
    words = re.fullmatch(r"Difference × (\d+), frame 13 of moved", images[2]["alt"])
    assert words
    factor = int(words[1])
    a, b, difference = (pixels(image["src"]) for image in images[:3])
    frame = draw(20, 32, 24)[13]
    assert np.array_equal(a, frame)
    assert frame_psnr(a, b) is not None
    expected = np.minimum(np.abs(a.astype(int) - b) * factor, 255)
    assert np.array_equal(difference, expected)
    # Frames 13, and two that are eight or more from it and from each other.
    shown = [int(image["alt"].split()[2]) for image in images[::3]]
    assert shown[0] == 13 and len(shown) in (2, 3)
    assert all(abs(x - y) >= 8 for x in shown for y in shown if x != y)
    assert any(text.startswith("Frame 13, the worst: ") for text in page.texts)


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(renders, page):
    for _, attributes in page.elements:
        assert attributes.get("src", "data:image/webp").startswith("data:image/webp")
        assert not {"href", "srcset", "poster"} & set(attributes)
        assert not any(key.startswith("on") for key in attributes)
    assert not page.all("script") and not page.all("iframe")
    assert any("default-src 'none'" in m.get("content", "") for m in page.all("meta"))
    style = next(text for text in page.texts if ":root" in text)
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style and "max-width" in style
    assert NASTY in page.texts


def test_the_page_tells_all_that_the_table_does(renders, page):
    said = " ".join(page.texts)
    assert str(renders[0]) in said and str(renders[1]) in said
    assert "left" in page.texts and "right" in page.texts
    assert "All frames are identical." in page.texts
    assert "Settings that differ: guidance" in page.texts
    assert "8 of 26" in page.texts and "2 of 20" in page.texts
    assert page.texts.count("identical") >= 3


def test_large_frames_are_shown_smaller(tmp_path):
    frames = draw(1, 1000, 500)
    found = compare_clip(pair(frames, noisy(frames, [9])))
    page = Page(render_page(Comparison("a", "b", (found,), {})))
    for image in page.all("img"):
        assert pixels(image["src"]).shape == (320, 640, 3)
        assert (image["width"], image["height"]) == ("1000", "500")


@given(st.integers(0, 255))
def test_a_difference_is_amplified_as_far_as_it_can_be_shown(most):
    a = np.zeros((16, 16, 3), np.uint8)
    b = a.copy()
    b[:8] = most
    for difference, factor in (amplify(a, b), amplify(b, a)):
        assert math.log2(factor).is_integer() and 1 <= factor <= 64
        assert np.array_equal(difference, b * factor) and most * factor <= 255
        assert most == 0 or factor == 64 or most * factor * 2 > 255


def points(path):
    return [
        [
            tuple(map(float, point.split()))
            for point in run.removesuffix("h0").split("L")
        ]
        for run in path.split("M")[1:]
    ]


@given(st.lists(st.none() | st.floats(0, 110), min_size=1, max_size=50))
def test_the_chart_has_each_frame_at_its_place(psnr):
    laid = chart(psnr)
    finite = [value for value in psnr if value is not None]
    if not finite:
        assert laid == {}
        return
    ticks = [(top, float(label)) for top, label in laid["ticks"]]
    (bottom, low), (top, high) = ticks[0], ticks[-1]
    assert (bottom, top) == (100, 0) and 2 <= len(ticks) <= 6
    assert low <= min(finite) and max(finite) <= high
    drawn = {x: y for run in points(laid["line"]) for x, y in run}
    same = {x: y for run in points(laid["identical"]) for x, y in run}
    for n, value in enumerate(psnr):
        x = float(f"{100 * n / max(1, len(psnr) - 1):.2f}")
        if value is None:
            assert same.pop(x) == 0
        else:
            # Two decimals of a percent of the chart.
            place = 100 * (high - value) / (high - low)
            assert drawn.pop(x) == pytest.approx(place, abs=0.006)
    assert not drawn and not same


def test_the_line_breaks_where_frames_are_identical():
    laid = chart([30.0, 31.0, None, None, 32.0])
    assert [len(run) for run in points(laid["line"])] == [2, 1]
    assert [len(run) for run in points(laid["identical"])] == [2]
    assert laid["line"].endswith("h0")


# The command


@pytest.fixture
def tilereel(monkeypatch, capsys):
    """Runs a command here; returns its exit status, output and errors."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["tilereel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_the_command_compares_and_writes_only_what_it_is_told_to(
    tilereel, renders, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    status, out, err = tilereel("compare", *renders)
    assert (status, err) == (0, "") and "moved" in out
    assert list(Path().iterdir()) == []
    status, out, err = tilereel("compare", *renders, "--json", "--html", "x.html")
    assert (status, err) == (0, "")
    assert len(json.loads(out)["clips"]) == 2
    assert [path.name for path in Path().iterdir()] == ["x.html"]


@pytest.mark.parametrize(
    ("a", "b", "html", "words"),
    [
        ("nowhere", "b/spring", None, "nowhere is not there; give a batch's folder"),
        ("a/spring", "nowhere", None, "nowhere is not there"),
        ("a/spring", "b/spring/batch.json", None, "is a file and a/spring is none"),
        ("a/spring/batch.json", "b/spring", None, "is a file and b/spring is none"),
        ("a/spring", "b/spring/clips", None, "b/spring/clips holds no batch"),
        ("gs://x/y", "b/spring", None, "gs://x/y: this version"),
        ("a/spring", "b/spring", "page.txt", "a file whose name ends in .html"),
        ("a/spring", "b/spring", "dir.html", "a file whose name ends in .html"),
        ("a/spring", "b/spring", "no/x.html", "there is no folder no"),
    ],
)
def test_a_wrong_request_ends_with_2(tilereel, renders, monkeypatch, a, b, html, words):
    root = renders[0].parents[1]
    monkeypatch.chdir(root)
    (root / "dir.html").mkdir(exist_ok=True)
    before = sorted(root.rglob("*"))
    status, out, err = tilereel("compare", a, b, *(("--html", html) if html else ()))
    assert (status, out) == (2, "")
    assert err.startswith("tilereel: ") and words in err
    assert sorted(root.rglob("*")) == before
