import html.parser
from pathlib import Path

import pytest

from pipeline import names
from pipeline.attention import work_words
from pipeline.batch import Batch
from pipeline.report import render_page, write_report
from pipeline.stitch import stitch_batch
from tests.pipeline.batches import SPARSE, work
from tests.pipeline.drawn import decode_clip, job, write_batch
from workers.output import HeadWork

NASTY = (
    "\"q\" 'q' <script>alert(1)</script> <img src=x onerror=alert(1)> </p></article>"
    " &amp; {{ 7 * 7 }} {% raw %} %{localtime} 🎬\nsecond line <b " + "x" * 5000
)


class Page(html.parser.HTMLParser):
    """What a browser would see: elements, their texts, and every reference."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = {}
        self._open = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in ("meta", "img", "br"):
            self._open.append(attributes.get("class") or tag)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """One clip of each state, "done" with hostile texts."""
    jobs = [
        job("done", prompt=NASTY, negative_prompt=NASTY, width=30),
        job("bad", prompt="what went wrong"),
        job("broken", prompt="frames gone"),
        job("under-way"),
        job("waiting"),
    ]
    batch = write_batch(tmp_path_factory.mktemp("out") / "spring", jobs)
    decode_clip(batch, jobs[0])
    decode_clip(batch, jobs[2])
    batch.store.delete(names.frame("broken", 1, 0, 3))
    log = batch.log
    log.append("bad", "queued", 1)
    log.append("bad", "failed", 1, reason=NASTY, stage="denoise", retryable=False)
    log.append("under-way", "started", 1, slice="slice-0", resumed_from=0)
    log.append("under-way", "step", 1, step=12, of=20, seconds=100.0)
    stitch_batch(batch.uri)
    return batch


@pytest.fixture(scope="module")
def text(batch):
    return render_page(Batch.open(batch.uri))


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_report_is_written_at_the_batchs_root(batch):
    where = write_report(batch.uri)
    assert where == str(Path(batch.uri, "index.html"))
    first = Path(where).read_text()
    assert first.startswith("<!doctype html>") and first.endswith("</html>\n")
    write_report(batch.uri)


def test_prompts_and_reasons_are_shown_unharmed_and_unexecuted(page):
    assert NASTY in page.texts["prompt"]
    assert any(NASTY in "".join(reason) for reason in page.texts["reason"])
    assert NASTY in page.texts["dd"]
    assert not page.all("script") and not page.all("iframe")
    assert [image["src"] for image in page.all("img")] == ["videos/done.webp"]
    assert not any(key.startswith("on") for _, found in page.elements for key in found)


def test_the_page_needs_nothing_from_elsewhere(batch, page, text):
    assert "default-src 'none'" in text and "script-src" not in text
    for _, attributes in page.elements:
        for key in ("src", "href", "poster"):
            if key in attributes:
                target = attributes[key].partition("#")[0]
                assert Path(batch.uri, target).is_file()
    style = "".join(page.texts["style"])
    assert "url(" not in style and "@import" not in style


def test_each_clip_is_there_in_the_manifests_order(page):
    ids = [found["id"] for found in page.all("article")]
    assert ids == ["done", "bad", "broken", "under-way", "waiting"]
    assert page.texts["h2"] == ids


def test_only_published_videos_are_shown(page):
    (video,) = page.all("video")
    assert video["src"].startswith("videos/done.mp4")
    assert (video["width"], video["height"]) == ("30", "24")
    assert {"controls", "loop", "muted", "playsinline"} <= set(video)
    links = [link["href"] for link in page.all("a")]
    assert links == ["videos/done.mp4", "videos/done.json"]


def test_states_reasons_and_counts_are_told(page):
    states = {
        kind: texts for kind, texts in page.texts.items() if kind.startswith("state ")
    }
    assert states == {
        "state stitched": ["1 done", "done"],
        "state failed": ["2 failed", "failed", "failed"],
        "state rendering": ["1 rendering", "rendering, step 12 of 20"],
        "state queued": ["1 queued", "queued"],
    }
    reasons = "".join(page.texts["reason"])
    assert "frame 3 (" in reasons and "is missing" in reasons
    assert "Failed in stitch." in page.texts["b"]
    assert "Failed in denoise." in page.texts["b"]


def test_timings_are_told_by_phase_and_in_all(page):
    said = page.texts["b"]
    # "done" alone: text, denoise, decode; the batch's denoise: two clips and 100 s.
    assert {"0.5 s", "9.2 s", "1.8 s"} <= set(said)
    assert "1 min 58 s" in said


def test_settings_are_told(page):
    said = page.texts["dd"]
    assert {"30 × 24, 6 frames", "32 × 32, 9 frames", "16 fps", "7"} <= set(said)
    assert {"20, unipc", "h264, crf 18", "none"} <= set(said)


def test_what_attention_skipped_is_told_of_each_clip_and_of_all(tmp_path):
    jobs = [job("sparse", attention=SPARSE), job("dense"), job("waiting")]
    batch = write_batch(tmp_path / "spring", jobs)
    for one in jobs[:2]:
        decode_clip(batch, one)
    page = Page(render_page(batch))
    words = (
        "Attention: 41% of tiles skipped (410 of 1,000); heads: 50% spatial, 20% "
        "temporal, 30% dense (25% had to be, by dense_steps and dense_layers)"
    )
    whole, clip, other = page.texts["quiet"]
    assert whole == f"{words}; beside 1 clip dense throughout"
    assert (clip, other) == (words, "Attention: dense, no tile skipped")
    assert "dense" in page.texts["dd"]
    assert (
        "density 0.778 of 0.8 asked for, tiles of 4x4, band 0, rounding tile, "
        "tolerance 10; dense: 1 first steps, 1 first layers"
    ) in page.texts["dd"]


def test_heads_that_kept_a_running_maximum_are_told():
    words = work_words(HeadWork(**work(996, online=7)))
    assert words.startswith("0.4% of tiles skipped (4 of 1,000)")
    assert words.endswith("; 7.0% kept a running maximum")


def test_a_deleted_video_is_not_referred_to(batch):
    data = batch.store.read("videos/done.mp4")
    batch.store.delete("videos/done.mp4")
    try:
        page = Page(render_page(Batch.open(batch.uri)))
        assert not page.all("video") and not page.all("a")
    finally:
        batch.store.create("videos/done.mp4", data)


def test_a_batch_where_nothing_has_happened_has_a_page(tmp_path):
    batch = write_batch(tmp_path / "new", [job("a"), job("b")])
    page = Page(render_page(batch))
    assert page.texts["state queued"] == ["2 queued", "queued", "queued"]
    assert page.texts["h1"] == ["new"]


def test_a_damaged_event_is_told_and_the_page_still_made(tmp_path):
    batch = write_batch(tmp_path / "new", [job("a"), job("b")])
    batch.store.create(names.event("a", 1), b"{}")
    page = Page(render_page(batch))
    assert "is no event" in "".join(page.texts["reason"])
    assert page.texts["state failed"] == ["1 failed", "failed"]


def test_a_batch_of_many_clips_loads_few_videos_at_once(tmp_path):
    jobs = [job(f"clip-{n}", frames=1, width=2, height=2) for n in range(30)]
    batch = write_batch(tmp_path / "many", jobs)
    for one in jobs:
        data = {"video": names.video(one.clip), "seconds": 1.0}
        batch.log.append(one.clip, "stitched", 1, **data)
        batch.store.create(names.video(one.clip), b"video")
    page = Page(render_page(batch))
    preloads = [video["preload"] for video in page.all("video")]
    assert preloads == ["metadata"] * 24 + ["none"] * 6
