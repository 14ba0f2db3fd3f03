"""The random models and inputs of which reference outputs are stored or compared."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class VAECase:
    """A random autoencoder and what it decodes and encodes.

    Attributes:
        name: Names the case in tests and in the stored outputs.
        config: What the checkpoint's config.json would say.
        latents: Shape of the latents to decode, [batch, time, height, width].
        video: Shape of the video to encode, [batch, frames, height, width].
        seed: Seed of the weights, the latents and the video.
    """

    name: str
    config: dict[str, Any]
    latents: tuple[int, int, int, int]
    video: tuple[int, int, int, int]
    seed: int = 0

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Latents [batch, time, height, width, z_dim] and video [..., 3], float32."""
        rng = np.random.default_rng((self.seed, 1))
        z = rng.standard_normal((*self.latents, self.config["z_dim"]))
        video = rng.uniform(-1, 1, (*self.video, 3))
        return z.astype(np.float32), video.astype(np.float32)


def vae_config(
    base_dim: int,
    z_dim: int,
    dim_mult: list[int],
    blocks: int,
    temporal: list[bool],
) -> dict[str, Any]:
    """A config.json with latents of uneven means and deviations."""
    return {
        "base_dim": base_dim,
        "z_dim": z_dim,
        "dim_mult": dim_mult,
        "num_res_blocks": blocks,
        "attn_scales": [],
        "temperal_downsample": temporal,
        "dropout": 0.0,
        "latents_mean": [0.3 * i - 0.5 for i in range(z_dim)],
        "latents_std": [0.5 + 0.2 * i for i in range(z_dim)],
    }


STORED_VAE = (
    VAECase(
        "wan",
        vae_config(8, 4, [1, 2, 4, 4], 2, [False, True, True]),
        latents=(1, 3, 3, 5),
        video=(1, 9, 24, 40),
    ),
    VAECase(
        "batch",
        vae_config(12, 3, [1, 2, 3], 1, [True, False]),
        latents=(2, 2, 5, 3),
        video=(2, 5, 12, 20),
        seed=1,
    ),
)

LIVE_VAE = (
    VAECase(
        "one frame",
        vae_config(12, 8, [1, 2, 4, 4], 1, [False, True, True]),
        latents=(2, 1, 4, 4),
        video=(2, 1, 32, 32),
        seed=2,
    ),
    VAECase(
        "five frames",
        vae_config(12, 5, [1, 2, 4, 4], 1, [True, True, False]),
        latents=(1, 5, 3, 2),
        video=(1, 17, 24, 8),
        seed=3,
    ),
    VAECase(
        "wide",
        vae_config(8, 4, [1, 8, 2], 2, [True, True]),
        latents=(2, 2, 1, 7),
        video=(2, 5, 4, 28),
        seed=4,
    ),
    VAECase(
        "no time",
        vae_config(8, 4, [2, 1], 1, [False]),
        latents=(1, 2, 5, 3),
        video=(1, 1, 10, 6),
        seed=5,
    ),
    VAECase(
        "half time",
        vae_config(8, 6, [1, 1, 2], 1, [False, True]),
        latents=(1, 5, 7, 3),
        video=(1, 5, 28, 12),
        seed=6,
    ),
)


@dataclasses.dataclass(frozen=True)
class TextCase:
    """A random text encoder and the prompts, as token ids, that it encodes.

    Attributes:
        name: Names the case in tests and in the stored outputs.
        config: What the checkpoint's config.json would say.
        lengths: Tokens of each prompt, its end included.
        seed: Seed of the weights and the tokens.
    """

    name: str
    config: dict[str, Any]
    lengths: tuple[int, ...]
    seed: int = 0

    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and mask [prompts, 512], int32; token 1 ends, 0 pads."""
        rng = np.random.default_rng((self.seed, 1))
        mask = np.arange(512) < np.array(self.lengths)[:, None]
        ids = rng.integers(3, self.config["vocab_size"], mask.shape) * mask
        ids[np.arange(len(ids)), np.array(self.lengths) - 1] = 1
        return ids.astype(np.int32), mask.astype(np.int32)


def text_config(
    vocab: int, width: int, heads: int, head_dim: int, layers: int, **other: Any
) -> dict[str, Any]:
    """A config.json of a UMT5 encoder."""
    return {
        "vocab_size": vocab,
        "d_model": width,
        "d_kv": head_dim,
        "d_ff": 2 * width + 3,
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
    } | other


STORED_TEXT = (
    TextCase("three layers", text_config(50, 24, 3, 8, 3), (1, 2, 41)),
    TextCase(
        "few buckets",
        text_config(31, 16, 2, 12, 1, relative_attention_num_buckets=8),
        (7, 512),
        seed=1,
    ),
)

LIVE_TEXT = (
    TextCase("one head", text_config(99, 16, 1, 16, 2), (512, 1), seed=2),
    TextCase(
        "near only",
        text_config(
            20,
            32,
            4,
            4,
            2,
            relative_attention_num_buckets=12,
            relative_attention_max_distance=20,
            layer_norm_epsilon=1e-3,
        ),
        (100, 3),
        seed=3,
    ),
)
