"""A whole model folder in the diffusers layout, tiny and with random weights."""

import json
from pathlib import Path

import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.references.weights import random_tensors
from workers.models import text_encoder, transformer, vae

TRANSFORMER = {
    "_class_name": "WanTransformer3DModel",
    "attention_head_dim": 12,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "ffn_dim": 32,
    "freq_dim": 16,
    "in_channels": 4,
    "num_attention_heads": 2,
    "num_layers": 2,
    "out_channels": 4,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 16,
}
VAE = {
    "_class_name": "AutoencoderKLWan",
    "attn_scales": [],
    "base_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "dropout": 0.0,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.0, 1.2, 0.8, 0.9],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "z_dim": 4,
}
TEXT = {
    "architectures": ["UMT5EncoderModel"],
    "d_ff": 24,
    "d_kv": 8,
    "d_model": 16,
    "dense_act_fn": "gelu_new",
    "feed_forward_proj": "gated-gelu",
    "is_gated_act": True,
    "layer_norm_epsilon": 1e-6,
    "model_type": "umt5",
    "num_heads": 2,
    "num_layers": 1,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "vocab_size": 16,
}
WORDS = ["<pad>", "</s>", "<unk>", "\N{LOWER ONE EIGHTH BLOCK}", "a", "red", "circle"]

_PARTS = {
    "transformer": (
        TRANSFORMER,
        transformer.TransformerConfig,
        transformer,
        "diffusion_pytorch_model",
    ),
    "vae": (VAE, vae.VAEConfig, vae, "diffusion_pytorch_model"),
    "text_encoder": (TEXT, text_encoder.TextConfig, text_encoder, "model"),
}


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Writes a model that the denoiser takes, of some thousand parameters.

    Args:
        folder: Where; is made.
        seed: The same seed gives the same weights.

    Returns:
        The folder.
    """
    for number, (part, (config, kind, module, stem)) in enumerate(_PARTS.items()):
        home = folder / part
        home.mkdir(parents=True)
        (home / "config.json").write_text(json.dumps(config))
        shapes = module.tensor_shapes(kind.from_json(config))
        tensors = random_tensors(shapes, seed + number)
        safetensors.numpy.save_file(tensors, home / f"{stem}.safetensors")
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(
        '{"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}'
    )
    _write_tokenizer(folder / "tokenizer")
    return folder


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    unigram = models.Unigram([(word, -float(len(word))) for word in WORDS], unk_id=2)
    tokenizer = tokenizers.Tokenizer(unigram)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
