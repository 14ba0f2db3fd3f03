"""Samplers by themselves; against diffusers they are in tests/peers."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import samplers


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(samplers.SAMPLERS),
    steps=st.integers(1, 60),
    shift=st.floats(0.5, 12),
)
def test_a_model_that_knows_the_clip_recovers_it(name, steps, shift):
    """With velocity = noise - clip everywhere, every sampler ends at the clip."""
    rng = np.random.default_rng(steps)
    clip, noise = (jnp.asarray(rng.normal(size=(2, 3)), jnp.float32) for _ in "ab")
    schedule = samplers.make_schedule(name, steps, shift)
    state = samplers.initial_state(noise)
    for row in schedule.rows:
        state = samplers.update(state, noise - clip, row)
    # UniPC's logarithms amplify float32 rounding near sigma = 1.
    np.testing.assert_allclose(state.sample, clip, atol=2e-4)


@pytest.mark.parametrize("name", samplers.SAMPLERS)
def test_more_steps_come_nearer_to_the_true_flow(name):
    """dx/dsigma = (x - clip(x)) / sigma with a smooth clip(x), against 2,000 steps."""

    def sample(steps):
        schedule = samplers.make_schedule(name, steps, 3.0)
        state = samplers.initial_state(jnp.linspace(-2, 2, 9, dtype=jnp.float32))
        for row in schedule.rows:
            clean = 0.3 * jnp.sin(state.sample)
            state = samplers.update(state, (state.sample - clean) / row[0], row)
        return np.asarray(state.sample)

    exact = sample(2000)
    errors = [np.abs(sample(steps) - exact).max() for steps in (5, 20, 80)]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    ("name", "steps", "shift"), [("ddim", 5, 3.0), ("unipc", 0, 3.0), ("euler", 5, 0.0)]
)
def test_impossible_schedules_are_refused(name, steps, shift):
    with pytest.raises(ValueError):
        samplers.make_schedule(name, steps, shift)
