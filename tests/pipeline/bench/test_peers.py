"""The kernels that ours are compared with."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pipeline.bench import peers
from pipeline.bench.bundles import compile_kernel

BLOCKS = (512, 512, 256)


@pytest.mark.parametrize("transposed", [True, False])
def test_the_two_matmuls_are_those_of_attention(transposed):
    with pltpu.force_tpu_interpret_mode():
        call, shapes = peers.matmuls(128, 256, 128, transposed=transposed)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, shape.shape, shape.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    out = call(q, k, v)
    if transposed:
        out = out.mT
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    want = np.einsum("hqd,hkd,hke->hqe", q, k, v, optimize=True)
    # Scores and results are rounded to bfloat16, by up to 2^-9 of each: over sums of
    # 512 terms of either sign, less than 2^-7 of their size.
    error = np.abs(np.asarray(out, np.float64) - want).max()
    assert error < 2**-7 * np.abs(want).max()


def test_the_floor_is_the_v6es_peak_with_the_array_half_used_by_the_scores():
    assert peers.floor(2048, 2048) == 6144
    assert peers.floor(3328, 1536) == 7488


@pytest.mark.tpu_compile
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
@pytest.mark.parametrize("name", peers.kernels(*BLOCKS))
def test_a_peers_tile_holds_all_its_products(name):
    if "Tokamax" in name:
        pytest.importorskip("tokamax")
    tile = compile_kernel(peers.kernels(*BLOCKS)[name]).tile()
    # Both products are half as deep, or half as wide, as the array, but for p.v in
    # the transposed form.
    both_halved = 2 * BLOCKS[0] * BLOCKS[1] * peers.HEAD_DIM // 131_072
    floor = peers.floor(*BLOCKS[:2])
    assert tile.matmul_cycles == (floor if "transposed" in name else both_halved)
    assert tile.bundles > tile.matmul_cycles


def test_the_kernels_arguments_are_those_of_their_builders():
    for kernel in peers.kernels(*BLOCKS).values():
        module, function = kernel.build.split(":")
        assert module == peers.__name__
        if function != "tokamax_splash":  # which needs tokamax
            _, (q, _, v) = getattr(peers, function)(**kernel.arguments)
            assert (q.dtype, v.dtype) == (jnp.bfloat16, jnp.bfloat16)
