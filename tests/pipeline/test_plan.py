import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RequestError
from pipeline.manifest import Manifest
from pipeline.models import Shape
from pipeline.plan import forward_tflop, make_plan, plan_json, plan_table
from pipeline.tiles import best_tile

MODEL = "wan2.1-t2v-1.3b"
SIDES = st.integers(1, 4096).map(lambda half: 2 * half)


def manifest(*clips, **fields):
    named = [
        {"id": f"clip-{n}", "prompt": "a red circle"} | c for n, c in enumerate(clips)
    ]
    whole = {"version": 1, "batch": "spring", "model": MODEL, "clips": named}
    return Manifest.model_validate(whole | fields)


def plan_one(**clip):
    return make_plan(manifest(clip)).clips[0]


@given(SIDES, SIDES, st.integers(1, 4093))
def test_what_is_rendered_is_the_next_size_and_length_that_the_model_takes(
    width, height, frames
):
    clip = plan_one(size=f"{width}x{height}", frames=frames)
    job = clip.job
    for asked, rendered in ((width, job.render_width), (height, job.render_height)):
        assert rendered % 16 == 0
        assert 0 <= rendered - asked < 16
    assert (job.render_frames - 1) % 4 == 0
    assert 0 <= job.render_frames - frames < 4
    assert clip.latent_frames == (job.render_frames - 1) // 4 + 1
    # What the rotary table has room for.
    assert clip.latent_frames <= 1024
    assert job.render_width // 16 <= 1024
    grid = job.render_width * job.render_height // 256
    assert clip.tokens == clip.latent_frames * grid
    assert clip.windows == 1


@given(SIDES, SIDES, st.integers(1, 4093), SIDES, SIDES, st.integers(1, 4093))
def test_more_pixels_cost_more(width, height, frames, more_width, more_height, more):
    one = plan_one(size=f"{width}x{height}", frames=frames)
    larger = f"{max(width, more_width)}x{max(height, more_height)}"
    other = plan_one(size=larger, frames=max(frames, more))
    assert other.cost >= one.cost


@pytest.mark.parametrize(
    ("shape", "attention", "linear"),
    [
        (Shape(16, 4, 40, 128, 13824, 40), 4682, 1807),
        (Shape(16, 4, 12, 128, 8960, 30), 1053, 189),
    ],
)
def test_the_work_is_that_of_wan_at_720p(shape, attention, linear):
    # The figures are published for 81 frames of 1280x720, in whole TFLOP.
    assert math.isclose(forward_tflop(shape, 75_600), attention + linear, abs_tol=1)


def test_the_clip_of_the_facts_has_their_numbers():
    clip = plan_one(size="1280x720", frames=81)
    assert (clip.latent_frames, clip.tokens) == (21, 75_600)
    assert plan_one(size="2560x1440", frames=81).tokens == 302_400


def test_without_guidance_a_step_costs_half():
    guided, alone = plan_one(guidance=5.0), plan_one(guidance=1.0)
    assert guided.cost == 2 * alone.cost
    assert plan_one(steps=10).cost * 5 == pytest.approx(plan_one(steps=50).cost)


def plan_attention(clip, **attention):
    return make_plan(manifest(clip, attention=attention)).clips[0]


def planned(clip, **attention):
    """A clip's attention, its tiles and its cost."""
    found = plan_attention(clip, **attention)
    assert found.job.attention is not None and found.table is not None
    return found.job.attention, found.table, found.cost


def test_the_tiles_are_the_widest_band_within_the_density():
    size = {"size": "128x128", "frames": 81}
    for rounding in ("tile", "exact"):
        said, table, _ = planned(size, density=0.5, tile="64x32", rounding=rounding)
        assert (said.tile, said.rounding, said.density) == ((64, 32), rounding, 0.5)
        assert said.achieved == table.density <= 0.5
        wider = dataclasses.replace(table, band=said.band + 1)
        assert wider.density > 0.5


@pytest.mark.parametrize(
    ("share", "steps", "dense"),
    [(0.2, 50, 10), (0.2, 4, 1), (0.1, 30, 3), (0.3, 10, 3), (0, 9, 0), (1, 9, 9)],
)
def test_a_share_of_dense_steps_is_rounded_up(share, steps, dense):
    assert planned({"steps": steps}, dense_steps=share)[0].dense_steps == dense


def test_sparse_steps_and_layers_cost_by_their_tiles():
    shape = make_plan(manifest({})).model.shape
    alone = {"guidance": 1.0}
    _, table, cost = planned(alone, dense_steps=0.5, dense_layers=10)
    dense = forward_tflop(shape, table.grid.tokens)
    skipped = 4 * (table.grid.tokens**2) * shape.dim * 20 * (1 - table.density) / 1e12
    sparse = dense - skipped
    assert cost == pytest.approx(25 * dense + 25 * sparse)
    assert plan_attention(alone, kinds="dense").cost == 50 * dense
    assert planned(alone, dense_layers=99)[2] == 50 * dense


def test_dense_is_dense_whatever_else_is_said():
    clip = plan_attention({}, kinds="dense", density=0.001, tile="16x16")
    assert (clip.job.attention, clip.table, clip.unfit) == (None, None, "")
    text = plan_table(make_plan(manifest({}, attention={"kinds": "dense"})))
    assert "Tiles" not in text


@pytest.mark.parametrize(
    ("clip", "least"), [({"frames": 1}, "1.0000"), ({"frames": 17}, "0.5200")]
)
def test_a_clip_that_cannot_have_the_default_density_is_dense_and_said_to_be(
    clip, least
):
    plan = make_plan(manifest(clip | {"size": "128x128"}))
    assert plan.clips[0].job.attention is None
    assert "clip-0: dense, since a density of 0.38 is less than" in plan_table(plan)
    assert f"; the least is {least}\n" in plan_table(plan)
    assert f"the least is {least}" in plan_json(plan)["clips"][0]["tiles"]["dense"]


def test_a_density_that_a_clip_cannot_have_is_refused_with_the_least():
    clips = {"frames": 81}, {"frames": 17}, {"frames": 1}
    sized = [clip | {"size": "128x128"} for clip in clips]
    with pytest.raises(RequestError) as raised:
        make_plan(manifest(*sized, attention={"density": 0.4}))
    first, second = str(raised.value).splitlines()
    assert first.startswith("clip clip-1: a density of 0.4 is less than")
    assert "the least is 0.5200; give what it can have, or leave `density` out" in first
    assert second.startswith("clip clip-2: ") and "the least is 1.0000" in second


def test_a_clip_of_too_many_tiles_is_dense():
    clip = plan_attention({"size": "8192x8192", "frames": 4093})
    assert clip.job.attention is None
    assert "268,435,456 tokens are more tiles than" in clip.unfit


@pytest.mark.parametrize(
    ("size", "frames", "tile", "why"),
    [
        ("128x128", 81, "8192x8192", "the least is 1.0000"),
        ("1280x720", 81, "16x16", "and the most are 16,777,216"),
        ("1280x720", 81, "128x128", "take larger tiles"),
        ("1280x720", 81, "8192x8192", "take smaller tiles"),
    ],
)
def test_tiles_that_a_clip_cannot_have_are_refused(size, frames, tile, why):
    clip = {"size": size, "frames": frames}
    # A density that the first frame and the diagonal leave room in.
    density = {"density": 0.9} if "smaller" in why else {}
    with pytest.raises(RequestError) as raised:
        plan_attention(clip, tile=tile, **density)
    assert why in str(raised.value)
    assert "`tile` out to have such clips dense" in str(raised.value)


@pytest.mark.parametrize(
    ("size", "frames", "tile"),
    [("128x128", 81, "64x64"), ("256x256", 65, "256x256"), ("832x480", 81, None)],
)
def test_longer_clips_get_larger_tiles(size, frames, tile):
    table = plan_attention({"size": size, "frames": frames}).table
    assert table is not None
    if tile is None:
        assert table.tile == best_tile(table.grid, 0.38, 12)
    else:
        assert str(table.tile) == tile


def test_a_job_holds_what_was_asked_for():
    clip = plan_one(
        prompt="b",
        negative_prompt="n",
        seed=9,
        size="30x28",
        frames=6,
        fps="24000/1001",
        steps=4,
        guidance=2,
        flow_shift=1.5,
        sampler="euler",
        priority=3,
    )
    job = clip.job
    assert (job.clip, job.prompt, job.negative_prompt) == ("clip-0", "b", "n")
    assert (job.seed, job.steps, job.guidance) == (9, 4, 2.0)
    assert (job.flow_shift, job.sampler) == (1.5, "euler")
    assert (job.width, job.height, job.frames) == (30, 28, 6)
    assert (job.render_width, job.render_height, job.render_frames) == (32, 32, 9)
    assert (clip.fps, clip.priority) == (Fraction(24000, 1001), 3)
    assert clip.encode.crf == 18
    # Two latent frames of four tokens are but one tile.
    assert job.attention is None and clip.table is None


def test_clips_are_dealt_by_priority_then_cost_then_as_they_stand():
    plan = make_plan(
        manifest(
            {"id": "short", "frames": 5},
            {"id": "long", "frames": 81},
            {"id": "same", "frames": 81},
            {"id": "later", "frames": 161, "priority": -1},
            {"id": "first", "frames": 1, "priority": 1},
        )
    )
    order = [clip.job.clip for clip in plan.clips]
    assert order == ["first", "long", "same", "short", "later"]


@pytest.mark.parametrize(
    ("said", "override", "where"),
    [
        (None, None, "HERE/renders"),
        ("./out", None, "FOLDER/out"),
        ("/abs/out", None, "/abs/out"),
        ("../out", None, "PARENT/out"),
        ("./out", "over", "HERE/over"),
        (None, "/abs/over/", "/abs/over"),
    ],
)
def test_the_output_is_an_absolute_path(tmp_path, monkeypatch, said, override, where):
    folder, here = tmp_path / "manifests", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    plan = make_plan(manifest({}, output=said), override, folder)
    where = where.replace("HERE", str(here)).replace("FOLDER", str(folder))
    assert plan.output == where.replace("PARENT", str(tmp_path))


def test_an_output_in_the_home_folder_goes_there(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert make_plan(manifest({}, output="~/x")).output == "/somewhere/x"


@pytest.mark.parametrize("output", ["gs://bucket/x", "s3://bucket"])
def test_an_output_in_a_bucket_is_refused(output):
    with pytest.raises(RequestError, match="local folders only"):
        make_plan(manifest({}, output=output))
    with pytest.raises(RequestError, match="local folders only"):
        make_plan(manifest({}), output)


def test_the_plan_shows_what_is_cropped_and_cut():
    clips = {"size": "1278x716", "frames": 240}, {"size": "1280x720", "frames": 81}
    text = plan_table(make_plan(manifest(*clips)))
    assert "clip-0: rendered at 1280x720, cropped to 1278x716 from the centre" in text
    assert "clip-0: 241 frames are rendered, 1 cut off the end" in text
    assert "clip-0: longer than the 81 frames that the model was trained on" in text
    assert "of 1280x720" in text
    assert "of 241" in text
    assert "clip-1:" not in text


def test_the_plan_shows_numbers_and_places():
    plan = make_plan(manifest({"size": "1280x720"}), "/abs/[out]")
    text = plan_table(plan)
    row = next(line for line in text.splitlines() if line.startswith("clip-0 "))
    assert row.split() == [
        "clip-0",
        "1280x720",
        "81",
        "16",
        "21",
        "75,600",
        "1",
        "50",
        "72.5",
    ]
    tiles = text.partition("Tiles that a sparse head computes")[2]
    row = next(line for line in tiles.splitlines() if line.startswith("clip-0 "))
    assert row.split() == [
        "clip-0",
        "2048x2048",
        "0.38",
        "0.364",
        "10,240",
        "499",
        "1,369",
    ]
    assert "those whose error is over 0.15" in text
    assert "Videos: /abs/[out]/spring/videos/CLIP.mp4\n" in text
    assert "Report: /abs/[out]/spring/index.html\n" in text
    assert f"Model {MODEL}: {plan.model.path}\n" in text
    assert "not whole: no weights in" in text


def test_the_plan_cuts_nothing_off():
    name = "a" * 64
    clip = {"size": "8190x4094", "frames": 4090, "fps": "120000/1001", "steps": 1000}
    lines = plan_table(make_plan(manifest({"id": name} | clip))).splitlines()
    assert lines[3].split()[:4] == [name, "8190x4094", "4090", "120000/1001"]
    assert lines[4].split() == ["of", "8192x4096", "of", "4093"]


def test_the_plan_of_common_clips_fits_a_terminal_of_80_columns():
    text = plan_table(make_plan(manifest({"size": "1278x716", "frames": 240})))
    assert max(len(line) for line in text.splitlines()[:5]) <= 80


def test_the_plan_as_json_says_all_of_it():
    clip = {"id": "a", "size": "1278x716", "frames": 80, "fps": "24000/1001"}
    said = json.loads(json.dumps(plan_json(make_plan(manifest(clip), "/abs"))))
    (found,) = said["clips"]
    assert said["output"] == "/abs/spring"
    assert said["report"] == "/abs/spring/index.html"
    assert said["model"]["name"] == MODEL
    assert "hf download" in said["model"]["missing"]
    assert found["video"] == "/abs/spring/videos/a.mp4"
    assert found["crop"] == {"left": 1, "top": 2}
    assert found["fps"] == "24000/1001"
    assert (found["width"], found["render_width"]) == (1278, 1280)
    assert (found["frames"], found["render_frames"]) == (80, 81)
    assert (found["tokens"], found["windows"]) == (75_600, 1)
    assert said["tflop"] == found["tflop"] > 0
    assert found["tiles"] == {
        "density": pytest.approx(499 / 1369),
        "computed": 499,
        "all": 1369,
    }
    assert found["attention"] == {
        "band": 10_240,
        "tile": [2048, 2048],
        "rounding": "tile",
        "density": 0.38,
        "achieved": found["tiles"]["density"],
        "dense_steps": 10,
        "dense_layers": 1,
        "tolerance": 0.15,
        "samples": 64,
    }


def test_the_example_manifest_is_one():
    from pipeline.manifest import load_manifest

    path = Path(__file__).parents[2] / "configs" / "manifests" / "demo.yaml"
    example = load_manifest(path)
    assert example.model == "demo"
    assert len(example.clips) == 3
