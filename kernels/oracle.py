"""Attention written out in float64, which every backend is checked against.

Masks are made element by element from the pattern's definition, and share nothing with
the closed forms of `kernels.tiles`.
"""

import numpy as np

from kernels.tiles import HeadKind, TileTable


def mask(table: TileTable, kind: HeadKind) -> np.ndarray:
    """Which keys each query of a head looks at, bool [tokens, tokens], frame-major."""
    tokens, sink = table.grid.tokens, table.grid.positions
    if kind == HeadKind.DENSE:
        return np.ones((tokens, tokens), bool)
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    kept = (i < sink) | (j < sink) | (abs(i - j) <= table.band)
    if table.rounding == "tile":
        height, width = table.tile
        for top in range(0, tokens, height):
            for left in range(0, tokens, width):
                tile = np.s_[top : top + height, left : left + width]
                kept[tile] = kept[tile].any()
    if kind == HeadKind.TEMPORAL:
        frame, position = np.divmod(np.arange(tokens), sink)
        place = sink + position * (table.grid.frames - 1) + frame - 1
        place[:sink] = np.arange(sink)
        kept = kept[np.ix_(place, place)]
    return kept


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: TileTable | None = None,
    kinds: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention of q, k, v [heads, tokens, head_dim], in float64.

    With a table, head h looks at what `mask(table, kinds[h])` keeps.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if table is not None and kinds is not None:
        scores[~np.stack([mask(table, HeadKind(kind)) for kind in kinds])] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v
