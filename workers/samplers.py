"""Samplers of flow models, as tables of coefficients.

A step of UniPC or of Euler's method is a linear combination of a few tensors whose
coefficients depend on the noise levels alone. They are made beforehand, in float64;
what remains is one function, `update`, that serves every sampler and step.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

TRAIN_TIMESTEPS = 1000  # of Wan 2.1's scheduler_config.json
SAMPLERS = ("unipc", "euler")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All that a sampler knows of its noise levels.

    Attributes:
        timesteps: what the model is told, float32 [steps].
        rows: float32 [steps, 9], the coefficients of each step:
            [0] the noise level of the step;
            [1:6] the corrected sample, from (sample, last, before, previous, now);
            [6:9] the next sample, from (corrected sample, now, previous).
    """

    timesteps: np.ndarray
    rows: np.ndarray


class SamplerState(NamedTuple):
    """What a sampler carries between steps; all fields have the latents' shape.

    Attributes:
        sample: the latents at the present noise level.
        last: the corrected sample of the step before.
        previous: the clean latents predicted a step before.
        before: those predicted two steps before.
    """

    sample: Array
    last: Array
    previous: Array
    before: Array


def noise_levels(steps: int, flow_shift: float) -> np.ndarray:
    """Sigmas [steps + 1] from 1 to 0, shifted towards noise; float64.

    The first is a millionth below 1, since UniPC takes the logarithm of 1 - sigma.
    """
    sigmas = np.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1)[:-1]
    sigmas = flow_shift * sigmas / (1 + (flow_shift - 1) * sigmas)
    sigmas[0] = min(sigmas[0], 1 - 1e-6)
    return np.append(sigmas, 0)


def make_schedule(sampler: str, steps: int, flow_shift: float) -> Schedule:
    """The table of a sampler.

    Args:
        sampler: "unipc" (order 2, bh2, predicting clean latents, order 1 at the end;
            https://arxiv.org/abs/2302.04867) or "euler".
        steps: denoising steps, at least 1.
        flow_shift: how far noise levels are shifted towards noise; 1 leaves them.

    Raises:
        ValueError: no such sampler, no steps, or a shift that is not positive.
    """
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r}: choose one of {', '.join(SAMPLERS)}")
    if steps < 1 or not flow_shift > 0:
        raise ValueError(
            f"{steps} steps with flow_shift {flow_shift}: both must be > 0"
        )
    exact = noise_levels(steps, flow_shift)
    # diffusers rounds to float32 here; near 1 - sigma = 1e-6 that shows.
    sigmas = exact.astype(np.float32).astype(np.float64)
    rows = np.zeros((steps, 9))
    rows[:, 0] = sigmas[:-1]
    if sampler == "euler":
        ratio = sigmas[1:] / sigmas[:-1]
        rows[:, 1] = 1
        rows[:, 6], rows[:, 7] = ratio, 1 - ratio
        timesteps = exact[:-1] * TRAIN_TIMESTEPS
    else:
        for step in range(steps):
            rows[step, 1:6] = _unipc_corrector(sigmas, step)
            rows[step, 6:9] = _unipc_predictor(sigmas, step)
        # Wan's model was trained on whole timesteps.
        timesteps = np.trunc(exact[:-1] * TRAIN_TIMESTEPS)
    return Schedule(timesteps.astype(np.float32), rows.astype(np.float32))


def _log_ratio(sigma: float) -> float:
    """Half the logarithm of the signal-to-noise ratio, lambda in the paper."""
    return math.log(1 - sigma) - math.log(sigma) if sigma else math.inf


def _order(step: int, steps: int) -> int:
    return min(2, step + 1, steps - step)


def _unipc_predictor(sigmas: np.ndarray, step: int) -> tuple[float, float, float]:
    now, after = sigmas[step], sigmas[step + 1]
    h = _log_ratio(after) - _log_ratio(now)
    grown = (1 - after) * math.expm1(-h)
    sample, clean, previous = after / now, -grown, 0.0
    if _order(step, len(sigmas) - 1) == 2:
        ratio = (_log_ratio(sigmas[step - 1]) - _log_ratio(now)) / h
        previous = -grown * 0.5 / ratio
        clean -= previous
    return sample, clean, previous


def _unipc_corrector(
    sigmas: np.ndarray, step: int
) -> tuple[float, float, float, float, float]:
    if step == 0:
        return 1.0, 0.0, 0.0, 0.0, 0.0
    earlier, now = sigmas[step - 1], sigmas[step]
    h = _log_ratio(now) - _log_ratio(earlier)
    grown = (1 - now) * math.expm1(-h)
    if _order(step - 1, len(sigmas) - 1) == 1:
        before, this = 0.0, -grown * 0.5
    else:
        ratio = (_log_ratio(sigmas[step - 2]) - _log_ratio(earlier)) / h
        first = math.expm1(-h) / -h - 1
        second = first / -h - 0.5
        matrix = np.array([[1, 1], [ratio, 1]])
        weights = np.linalg.solve(matrix, np.array([first, 2 * second]))
        weights /= math.expm1(-h)
        before, this = -grown * weights[0] / ratio, -grown * weights[1]
    return 0.0, now / earlier, before, -grown - before - this, this


def initial_state(noise: Array) -> SamplerState:
    """The state before the first step, from unit noise of the latents' shape."""
    zeros = jnp.zeros_like(noise)
    return SamplerState(noise, zeros, zeros, zeros)


def update(
    state: SamplerState, velocity: Array, row: Float[Array, "9"]
) -> SamplerState:
    """One step, from the model's velocity at `state.sample` and the step's row."""
    now = state.sample - row[0] * velocity
    terms = (state.sample, state.last, state.before, state.previous, now)
    corrected = sum(c * x for c, x in zip(row[1:6], terms, strict=True))
    following = row[6] * corrected + row[7] * now + row[8] * state.previous
    return SamplerState(
        jnp.asarray(following), jnp.asarray(corrected), now, state.previous
    )
