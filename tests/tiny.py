"""A tiny model with random weights, in the layout of a published checkpoint."""

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from configs.demo_training import vocabulary
from tests.references.weights import random_tensors
from workers.models import text_encoder, transformer, vae

CONFIGS: dict[str, dict[str, Any]] = {
    "transformer": {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    },
    "text_encoder": {
        "vocab_size": len(vocabulary.WORDS),
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
    },
    "vae": {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    },
}
_SHAPES = {
    "transformer": (transformer.TransformerConfig, transformer.tensor_shapes),
    "text_encoder": (text_encoder.TextConfig, text_encoder.tensor_shapes),
    "vae": (vae.VAEConfig, vae.tensor_shapes),
}


def file_of(part: str) -> str:
    """The name that a part's weights go by."""
    return "model" if part == "text_encoder" else "diffusion_pytorch_model"


def write_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model's folder and returns it."""
    for part, config in CONFIGS.items():
        kind, shapes = _SHAPES[part]
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(config))
        tensors = random_tensors(shapes(kind.from_json(config)), seed)
        save_file(tensors, folder / part / f"{file_of(part)}.safetensors")
    (folder / "tokenizer").mkdir(exist_ok=True)
    vocabulary.tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return folder
