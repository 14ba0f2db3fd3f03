import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from kernels import attention, chip, dense, oracle, tpu
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

# Several tiles to a row, empty ones between the runs, both ends ragged.
TABLE = TileTable(TokenGrid(6, 90), TileShape(128, 128), 20)
# bfloat16: the output's own rounding, 2^-9 of values that reach 4, and that of each
# weight, which averages out.
ATOL = 0.02
TRACED = []  # a table for each program
BOTH = pytest.mark.parametrize("safe", [100.0, -1.0], ids=["bounded", "online"])
ROUNDINGS = pytest.mark.parametrize("rounding", ["tile", "exact"])


@functools.partial(
    jax.jit,
    static_argnames=("table", "safe"),
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
def interpreted(q, k, v, table, kinds, safe=tpu.SAFE):
    TRACED.append(table)
    return tpu.attend(q, k, v, table, kinds, interpret=True)


def run(qkv, table, kinds, safe=tpu.SAFE):
    q, k, v = map(jnp.asarray, qkv)
    return interpreted(q, k, v, table, jnp.asarray(kinds), safe)


@pytest.fixture
def attend(monkeypatch, safe):
    """Attention in Pallas's interpreter, all heads by one kernel where they can be."""
    monkeypatch.setattr(tpu, "SAFE", safe)

    def attend(q, k, v, table, kinds):
        out, online = interpreted(q, k, v, table, kinds, safe)
        assert safe > 0 or online.all()
        return out

    return attend


def scaled(qkv):
    """What the kernel makes of q, for an oracle: rounded after it is scaled."""
    q, k, v = qkv
    scale = np.log2(np.e) / np.sqrt(q.shape[-1])
    rounded = (np.asarray(q, np.float32) * np.float32(scale)).astype(jnp.bfloat16)
    return np.asarray(rounded, np.float64) / scale, k, v


@BOTH
@settings(max_examples=5, deadline=None)
@given(
    frames=st.integers(1, 6),
    positions=st.integers(1, 130),
    tile=st.sampled_from([(128, 128), (256, 128), (128, 384)]),
    band=st.integers(0, 300),
    rounding=st.sampled_from(["tile", "exact"]),
    head_dim=st.sampled_from([8, 32, 128]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_oracle(
    safe, frames, positions, tile, band, rounding, head_dim, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "SAFE", safe)
        table = TileTable(
            TokenGrid(frames, positions), TileShape(*tile), band, rounding
        )
        qkv = cases.random_qkv(seed, 3, table.grid.tokens, head_dim, jnp.bfloat16)
        out, online = run(qkv, table, np.arange(3), safe)
        assert online.all() == (safe < 0)
        expected = oracle.attend(*scaled(qkv), table, np.arange(3))
        np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=ATOL)


@BOTH
@ROUNDINGS
@pytest.mark.parametrize("poisoned", ["keys", "values"])
def test_empty_tiles_are_not_read(monkeypatch, safe, rounding, poisoned):
    # References come from all keys: those of the first call, without NaN, are kept.
    references, kept = tpu.references, []

    @functools.partial(jax.jit, static_argnames="table")
    def with_references(q, k, v, table, kinds, given):
        made = []

        def stored(q, k):
            made.append(given or references(q, k))
            return made[0]

        monkeypatch.setattr(tpu, "references", stored)
        return tpu.attend(q, k, v, table, kinds, interpret=True), made[0]

    def attend(q, k, v, table, kinds):
        given = kept[0] if kept else None
        (out, online), made = with_references(q, k, v, table, kinds, given)
        assert online.all() == (safe < 0)
        kept.append(made)
        return out

    monkeypatch.setattr(tpu, "SAFE", safe)
    table = dataclasses.replace(TABLE, rounding=rounding)
    qkv = cases.random_qkv(1, 2, table.grid.tokens, 32, jnp.bfloat16)
    cases.check_poison(attend, qkv, table, poisoned)


@BOTH
@pytest.mark.parametrize("name", cases.ADVERSARIAL)
def test_adversarial_scores_come_out_right(attend, name):
    cases.check_adversarial(attend, name, TABLE, 32, ATOL, jnp.bfloat16, scaled)


@pytest.mark.parametrize(
    ("name", "online"),
    [("huge", True), ("outlier", True), ("equal", False), ("zeros", False)],
)
def test_heads_whose_bound_is_not_safe_take_the_online_kernel(name, online):
    q, k, _ = cases.adversarial(name, 2, 60, 32)
    scale = np.log2(np.e) / np.sqrt(32)
    bound, own, taken = tpu.references(jnp.asarray(q * scale), jnp.asarray(k))
    assert (np.asarray(taken) == online).all()
    scores = scale * np.asarray(q, float) @ np.asarray(k, float).swapaxes(1, 2)
    assert (scores <= np.asarray(bound)[..., None] + 1e-5 * abs(scores)).all()
    own_scores = np.diagonal(scores, axis1=1, axis2=2)
    np.testing.assert_allclose(own, own_scores, rtol=1e-4, atol=1e-4)


def test_one_query_whose_bound_is_not_safe_takes_its_head_online():
    q, k, _ = map(jnp.asarray, cases.random_qkv(7, 3, 40, 32))
    unlike = q.at[1, 9].set(-100 * k[1, 9])
    assert tpu.references(q, k)[2].tolist() == [False] * 3
    assert tpu.references(unlike, k)[2].tolist() == [False, True, False]


def test_what_is_not_finite_takes_the_online_kernel():
    q = jnp.ones((3, 4, 8)).at[1, 2, 3].set(jnp.inf).at[2, 0, 0].set(jnp.nan)
    assert tpu.references(q, jnp.ones((3, 4, 8)))[2].tolist() == [False, True, True]


def test_a_score_far_above_the_first_reference_raises_it():
    # The last key exceeds all before it by 2^400, long after the row has begun.
    q, k, v = cases.random_qkv(2, 1, TABLE.grid.tokens, 32)
    k[:, -1] = 300 * q[:, -2] / (q[:, -2] ** 2).sum(-1, keepdims=True) * np.sqrt(32)
    qkv = tuple(x.astype(jnp.bfloat16) for x in (q, k, v))
    out, online = run(qkv, TABLE, [HeadKind.SPATIAL])
    assert online.all()
    expected = oracle.attend(*scaled(qkv), TABLE, np.array([HeadKind.SPATIAL]))
    # The query that is all that key's; others have scores that bfloat16 decides.
    np.testing.assert_allclose(
        np.asarray(out, float)[0, -2], expected[0, -2], atol=ATOL
    )
    assert np.isfinite(np.asarray(out, float)).all()


@pytest.mark.parametrize("kinds", [[0, 1, 2], [2, 2, 2], [1, 1, 0]])
def test_kinds_and_safety_are_data(kinds):
    """One program for any kinds and any share of heads in either kernel."""
    qkv = cases.random_qkv(3, 3, TABLE.grid.tokens, 32)
    factors = np.array([1, 40, 1])[:, None, None]
    qkv = tuple(x.astype(jnp.bfloat16) for x in (qkv[0] * factors, *qkv[1:]))
    out, online = run(qkv, TABLE, kinds)
    assert online.tolist() == [False, True, False]
    expected = oracle.attend(*scaled(qkv), TABLE, np.asarray(kinds))
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=ATOL)
    before = len(TRACED)
    run(qkv, TABLE, kinds[::-1])
    run(qkv[::-1], TABLE, [0, 0, 0])
    assert len(TRACED) == before


@pytest.mark.parametrize(("gap", "online"), [(98, False), (102, True)])
def test_a_bound_is_safe_up_to_100_above_a_query_s_own_score(gap, online):
    # Queries and keys at right angles: their own scores are 0, and the bound the gap.
    length = np.sqrt(gap / np.log2(np.e)) * 8**0.25
    q, k = np.zeros((2, 1, 300, 8), np.float32)
    q[..., 0], k[..., 1] = length, length
    v = cases.random_qkv(8, 1, 300, 8)[2]
    table = TileTable(TokenGrid(3, 100), TileShape(128, 128), 10)
    got, taken = run((q, k, v), table, [HeadKind.SPATIAL])
    assert taken.tolist() == [online]
    expected = oracle.attend(q, k, v, table, np.array([HeadKind.SPATIAL]))
    np.testing.assert_allclose(np.asarray(got, float), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize(("safe", "rounding"), [(100.0, "exact"), (-1.0, "tile")])
def test_no_step_races_with_another(monkeypatch, safe, rounding):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    monkeypatch.setattr(tpu, "SAFE", safe)
    table = TileTable(TokenGrid(3, 120), TileShape(128, 128), 10, rounding)
    # Scores that raise the online kernel's reference; values in float32.
    q, k, v = cases.adversarial("opposite", 2, table.grid.tokens, 32)
    qkv = (3 * q).astype(jnp.bfloat16), k.astype(jnp.bfloat16), v
    kinds = np.array([HeadKind.TEMPORAL, HeadKind.DENSE])
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    q, k, v = map(jnp.asarray, qkv)
    out, _ = tpu.attend(q, k, v, table, jnp.asarray(kinds), params)
    expected = oracle.attend(*scaled(qkv), table, kinds)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=ATOL)
    assert interpreter.races is not None
    assert not interpreter.races.races_found


@settings(max_examples=8, deadline=None)
@given(
    table=cases.tables(queries=[1, 2, 3, 8], keys=[1, 2, 5, 8]),
    kinds=st.lists(st.sampled_from(HeadKind), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_work_list_holds_each_live_tile_once_and_in_order(table, kinds, data):
    heads = len(kinds)
    mine = np.array(data.draw(st.lists(st.booleans(), min_size=heads, max_size=heads)))
    work = tpu.work_list(table, jnp.asarray(kinds), jnp.asarray(mine))
    every = [(r, c) for r in range(table.rows) for c in range(table.columns)]
    live = [tuple(tile) for tile in table.live().tolist()]
    expected = [
        (head, *tile)
        for head, kind in enumerate(kinds)
        if mine[head]
        for tile in (every if kind == HeadKind.DENSE else live)
    ]
    steps = jnp.arange(int(work.starts[-1]))
    places = tpu._place(steps, work, chip.block_bits(table))
    heads, rows, columns, first, last, boundary = map(np.asarray, places)
    assert list(zip(heads, rows, columns, strict=True)) == expected
    change = np.array([a[:2] != b[:2] for a, b in itertools.pairwise(expected)], bool)
    edge = np.ones(min(len(expected), 1), bool)
    np.testing.assert_array_equal(first, np.concatenate([edge, change]))
    np.testing.assert_array_equal(last, np.concatenate([change, edge]))
    sparse = np.array([kinds[head] != HeadKind.DENSE for head in heads], bool)
    np.testing.assert_array_equal(
        boundary, sparse & (table.classify(rows, columns) == 1)
    )


def test_heads_are_taken_in_groups_where_they_take_much_room(monkeypatch):
    monkeypatch.setattr(tpu, "HBM_BYTES", 2 * 2 * 150 * 8)
    table = TileTable(TokenGrid(3, 50), TileShape(128, 128), 10)
    qkv = cases.random_qkv(5, 3, 150, 8, jnp.bfloat16)
    kinds = np.array([0, 1, 2])
    q, k, v = map(jnp.asarray, qkv)
    out, online = tpu.attend(q, k, v, table, jnp.asarray(kinds), interpret=True)
    assert online.shape == (3,)
    expected = oracle.attend(*scaled(qkv), table, kinds)
    np.testing.assert_allclose(np.asarray(out, float), expected, rtol=0, atol=ATOL)


def test_small_tiles_go_through_xla_on_a_tpu():
    table = TileTable(TokenGrid(4, 30), TileShape(32, 32), 10)
    q, k, v = map(jnp.asarray, cases.random_qkv(6, 3, 120, 8))
    kinds = jnp.arange(3)
    got = attention.attend(q, k, v, table, kinds, backend="tpu")
    expected = attention.attend(q, k, v, table, kinds, backend="cpu")
    np.testing.assert_array_equal(got.out, expected.out)


def test_a_maximum_is_a_choice_in_a_tpu_s_kernel_alone():
    small, large = (
        TileTable(TokenGrid(4, 300), TileShape(side, side), 10) for side in (64, 128)
    )
    assert attention.has_choice(large, "tpu")
    assert not attention.has_choice(small, "tpu")
    assert not attention.has_choice(large, "gpu")
    assert not attention.has_choice(large)


def test_dense_attention_of_many_tokens_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(attention, "LEAST_TOKENS", 300)
    monkeypatch.setattr(attention, "DENSE_TILE", TileShape(128, 256))
    taken = []

    def kernel(*args):
        taken.append(args)
        return tpu_attend(*args, interpret=True)

    tpu_attend = tpu.attend
    monkeypatch.setattr(tpu, "attend", kernel)
    qkv = cases.random_qkv(9, 2, 300, 32, jnp.bfloat16)
    q, k, v = map(jnp.asarray, qkv)
    got = attention.attend_all(q, k, v, "tpu")
    assert len(taken) == 1
    expected = oracle.attend(*scaled(qkv))
    np.testing.assert_allclose(np.asarray(got, float), expected, rtol=0, atol=ATOL)
    attention.attend_all(q[:, :299], k[:, :299], v[:, :299], "tpu")
    assert len(taken) == 1
    np.testing.assert_array_equal(attention.attend_all(q, k, v), dense.attend(q, k, v))


def test_what_the_chip_cannot_hold_is_refused():
    def check(tokens, tile, heads=5):
        table = TileTable(TokenGrid(1, tokens), TileShape(*tile), 0)
        shape = jax.ShapeDtypeStruct((heads, tokens, 128), jnp.bfloat16)
        kinds = jax.ShapeDtypeStruct((heads,), jnp.int32)
        call = functools.partial(tpu.attend, table=table)
        jax.eval_shape(call, shape, shape, shape, kinds=kinds)

    check(1000, (128, 128))
    with pytest.raises(ValueError, match="multiples of 128"):
        check(1000, (64, 128))
    with pytest.raises(ValueError, match=r"lists .*take larger tiles"):
        check(302_400, (1024, 1024))
    with pytest.raises(ValueError, match=r"up to 4095 each way.*larger tiles"):
        check(4096 * 128, (128, 2048))
    with pytest.raises(ValueError, match="take smaller tiles"):
        check(302_400, (8192, 8192))


def test_lists_fit_with_all_heads_dense_at_302400_tokens():
    table = TileTable.within(0.38, TokenGrid(21, 14_400), TileShape(2048, 2048))
    for heads in (1, 5, 40):
        kinds = jnp.full(heads, HeadKind.DENSE)
        work = tpu.work_list(table, kinds, jnp.ones(heads, bool))
        assert int(work.starts[-1]) == heads * table.all_tiles
        assert sum(x.nbytes for x in work) <= 256 * 2**10
