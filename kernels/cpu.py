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

    def spatial(q: Array, k: Array, v: Array) -> Array:
        return _sparse(q, k, v, table)

    def temporal(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (layouts.to_position_major(x, table.grid) for x in (q, k, v))
        return layouts.to_frame_major(_sparse(q, k, v, table), table.grid)

    def whole(q: Array, k: Array, v: Array) -> Array:
        return dense.attend(q[None], k[None], v[None])[0]

    branches = {
        HeadKind.SPATIAL: spatial,
        HeadKind.TEMPORAL: temporal,
        HeadKind.DENSE: whole,
    }

    def head(x: tuple[Array, ...]) -> Array:
        kind, q, k, v = x
        return jax.lax.switch(kind, [branches[kind] for kind in HeadKind], q, k, v)

    return jax.lax.map(head, (kinds, q, k, v))


def _sparse(q: Array, k: Array, v: Array, table: TileTable) -> Array:
    """Attention of one head, its tokens in the head's own layout."""
    tokens, head_dim = q.shape
    height, width = table.tile
    q = jnp.pad(q * (head_dim**-0.5), ((0, table.rows * height - tokens), (0, 0)))
    q = q.reshape(table.rows, height, head_dim)

    # Runs in tokens; the padding of the last column is in none, so nothing masks it.
    near_end, far_start, far_end = np.minimum(table.runs * width, tokens).T
    lengths = np.stack([near_end, far_end - far_start], 1)
    out = jnp.zeros(q.shape, v.dtype)
    # Rows whose runs are equally long share a program; nearly all do.
    for near, far in np.unique(lengths, axis=0).tolist():
        rows = np.flatnonzero((lengths == [near, far]).all(1))
        count = min(height, -(-height * (near + far) // SCORES_AT_ONCE))
        size = -(-height // count)

        def row(x: tuple[Array, Array, Array], near=near, far=far, size=size) -> Array:
            first, start, q = x
            keys, values, places = [k[:near]], [v[:near]], [jnp.arange(near)]
            if far:
                keys.append(jax.lax.dynamic_slice_in_dim(k, start, far))
                values.append(jax.lax.dynamic_slice_in_dim(v, start, far))
                places.append(start + jnp.arange(far))

            def block(x: tuple[Array, Array]) -> Array:
                first, q = x
                scores = [
                    jnp.einsum("qd,kd->qk", q, k, preferred_element_type=jnp.float32)
                    for k in keys
                ]
                if table.rounding == "exact":
                    query = first + jnp.arange(size)[:, None]
                    scores = [
                        jnp.where(table.keeps(query, place), s, -jnp.inf)
                        for s, place in zip(scores, places, strict=True)
                    ]
                return _softmax(scores, values)

            if size == height:
                return block((first, q))
            blocks = -(-height // size)
            q = jnp.pad(q, ((0, blocks * size - height), (0, 0)))
            firsts = first + size * jnp.arange(blocks)
            made = jax.lax.map(block, (firsts, q.reshape(blocks, size, head_dim)))
            return made.reshape(-1, head_dim)[:height]

        starts = jnp.asarray(far_start[rows])
        made = jax.lax.map(row, (jnp.asarray(rows * height), starts, q[rows]))
        out = out.at[rows].set(made)
    return out.reshape(-1, head_dim)[:tokens]


def _softmax(scores: list[Array], values: list[Array]) -> Array:
    """Softmax over all the scores, each [queries, keys], times their values."""
    tops = [s.max(-1, keepdims=True) for s in scores]
    top = jnp.stack(tops).max(0)
    weights = [jnp.exp(s - top) for s in scores]
    total = jnp.stack([w.sum(-1, keepdims=True) for w in weights]).sum(0)
    parts = [
        jnp.einsum(
            "qk,kd->qd", w.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        for w, v in zip(weights, values, strict=True)
    ]
    return (jnp.stack(parts).sum(0) / total).astype(values[0].dtype)
