import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import oracle, profiling
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

SPATIAL, TEMPORAL, DENSE = HeadKind
GRID = TokenGrid(9, 16)
TABLE = TileTable.within(0.5, GRID, TileShape(16, 16))


def expected_errors(qkv, table, rows):
    """Relative errors [heads, 2] at the sampled rows, in float64 by the oracle."""
    q, k, v = qkv
    exact = oracle.attend(q, k, v)[:, rows]
    errors = []
    for kind in (SPATIAL, TEMPORAL):
        kinds = np.full(len(exact), kind)
        sparse = oracle.attend(q, k, v, table, kinds)[:, rows]
        difference = ((sparse - exact) ** 2).mean((1, 2))
        errors.append(np.sqrt(difference / (exact**2).mean((1, 2))))
    return np.stack(errors, 1)


def choose(qkv, table=TABLE, rows=None, tolerance=0.1):
    if rows is None:
        rows = profiling.sample(jax.random.key(0), table.grid.tokens, 64)
    q, k, v = map(jnp.asarray, qkv)
    return profiling.choose(q, k, v, table, rows, tolerance)


# Each table compiles anew.
@settings(max_examples=8)
@given(cases.tables(), st.integers(0, 2**32 - 1), st.data())
def test_errors_are_those_of_the_masks(table, seed, data):
    qkv = cases.random_qkv(seed, 2, table.grid.tokens, 8)
    row = st.integers(0, table.grid.tokens - 1)
    rows = np.array(data.draw(st.lists(row, min_size=1, max_size=9)), np.int32)
    profile = choose(qkv, table, jnp.asarray(rows))
    # float32 rounding of sums of up to a hundred terms, of the order of the outputs.
    expected = expected_errors(qkv, table, rows)
    np.testing.assert_allclose(profile.errors, expected, rtol=1e-4, atol=1e-5)


def planted(kind, seed=0):
    """A head whose queries see the tokens near their own in the kind's layout."""
    rng = np.random.default_rng(seed)
    frame, position = np.divmod(np.arange(GRID.tokens), GRID.positions)
    near = frame if kind == SPATIAL else position
    # Tokens of a frame, or a position, share a key that nobody else has.
    keys = 8 * np.eye(16)[near] + 0.1 * rng.normal(size=(GRID.tokens, 16))
    values = rng.normal(size=(GRID.tokens, 16))
    return [keys, keys, values]


def sharp(seed=0):
    """A head whose queries each see a few keys anywhere."""
    q, k, v = np.random.default_rng(seed).normal(size=(3, GRID.tokens, 16))
    return [6 * q, k, v]


def heads(*made):
    return [np.stack(x).astype(np.float32) for x in zip(*made, strict=True)]


@pytest.mark.parametrize("rounding", ["tile", "exact"])
def test_planted_heads_get_their_kind_and_unstructured_ones_stay_dense(rounding):
    table = TileTable.within(0.5, GRID, TileShape(16, 16), rounding)
    qkv = heads(planted(TEMPORAL), sharp(), planted(SPATIAL), planted(TEMPORAL, 1))
    profile = choose(qkv, table)
    assert profile.kinds.tolist() == [TEMPORAL, DENSE, SPATIAL, TEMPORAL]
    assert profile.errors[0, 1] < 0.1 < profile.errors[0, 0]


def test_the_better_kind_is_taken_within_the_tolerance_and_dense_beyond_it():
    qkv = cases.random_qkv(3, 6, GRID.tokens, 8)
    errors = np.asarray(choose(qkv).errors)
    least = errors.min(1)
    tolerance = float(np.median(least))
    kinds = np.asarray(choose(qkv, tolerance=tolerance).kinds)
    np.testing.assert_array_equal(kinds == DENSE, least > tolerance)
    kinds = np.asarray(choose(qkv, tolerance=10).kinds)
    np.testing.assert_array_equal(kinds, errors.argmin(1))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_errors_that_are_not_finite_make_a_head_dense(bad):
    qkv = heads(planted(SPATIAL), planted(SPATIAL), planted(SPATIAL))
    qkv[2][1] = bad
    qkv[2][2] = 0
    assert choose(qkv, tolerance=1000).kinds.tolist() == [SPATIAL, DENSE, DENSE]


def test_a_table_of_all_tiles_has_no_error():
    whole = TileTable(GRID, TileShape(16, 16), GRID.tokens)
    errors = choose(cases.random_qkv(1, 2, GRID.tokens, 8), whole).errors
    np.testing.assert_array_equal(errors, np.zeros((2, 2)))


@settings(max_examples=50)
@given(st.integers(1, 10**6), st.integers(0, 2**32 - 1))
def test_samples_come_from_the_whole_clip(tokens, seed):
    rows = np.asarray(profiling.sample(jax.random.key(seed), tokens, 64))
    assert rows.shape == (64,)
    assert rows.min() >= 0 and rows.max() < tokens
    # One in each stretch: two neighbours are never two stretches apart.
    assert np.diff(rows, prepend=0, append=tokens).max() <= 2 * -(-tokens // 64)


def test_scores_of_one_head_are_held_at_a_time():
    grid = TokenGrid(8, 128)
    table = TileTable.within(0.5, grid, TileShape(64, 64))
    shape = jax.ShapeDtypeStruct((32, grid.tokens, 8), jnp.float32)
    rows = jax.ShapeDtypeStruct((64,), jnp.int32)
    program = jax.jit(lambda q, k, v, rows: profiling.choose(q, k, v, table, rows, 0.1))
    memory = program.lower(shape, shape, shape, rows).compile().memory_analysis()
    assert memory is not None
    one_head = 4 * 64 * grid.tokens
    # Scores and masked ones of both kinds, weights, and the masks: of one head, not 32.
    assert memory.temp_size_in_bytes < 10 * one_head


def test_a_head_without_output_is_dense_and_its_error_infinite():
    q, k, v = cases.random_qkv(3, 2, GRID.tokens, 8)
    v[1] = 0
    profile = choose((q, k, v), tolerance=1e9)
    assert profile.kinds[1] == DENSE != profile.kinds[0]
    assert np.isposinf(profile.errors[1]).all()
