"""Sparse attention for GPUs: a Pallas kernel, lowered by Triton, over the live tiles.

One program computes a block of queries of one head: an online softmax (Milakov and
Gimelshein, arXiv:1805.02867) over blocks of keys, with the output divided once at the
end (Dao, arXiv:2307.08691). The live tiles of a row are two runs of keys, which are
walked by blocks of their own size from where each run begins; only where a run ends
within a block are keys masked. So tiles of any shape will do, nothing is padded to
them, and what the runs leave out is never read.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from kernels import layouts
from kernels.tiles import HeadKind, TileTable

# Shared memory of a block of keys, and of one of values. Three of each in flight make
# 96 KB, where the smallest of the GPUs that Triton serves has 99 KB (compute capability
# 8.6 and 8.9, CUDA programming guide). Longer rows also take room for the queries, and
# keep two in flight: 74 KB (as Triton 3.6 compiles them, for 8.9 and 9.0).
BLOCK_BYTES = 2**14
LONG_ROW_BYTES = 256
# Scores of one query in a block, as weights: with more, registers spill.
WEIGHTS_BYTES = 128
# The least side of a product in Triton.
LEAST_SIDE = 16


def attend(
    q: Float[Array, "heads tokens head_dim"],
    k: Float[Array, "heads tokens head_dim"],
    v: Float[Array, "heads tokens head_dim"],
    table: TileTable,
    kinds: Int[Array, " heads"],
    interpret: bool = False,
) -> Float[Array, "heads tokens head_dim"]:
    """Attention through the live tiles; see `kernels.attention.attend`.

    An empty tile is neither read nor computed. Kinds are data, so that they change
    without compiling anything again.

    Args:
        q: Queries, the table's tokens in frame-major order.
        k: Keys, likewise.
        v: Values, likewise.
        table: The live tiles of SPATIAL and TEMPORAL heads; of any shape.
        kinds: Each head's `kernels.tiles.HeadKind`.
        interpret: Runs the kernel without a GPU, step by step: for tests.

    Raises:
        ValueError: A head's dimension is too large for a block.
    """
    heads, tokens, head_dim = q.shape
    queries, keys, padded = _block(table.tile.queries, head_dim, q.dtype)
    temporal = (kinds == HeadKind.TEMPORAL)[:, None, None]

    def enter(x: Array) -> Array:
        x = jnp.where(temporal, layouts.to_position_major(x, table.grid), x)
        return jnp.pad(x, ((0, 0), (0, 0), (0, padded - head_dim)))

    # In tokens, so that the padding of the last column is in no run. The sink's rows
    # run over all tokens, as a DENSE head does.
    runs = np.minimum(table.runs * table.tile.keys, tokens).astype(np.int32)
    ragged = ((runs[:, 0] % keys) | ((runs[:, 2] - runs[:, 1]) % keys)).any()
    kernel = functools.partial(
        _kernel,
        table=table,
        queries=queries,
        keys=keys,
        scale=math.log2(math.e) / math.sqrt(head_dim),
        masks=bool(ragged) or table.rounding == "exact",
    )
    head = pl.BlockSpec((None, tokens, padded), lambda block, row, head: (head, 0, 0))
    out = pl.pallas_call(
        kernel,
        # The head changes last: the programs at work share keys and values in cache.
        grid=(-(-table.tile.queries // queries), table.rows, heads),
        in_specs=[pl.BlockSpec(), pl.BlockSpec(), head, head, head],
        out_specs=head,
        out_shape=jax.ShapeDtypeStruct((heads, tokens, padded), v.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=8 if queries > 64 else 4,
            num_stages=3 if padded * q.dtype.itemsize <= LONG_ROW_BYTES else 2,
        ),
        interpret=interpret,
        name="tile_attention",
    )(kinds.astype(jnp.int32), jnp.asarray(runs), enter(q), enter(k), enter(v))
    out = out[..., :head_dim]
    return jnp.where(temporal, layouts.to_frame_major(out, table.grid), out)


def _block(height: int, head_dim: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Queries, keys and head_dim of a block, powers of two as Triton needs them."""
    padded = max(LEAST_SIDE, pl.next_power_of_2(head_dim))
    keys = min(WEIGHTS_BYTES, BLOCK_BYTES // padded) // dtype.itemsize
    if keys < LEAST_SIDE:
        raise ValueError(
            f"a head_dim of {head_dim} in {dtype.name} is too large for the GPU's "
            f"kernel; the largest is {BLOCK_BYTES // LEAST_SIDE // dtype.itemsize}"
        )
    # What leaves fewer rows of a tile's last block unused; the larger where both do.
    queries = min((2 * keys, keys), key=lambda size: -height % size)
    return min(queries, max(LEAST_SIDE, pl.next_power_of_2(height))), keys, padded


def _kernel(
    kinds_ref,
    runs_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    *,
    table: TileTable,
    queries: int,
    keys: int,
    scale: float,
    masks: bool,
):
    """One block of queries, over its row's live tiles.

    Args:
        kinds_ref: int32 [heads].
        runs_ref: The rows' runs in tokens, int32 [rows, 3]; see `TileTable.runs`.
        q_ref: The head's queries in its own layout [tokens, head_dim].
        k_ref: Its keys, likewise.
        v_ref: Its values, likewise.
        out_ref: Its output, likewise.
        table: The table that the runs are of.
        queries: Of a block.
        keys: Of a block.
        scale: Of the scores, so that weights are powers of two.
        masks: Whether any block of any row or kind needs a mask.
    """
    block, row, head = (pl.program_id(axis) for axis in range(3))
    tokens, sink = table.grid.tokens, table.grid.positions
    first = row * table.tile.queries + block * queries
    places = first + jnp.arange(queries)
    row_end = jnp.minimum((row + 1) * table.tile.queries, tokens)
    # Rows of the next tile have other runs, and are another program's.
    mine = (places < row_end)[:, None]
    q = pltriton.load(q_ref.at[pl.ds(first, queries)], mask=mine, other=0)

    dense = kinds_ref[head] == HeadKind.DENSE
    near_end = jnp.where(dense, tokens, runs_ref[row, 0])
    far = runs_ref[row, 1]
    far_end = jnp.where(dense, far, runs_ref[row, 2])
    near_blocks = lax.div(near_end + keys - 1, keys)
    far_blocks = lax.div(far_end - far + keys - 1, keys)

    # Of the blocks in their order, [0, a) and [b, c) are whole: no key needs a mask.
    a, b = lax.div(near_end, keys), near_blocks
    c = near_blocks + lax.div(far_end - far, keys)
    if table.rounding == "exact":

        def starting_before(end: Array) -> Array:
            in_near = jnp.clip(lax.div(end, keys), 0, near_blocks)
            return in_near + jnp.clip(lax.div(end - far, keys), 0, far_blocks)

        # Keys within the band of all the block's queries, and the sink's keys.
        inner, outer = first + queries - 1 - table.band, first + table.band + 1
        sink_blocks = sink // keys
        inner_begin = jnp.maximum(starting_before(inner + keys - 1), sink_blocks)
        inner_end = starting_before(jnp.minimum(outer, tokens))
        all_kept = dense | (first + queries <= sink)
        a = jnp.where(all_kept, a, sink_blocks)
        b = jnp.where(all_kept, b, inner_begin)
        c = jnp.where(all_kept, c, jnp.maximum(inner_begin, inner_end))

    def step(at: Array, carry, masked: bool):
        near = at < near_blocks
        start = jnp.where(near, at * keys, far + (at - near_blocks) * keys)
        k_block, v_block = (ref.at[pl.ds(start, keys)] for ref in (k_ref, v_ref))
        if masked:
            key = start + jnp.arange(keys)
            live = key < jnp.where(near, near_end, far_end)
            load = functools.partial(pltriton.load, mask=live[:, None], other=0)
            keep = live[None, :]
            if table.rounding == "exact":
                keep &= table.keeps(places[:, None], key[None, :]) | dense
            scores = jnp.where(keep, _dot(q, load(k_block).T), -jnp.inf)
        else:
            load = pltriton.load
            scores = _dot(q, load(k_block).T)
        out, top, total = carry
        # Scaled here and not before the maximum, scores less their maximum are one
        # operation (and too inexact beyond 2**30, which no model comes near).
        new_top = jnp.maximum(top, scores.max(1) * scale)
        weights = jnp.exp2(scores * scale - new_top[:, None])
        fade = jnp.exp2(top - new_top)
        total = total * fade + weights.sum(1)
        values = load(v_block)
        out = out * fade[:, None] + _dot(weights.astype(values.dtype), values)
        return out, new_top, total

    def whole(i: Array, carry):
        return step(jnp.where(i < a, i, i - a + b), carry, masked=False)

    def partly(i: Array, carry):
        return step(jnp.where(i < b - a, a + i, i - (b - a) + c), carry, masked=True)

    carry = (
        jnp.zeros((queries, q.shape[1]), jnp.float32),
        # No inf - inf follows: the first block is whole, or has the sink's first key.
        jnp.full(queries, -jnp.inf),
        jnp.zeros(queries, jnp.float32),
    )
    carry = lax.fori_loop(0, a + c - b, whole, carry)
    if masks:
        blocks = near_blocks + far_blocks
        carry = lax.fori_loop(0, b - a + blocks - c, partly, carry)
    out, _, total = carry
    out = (out / total[:, None]).astype(out_ref.dtype)
    pltriton.store(out_ref.at[pl.ds(first, queries)], out, mask=mine)


def _dot(a: Array, b: Array) -> Array:
    """A product summed in float32; of float32 without rounding it to TF32."""
    return jnp.dot(
        a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
