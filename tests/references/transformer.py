"""Random transformers and inputs of which reference outputs are stored or compared."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class TransformerCase:
    """A random transformer, and noisy latents that it is run on.

    Attributes:
        name: Names the case in tests and in the stored outputs.
        config: What the checkpoint's config.json would say.
        latents: Shape of the latents, [batch, frames, height, width].
        words: Tokens of each prompt that are not padding.
        seed: Seed of the weights and the inputs.
    """

    name: str
    config: dict[str, Any]
    latents: tuple[int, int, int, int]
    words: tuple[int, ...]
    seed: int = 0

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Latents [..., channels], whole timesteps [batch] and text, float32."""
        rng = np.random.default_rng((self.seed, 1))
        latents = rng.standard_normal((*self.latents, self.config["in_channels"]))
        text = rng.standard_normal((len(self.words), 512, self.config["text_dim"]))
        text *= (np.arange(512) < np.array(self.words)[:, None])[..., None]
        timesteps = rng.integers(1, 1000, len(self.words)).astype(np.float32)
        return latents.astype(np.float32), timesteps, text.astype(np.float32)


def transformer_config(
    heads: int, head_dim: int, layers: int, channels: int, **other: Any
) -> dict[str, Any]:
    """A config.json of a Wan 2.1 transformer."""
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "in_channels": channels,
        "out_channels": channels,
        "text_dim": 20,
        "freq_dim": 256,
        "ffn_dim": 3 * heads * head_dim // 2,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    } | other


STORED = (
    TransformerCase(
        "three heads", transformer_config(3, 16, 2, 4), (2, 3, 4, 6), (1, 512)
    ),
    TransformerCase(
        "odd patches",
        transformer_config(1, 24, 3, 3, patch_size=(1, 1, 2), eps=1e-3, freq_dim=64),
        (1, 2, 3, 10),
        (7,),
        seed=1,
    ),
)

LIVE = (
    TransformerCase(
        "wan's head", transformer_config(2, 128, 1, 16), (1, 5, 6, 2), (0,), seed=2
    ),
    TransformerCase(
        "one frame, five heads",
        transformer_config(5, 32, 4, 8),
        (2, 1, 8, 8),
        (512, 0),
        seed=3,
    ),
    TransformerCase(
        "long",
        transformer_config(2, 20, 2, 4, text_dim=33, freq_dim=32),
        (1, 21, 4, 8),
        (1,),
        seed=4,
    ),
)
