"""diffusers' own pipeline on the demo checkpoint, and a short run of its training."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.demo_model import job
from workers.denoiser import Denoiser

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from configs.demo_training import export, train_transformer, train_vae

# What diffusers and torch warn of among themselves is not ours to mend.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo"


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.square(a.astype(np.float64) - b).mean()
    return float(10 * np.log10(255**2 / error)) if error else np.inf


def test_wan_pipeline_renders_the_same_clip_from_the_same_noise():
    pipeline = diffusers.WanPipeline.from_pretrained(MODEL, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    asked = job(("purple", "square", "up"), seed=5, frames=17)
    ours = Denoiser.load(MODEL)
    rng = np.random.default_rng(asked.seed)
    noise = rng.standard_normal(ours.latent_shape(asked)).astype(np.float32)
    theirs = pipeline(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        height=asked.height,
        width=asked.width,
        num_frames=asked.frames,
        num_inference_steps=asked.steps,
        guidance_scale=asked.guidance,
        max_sequence_length=512,
        latents=torch.from_numpy(noise).permute(3, 0, 1, 2)[None],
        output_type="np",
    ).frames[0]
    state = ours.begin_from(asked, ours.encode(asked), noise)
    state, _ = ours.advance(state, asked.steps)
    frames = np.stack(list(ours.decode(state)))
    assert frames.std() > 20  # a picture, not a plain background
    assert psnr(frames, np.rint(255 * theirs)) >= 40


def test_a_short_training_run_learns(tmp_path):
    losses = train_vae.train(tmp_path, steps=30)
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert train_vae.train(tmp_path, steps=30) == []  # goes on from its checkpoint

    latents = train_transformer.make_latents(tmp_path, long_files=0, short_files=1)
    losses = train_transformer.train(tmp_path, 80, latents, batches={1: 16})
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
    assert train_transformer.train(tmp_path, 80, latents, batches={1: 16}) == []

    # What else lies in the folder must not change what the model was trained with.
    mean, std = train_transformer.Clips(latents).statistics()
    train_transformer.make_latents(tmp_path, long_files=0, short_files=2)
    export.export(tmp_path, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "vae" / "config.json").read_text())
    assert config["latents_mean"] == mean.tolist()
    assert config["latents_std"] == std.tolist()
    Denoiser.load(tmp_path / "model")


@pytest.mark.parametrize("frames", [2, 30])
def test_the_forward_pass_of_training_is_that_of_the_model(frames):
    """On few and on many tokens, against diffusers', each frame at its own level."""
    torch.manual_seed(0)
    models = train_transformer.Models()
    for parameter in models.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.tensor([[3, 4, 5, 1, 0, 0, 0, 0], [3, 6, 7, 8, 9, 10, 1, 0]])
    mask = (ids > 0).long()
    with torch.no_grad():
        text = models.embed(ids, mask)
        x = torch.randn(2, 8, frames, 8, 8)
        sigma = torch.rand(2, frames)
        fast = train_transformer.velocity(models.transformer, x, sigma, text)
        whole = torch.nn.functional.pad(text, (0, 0, 0, 512 - text.shape[1]))
        levels = (1000 * sigma).repeat_interleave(4 * 4, 1)  # one for each token
        plain = models.transformer(x, levels, whole).sample
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
