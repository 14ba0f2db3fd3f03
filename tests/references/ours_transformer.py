"""Our transformer and sampler on the cases in `transformer`."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.references.transformer import TransformerCase
from tests.references.weights import random_tensors
from workers import denoiser, samplers
from workers.models import transformer
from workers.models.params import nest


def loaded(case: TransformerCase) -> tuple[transformer.TransformerConfig, dict]:
    """The config and parameters of a case."""
    config = transformer.TransformerConfig.from_json(case.config)
    tensors = random_tensors(transformer.tensor_shapes(config), case.seed)
    return config, jax.tree.map(jnp.asarray, nest(tensors, ("blocks",)))


def velocity(case: TransformerCase) -> np.ndarray:
    """The model's output on the case's inputs."""
    return forward(case)[0]


def forward(
    case: TransformerCase, attention: transformer.SparseStep | None = None
) -> tuple[np.ndarray, transformer.HeadStats | None]:
    """The model's output on the case's inputs, and what its heads did."""
    config, params = loaded(case)
    latents, timesteps, text = case.inputs()
    velocity, stats = jax.jit(transformer.forward, static_argnames="config")(
        params,
        config=config,
        latents=latents,
        timestep=timesteps,
        text=text,
        attention=attention,
    )
    return np.asarray(velocity), stats


def sampled(case: TransformerCase, steps: int, guidance: float, shift: float):
    """Latents of the first clip after guided UniPC steps; see make_transformer."""
    config, params = loaded(case)
    latents, _, text = case.inputs()
    branches = jnp.stack([text[0], text[0, ::-1]])
    schedule = samplers.make_schedule("unipc", steps, shift)
    state = samplers.initial_state(jnp.asarray(latents[0]))
    for timestep, row in zip(schedule.timesteps, schedule.rows, strict=True):
        state, finite, _ = denoiser.denoise_step(
            params, state, branches, timestep, row, jnp.float32(guidance), config=config
        )
        assert finite
    return np.asarray(state.sample)[None]


def relative_error(x: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference over the reference's largest value."""
    assert x.shape == reference.shape
    return float(np.abs(x - reference).max() / np.abs(reference).max())
