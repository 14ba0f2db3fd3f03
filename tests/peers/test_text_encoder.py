"""The text encoder and the tokenizer against transformers and diffusers."""

import jax
import numpy as np
import pytest

from tests.references.vae_text import LIVE_TEXT, STORED_TEXT, TextCase
from tests.references.weights import random_tensors
from workers.models import text_encoder
from workers.models.params import nest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from transformers.models.umt5.modeling_umt5 import UMT5Attention

from tests.references import make_vae_text

pytestmark = pytest.mark.peers

CASES = STORED_TEXT + LIVE_TEXT


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensor_names_and_shapes_are_those_of_transformers(case: TextCase):
    shapes = make_vae_text.shapes_of(make_vae_text.text_model(case))
    config = text_encoder.TextConfig.from_json(case.config)
    assert text_encoder.tensor_shapes(config) == shapes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_embeddings_are_those_of_transformers(case: TextCase):
    config = text_encoder.TextConfig.from_json(case.config)
    tensors = random_tensors(text_encoder.tensor_shapes(config), case.seed)
    params = nest(tensors, text_encoder.STACKED)
    run = jax.jit(text_encoder.encode, static_argnames="config")
    embeddings = np.asarray(run(params, config, *case.inputs()))
    for embedding, reference in zip(embeddings, make_vae_text.text(case), strict=True):
        # Both compute in float32 and add in different orders over a few layers.
        error = np.abs(embedding[: len(reference)] - reference).max()
        assert error < 2e-4 * np.abs(reference).max()
        assert not embedding[len(reference) :].any()


@pytest.mark.parametrize("buckets", [8, 12, 32, 64])
@pytest.mark.parametrize("distance", [20, 128, 256, 1000])
def test_every_distance_falls_into_the_bucket_of_transformers(buckets, distance):
    config = text_encoder.TextConfig(
        9, 4, 4, 4, 1, 1, buckets, relative_attention_max_distance=distance
    )
    case = make_vae_text.UMT5Config(
        d_model=4,
        num_heads=1,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        is_encoder_decoder=False,
    )
    layer = UMT5Attention(case, has_relative_attention_bias=True)
    position = torch.arange(512)
    reference = layer._relative_position_bucket(position[None] - position[:, None])
    np.testing.assert_array_equal(text_encoder._buckets(config, 512), reference)
