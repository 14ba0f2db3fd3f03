"""Cases that every backend's attention is held to, against the same oracle.

Each check takes `attend(q, k, v, table, kinds)`, which gives the output alone: arrays
[heads, tokens, head_dim], tokens in frame-major order. What a head may look at comes
from the oracle's element by element mask, never from the tables under test.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from kernels import oracle
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid

Attend = Callable[..., Any]
QKV = tuple[np.ndarray, np.ndarray, np.ndarray]

SPATIAL, TEMPORAL, DENSE = HeadKind
# Ragged ends on both sides, the last tile short, several empty tiles in a row.
RAGGED = TileTable(TokenGrid(7, 11), TileShape(8, 6), 5)


def tables(
    frames: Sequence[int] = range(1, 9),
    positions: Sequence[int] = range(1, 14),
    queries: Sequence[int] = range(1, 41),
    keys: Sequence[int] = range(1, 41),
) -> st.SearchStrategy[TileTable]:
    """Tables of these sizes and any band, up to one that covers the clip."""

    def table(sizes: tuple[int, ...]) -> st.SearchStrategy[TileTable]:
        grid, tile = TokenGrid(*sizes[:2]), TileShape(*sizes[2:])
        bands = st.integers(0, grid.tokens)
        roundings = st.sampled_from(["tile", "exact"])
        return st.builds(TileTable, st.just(grid), st.just(tile), bands, roundings)

    sizes = map(st.sampled_from, (frames, positions, queries, keys))
    return st.tuples(*sizes).flatmap(table)


def random_qkv(
    seed: int, heads: int, tokens: int, head_dim: int, dtype: Any = np.float32
) -> QKV:
    """Normally distributed q, k and v [heads, tokens, head_dim]."""
    normal = np.random.default_rng(seed).normal(size=(3, heads, tokens, head_dim))
    q, k, v = normal.astype(dtype)
    return q, k, v


def check_oracle(
    attend: Attend, qkv: QKV, table: TileTable, kinds: Any, atol: float
) -> None:
    """Every row agrees with the oracle, and has the dtype of the values."""
    got = attend(*map(jnp.asarray, qkv), table, jnp.asarray(kinds, jnp.int32))
    assert got.dtype == qkv[2].dtype
    expected = oracle.attend(*qkv, table, np.asarray(kinds))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0, atol=atol)


def check_poison(attend: Attend, qkv: QKV, table: TileTable, poisoned: str) -> None:
    """NaN in a row of tiles' own empty tiles leaves its output bit for bit the same.

    One SPATIAL head and one TEMPORAL; `poisoned` is "keys" or "values".
    """
    which = {"keys": 1, "values": 2}[poisoned]
    kinds = jnp.array([SPATIAL, TEMPORAL])
    # Rounded to tiles, the mask is false in empty tiles and nowhere else.
    whole = dataclasses.replace(table, rounding="tile")
    kept = np.stack([oracle.mask(whole, kind) for kind in (SPATIAL, TEMPORAL)])
    # A query's row of tiles, in each head's own layout.
    row = np.arange(table.grid.tokens) // table.tile.queries
    rows = np.stack([row, row[_position_major(table.grid)]])
    clean = np.asarray(attend(*map(jnp.asarray, qkv), table, kinds))
    assert np.isfinite(np.asarray(clean, np.float64)).all()
    some = False
    for r in range(table.rows):
        mine = rows == r
        seen = np.stack([kept[h][mine[h]].any(0) for h in range(2)])
        some |= not seen.all()
        hurt = list(qkv)
        hurt[which] = np.where(seen[..., None], qkv[which], np.nan).astype(
            qkv[which].dtype
        )
        got = np.asarray(attend(*map(jnp.asarray, hurt), table, kinds))
        np.testing.assert_array_equal(got[mine], clean[mine], err_msg=f"row {r}")
    assert some, "the table has no empty tile, so that nothing was tested"


def check_padding(
    attend: Attend, qkv: QKV, table: TileTable, kinds: Any, extra: int
) -> None:
    """What lies beyond the table's tokens reaches no row; its own rows are zeros."""
    kinds, tokens = jnp.asarray(kinds, jnp.int32), table.grid.tokens

    def padded(value: float) -> np.ndarray:
        pads = (0, 0), (0, extra), (0, 0)
        args = [jnp.asarray(np.pad(x, pads, constant_values=value)) for x in qkv]
        return np.asarray(attend(*args, table, kinds))

    clean = padded(0)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean[:, tokens:], np.zeros_like(clean)[:, tokens:])
    for bad in (np.nan, np.inf, -np.inf):
        np.testing.assert_array_equal(padded(bad), clean)


ADVERSARIAL = ("huge", "outlier", "opposite", "equal", "zeros")


def adversarial(
    name: str, heads: int, tokens: int, head_dim: int, dtype: Any = np.float32
) -> QKV:
    """q, k and v that a careless softmax trips over.

    huge: norms a thousand times the usual.
    outlier: one key so long that it is all that half of the queries see, and nothing
        to the others, for whom a bound from the longest key lies far too high.
    opposite: each token's own key, the one it surely sees, is the least like it.
    equal: all tokens the same, so that the output is the mean of what a head sees.
    zeros: likewise, from scores of zero.
    """
    q, k, v = random_qkv(0, heads, tokens, head_dim)
    match name:
        case "huge":
            q, k = 1e3 * q, 1e3 * k
        case "outlier":
            # Scores of about 100 either way, which no rounding can hide.
            q[..., 0] = np.where(np.arange(tokens) % 2, 1, -1)
            k[..., 0] = 0
            k[:, tokens // 2] = 0
            k[:, tokens // 2, 0] = 100 * np.sqrt(head_dim)
        case "opposite":
            q = -3 * k
        case "equal":
            q[:], k[:] = 1.5, 1.5
        case "zeros":
            q, k = np.zeros_like(q), np.zeros_like(k)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def check_adversarial(
    attend: Attend,
    name: str,
    table: TileTable,
    head_dim: int,
    atol: float,
    dtype: Any,
    rounded: Callable[[QKV], QKV] = lambda qkv: qkv,
) -> None:
    """Rows are right wherever the rounding of a score does not decide them.

    `rounded` gives the oracle what a backend makes of its arguments.
    """
    qkv = adversarial(name, 3, table.grid.tokens, head_dim, dtype)
    kinds = list(HeadKind)
    args = map(jnp.asarray, qkv)
    got = np.asarray(attend(*args, table, jnp.asarray(kinds, jnp.int32)), np.float64)
    assert np.isfinite(got).all()
    expected = oracle.attend(*rounded(qkv), table, np.asarray(kinds))
    sure = np.ones(got.shape[:2], bool)
    if name == "huge":
        # Scores are wrong by the dtype's rounding of the largest; nearer ties are moot.
        q, k, _ = (np.asarray(x, np.float64) for x in qkv)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(head_dim)
        kept = np.stack([oracle.mask(table, kind) for kind in kinds])
        ordered = np.sort(np.where(kept, scores, -np.inf), -1)
        margin = ordered[..., -1] - ordered[..., -2]
        rounding = float(jnp.finfo(dtype).eps) * abs(scores).max()
        sure = margin > 4 * rounding + 30
        assert sure.mean() > 0.5
    np.testing.assert_allclose(got[sure], expected[sure], rtol=0, atol=atol)


def _position_major(grid: TokenGrid) -> np.ndarray:
    """The place in sink-first position-major order of each frame-major token."""
    frame, position = np.divmod(np.arange(grid.tokens), grid.positions)
    later = grid.positions + position * (grid.frames - 1) + frame - 1
    return np.where(frame == 0, position, later)
