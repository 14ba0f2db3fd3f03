"""Stores what diffusers makes of the cases in `transformer`.

    python -m tests.references.make_transformer

Needs the `bench` extra. The weights are not stored: `random_tensors` draws them again.
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

from tests.references import transformer
from tests.references.make_vae_text import channels_last, fill
from tests.references.transformer import TransformerCase

STORED_OUTPUTS = Path(__file__).with_name("transformer.npz")
STEPS, GUIDANCE, SHIFT = 8, 4.0, 3.0  # of the sampled latents


def model_of(case: TransformerCase) -> WanTransformer3DModel:
    """The random transformer of a case."""
    model = fill(WanTransformer3DModel(**case.config), case.seed)
    assert isinstance(model, WanTransformer3DModel)
    return model


@torch.no_grad()
def velocity(case: TransformerCase) -> np.ndarray:
    """The model's output on the case's inputs, channels last."""
    latents, timesteps, text = (torch.from_numpy(x) for x in case.inputs())
    latents = latents.permute(0, 4, 1, 2, 3)
    return channels_last(model_of(case)(latents, timesteps.long(), text).sample)


@torch.no_grad()
def sampled(case: TransformerCase) -> np.ndarray:
    """Latents of the first clip after `STEPS` guided UniPC steps, channels last.

    The negative branch has the text embeddings of the prompt, reversed.
    """
    model = model_of(case)
    latents, _, text = (torch.from_numpy(x) for x in case.inputs())
    x = latents[:1].permute(0, 4, 1, 2, 3)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    scheduler.set_timesteps(STEPS)
    for t in scheduler.timesteps:
        positive = model(x, t[None], text[:1]).sample
        negative = model(x, t[None], text[:1].flip(1)).sample
        guided = negative + GUIDANCE * (positive - negative)
        x = scheduler.step(guided, t, x).prev_sample
    return channels_last(x)


if __name__ == "__main__":
    outputs = {}
    for stored in transformer.STORED:
        outputs[f"{stored.name}/velocity"] = velocity(stored)
        outputs[f"{stored.name}/sampled"] = sampled(stored)
    np.savez_compressed(STORED_OUTPUTS, **outputs)
