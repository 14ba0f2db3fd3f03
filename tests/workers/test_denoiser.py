import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.pipeline.batches import SPARSE
from tests.tiny_model import write_tiny_model
from workers.checkpoint import CheckpointError
from workers.denoiser import ClipState, Denoiser, NumericalError
from workers.job import ClipJob

JOB = ClipJob(
    clip="a",
    prompt="a red circle moving left",
    negative_prompt="",
    seed=3,
    width=28,
    height=18,
    frames=7,
    render_width=32,
    render_height=32,
    render_frames=9,
    steps=4,
    guidance=3.0,
    flow_shift=3.0,
    sampler="unipc",
)
SPARSE_JOB = dataclasses.replace(JOB, attention=SPARSE)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def denoiser(model):
    return Denoiser.load(model)


def render(denoiser, job, steps_at_once=100):
    state = denoiser.begin(job, denoiser.encode(job))
    while state.step < job.steps:
        state, _ = denoiser.advance(state, steps_at_once)
    return np.stack(list(denoiser.decode(state)))


def test_frames_are_cropped_from_the_centre_and_cut(denoiser):
    frames = render(denoiser, JOB)
    assert frames.shape == (7, 18, 28, 3) and frames.dtype == np.uint8
    whole = render(denoiser, dataclasses.replace(JOB, width=32, height=32, frames=9))
    np.testing.assert_array_equal(frames, whole[:7, 7:25, 2:30])


@pytest.mark.parametrize(
    "job",
    [JOB, dataclasses.replace(JOB, sampler="euler"), SPARSE_JOB],
    ids=["unipc", "euler", "sparse"],
)
def test_a_stored_state_goes_on_to_the_same_frames(denoiser, job):
    expected = render(denoiser, job)
    np.testing.assert_array_equal(render(denoiser, job, steps_at_once=1), expected)
    for stop in range(job.steps + 1):
        state, _ = denoiser.advance(denoiser.begin(job, denoiser.encode(job)), stop)
        state = ClipState.from_tensors(job, state.to_tensors())
        assert state.step == stop
        state, _ = denoiser.advance(state, 100)
        frames = np.stack(list(denoiser.decode(state)))
        np.testing.assert_array_equal(frames, expected)


def test_every_setting_changes_the_picture(denoiser):
    base = render(denoiser, JOB)
    for change in (
        {"seed": 4},
        {"prompt": "a blue square moving up"},
        {"negative_prompt": "blue"},
        {"guidance": 1.0},
        {"guidance": 5.0},
        {"steps": 5},
        {"flow_shift": 5.0},
        {"sampler": "euler"},
        {"attention": SPARSE},
    ):
        other = render(denoiser, dataclasses.replace(JOB, **change))
        assert (other != base).any(), change


def test_without_guidance_the_negative_prompt_is_not_run(denoiser):
    job = dataclasses.replace(JOB, guidance=1.0)
    assert denoiser.begin(job, denoiser.encode(job)).text.shape[0] == 1
    other = dataclasses.replace(job, negative_prompt="blue")
    np.testing.assert_array_equal(render(denoiser, job), render(denoiser, other))


def test_a_clip_of_one_frame(denoiser):
    job = dataclasses.replace(JOB, frames=1, render_frames=1)
    assert render(denoiser, job).shape == (1, 18, 28, 3)


def work(denoiser, attention, steps=JOB.steps):
    job = dataclasses.replace(JOB, attention=attention)
    return denoiser.advance(denoiser.begin(job, denoiser.encode(job)), steps)[1]


def test_the_work_of_heads_is_counted(denoiser):
    # Two layers, two branches and two heads; of the steps and the layers, one is dense.
    assert work(denoiser, None) is None
    found = work(denoiser, SPARSE)
    assert found.spatial + found.temporal == found.profiled == 3 * 4
    assert found.dense == 4 * 8 - 3 * 4
    assert found.all_tiles == 32 * 9
    assert found.tiles == 20 * 9 + 12 * 7
    assert found.online is None
    first = work(denoiser, SPARSE, steps=1)
    assert (first.dense, first.profiled, first.tiles) == (8, 0, first.all_tiles)
    strict = work(denoiser, dataclasses.replace(SPARSE, tolerance=0.0))
    assert (strict.dense, strict.profiled) == (32, 12)


def test_heads_that_must_be_dense_give_the_frames_of_dense_attention(denoiser):
    whole = render(denoiser, JOB)
    for change in ({"dense_steps": 4}, {"dense_layers": 2}, {"tolerance": 0.0}):
        attention = dataclasses.replace(SPARSE, **change)
        frames = render(denoiser, dataclasses.replace(JOB, attention=attention))
        # Heads come one by one, not together: the last bits of the sums differ.
        assert np.abs(frames.astype(int) - whole).max() <= 1, change


def test_latents_that_are_not_finite_name_the_step(model, tmp_path):
    poisoned = write_tiny_model(tmp_path)
    path = poisoned / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["blocks.1.ffn.net.2.bias"][0] = np.nan
    save_file(tensors, path)
    denoiser = Denoiser.load(poisoned)
    with pytest.raises(NumericalError, match="after step 1 of 4"):
        render(denoiser, JOB)


def test_frames_that_are_not_finite_are_named(tmp_path):
    poisoned = write_tiny_model(tmp_path)
    path = poisoned / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["decoder.conv_out.bias"][0] = np.nan
    save_file(tensors, path)
    with pytest.raises(NumericalError, match="not finite from frame 0 on"):
        render(Denoiser.load(poisoned), JOB)


def test_bfloat16_stays_near_float32(model, denoiser):
    narrow = Denoiser.load(model, dtype="bfloat16")
    assert narrow.describe()["dtype"] == "bfloat16"
    difference = render(narrow, JOB).astype(int) - render(denoiser, JOB)
    # bfloat16 keeps 8 bits; random weights amplify, so only the mean is bounded.
    assert np.abs(difference).mean() < 10


def test_parts_of_different_models_are_refused(tmp_path):
    model = write_tiny_model(tmp_path / "vae")
    path = model / "vae" / "config.json"
    config = json.loads(path.read_text()) | {"base_dim": 8}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"vae.*must be"):
        Denoiser.load(model)

    model = write_tiny_model(tmp_path / "tokenizer")
    (model / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Denoiser.load(model)


def test_describes_what_made_the_picture(denoiser):
    description = denoiser.describe()
    assert description["jax"] == jax.__version__
    assert description["parameters"]["transformer"] > 1000
    assert len(description["model_hash"]) == 64
