import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from workers.checkpoint import (
    CheckpointError,
    load_tensors,
    model_hash,
    read_config,
    weight_files,
)

SHAPES = {"a.weight": (3, 4), "b": (5,)}
NAME = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def test_reads_one_file(tmp_path, tensors):
    save_file(tensors, tmp_path / NAME)
    loaded = load_tensors(tmp_path, SHAPES)
    assert list(loaded) == list(SHAPES)
    for name in SHAPES:
        np.testing.assert_array_equal(loaded[name], tensors[name])


def test_reads_parts_by_their_index(tmp_path, tensors):
    for part, name in enumerate(SHAPES):
        save_file({name: tensors[name]}, tmp_path / f"part-{part}.safetensors")
    index = {"weight_map": {n: f"part-{i}.safetensors" for i, n in enumerate(SHAPES)}}
    (tmp_path / f"{NAME}.index.json").write_text(json.dumps(index))
    loaded = load_tensors(tmp_path, SHAPES)
    np.testing.assert_array_equal(loaded["b"], tensors["b"])

    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors.*not there"):
        load_tensors(tmp_path, SHAPES)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside.safetensors").touch()
    index = {"weight_map": {"b": "../outside.safetensors"}}
    (tmp_path / "inside" / f"{NAME}.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        weight_files(tmp_path / "inside")


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": {"b": 1, "c": []}}'])
def test_an_index_that_is_none_is_named(tmp_path, content):
    (tmp_path / f"{NAME}.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: not an index"):
        weight_files(tmp_path)


def test_bfloat16_is_widened_exactly(tmp_path, tensors):
    narrow = {n: t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    save_file(narrow, tmp_path / NAME)
    loaded = load_tensors(tmp_path, SHAPES)
    assert loaded["b"].dtype == np.float32
    np.testing.assert_array_equal(loaded["b"], narrow["b"].astype(np.float32))


def test_every_fault_is_named_at_once(tmp_path, tensors):
    tensors["a.weight"] = tensors["a.weight"].T.copy()
    tensors["stray"] = tensors.pop("b")
    save_file(tensors, tmp_path / NAME)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(tmp_path, SHAPES)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "a.weight is [4, 3] and must be [3, 4]" in message
    assert "b is missing" in message
    assert "stray does not belong" in message


def test_optional_tensors_are_passed_over(tmp_path, tensors):
    save_file(tensors | {"stray": tensors["b"]}, tmp_path / NAME)
    assert set(load_tensors(tmp_path, SHAPES, optional=["stray"])) == set(SHAPES)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_file_cut_short_is_named(tmp_path, tensors, keep):
    path = tmp_path / NAME
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=re.escape(str(path)) + ".*cut short"):
        load_tensors(tmp_path, SHAPES)


def test_missing_weights_and_configs_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no weights"):
        load_tensors(tmp_path, SHAPES)
    with pytest.raises(CheckpointError, match=r"config\.json.*diffusers layout"):
        read_config(tmp_path, dict)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path, dict)


def test_the_hash_depends_on_names_and_contents(tmp_path, tensors):
    save_file(tensors, tmp_path / NAME)
    first = model_hash(tmp_path)
    assert model_hash(tmp_path) == first
    (tmp_path / "README.md").write_text("not part of the model")
    assert model_hash(tmp_path) == first
    tensors["b"][0] += 1
    save_file(tensors, tmp_path / NAME)
    second = model_hash(tmp_path)
    (tmp_path / NAME).rename(tmp_path / "other.safetensors")
    assert len({first, second, model_hash(tmp_path)}) == 3


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    # For root, who may read anything, a name that is too long does the same.
    folder = tmp_path / ("x" * 300)
    with pytest.raises(CheckpointError, match=r"xxx/.*cannot be read \(File name too"):
        weight_files(folder)
