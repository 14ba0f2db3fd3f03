"""The transformer and the samplers against diffusers, on the same random weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.references import ours_transformer as ours
from tests.references.transformer import LIVE, STORED, TransformerCase
from workers import samplers
from workers.models import transformer

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from tests.references import make_transformer as theirs
from tests.references.make_vae_text import shapes_of

pytestmark = pytest.mark.peers

CASES = STORED + LIVE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tensor_names_and_shapes_are_those_of_diffusers(case: TransformerCase):
    config = transformer.TransformerConfig.from_json(case.config)
    assert transformer.tensor_shapes(config) == shapes_of(theirs.model_of(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_velocity_is_that_of_diffusers(case: TransformerCase):
    # float32 against float32: rounding through a few layers.
    assert ours.relative_error(ours.velocity(case), theirs.velocity(case)) < 2e-4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_guided_latents_are_those_of_diffusers(case: TransformerCase):
    settings = (theirs.STEPS, theirs.GUIDANCE, theirs.SHIFT)
    error = ours.relative_error(ours.sampled(case, *settings), theirs.sampled(case))
    # Eight steps at guidance 4 multiply the rounding of each forward.
    assert error < 1e-3


def scheduler(name: str, steps: int, shift: float):
    if name == "unipc":
        made = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        )
        made.set_timesteps(steps)
    else:
        made = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
        made.set_timesteps(sigmas=np.linspace(1, 1 / 1000, steps + 1)[:-1])
    return made


@pytest.mark.parametrize("name", samplers.SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 20, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.5])
def test_samplers_are_those_of_diffusers(name: str, steps: int, shift: float):
    rng = np.random.default_rng((steps, int(10 * shift)))
    x = rng.standard_normal((1, 6, 7)).astype(np.float32)
    mix = rng.standard_normal((7, 7)).astype(np.float32)
    reference = scheduler(name, steps, shift)
    schedule = samplers.make_schedule(name, steps, shift)
    np.testing.assert_allclose(schedule.timesteps, reference.timesteps, rtol=1e-6)
    state, y = samplers.initial_state(jnp.asarray(x)), torch.from_numpy(x)
    for step, t in enumerate(reference.timesteps):
        velocity = jnp.tanh(state.sample @ mix)
        state = samplers.update(state, velocity, schedule.rows[step])
        velocity = torch.tanh(y @ torch.from_numpy(mix))
        y = reference.step(velocity, t, y).prev_sample
    # Coefficients here are float64 rounded once, there float32 throughout.
    assert ours.relative_error(np.asarray(state.sample), y.numpy()) < 2e-5
