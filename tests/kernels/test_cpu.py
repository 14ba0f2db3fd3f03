import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kernels import attention, cpu
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

SPATIAL, TEMPORAL, DENSE = HeadKind
ROUNDINGS = pytest.mark.parametrize("rounding", ["tile", "exact"])

# float32: rounding of scores and of sums of a few hundred terms, as in dense attention.
FLOAT32 = 2e-5
# bfloat16: the output's own rounding, 2^-9 of values that reach 4, and that of each
# weight, which averages out.
BFLOAT16 = 0.02


def attend_untraced(q, k, v, table, kinds):
    return attention.attend(q, k, v, table, kinds, backend="cpu").out


attend = jax.jit(attend_untraced, static_argnames="table")
# Tiles of few queries make many programs, which take long to compile.
tables = cases.tables(queries=range(8, 41))
# To look for a smaller failing case would take minutes of compiling.
PHASES = set(Phase) - {Phase.shrink}


@settings(max_examples=6, phases=PHASES)
@given(
    table=tables,
    kinds=st.lists(st.sampled_from(HeadKind), min_size=1, max_size=4),
    head_dim=st.sampled_from([1, 24, 128]),
    seed=st.integers(0, 2**32 - 1),
)
@example(TileTable(TokenGrid(3, 2), TileShape(1, 1), 1), [TEMPORAL, SPATIAL], 24, 0)
@example(TileTable(TokenGrid(1, 1), TileShape(1, 1), 0), [DENSE, SPATIAL], 24, 0)
def test_equals_the_oracle(table, kinds, head_dim, seed):
    qkv = cases.random_qkv(seed, len(kinds), table.grid.tokens, head_dim)
    cases.check_oracle(attend, qkv, table, kinds, FLOAT32)


@settings(max_examples=10)
@given(
    kinds=st.lists(st.sampled_from(HeadKind), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_bfloat16_equals_the_oracle(kinds, seed):
    # One shape, which compiles once.
    qkv = cases.random_qkv(seed, 3, cases.RAGGED.grid.tokens, 32, jnp.bfloat16)
    cases.check_oracle(attend, qkv, cases.RAGGED, kinds, BFLOAT16)


@pytest.mark.parametrize(
    ("rounding", "at_once"), [("tile", 300), ("exact", 300), ("exact", 1)]
)
def test_blocks_of_queries_change_nothing(monkeypatch, rounding, at_once):
    monkeypatch.setattr(cpu, "SCORES_AT_ONCE", at_once)
    table = dataclasses.replace(cases.RAGGED, rounding=rounding)
    qkv = cases.random_qkv(at_once, 3, table.grid.tokens, 16)
    # Traced anew: what was compiled before has the constant that was.
    anew = jax.jit(attend_untraced, static_argnames="table")
    cases.check_oracle(anew, qkv, table, list(HeadKind), FLOAT32)


@ROUNDINGS
@pytest.mark.parametrize("poisoned", ["keys", "values"])
def test_poison_in_empty_tiles_is_never_read(rounding, poisoned):
    table = dataclasses.replace(cases.RAGGED, rounding=rounding)
    cases.check_poison(
        attend, cases.random_qkv(0, 2, table.grid.tokens, 16), table, poisoned
    )


@ROUNDINGS
def test_padding_reaches_no_row(rounding):
    table = dataclasses.replace(cases.RAGGED, rounding=rounding)
    qkv = cases.random_qkv(0, 3, table.grid.tokens, 16)
    cases.check_padding(attend, qkv, table, list(HeadKind), extra=5)


@pytest.mark.parametrize("name", cases.ADVERSARIAL)
@pytest.mark.parametrize(
    ("dtype", "atol"), [(np.float32, FLOAT32), (jnp.bfloat16, BFLOAT16)]
)
def test_adversarial_scores_are_right(name, dtype, atol):
    cases.check_adversarial(attend, name, cases.RAGGED, 32, atol, dtype)


def test_new_kinds_compile_nothing():
    traced = []

    @functools.partial(jax.jit, static_argnames="table")
    def counted(q, k, v, table, kinds):
        traced.append(table)
        return attend(q, k, v, table, kinds)

    qkv = cases.random_qkv(0, 3, cases.RAGGED.grid.tokens, 16)
    for kinds in ([SPATIAL] * 3, [DENSE] * 3, [TEMPORAL, DENSE, SPATIAL]):
        table = dataclasses.replace(cases.RAGGED)
        cases.check_oracle(counted, qkv, table, kinds, FLOAT32)
    assert len(traced) == 1


@pytest.mark.parametrize(
    "refused",
    [
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda q: jax.vmap(jax.grad(f))(q[None]),
        lambda f: lambda q: jax.grad(lambda q: jax.vmap(f)(q).sum())(q[None]),
        lambda f: lambda q: jax.jvp(f, (q,), (q,)),
    ],
    ids=["grad", "jit", "checkpoint", "vmap of grad", "grad of vmap", "jvp"],
)
@pytest.mark.parametrize("argument", [0, 1, 2])
def test_a_gradient_is_refused_by_name(refused, argument):
    qkv = [*map(jnp.asarray, cases.random_qkv(0, 2, cases.RAGGED.grid.tokens, 8))]
    kinds = jnp.array([SPATIAL, TEMPORAL])

    def loss(x):
        q, k, v = (x if i == argument else given for i, given in enumerate(qkv))
        return attention.attend(q, k, v, cases.RAGGED, kinds, "cpu").out.sum()

    with pytest.raises(NotImplementedError, match="has no gradient"):
        refused(loss)(qkv[argument])


def test_shapes_that_do_not_belong_together_are_refused():
    q, k, v = map(jnp.asarray, cases.random_qkv(0, 2, cases.RAGGED.grid.tokens, 8))
    kinds = jnp.array([SPATIAL, DENSE])
    for a, b, c in ((q[:1], k, v), (q, k[..., :4], v), (q, k, v[:, :5])):
        with pytest.raises(ValueError, match="attention takes q, k, v .* got q"):
            attention.attend(a, b, c, cases.RAGGED, kinds)
    with pytest.raises(ValueError, match=r"kinds \[heads\]; got .* kinds \(1,\)"):
        attention.attend(q, k, v, cases.RAGGED, kinds[:1])
    with pytest.raises(ValueError, match="attention takes"):
        attention.attend(q[0], k[0], v[0], cases.RAGGED, kinds)


def test_too_few_tokens_for_the_table_are_refused():
    q, k, v = cases.random_qkv(0, 1, cases.RAGGED.grid.tokens - 1, 8)
    with pytest.raises(ValueError, match="76 tokens for a table of 77"):
        attend(q, k, v, cases.RAGGED, np.array([SPATIAL]))


def test_all_heads_keep_a_running_maximum_here():
    q, k, v = map(jnp.asarray, cases.random_qkv(0, 3, cases.RAGGED.grid.tokens, 8))
    kinds = jnp.array([TEMPORAL, SPATIAL, DENSE])
    online = jax.jit(attention.attend, static_argnums=(3, 5))(
        q, k, v, cases.RAGGED, kinds, "cpu"
    ).online
    np.testing.assert_array_equal(online, [True, True, True])


@pytest.mark.parametrize(
    "change",
    [
        lambda q, kinds: (q.astype(jnp.int32), kinds),
        lambda q, kinds: (q.astype(jnp.complex64), kinds),
        lambda q, kinds: (q, kinds.astype(jnp.float32)),
        lambda q, kinds: (q[..., :0], kinds),
    ],
)
def test_what_is_no_attention_is_refused(change):
    q, kinds = change(jnp.ones((2, 6, 4)), jnp.zeros(2, jnp.int32))
    table = TileTable(TokenGrid(2, 3), TileShape(2, 2), 1)
    with pytest.raises(ValueError, match="of floating point, head_dim 1 or more"):
        attention.attend(q, q, q, table, kinds)
