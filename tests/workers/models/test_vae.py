import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references.vae_text import STORED_VAE, VAECase, vae_config
from tests.references.weights import random_tensors
from workers.models import vae
from workers.models.params import nest

STORED = Path(__file__).parents[2] / "references" / "vae_text.npz"
# float32 on both sides, sums in different orders over some 30 layers.
TOLERANCE = 2e-4

TINY = vae_config(8, 3, [1, 2], 1, [True])
# What diffusers' AutoencoderKLWan has by default: the autoencoder of Wan 2.1.
WAN = vae.VAEConfig.from_json(vae_config(96, 16, [1, 2, 4, 4], 2, [False, True, True]))

decode_first = jax.jit(vae.decode_first, static_argnames="config")
decode_next = jax.jit(vae.decode_next, static_argnames="config")


def load(config: dict, seed: int = 0):
    sizes = vae.VAEConfig.from_json(config)
    return nest(random_tensors(vae.tensor_shapes(sizes), seed)), sizes


def draw(*shape: int) -> jax.Array:
    return jnp.array(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def decode(params, config, z, decode_next=decode_next):
    """All frames of latents [batch, time, height, width, z]."""
    chunk, cache = decode_first(params, config, z[:, 0])
    chunks = [chunk]
    for i in range(1, z.shape[1]):
        chunk, cache = decode_next(params, config, z[:, i], cache)
        chunks.append(chunk)
    return np.concatenate(chunks, 1)


def assert_close(x, reference):
    assert x.shape == reference.shape
    error = np.abs(np.asarray(x) - np.asarray(reference)).max()
    assert error <= TOLERANCE * np.abs(reference).max()


@pytest.mark.parametrize("case", STORED_VAE, ids=lambda case: case.name)
def test_frames_are_those_stored_from_diffusers_and_one_program_makes_them(
    case: VAECase,
):
    params, config = load(case.config, case.seed)
    traced = []

    @functools.partial(jax.jit, static_argnames="config")
    def counted(params, config, z, cache):
        traced.append(z.shape)
        return vae.decode_next(params, config, z, cache)

    z = np.concatenate([case.inputs()[0]] * 2, 1)
    frames = decode(params, config, z, counted)
    assert frames.dtype == np.float32
    stored = np.load(STORED)[f"{case.name}/frames"]
    assert_close(frames[:, : stored.shape[1]], stored)
    assert len(traced) == 1


@pytest.mark.parametrize("case", STORED_VAE, ids=lambda case: case.name)
def test_latents_are_those_stored_from_diffusers(case: VAECase):
    params, config = load(case.config, case.seed)
    latents = vae.encode(params, config, jnp.array(case.inputs()[1]))
    assert latents.dtype == np.float32
    assert_close(latents, np.load(STORED)[f"{case.name}/latents"])


def test_decoding_frame_by_frame_equals_decoding_them_at_once():
    params, config = load(TINY)
    z = draw(2, 5, 3, 5, 3)
    frames = decode(params, config, z)

    @jax.jit
    def at_once(params, z):
        x = z * jnp.array(config.latents_std) + jnp.array(config.latents_mean)
        x = vae._pointwise(params["post_quant_conv"], x)
        run = functools.partial(
            vae._run, params["decoder"], vae._decoder_layers(config)
        )
        start = vae._Past(None)
        first = run(x[:, :1], start)
        later = run(x[:, 1:], vae._Past(start.cache()))
        return jnp.clip(jnp.concatenate([first, later], 1), -1, 1)

    assert_close(frames, at_once(params, z))


def test_encoding_chunk_by_chunk_equals_encoding_them_at_once():
    params, config = load(TINY)
    video = draw(1, 9, 6, 10, 3)
    latents = vae.encode(params, config, video)
    first, cache = vae._encode_first(params, config, video[:, :1])
    later, _ = vae._encode_next(params, config, video[:, 1:], cache)
    assert_close(latents, np.concatenate([first, later], 1))


def test_a_later_frame_changes_no_earlier_latents():
    params, config = load(TINY)
    video = draw(1, 9, 6, 10, 3)
    changed = video.at[:, 5].multiply(-1)
    latents = vae.encode(params, config, video)
    after = vae.encode(params, config, changed)
    np.testing.assert_array_equal(latents[:, :3], after[:, :3])
    assert (latents[:, 3] != after[:, 3]).any()


@settings(max_examples=5)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_a_causal_convolution_is_a_3d_one_padded_in_the_past(
    time, height, width, channels
):
    shapes = {"weight": (4, channels, 3, 3, 3), "bias": (4,)}
    tensors = jax.tree.map(jnp.array, random_tensors(shapes, 0))

    @jax.jit
    def run(x):
        reference = jax.lax.conv_general_dilated(
            x,
            tensors["weight"],
            (1, 1, 1),
            ((2, 0), (1, 1), (1, 1)),
            dimension_numbers=("NDHWC", "OIDHW", "NDHWC"),
        )
        results = []
        for stacked in (0, channels):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(vae, "STACKED_CHANNELS", stacked)
                past = vae._Past(None)
                y = vae._causal_conv(tensors, x, past)
            results.append((y, past.cache()[0]))
        return reference + tensors["bias"], results

    x = draw(2, time, height, width, channels)
    reference, results = run(x)
    before = np.pad(x, ((0, 0), (2, 0), (0, 0), (0, 0), (0, 0)))
    for y, cache in results:
        assert_close(y, reference)
        np.testing.assert_array_equal(cache, before[:, -2:])


def test_attention_in_chunks_equals_attention_at_once(monkeypatch):
    tensors = nest(
        random_tensors(
            {
                "norm.gamma": (8, 1, 1),
                "to_qkv.weight": (24, 8, 1, 1),
                "to_qkv.bias": (24,),
                "proj.weight": (8, 8, 1, 1),
                "proj.bias": (8,),
            },
            seed=0,
        )
    )
    x = draw(2, 2, 3, 5, 8)
    at_once = jax.jit(lambda x: vae._attention(tensors, x))(x)
    monkeypatch.setattr(vae, "QUERY_CHUNK", 4)
    assert_close(jax.jit(lambda x: vae._attention(tensors, x))(x), at_once)


def test_attention_over_a_1440p_frame_never_holds_all_scores():
    sizes = {"norm.gamma": (384, 1, 1), "to_qkv.weight": (1152, 384, 1, 1)}
    sizes |= {"to_qkv.bias": (1152,), "proj.weight": (384, 384, 1, 1)}
    sizes |= {"proj.bias": (384,), "x": (1, 1, 180, 320, 384)}
    tree = nest({n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in sizes.items()})
    program = jax.jit(lambda tree: vae._attention(tree, tree["x"])).lower(tree)
    memory = program.compile().memory_analysis()
    assert memory is not None
    # All scores, 57,600 by 57,600 in float32, would take 13.3 GB.
    assert memory.temp_size_in_bytes < 1.5e9


def test_weights_in_bfloat16_give_float32_frames_close_by():
    params, config = load(TINY)
    z = draw(1, 2, 3, 5, 3)
    frames = decode(params, config, z)
    half = jax.tree.map(lambda x: jnp.array(x, jnp.bfloat16), params)
    halved = decode(half, config, z)
    assert halved.dtype == np.float32
    # bfloat16 keeps 8 bits, and errors add up over 20 layers.
    assert np.abs(halved - frames).mean() < 0.05


def test_the_cache_of_a_720p_clip_keeps_its_shapes():
    shapes = nest(
        {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in vae.tensor_shapes(WAN).items()
        }
    )
    z = jax.ShapeDtypeStruct((1, 90, 160, 16), jnp.float32)
    frames, cache = jax.eval_shape(
        lambda params, z: vae.decode_first(params, WAN, z), shapes, z
    )
    assert frames.shape == (1, 1, 720, 1280, 3)
    frames, later = jax.eval_shape(
        lambda params, z, cache: vae.decode_next(params, WAN, z, cache),
        shapes,
        z,
        cache,
    )
    assert frames.shape == (1, 4, 720, 1280, 3)
    assert later == cache


def test_the_autoencoder_of_wan_has_its_127_million_parameters():
    # As counted over diffusers' own model.
    count = sum(math.prod(shape) for shape in vae.tensor_shapes(WAN).values())
    assert count == 126_892_531
    assert (WAN.time_scale, WAN.space_scale) == (4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_residual": True}, "is_residual is True"),
        ({"patch_size": 2}, "patch_size is 2"),
        ({"out_channels": 12}, "out_channels is 12, and only 3"),
        ({"decoder_base_dim": 16}, "decoder_base_dim is 16, and only 8"),
        ({"attn_scales": [0.5]}, "attn_scales"),
        ({"temperal_downsample": [True, True]}, "temperal_downsample has 2 entries"),
        ({"latents_mean": [0.0]}, "latents_mean has 1 entries, and z_dim is 3"),
        ({"latents_std": [1.0] * 4}, "latents_std has 4 entries"),
    ],
)
def test_a_config_of_another_autoencoder_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        vae.VAEConfig.from_json(TINY | change)


def test_what_a_config_lacks_is_named():
    lacking = {k: v for k, v in TINY.items() if k not in ("z_dim", "latents_std")}
    with pytest.raises(ValueError, match="latents_std, z_dim missing"):
        vae.VAEConfig.from_json(lacking)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 4, 6, 6, 3), r"4 frames: takes 2 \* k \+ 1"), ((1, 3, 6, 5, 3), "5 x 6")],
)
def test_a_video_that_does_not_fit_is_refused(shape, message):
    params, config = load(TINY)
    with pytest.raises(ValueError, match=message):
        vae.encode(params, config, jnp.zeros(shape))
