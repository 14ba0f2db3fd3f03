import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gpu
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

ROUNDINGS = pytest.mark.parametrize("rounding", ["tile", "exact"])

# float32: rounding of scores and of sums of a few hundred terms.
FLOAT32 = 2e-5
# bfloat16: the output's own rounding, 2^-9 of values that reach 4, and that of each
# weight, which averages out.
BFLOAT16 = 0.02

# Blocks are 64 queries x 32 keys in float32 and 128 x 64 in bfloat16: here whole ones,
# several to a tile, lie in both runs, and runs end within others or (EVEN) never. Some
# blocks of EVEN are but one key from being whole in the pattern.
LARGE = TileTable(TokenGrid(8, 60), TileShape(96, 80), 110)
EVEN = TileTable(TokenGrid(6, 64), TileShape(64, 64), 62)

tables = st.builds(
    TileTable,
    st.builds(TokenGrid, st.integers(1, 8), st.integers(1, 40)),
    st.builds(TileShape, st.integers(1, 160), st.integers(1, 80)),
    st.integers(0, 200),
    st.sampled_from(["tile", "exact"]),
)


# Pallas's interpreter, which gives NaN for what is read beyond an array. The compiler
# takes most of the time: without its optimizations, a third of it.
@functools.partial(
    jax.jit,
    static_argnames="table",
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
def attend(q, k, v, table, kinds):
    return gpu.attend(q, k, v, table, kinds, interpret=True)


@settings(max_examples=8)
@given(
    table=tables,
    dtype=st.sampled_from([np.float32, jnp.bfloat16]),
    head_dim=st.sampled_from([1, 24, 32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_oracle(table, dtype, head_dim, seed):
    qkv = cases.random_qkv(seed, 3, table.grid.tokens, head_dim, dtype)
    atol = FLOAT32 if dtype == np.float32 else BFLOAT16
    cases.check_oracle(attend, qkv, table, list(HeadKind), atol)


@ROUNDINGS
@pytest.mark.parametrize(
    ("table", "head_dim"), [(LARGE, 48), (EVEN, 128)], ids=["large", "even"]
)
@pytest.mark.parametrize(
    ("dtype", "atol"), [(np.float32, FLOAT32), (jnp.bfloat16, BFLOAT16)]
)
def test_parts_of_blocks_equal_the_oracle(table, head_dim, rounding, dtype, atol):
    table = dataclasses.replace(table, rounding=rounding)
    qkv = cases.random_qkv(0, 3, table.grid.tokens, head_dim, dtype)
    cases.check_oracle(attend, qkv, table, list(HeadKind), atol)


@ROUNDINGS
@pytest.mark.parametrize("poisoned", ["keys", "values"])
@pytest.mark.parametrize("table", [cases.RAGGED, LARGE], ids=["ragged", "large"])
def test_poison_in_empty_tiles_is_never_read(table, rounding, poisoned):
    table = dataclasses.replace(table, rounding=rounding)
    qkv = cases.random_qkv(0, 2, table.grid.tokens, 16)
    cases.check_poison(attend, qkv, table, poisoned)


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
        return gpu.attend(q, k, v, table, kinds, interpret=True)

    qkv = cases.random_qkv(0, 3, cases.RAGGED.grid.tokens, 32)
    for kinds in ([0, 0, 0], [2, 2, 2], [1, 2, 0]):
        table = dataclasses.replace(cases.RAGGED, rounding="exact")
        cases.check_oracle(counted, qkv, table, kinds, FLOAT32)
    assert len(traced) == 1


@pytest.mark.parametrize("table", [cases.RAGGED, LARGE], ids=["ragged", "large"])
def test_programs_write_the_rows_of_their_tile_alone(table, monkeypatch):
    # On a GPU they run in any order, and behind a head's last row is the next head.
    store, tokens = gpu.pltriton.store, table.grid.tokens

    def checked(ref, x, mask):
        place = ref.transforms[-1].indices[0].start + jnp.arange(len(x))[:, None]
        written = ~jnp.isnan(gpu.pltriton.load(ref))
        wrong = mask & (written | (place >= tokens))
        store(ref, jnp.where(wrong.any(), jnp.inf, x), mask=mask)

    monkeypatch.setattr(gpu.pltriton, "store", checked)
    qkv = cases.random_qkv(0, 3, tokens, 16)
    traced_anew = functools.partial(gpu.attend, interpret=True)
    cases.check_oracle(traced_anew, qkv, table, list(HeadKind), FLOAT32)


@pytest.mark.parametrize(("dtype", "most"), [(jnp.bfloat16, 512), (np.float32, 256)])
def test_too_large_a_head_is_refused(dtype, most):
    lower(cases.RAGGED, 1, most, dtype)
    with pytest.raises(ValueError, match=f"{most + 1} .* too large .* is {most}"):
        lower(cases.RAGGED, 1, most + 1, dtype)


def lower(table, heads, head_dim, dtype):
    """What is compiled for an NVIDIA GPU, which takes none to be made."""
    qkv = jax.ShapeDtypeStruct((heads, table.grid.tokens, head_dim), dtype)
    kinds = jax.ShapeDtypeStruct((heads,), jnp.int32)
    traced = jax.jit(functools.partial(gpu.attend, table=table)).trace(
        qkv, qkv, qkv, kinds=kinds
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


WAN, LONG, DEMO = TokenGrid(21, 3600), TokenGrid(84, 3600), TokenGrid(9, 64)


@ROUNDINGS
@pytest.mark.parametrize(
    ("grid", "tile", "heads", "head_dim", "dtype"),
    [
        (WAN, TileShape(128, 128), 12, 128, jnp.bfloat16),
        (WAN, TileShape(192, 256), 40, 128, jnp.bfloat16),
        (LONG, TileShape(128, 128), 64, 128, jnp.bfloat16),  # offsets beyond 32 bits
        (DEMO, TileShape(64, 64), 6, 32, jnp.bfloat16),
        (DEMO, TileShape(64, 64), 6, 32, jnp.float32),
        (DEMO, TileShape(48, 80), 6, 24, jnp.float32),
        (DEMO, TileShape(5, 7), 6, 64, jnp.bfloat16),
    ],
)
def test_is_lowered_to_one_triton_kernel(rounding, grid, tile, heads, head_dim, dtype):
    text = lower(TileTable.within(0.5, grid, tile, rounding), heads, head_dim, dtype)
    assert len(re.findall(r"custom_call @\S*triton", text)) == 1
