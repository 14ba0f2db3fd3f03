"""Sparse attention in XLA over the live tiles, for machines without an accelerator."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels import dense, layouts
from kernels.tiles import HeadKind, TileTable

# Scores of one head that are held at once, in elements: see `dense.SCORES_AT_ONCE`.
SCORES_AT_ONCE = 2**20


def attend(
    q: Float[Array, "heads tokens head_dim"],
    k: Float[Array, "heads tokens head_dim"],
    v: Float[Array, "heads tokens head_dim"],
    table: TileTable,
    kinds: Int[Array, " heads"],
) -> Float[Array, "heads tokens head_dim"]:
    """Attention through the live tiles; see `kernels.attention.attend`.

    An empty tile is neither read nor computed. Head after head, each by the branch of
    its kind, so that kinds are data and change without compiling anything again.
    """

    def head(x: tuple[Array, ...]) -> Array:
        kind, q, k, v = x
        return jax.lax.cond(kind == HeadKind.DENSE, whole, sparse, kind, q, k, v)

    def whole(kind: Array, q: Array, k: Array, v: Array) -> Array:
        return dense.attend(q[None], k[None], v[None])[0]

    def sparse(kind: Array, q: Array, k: Array, v: Array) -> Array:
        def if_temporal(move, *x: Array):
            return jax.lax.cond(
                kind == HeadKind.TEMPORAL,
                lambda *x: tuple(move(y, table.grid) for y in x),
                lambda *x: x,
                *x,
            )

        q, k, v = if_temporal(layouts.to_position_major, q, k, v)
        (out,) = if_temporal(layouts.to_frame_major, _sparse(q, k, v, table))
        return out

    return jax.lax.map(head, (kinds, q, k, v))


def _sparse(q: Array, k: Array, v: Array, table: TileTable) -> Array:
    """Attention of one head, its tokens in the head's own layout."""
    tokens, head_dim = q.shape
    height, width = table.tile
    q = jnp.pad(q * (head_dim**-0.5), ((0, table.rows * height - tokens), (0, 0)))
    q = q.reshape(table.rows, height, head_dim)

    # Runs in tokens; the padding of the last column is in none, so nothing masks it.
    near_end, far_start, far_end = np.minimum(table.runs * width, tokens).T
    counts = near_end + far_end - far_start
    out = jnp.zeros(q.shape, v.dtype)
    # Rows with equally many keys share a program; nearly all do.
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        blocks = min(height, -(-height * count // SCORES_AT_ONCE))
        size = -(-height // blocks)

        def row(x: tuple[Array, ...], count=count, blocks=blocks, size=size) -> Array:
            first, near_end, far_start, q = x
            # Both runs' keys one after the other: two products and a softmax between
            # them are what XLA makes the best code of (0.8 of the time of runs taken
            # each by itself, at 1,344 tokens of 12 heads of 32).
            place = jnp.arange(count)
            place = jnp.where(place < near_end, place, place - near_end + far_start)
            keys, values = (jnp.take(x, place, 0, mode="clip") for x in (k, v))

            def block(x: tuple[Array, Array]) -> Array:
                query, q = x
                keeps = None
                if table.rounding == "exact":
                    keeps = table.keeps(query[:, None], place)
                return _softmax(q, keys, values, keeps)

            query = first + jnp.arange(blocks * size).reshape(blocks, size)
            q = jnp.pad(q, ((0, blocks * size - height), (0, 0)))
            made = jax.lax.map(block, (query, q.reshape(blocks, size, head_dim)))
            return made.reshape(-1, head_dim)[:height]

        firsts = rows * height, near_end[rows], far_start[rows]
        made = jax.lax.map(row, (*map(jnp.asarray, firsts), q[rows]))
        out = out.at[rows].set(made)
    return out.reshape(-1, head_dim)[:tokens]


def _softmax(q: Array, k: Array, v: Array, keeps: Array | None) -> Array:
    """Attention of queries to keys, of which `keeps` [queries, keys] may drop some."""
    scores = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=jnp.float32)
    if keeps is not None:
        scores = jnp.where(keeps, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum(
        "qk,kd->qd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return (out / total).astype(v.dtype)
