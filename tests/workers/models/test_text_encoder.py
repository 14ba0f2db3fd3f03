import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.references.vae_text import STORED_TEXT, TextCase, text_config
from tests.references.weights import random_tensors
from workers.models import text_encoder
from workers.models.params import nest

STORED = Path(__file__).parents[2] / "references" / "vae_text.npz"
# float32 on both sides, sums in different orders over a few layers.
TOLERANCE = 2e-4

SMALL = TextCase("small", text_config(40, 16, 2, 8, 2), (5, 1))

encode = jax.jit(text_encoder.encode, static_argnames="config")


def load(case: TextCase):
    config = text_encoder.TextConfig.from_json(case.config)
    tensors = random_tensors(text_encoder.tensor_shapes(config), case.seed)
    return nest(tensors, text_encoder.STACKED), config


@pytest.mark.parametrize("case", STORED_TEXT, ids=lambda case: case.name)
def test_embeddings_are_those_stored_from_transformers(case: TextCase):
    embeddings = np.asarray(encode(*load(case), *case.inputs()))
    assert embeddings.dtype == np.float32
    for i, length in enumerate(case.lengths):
        reference = np.load(STORED)[f"{case.name}/{i}"]
        error = np.abs(embeddings[i, :length] - reference).max()
        assert error < TOLERANCE * np.abs(reference).max()
        assert not embeddings[i, length:].any()


def test_what_the_mask_hides_changes_nothing():
    ids, mask = SMALL.inputs()
    noise = np.random.default_rng(0).integers(0, 40, ids.shape).astype(np.int32)
    embeddings = encode(*load(SMALL), ids, mask)
    changed = encode(*load(SMALL), np.where(mask, ids, noise), mask)
    np.testing.assert_array_equal(embeddings, changed)


def test_a_row_that_is_all_padding_is_zero():
    ids, mask = SMALL.inputs()
    embeddings = encode(*load(SMALL), ids, mask * np.array([[1], [0]], np.int32))
    assert np.isfinite(embeddings).all()
    assert not embeddings[1].any()


def test_weights_in_bfloat16_give_float32_embeddings_close_by():
    params, config = load(SMALL)
    embeddings = encode(params, config, *SMALL.inputs())
    half = jax.tree.map(lambda x: jnp.array(x, jnp.bfloat16), params)
    halved = encode(half, config, *SMALL.inputs())
    assert halved.dtype == np.float32
    # bfloat16 keeps 8 bits.
    assert np.abs(halved - embeddings).max() < 0.05 * np.abs(embeddings).max()


def test_the_encoder_of_wan_has_the_parameters_of_umt5_xxl():
    config = text_encoder.TextConfig.from_json(
        text_config(256384, 4096, 64, 64, 24, d_ff=10240)
    )
    shapes = text_encoder.tensor_shapes(config)
    # As counted over transformers' own model of this config.
    assert sum(math.prod(shape) for shape in shapes.values()) == 5_680_910_336


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "relu"}, "feed_forward_proj is 'relu'"),
        ({"d_kv": None}, "d_kv missing"),
    ],
)
def test_a_config_of_another_encoder_is_refused(change, message):
    config = {k: v for k, v in (SMALL.config | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        text_encoder.TextConfig.from_json(config)
