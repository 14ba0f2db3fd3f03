"""Writes the trained demo model as a folder in the diffusers layout.

    python -m configs.demo_training.export --work FOLDER --output configs/models/demo

Weights are stored as bfloat16; the transformer and the text encoder are the running
averages of training. Needs the `bench` extra.
"""

import argparse
import json
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from transformers import PreTrainedTokenizerFast

from configs.demo_training import train_transformer, train_vae, vocabulary

INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": diffusers.__version__,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def export(work: Path, output: Path) -> None:
    """Writes OUTPUT/{transformer,text_encoder,vae,tokenizer,scheduler}."""
    models = train_transformer.Models()
    saved = torch.load(work / "transformer.pt", weights_only=True)
    models.load_state_dict(saved["average"])
    config = {
        **train_vae.CONFIG,
        "latents_mean": models.mean.tolist(),
        "latents_std": models.std.tolist(),
    }
    vae = AutoencoderKLWan(**config)
    vae.load_state_dict(torch.load(work / "vae.pt", weights_only=True)["model"])

    for name, part in (
        ("vae", vae),
        ("transformer", models.transformer),
        ("text_encoder", models.text),
    ):
        part.to(torch.bfloat16).save_pretrained(output / name)
    PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.tokenizer(),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=train_transformer.TEXT_LENGTH,
        padding_side="right",
    ).save_pretrained(output / "tokenizer")
    UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=train_transformer.SHIFT,
    ).save_pretrained(output / "scheduler")
    (output / "model_index.json").write_text(json.dumps(INDEX, indent=2) + "\n")
    for path in output.rglob("*.safetensors"):
        path.chmod(0o644)  # the library leaves them to their owner alone


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.work, arguments.output)
