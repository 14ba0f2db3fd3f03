import json
import os
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.errors import RequestError
from pipeline.models import (
    PRESETS,
    find_model,
    missing_weights,
    preset_names,
    require_weights,
)
from tests.tiny_model import write_tiny_model

WAN = PRESETS / "wan2.1-t2v-1.3b"


@pytest.fixture
def folder(tmp_path):
    """A model of the published configuration, with no weights."""
    for part in ("transformer", "vae", "text_encoder"):
        shutil.copytree(WAN / part, tmp_path / "wan" / part)
    return tmp_path / "wan"


def test_the_presets_are_demo_and_wan():
    assert preset_names() == ["demo", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b"]


@pytest.mark.parametrize(
    ("name", "size", "dim", "ffn_dim", "layers", "flow_shift"),
    [
        ("wan2.1-t2v-1.3b", "832x480", 12 * 128, 8960, 30, 3.0),
        ("wan2.1-t2v-14b", "1280x720", 40 * 128, 13824, 40, 5.0),
    ],
)
def test_wan_presets_are_as_published(
    tmp_path, name, size, dim, ffn_dim, layers, flow_shift
):
    model = find_model(name, tmp_path)
    shape, settings = model.shape, model.settings
    assert (shape.pixels, shape.frames) == (16, 4)
    assert (shape.dim, shape.ffn_dim, shape.layers) == (dim, ffn_dim, layers)
    assert (settings.size, settings.frames, settings.fps) == (size, 81, 16)
    assert (settings.steps, settings.guidance) == (50, 5.0)
    assert (settings.flow_shift, settings.sampler) == (flow_shift, "unipc")
    assert "overexposed" in (settings.negative_prompt or "")
    assert model.preset.native_frames == 81


def test_a_relative_folder_counts_from_the_folder_given(folder):
    model = find_model("wan", folder.parent)
    assert model.path == folder
    assert model.name == "wan"
    assert find_model("./wan", folder.parent).path == folder
    assert find_model(str(folder), folder).path == folder


def test_a_folder_without_a_preset_has_wan_settings(folder):
    settings = find_model(str(folder), folder).settings
    assert all(value is not None for value in dict(settings).values())
    assert (settings.size, settings.fps) == ("832x480", Fraction(16))


def test_a_folder_may_have_a_preset_of_its_own(folder):
    (folder / "preset.yaml").write_text("native_frames: 33\ndefaults: {steps: 4}\n")
    model = find_model(str(folder), folder)
    assert model.preset.native_frames == 33
    assert (model.settings.steps, model.settings.guidance) == (4, 5.0)


def test_a_wrong_preset_is_refused_with_its_line(folder):
    (folder / "preset.yaml").write_text("description: x\ndefaults: {stepz: 4}\n")
    with pytest.raises(RequestError, match=r"preset\.yaml:2: defaults\.stepz: unknown"):
        find_model(str(folder), folder)


def test_the_shape_follows_the_configuration(folder):
    change(folder / "vae", dim_mult=[1, 2, 4], temperal_downsample=[True, False])
    change(folder / "transformer", patch_size=[1, 4, 4])
    shape = find_model(str(folder), folder).shape
    assert (shape.pixels, shape.frames) == (16, 2)


def change(part, **values):
    path = part / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("transformer", {"patch_size": [2, 2, 2]}, "patch_size is"),
        ("transformer", {"patch_size": [1, 2, 4]}, "patch_size is"),
        ("transformer", {"patch_size": [1, 0, 0]}, "patch_size is"),
        ("transformer", {"num_layers": "30"}, "num_layers is '30', not a whole"),
        ("transformer", {"num_layers": None}, "num_layers is None, not a whole"),
        ("transformer", {"ffn_dim": []}, "ffn_dim is"),
        ("vae", {"dim_mult": [1, -2]}, "dim_mult is"),
    ],
)
def test_a_configuration_of_another_model_is_refused(folder, part, values, words):
    change(folder / part, **values)
    with pytest.raises(RequestError) as raised:
        find_model(str(folder), folder)
    assert f"{part}/config.json: {words}" in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_a_configuration_that_is_no_json_object_is_refused(folder, text):
    (folder / "vae" / "config.json").write_text(text)
    with pytest.raises(RequestError, match=r"vae/config\.json is not "):
        find_model(str(folder), folder)


def test_a_missing_configuration_is_named(folder):
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(RequestError, match=r"vae/config\.json cannot be read"):
        find_model(str(folder), folder)


@pytest.mark.parametrize("name", ["nowhere", "./demo", "x" * 300, "~no-one-here/x"])
def test_a_model_that_is_not_there_is_refused(tmp_path, name):
    with pytest.raises(RequestError, match="neither a preset") as raised:
        find_model(name, tmp_path)
    assert "demo, wan2.1-t2v-1.3b" in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_folder_that_may_not_be_read_is_named():
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        folder = Path(home, "wan")
        folder.mkdir(mode=0o000)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(RequestError) as raised:
                find_model(str(folder), folder)
        finally:
            if root:
                os.seteuid(0)
    assert f"{folder}/preset.yaml cannot be read: Permission" in str(raised.value)


def test_a_model_in_a_bucket_is_refused(tmp_path):
    with pytest.raises(RequestError, match="local folders only"):
        find_model("gs://bucket/wan", tmp_path)


def test_a_preset_without_weights_says_how_to_get_them(tmp_path, monkeypatch):
    remedy = "`hf download Wan-AI/Wan2.1-T2V-14B-Diffusers --local-dir "
    with pytest.raises(RequestError) as raised:
        require_weights(find_model("wan2.1-t2v-14b", tmp_path))
    assert f"{remedy}~/models/wan2.1-t2v-14b`, and set TILEREEL_MODELS" in str(
        raised.value
    )
    monkeypatch.setenv("TILEREEL_MODELS", str(tmp_path))
    with pytest.raises(RequestError) as raised:
        require_weights(find_model("wan2.1-t2v-14b", tmp_path))
    assert f"{remedy}{tmp_path}/wan2.1-t2v-14b`" in str(raised.value)


def test_weights_of_a_preset_are_found_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEREEL_MODELS", str(tmp_path))
    written = write_tiny_model(tmp_path / "wan2.1-t2v-14b")
    model = find_model("wan2.1-t2v-14b", tmp_path / "elsewhere")
    assert model.path == written
    # What is there counts, not what the preset has.
    assert model.shape.dim == 24
    require_weights(model)


@pytest.mark.parametrize(
    "file",
    [
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
    ],
)
def test_a_part_that_is_missing_is_named(tmp_path, file):
    folder = write_tiny_model(tmp_path / "tiny")
    model = find_model(str(folder), tmp_path)
    assert not missing_weights(model)
    (folder / file).unlink()
    assert str((folder / file).parent) in missing_weights(model)
    with pytest.raises(RequestError, match="is not whole"):
        require_weights(model)
