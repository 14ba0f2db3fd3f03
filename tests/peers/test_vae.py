"""The autoencoder against diffusers, on the same random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.references.vae_text import LIVE_VAE, STORED_VAE, VAECase
from tests.references.weights import random_tensors
from workers.models import vae
from workers.models.params import nest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from tests.references import make_vae_text

pytestmark = pytest.mark.peers

CASES = STORED_VAE + LIVE_VAE


def relative_error(x, reference) -> float:
    assert x.shape == reference.shape
    return float(np.abs(np.asarray(x) - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensor_names_and_shapes_are_those_of_diffusers(case: VAECase):
    model = make_vae_text.AutoencoderKLWan(**case.config)
    shapes = make_vae_text.shapes_of(model)
    assert vae.tensor_shapes(vae.VAEConfig.from_json(case.config)) == shapes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_frames_and_latents_are_those_of_diffusers(case: VAECase):
    config = vae.VAEConfig.from_json(case.config)
    params = nest(random_tensors(vae.tensor_shapes(config), case.seed))
    frames, latents = make_vae_text.vae(case)
    z, video = case.inputs()

    first = jax.jit(vae.decode_first, static_argnames="config")
    then = jax.jit(vae.decode_next, static_argnames="config")
    chunk, cache = first(params, config, z[:, 0])
    chunks = [chunk]
    for i in range(1, z.shape[1]):
        chunk, cache = then(params, config, z[:, i], cache)
        chunks.append(chunk)
    # Both compute in float32 and add in different orders over some 30 layers.
    assert relative_error(np.concatenate(chunks, 1), frames) < 2e-4
    assert relative_error(vae.encode(params, config, jnp.array(video)), latents) < 2e-4
