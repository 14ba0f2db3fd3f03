"""Finds out, while rendering, which kind each head is.

After Sparse VideoGen (https://arxiv.org/abs/2502.01776): for a few sampled queries,
exact attention over all keys is compared with attention through the tiles, for both
sparse kinds; the better one is taken where it is good enough. Unlike there, the tiles
are the very ones that would run.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels import layouts
from kernels.tiles import HeadKind, TileTable


class Profile(NamedTuple):
    """What profiling found.

    Attributes:
        kinds: Each head's `kernels.tiles.HeadKind`.
        errors: Of each head as SPATIAL and as TEMPORAL, in this order: the root of the
            mean squared difference to exact attention, over that of exact attention;
            infinite where that is undefined.
    """

    kinds: Int[Array, " heads"]
    errors: Float[Array, "heads 2"]


def sample(key: Array, tokens: int, samples: int) -> Int[Array, " samples"]:
    """Draws tokens from the whole clip: one from each of equally long stretches."""
    ends = np.arange(samples + 1) * tokens // samples
    return jax.random.randint(key, (samples,), ends[:-1], ends[1:])


def choose(
    q: Float[Array, "heads tokens head_dim"],
    k: Float[Array, "heads tokens head_dim"],
    v: Float[Array, "heads tokens head_dim"],
    table: TileTable,
    rows: Int[Array, " samples"],
    tolerance: float,
) -> Profile:
    """Chooses each head's kind by its error at sampled queries.

    Head after head, so that memory for scores is that of one head's samples.

    Args:
        q: Queries, frame-major.
        k: Keys, likewise.
        v: Values, likewise.
        table: The tiles that a sparse head would compute.
        rows: The sampled queries' frame-major places.
        tolerance: The largest error of a sparse head; a head is DENSE where neither
            kind keeps to it, or where an error is not finite.
    """
    kept = jnp.stack([_kept(table, kind, rows) for kind in _SPARSE])

    def head(x: tuple[Array, Array, Array]) -> Array:
        q, k, v = x
        v = v.astype(jnp.float32)
        scale = q.shape[-1] ** -0.5
        scores = jnp.einsum(
            "qd,kd->qk", q[rows] * scale, k, preferred_element_type=jnp.float32
        )
        exact = jax.nn.softmax(scores) @ v
        sparse = jax.nn.softmax(jnp.where(kept, scores, -jnp.inf)) @ v
        difference = ((sparse - exact) ** 2).mean((1, 2))
        error = jnp.sqrt(difference / (exact**2).mean())
        return jnp.where(jnp.isnan(error), jnp.inf, error)

    errors = jax.lax.map(head, (q, k, v))
    good = (errors.min(1) <= tolerance) & jnp.isfinite(errors).all(1)
    kinds = jnp.where(good, jnp.array(_SPARSE)[errors.argmin(1)], HeadKind.DENSE)
    return Profile(kinds.astype(jnp.int32), errors)


# In the order of the errors.
_SPARSE = (HeadKind.SPATIAL, HeadKind.TEMPORAL)


def _kept(table: TileTable, kind: HeadKind, rows: Array) -> Bool[Array, "samples keys"]:
    """Which keys, in frame-major order, the tiles let the sampled queries look at."""
    places = np.arange(table.grid.tokens, dtype=np.int32)
    if kind == HeadKind.TEMPORAL:
        places = layouts.to_frame_major(places, table.grid, axis=0)
    query, key = jnp.asarray(places)[rows][:, None], jnp.asarray(places)
    runs = jnp.asarray(table.runs, jnp.int32)[query // table.tile.queries]
    sink_end, start, end = jnp.moveaxis(runs, -1, 0)
    column = key // table.tile.keys
    kept = (column < sink_end) | ((start <= column) & (column < end))
    if table.rounding == "exact":
        kept &= table.keeps(query, key)
    return kept
