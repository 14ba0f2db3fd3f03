"""Stores what diffusers and transformers make of the cases in `vae_text`.

    python -m tests.references.make_vae_text

Needs the `bench` extra. The weights are not stored: `random_tensors` draws them again.
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from transformers import UMT5Config, UMT5EncoderModel

from tests.references.vae_text import (
    STORED_TEXT,
    STORED_VAE,
    TextCase,
    VAECase,
)
from tests.references.weights import random_tensors

STORED = Path(__file__).with_name("vae_text.npz")


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that the model's checkpoint holds."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)  # tied, and so not saved
    return shapes


def fill(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Gives the model random weights."""
    tensors = random_tensors(shapes_of(model), seed)
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    unfilled = model.load_state_dict(state, strict=False)
    assert not unfilled.unexpected_keys
    assert set(unfilled.missing_keys) <= {"encoder.embed_tokens.weight"}
    return model.eval()


def channels_last(x: torch.Tensor) -> np.ndarray:
    """[batch, channels, time, height, width] to [batch, time, height, width, ...]."""
    return x.permute(0, 2, 3, 4, 1).numpy()


@torch.no_grad()
def vae(case: VAECase) -> tuple[np.ndarray, np.ndarray]:
    """The frames that diffusers decodes, and the normalised latents it encodes."""
    model = fill(AutoencoderKLWan(**case.config), case.seed)
    assert isinstance(model, AutoencoderKLWan)
    z, video = (torch.from_numpy(x).permute(0, 4, 1, 2, 3) for x in case.inputs())
    mean, std = (
        torch.tensor(case.config[name]).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    frames = model.decode(z * std + mean).sample
    latents = (model.encode(video).latent_dist.mode() - mean) / std
    return channels_last(frames), channels_last(latents)


def text_model(case: TextCase) -> UMT5EncoderModel:
    """The random text encoder of a case."""
    model = fill(UMT5EncoderModel(UMT5Config(**case.config)), case.seed)
    assert isinstance(model, UMT5EncoderModel)
    return model


@torch.no_grad()
def text(case: TextCase) -> list[np.ndarray]:
    """The embeddings [tokens, d_model] of each prompt's own tokens."""
    model = text_model(case)
    ids, mask = (torch.from_numpy(x).long() for x in case.inputs())
    embeddings = model(ids, mask).last_hidden_state.numpy()
    return [e[:n] for e, n in zip(embeddings, case.lengths, strict=True)]


if __name__ == "__main__":
    outputs = {}
    for vae_case in STORED_VAE:
        frames, latents = vae(vae_case)
        outputs[f"{vae_case.name}/frames"] = frames
        outputs[f"{vae_case.name}/latents"] = latents
        print(vae_case.name, f"{np.mean(np.abs(frames) == 1):.0%} of pixels clamped")
    for text_case in STORED_TEXT:
        for i, embedding in enumerate(text(text_case)):
            outputs[f"{text_case.name}/{i}"] = embedding
    np.savez_compressed(STORED, **outputs)
