"""The text encoder and the tokenizer against transformers and diffusers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from tests.references.vae_text import LIVE_TEXT, STORED_TEXT, TextCase
from tests.references.weights import random_tensors
from workers.models import text_encoder
from workers.models.params import nest
from workers.models.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import AutoTokenizer, T5Tokenizer
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


PROMPTS = [
    "",
    "a",
    "  A red &amp;amp; blue\ncircle\tmoving &lt;left&gt;  ",
    "The MoneyÃ¢â‚¬â„¢s \N{LEFT DOUBLE QUOTATION MARK}worth",
    "caf\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT} \N{CAT FACE} 紅い円",
    "ends early </s> and <pad> goes on <extra_id_0>",
    "a red circle moves to the left " * 100,
]


def test_token_ids_are_those_of_the_pipeline(tmp_path):
    train = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram())
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    unigram.train_from_iterator(PROMPTS, train)
    vocab = [tuple(entry) for entry in json.loads(unigram.to_str())["model"]["vocab"]]
    T5Tokenizer(vocab).save_pretrained(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)(
        [prompt_clean(prompt) for prompt in PROMPTS],
        padding="max_length",
        max_length=512,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="np",
    )
    ids, mask = Tokenizer(tmp_path).encode(PROMPTS)
    np.testing.assert_array_equal(ids, reference.input_ids)
    np.testing.assert_array_equal(mask, reference.attention_mask)
    assert mask.sum(1).max() == 512
    assert len(np.unique(ids)) > 20


@pytest.mark.parametrize("case", STORED_TEXT[:1], ids=lambda case: case.name)
def test_embeddings_are_those_of_the_pipeline(tmp_path, case: TextCase):
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(letter, -1.0) for letter in "\N{LOWER ONE EIGHTH BLOCK}abcdeilmnorstv"]
    T5Tokenizer(vocab, extra_ids=0).save_pretrained(tmp_path)
    prompts = ["", "a red circle moves"]
    pipe = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(tmp_path),
        text_encoder=make_vae_text.text_model(case),
        vae=None,
        scheduler=None,
    )
    with torch.no_grad():
        reference = pipe._get_t5_prompt_embeds(prompts, max_sequence_length=512)
    config = text_encoder.TextConfig.from_json(case.config)
    tensors = random_tensors(text_encoder.tensor_shapes(config), case.seed)
    params = nest(tensors, text_encoder.STACKED)
    ids, mask = Tokenizer(tmp_path).encode(prompts)
    embeddings = text_encoder.encode(params, config, jnp.array(ids), jnp.array(mask))
    error = np.abs(embeddings - reference.numpy()).max()
    # As above: float32, added in another order.
    assert error < 2e-4 * np.abs(reference.numpy()).max()
