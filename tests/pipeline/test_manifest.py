import json
from fractions import Fraction

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import RequestError
from pipeline.manifest import Manifest, Settings, load_manifest, parse_size
from tests.pipeline.test_document import PLAIN

PRESET = Settings(
    size="832x480",
    frames=81,
    fps=Fraction(16),
    steps=50,
    guidance=5.0,
    flow_shift=3.0,
    sampler="unipc",
    negative_prompt="",
    seed=0,
    priority=0,
)
WHOLE = {
    "version": 1,
    "batch": "spring",
    "model": "demo",
    "output": "./renders",
    "defaults": {"size": "128x128", "steps": 20, "fps": 16},
    "attention": {"kinds": "auto", "density": 0.4, "tile": "128x64"},
    "encode": {"codec": "h264", "crf": 20},
    "clips": [
        {"id": "opening", "prompt": "a red circle", "seed": 7},
        {"id": "harbour", "prompt": "a blue square", "frames": 9, "priority": 10},
    ],
}
SIDES = st.integers(1, 4096).map(lambda half: 2 * half)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("manifests")


def load(folder, content, name="m.json"):
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    (folder / name).write_text(text)
    return load_manifest(folder / name)


def refused(folder, content, name="m.json"):
    with pytest.raises(RequestError) as raised:
        load(folder, content, name)
    return str(raised.value).replace(f"{folder}/", "").splitlines()


def with_clip(**fields):
    return WHOLE | {"clips": [{"id": "a", "prompt": "b"} | fields]}


def test_yaml_and_json_of_the_same_are_the_same(tmp_path):
    from_json = load(tmp_path, WHOLE)
    assert load(tmp_path, yaml.safe_dump(WHOLE), "m.yaml") == from_json
    assert from_json.clips[1].priority == 10
    assert from_json.encode.crf == 20


def test_the_least_manifest_has_defaults(tmp_path):
    least = {k: WHOLE[k] for k in ("version", "batch", "model")}
    manifest = load(tmp_path, least | {"clips": [{"id": "a", "prompt": "b"}]})
    assert manifest.output is None
    assert manifest.encode.model_dump() == {"codec": "h264", "crf": 18}
    assert manifest.attention.model_dump() == {
        "kinds": "auto",
        "density": None,
        "dense_steps": 0.2,
        "dense_layers": 1,
        "tolerance": 0.15,
        "tile": None,
        "rounding": "tile",
    }


def test_a_clip_says_more_than_defaults_and_these_more_than_the_preset(tmp_path):
    opening, harbour = load(tmp_path, WHOLE).understood(PRESET).clips
    assert (opening.size, opening.steps, opening.seed) == ("128x128", 20, 7)
    assert (opening.frames, opening.guidance, opening.priority) == (81, 5.0, 0)
    assert (harbour.frames, harbour.priority, harbour.seed) == (9, 10, 0)


def test_manifests_that_ask_for_the_same_are_understood_the_same(tmp_path):
    moved = WHOLE | {"defaults": {}}
    shared = {"size": "128x128", "steps": 20, "fps": "16/1"}
    moved["clips"] = [clip | shared for clip in WHOLE["clips"]]
    one = load(tmp_path, WHOLE).understood(PRESET)
    assert load(tmp_path, moved).understood(PRESET) == one
    assert one.understood(PRESET) == one


def test_a_manifest_goes_through_json(tmp_path):
    understood = load(tmp_path, WHOLE).understood(PRESET)
    again = load(tmp_path, understood.model_dump(mode="json"))
    assert again.understood(PRESET) == understood


@settings(max_examples=50)
@given(SIDES, SIDES, st.integers(1, 4093), st.integers(0, 2**32 - 1))
def test_any_even_size_and_any_number_of_frames_is_welcome(
    folder, width, height, frames, seed
):
    fields = {"size": f"{width}x{height}", "frames": frames, "seed": seed}
    (clip,) = load(folder, with_clip(**fields)).clips
    assert parse_size(clip.size or "") == (width, height)
    assert (clip.frames, clip.seed) == (frames, seed)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_size_is_refused_exactly_where_it_is_odd_or_absurd(width, height):
    right = all(2 <= n <= 8192 and n % 2 == 0 for n in (width, height))
    try:
        assert parse_size(f"{width}x{height}") == (width, height)
        assert right
    except ValueError:
        assert not right


@settings(max_examples=50)
@given(st.fractions(1, 240, max_denominator=1001))
def test_any_frame_rate_is_kept_exactly(folder, fps):
    (clip,) = load(folder, with_clip(fps=str(fps))).clips
    assert clip.fps == fps


@settings(max_examples=50)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_any_prompt_is_kept_as_it_is(folder, prompt):
    if prompt.strip():
        (clip,) = load(folder, with_clip(prompt=prompt)).clips
        assert clip.prompt == prompt


@settings(max_examples=50)
@given(PLAIN, st.sampled_from([*WHOLE, "more"]), st.booleans())
def test_whatever_a_field_holds_the_manifest_is_read_or_refused(
    folder, value, field, in_clip
):
    content = with_clip(**{field: value}) if in_clip else WHOLE | {field: value}
    try:
        assert isinstance(load(folder, content), Manifest)
    except RequestError as error:
        for line in str(error).splitlines():
            assert line.startswith((f"{folder / 'm.json'}:", "and "))
            assert line.isprintable()


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(list(Settings.model_fields)), PLAIN))
def test_whatever_settings_hold_they_are_read_or_refused(folder, settings):
    try:
        load(folder, WHOLE | {"defaults": settings})
    except RequestError as error:
        assert all(": defaults" in line for line in str(error).splitlines())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", 2, "version: 2 is not known to this version, which reads 1"),
        ("version", True, "version: True is not a whole number; give 1"),
        ("version", "1", "version: '1' is not a whole number; give 1"),
        ("batch", "Spring", "batch: 'Spring' is not of that form; give up to 64 lower"),
        ("batch", "../up", "batch: '../up' is not of that form"),
        ("batch", "a\n", "batch: 'a\\n' is not of that form"),
        ("batch", "", "batch: '' is not of that form"),
        ("batch", "a" * 65, "is too long; give up to 64"),
        ("batch", 7, "batch: 7 is not text (put it in quotes"),
        ("model", "", "model: '' is too short; give a preset's name"),
        ("model", None, "model: nothing is not text"),
        ("model", "a\0b", "model: holds the control character '\\x00'; remove it"),
        ("output", ["x"], "output: this is not text"),
        ("defaults", [], "defaults: this is not a mapping; give a mapping"),
        ("defaults", {"stpes": 4}, "defaults.stpes: unknown; did you mean steps?"),
        ("defaults", {"id": "a"}, "defaults.id: unknown; Known are size, frames"),
        ("attention", "dense", "attention: 'dense' is not a mapping; give a mapping"),
        ("attention", {"kind": "auto"}, "attention.kind: unknown; did you mean kinds?"),
        ("attention", {"kinds": "sparse"}, "'sparse' is none of its values; give auto"),
        ("attention", {"density": 0}, "density: 0 is too small; give a number over 0"),
        ("attention", {"density": 1.1}, "attention.density: 1.1 is too large"),
        ("attention", {"density": "0.4"}, "attention.density: '0.4' is not a number"),
        ("attention", {"dense_steps": 10}, "dense_steps: 10 is too large; give a numb"),
        ("attention", {"dense_layers": 0.5}, "dense_layers: 0.5 is not a whole number"),
        ("attention", {"tolerance": -0.1}, "attention.tolerance: -0.1 is too small"),
        ("attention", {"tile": 64}, "attention.tile: 64 is not text"),
        ("attention", {"tile": "64"}, "tile: '64' is no tile; give QUERIESxKEYS, mult"),
        ("attention", {"tile": "64x40"}, "attention.tile: '64x40' is no tile"),
        ("attention", {"tile": "64x0"}, "attention.tile: '64x0' is no tile"),
        ("attention", {"rounding": "up"}, "rounding: 'up' is none of its values; give"),
        ("encode", {"codec": "prores"}, "encode.codec: 'prores' is none of its values"),
        ("encode", {"crf": 52}, "encode.crf: 52 is too large; give a whole number"),
        ("encode", {"crf": -1}, "encode.crf: -1 is too small"),
        ("encode", {"filter": "x"}, "encode.filter: unknown; Known are codec, crf"),
        ("clips", [], "clips: this is too short; give a list of 1 to 10,000 clips"),
        ("clips", {"id": "a"}, "clips: this is not a list"),
        ("clips", ["a"], "clips[0]: 'a' is not a mapping; give a mapping with id, pro"),
        ("xyz", 1, "xyz: unknown; Known are version, batch, model"),
        ("modle", "x", "modle: unknown; did you mean model?"),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(tmp_path, field, value, words):
    (line,) = refused(tmp_path, WHOLE | {field: value})
    assert line.startswith("m.json:")
    assert words in line


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": "Opening"}, "id: 'Opening' is not of that form"),
        ({"id": "a/b"}, "id: 'a/b' is not of that form"),
        ({"id": "-a"}, "id: '-a' is not of that form"),
        ({"id": "a.mp4"}, "id: 'a.mp4' is not of that form"),
        ({"id": None}, "id: nothing is not text"),
        ({"prompt": ""}, "prompt: empty; give a sentence"),
        ({"prompt": " \n\t"}, "prompt: empty; give a sentence"),
        ({"prompt": "x" * 10_001}, "is too long; give a sentence, up to 10,000"),
        ({"prompt": 5}, "prompt: 5 is not text (put it in quotes"),
        ({"prompt": "a\x1b[31m"}, "prompt: holds the control character '\\x1b'"),
        ({"prompt": "a\ud800"}, "prompt: 'a\\ud800' holds half a character"),
        ({"size": "1280"}, "size: '1280' is no size; give WIDTHxHEIGHT"),
        ({"size": [1280, 720]}, "size: this is not text"),
        ({"size": "641x360"}, "641x360 is odd"),
        ({"size": "640x361"}, "give even numbers, as 640x362"),
        ({"size": "0x16"}, "a width of 0 pixels; give an even number from 2 to 8192"),
        ({"size": "16x100000"}, "a height of 100000 pixels"),
        ({"size": "-2x16"}, "size: '-2x16' is no size"),
        ({"size": "1280x720\n"}, "is no size"),
        ({"size": "1e3x16"}, "is no size"),
        ({"size": "٣٢x16"}, "is no size"),  # Arabic digits
        ({"frames": 0}, "frames: 0 is too small; give a whole number from 1 to 4093"),
        ({"frames": 4094}, "frames: 4094 is too large"),
        ({"frames": 10**30}, "is too large"),
        ({"frames": 8.0}, "frames: 8.0 is not a whole number"),
        ({"frames": True}, "frames: True is not a whole number"),
        ({"frames": "81"}, "frames: '81' is not a whole number"),
        ({"fps": 23.976}, 'fps: 23.976 is no frame rate; give "24000/1001"'),
        ({"fps": 29.97}, 'give "30000/1001"'),
        ({"fps": 12.5}, "fps: 12.5 is no frame rate; give a whole number, as 16, or"),
        ({"fps": 0}, "fps: 0 frames per second; give"),
        ({"fps": 241}, "from 1 to 240"),
        ({"fps": "24/0"}, "fps: '24/0' is no frame rate"),
        ({"fps": True}, "fps: True is no frame rate"),
        ({"fps": "16; rm"}, "fps: '16; rm' is no frame rate"),
        ({"steps": 0}, "steps: 0 is too small; give a whole number from 1 to 1000"),
        ({"steps": 1001}, "steps: 1001 is too large"),
        ({"guidance": -1}, "guidance: -1 is too small"),
        ({"guidance": "5"}, "guidance: '5' is not a number"),
        ({"guidance": True}, "guidance: True is not a number"),
        ({"guidance": float("nan")}, "guidance: nan is not a finite number"),
        ({"guidance": float("inf")}, "guidance: inf is not a finite number"),
        ({"guidance": 10**400}, "guidance"),
        ({"flow_shift": 0}, "flow_shift: 0 is too small; give a number over 0"),
        ({"sampler": "ddim"}, "sampler: 'ddim' is none of its values; give unipc or"),
        ({"seed": -1}, "seed: -1 is too small"),
        ({"seed": 2**32}, "seed: 4294967296 is too large"),
        ({"seed": 1.5}, "seed: 1.5 is not a whole number"),
        ({"priority": "high"}, "priority: 'high' is not a whole number"),
        ({"promt": "x"}, "promt: unknown; did you mean prompt?"),
        ({"output": "x"}, "output: unknown; Known are size"),
    ],
)
def test_a_wrong_field_of_a_clip_is_named_with_its_remedy(tmp_path, fields, words):
    (line,) = refused(tmp_path, with_clip(**fields))
    assert line.startswith("m.json:")
    assert f": clips[0].{next(iter(fields))}: " in line
    assert words in line


def test_what_is_missing_is_named(tmp_path):
    lines = refused(tmp_path, {"version": 1, "clips": [{"id": "a"}]})
    assert lines == [
        "m.json:1: batch: missing; give up to 64 lower-case letters, digits and "
        "dashes, no dash first",
        "m.json:1: model: missing; give a preset's name, as demo, or a model's folder",
        "m.json:4: clips[0].prompt: missing; give a sentence, up to 10,000 characters",
    ]


def test_all_faults_are_told_at_once_by_their_lines(tmp_path):
    text = """version: 1
batch: spring
model: demo
defaults: {steps: 0}
clips:
  - {id: a, prompt: " "}
  - {id: b, prompt: x,
     size: 3x4, seed: .nan}
  - {id: a, prompt: x, fps: 16, fps: 24}
"""
    lines = refused(tmp_path, text, "m.yaml")
    assert [line.split(": ", 2)[:2] for line in lines] == [
        ["m.yaml:4", "defaults.steps"],
        ["m.yaml:6", "clips[0].prompt"],
        ["m.yaml:8", "clips[1].size"],
        ["m.yaml:8", "clips[1].seed"],
        ["m.yaml:9", "clips[2].fps"],
        ["m.yaml:9", "clips[2].id"],
    ]


def test_an_id_that_is_taken_is_refused_with_both_lines(tmp_path):
    text = "version: 1\nbatch: b\nmodel: demo\nclips:\n"
    text += "".join(f"  - {{id: {name}, prompt: x}}\n" for name in "abab")
    assert refused(tmp_path, text, "m.yaml") == [
        "m.yaml:7: clips[2].id: 'a' is taken by the clip on line 5; give each clip its "
        "own",
        "m.yaml:8: clips[3].id: 'b' is taken by the clip on line 6; give each clip its "
        "own",
    ]


def test_what_is_inside_a_key_given_twice_is_not_told_as_well(tmp_path):
    text = yaml.safe_dump(WHOLE) + yaml.safe_dump({"clips": WHOLE["clips"]})
    (line,) = refused(tmp_path, text, "m.yaml")
    assert ": clips: given twice, first on line " in line


def test_of_very_many_faults_the_first_are_told(tmp_path):
    lines = refused(tmp_path, WHOLE | {"clips": ["x"] * 500})
    assert len(lines) == 21
    assert lines[-1] == "and 480 more"


@pytest.mark.parametrize("content", ["1", "- a", "null", "# only words", "'x'"])
def test_a_document_that_is_no_mapping_is_refused(tmp_path, content):
    (line,) = refused(tmp_path, content, "m.yaml")
    assert line.startswith("m.yaml:1: ")
    assert line.endswith("; give a mapping with version, batch, model, clips")


def test_ten_thousand_clips_are_read(tmp_path):
    clips = [{"id": f"clip-{n}", "prompt": "x" * 100} for n in range(10_000)]
    assert len(load(tmp_path, WHOLE | {"clips": clips}).clips) == 10_000
    (line,) = refused(tmp_path, WHOLE | {"clips": [*clips, clips[0] | {"id": "z"}]})
    assert "clips: this is too long" in line
