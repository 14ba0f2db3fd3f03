"""Kernels to compare with: other people's attention, and what bounds any.

All take heads of 128, bfloat16, no mask, forward only, over a few tiles: enough for
the grid to be a loop. Each function is a `build` of `pipeline.bench.bundles.Kernel`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from pipeline.bench.bundles import Kernel

HEAD_DIM = 128
HEADS = 2
# Tiles along each side of the scores.
BLOCKS = 2
# As much as one of these kernels may take of a core's 128 MiB.
VMEM_LIMIT = 100 * 2**20

Built = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


def kernels(block_q: int, block_kv: int, kv_compute: int) -> dict[str, Kernel]:
    """All of this module's kernels, by what a table calls them.

    Args:
        block_q: queries of a tile.
        block_kv: keys of a tile.
        kv_compute: keys that are computed at once.
    """
    blocks = {"block_q": block_q, "block_kv": block_kv, "kv_compute": kv_compute}

    def kernel(function: str, name: str, **arguments: Any) -> Kernel:
        return Kernel(f"{__name__}:{function}", name, blocks | arguments)

    name = "splash_mha_fwd_no_residuals"
    return {
        "two matmuls, transposed": kernel("matmuls", "matmuls", transposed=True),
        "two matmuls, usual form": kernel("matmuls", "matmuls", transposed=False),
        "Tokamax splash, constant max": kernel("tokamax_splash", name, constant=True),
        "Tokamax splash, online max": kernel("tokamax_splash", name, constant=False),
        "JAX splash": kernel("jax_splash", name),
    }


def floor(block_q: int, block_kv: int) -> int:
    """The fewest bundles of a tile of attention on the v6e's MXUs.

    They take 262,144 multiply-adds a cycle (918 TFLOP/s at 1.75 GHz) where the depth
    of a product fills the array's 256 rows, and half where it is a head's 128: as in
    q.k, whichever way it is turned.
    """
    products = block_q * block_kv * HEAD_DIM
    return products // 131_072 + products // 262_144


def matmuls(block_q: int, block_kv: int, kv_compute: int, transposed: bool) -> Built:
    """Attention's two products without its softmax: nothing is left to take away.

    Args:
        block_q: queries of a tile.
        block_kv: keys of a tile.
        kv_compute: keys that are computed at once.
        transposed: S^T = K.Q^T and O^T = V^T.S^T, else S = Q.K^T and O = S.V. O is
            transposed in memory where it is computed so.
    """
    if transposed:
        out, scratch = (HEAD_DIM, block_q), lambda head, i, j: (head, 0, i)
    else:
        out, scratch = (block_q, HEAD_DIM), lambda head, i, j: (head, i, 0)

    def body(q_ref, k_ref, v_ref, o_ref, sum_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        for start in range(0, block_kv, kv_compute):
            keys = pl.ds(start, kv_compute)
            k, v = k_ref[keys, :], v_ref[keys, :]
            if transposed:
                scores = _product(k, q_ref[...], 1, 1).astype(v.dtype)
                sum_ref[...] += _product(v, scores, 0, 0)
            else:
                scores = _product(q_ref[...], k, 1, 1).astype(v.dtype)
                sum_ref[...] += _product(scores, v, 1, 0)

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = sum_ref[...].astype(o_ref.dtype)

    shapes = _shapes(block_q, block_kv)
    q = shapes[0]
    rows = pl.BlockSpec((None, block_q, HEAD_DIM), lambda head, i, j: (head, i, 0))
    keys = pl.BlockSpec((None, block_kv, HEAD_DIM), lambda head, i, j: (head, j, 0))
    call = pl.pallas_call(
        body,
        grid=(HEADS, BLOCKS, BLOCKS),
        in_specs=[rows, keys, keys],
        out_specs=pl.BlockSpec((None, *out), scratch),
        out_shape=jax.ShapeDtypeStruct(
            (HEADS, HEAD_DIM, q.shape[1]) if transposed else q.shape, q.dtype
        ),
        scratch_shapes=[pltpu.VMEM(out, jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT),
        name="matmuls",
    )
    return jax.jit(call), shapes


def jax_splash(block_q: int, block_kv: int, kv_compute: int) -> Built:
    """JAX's own splash attention, which has the online max only."""
    q, k, _ = shapes = _shapes(block_q, block_kv)
    mask = splash_attention_mask.FullMask((q.shape[1], k.shape[1]))
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * HEADS),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block_q, block_kv=block_kv, block_kv_compute=kv_compute
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    return jax.jit(attend), shapes


def tokamax_splash(
    block_q: int, block_kv: int, kv_compute: int, constant: bool
) -> Built:
    """Tokamax's splash attention.

    Args:
        block_q: queries of a tile.
        block_kv: keys of a tile.
        kv_compute: keys that are computed at once.
        constant: a given number in place of the running max of each row.
    """
    # No dependency of the product's.
    from tokamax._src.ops.experimental.tpu.splash_attention import (  # pyright: ignore
        splash_attention_kernel,
        splash_attention_mask,
    )

    q, k, _ = shapes = _shapes(block_q, block_kv)
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.FullMask((q.shape[1], k.shape[1])),
        config=splash_attention_kernel.SplashConfig(
            block_q=block_q,
            block_kv=block_kv,
            block_kv_compute=kv_compute,
            max_logit_const=math.sqrt(HEAD_DIM) if constant else None,
        ),
        q_seq_shards=1,
    )
    return jax.jit(attend), shapes


def _product(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    dimensions = (((over_a,), (over_b,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _shapes(block_q: int, block_kv: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k and v: [heads, tokens, head_dim], [heads, keys, head_dim] twice."""
    q = (HEADS, BLOCKS * block_q, HEAD_DIM)
    kv = (HEADS, BLOCKS * block_kv, HEAD_DIM)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, kv, kv))
