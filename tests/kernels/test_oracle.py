import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import oracle
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

few = cases.tables(
    frames=range(1, 5), positions=range(1, 4), queries=range(1, 7), keys=range(1, 7)
)


def sees(table, kind, query, key):
    """Whether a frame-major token looks at another: the words of DESIGN, in a loop."""
    frames, positions = table.grid
    height, width = table.tile

    def place(token):
        f, s = divmod(token, positions)
        if kind == HeadKind.SPATIAL or f == 0:
            return token
        return positions + s * (frames - 1) + f - 1

    def pattern(i, j):
        return i < positions or j < positions or abs(i - j) <= table.band

    if kind == HeadKind.DENSE:
        return True
    i, j = place(query), place(key)
    if table.rounding == "exact":
        return pattern(i, j)
    top, left = i // height * height, j // width * width
    return any(
        pattern(a, b)
        for a in range(top, min(top + height, table.grid.tokens))
        for b in range(left, min(left + width, table.grid.tokens))
    )


@settings(max_examples=60)
@given(table=few, kind=st.sampled_from(HeadKind))
def test_masks_are_what_the_words_say(table, kind):
    mask = oracle.mask(table, kind)
    assert mask.dtype == bool and mask.shape == (table.grid.tokens,) * 2
    for (query, key), kept in np.ndenumerate(mask):
        assert kept == sees(table, kind, query, key)


@settings(max_examples=60)
@given(
    table=few,
    kinds=st.lists(st.sampled_from(HeadKind), min_size=1, max_size=3),
    head_dim=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_equals_a_loop(table, kinds, head_dim, seed):
    tokens = table.grid.tokens
    qkv = cases.random_qkv(seed, len(kinds), tokens, head_dim, np.float64)
    got = oracle.attend(*qkv, table, np.array(kinds))
    q, k, v = (x.tolist() for x in qkv)
    for head, kind in enumerate(kinds):
        for i in range(tokens):
            total, sums = 0.0, [0.0] * head_dim
            for j in range(tokens):
                if sees(table, kind, i, j):
                    score = sum(
                        map(math.prod, zip(q[head][i], k[head][j], strict=True))
                    )
                    weight = math.exp(score / math.sqrt(head_dim))
                    total += weight
                    sums = [
                        a + weight * b for a, b in zip(sums, v[head][j], strict=True)
                    ]
            # float64, and no more than a dozen terms.
            assert got[head, i] == pytest.approx([a / total for a in sums], abs=1e-12)


def test_without_a_table_all_see_all():
    qkv = cases.random_qkv(0, 2, 12, 4)
    table = TileTable(TokenGrid(4, 3), TileShape(2, 2), 0)
    dense = np.full(2, HeadKind.DENSE)
    got = oracle.attend(*qkv)
    np.testing.assert_array_equal(got, oracle.attend(*qkv, table, dense))
    assert got.dtype == np.float64
