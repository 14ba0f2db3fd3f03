import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dense, oracle


def random_qkv(seed, heads, tokens, keys, head_dim):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(heads, length, head_dim)).astype(np.float32)
        for length in (tokens, keys, keys)
    ]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 70),
    keys=st.integers(1, 70),
    head_dim=st.sampled_from([1, 24, 32, 128]),
)
def test_equals_the_oracle(seed, heads, tokens, keys, head_dim):
    q, k, v = random_qkv(seed, heads, tokens, keys, head_dim)
    got = dense.attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    # float32 rounding of a few hundred terms.
    np.testing.assert_allclose(got, oracle.attend(q, k, v), rtol=0, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 193])
def test_blocks_of_queries_change_nothing(monkeypatch, tokens):
    q, k, v = random_qkv(tokens, 3, tokens, 50, 32)
    monkeypatch.setattr(dense, "SCORES_AT_ONCE", 3 * 50 * 64)
    monkeypatch.setattr(dense, "FEWEST_QUERIES", 1)
    got = jax.jit(dense.attend)(q, k, v)
    np.testing.assert_allclose(got, oracle.attend(q, k, v), rtol=0, atol=2e-5)


def test_huge_scores_do_not_overflow():
    q, k, v = random_qkv(0, 2, 20, 20, 32)
    got = dense.attend(jnp.asarray(1e3 * q), jnp.asarray(1e3 * k), jnp.asarray(v))
    expected = oracle.attend(1e3 * q, 1e3 * k, v)
    # Rows whose two best keys nearly tie may differ; a million to one they do not.
    np.testing.assert_allclose(got, expected, atol=1e-2)


def test_bfloat16_keeps_its_dtype_and_sums_in_float32():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in random_qkv(1, 2, 300, 300, 128))
    got = dense.attend(q, k, v)
    assert got.dtype == jnp.bfloat16
    expected = oracle.attend(np.asarray(q), np.asarray(k), np.asarray(v))
    # Weights rounded to bfloat16 (2^-9) average out over 300 keys.
    assert np.abs(np.asarray(got, np.float64) - expected).max() < 0.01


def test_shapes_that_do_not_belong_together_are_refused():
    q, k, v = random_qkv(0, 2, 4, 5, 8)
    with pytest.raises(ValueError, match="got q"):
        dense.attend(jnp.asarray(q), jnp.asarray(k[:1]), jnp.asarray(v[:1]))
    with pytest.raises(ValueError, match="got q"):
        dense.attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v[:, :4]))
