"""Trains the demo model's transformer and text encoder on latents of drawn clips.

    python -m configs.demo_training.train_transformer --work FOLDER

FOLDER holds vae.pt from `train_vae`. First the drawn clips are encoded into
FOLDER/latents, then both models learn together by flow matching
(https://arxiv.org/abs/2210.02747). Needs the `bench` extra. Stop it at any time:
the same command goes on.
"""

import argparse
import copy
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from configs.demo_training import draw, train_vae, vocabulary
from configs.demo_training.progress import Progress

TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "in_channels": 8,
    "out_channels": 8,
    "text_dim": 64,
    "freq_dim": 256,
    "ffn_dim": 576,
    "num_layers": 6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
TEXT = {
    "vocab_size": len(vocabulary.WORDS),
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
TEXT_LENGTH = 512  # tokens of a prompt as Wan pads it
SHIFT = 3.0  # of the noise levels, in training as in sampling
# Latent frames -> clips in a batch: about 6,000 tokens each.
BATCHES = {1: 64, 2: 48, 3: 32, 6: 16, 11: 8, 21: 4}
# Most of the batches are long: it takes many frames to see which way a shape moves.
SHARE = {1: 0.02, 2: 0.01, 3: 0.04, 6: 0.25, 11: 0.43, 21: 0.25}
CLIPS_PER_FILE = 36
RATE = 1.5e-3  # of learning, at its highest


def encode_clips(vae, scenes: list[draw.Scene], frames: int) -> torch.Tensor:
    """Means of the posteriors, bfloat16 [clips, channels, latent frames, 16, 16]."""
    video = np.stack([draw.draw(scene, frames) for scene in scenes])
    x = torch.from_numpy(video).permute(0, 4, 1, 2, 3).bfloat16() / 127.5 - 1
    with torch.no_grad():
        return vae.encode(x).latent_dist.mode()


def make_latents(work: Path, long_files: int, short_files: int) -> list[Path]:
    """Encodes the training clips: files of 36 clips of 81 or of 21 frames each."""
    train_vae.fast_norms()
    vae = AutoencoderKLWan(**train_vae.CONFIG)
    saved = torch.load(work / "vae.pt", weights_only=True)
    vae.load_state_dict(saved["model"])
    vae = vae.bfloat16().eval()
    folder = work / "latents"
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(long_files + short_files):
        frames = draw.LONGEST if number < long_files else 21
        path = folder / f"{frames}-{number:04d}.pt"
        paths.append(path)
        if path.exists():
            continue
        rng = np.random.default_rng((1, number))
        scenes = [draw.random_scene(rng) for _ in range(CLIPS_PER_FILE)]
        sixes = [scenes[i : i + 6] for i in range(0, CLIPS_PER_FILE, 6)]
        latents = torch.cat([encode_clips(vae, six, frames) for six in sixes])
        words = [(s.colour, s.shape, s.direction) for s in scenes]
        beside = path.with_suffix(".new")
        torch.save({"latents": latents, "words": words}, beside)
        os.replace(beside, path)
        print(f"encoded {number + 1}/{long_files + short_files}", flush=True)
    return paths


class Clips:
    """Latents by length: long clips serve shorter lengths by their beginnings.

    The VAE is causal, so the first latents of a clip are those of its beginning.
    """

    def __init__(self, paths: list[Path]):
        files = [torch.load(path, weights_only=True) for path in paths]
        self.latents = [clip for file in files for clip in file["latents"]]
        self.words = [words for file in files for words in file["words"]]
        self.long = [i for i, clip in enumerate(self.latents) if clip.shape[1] >= 21]

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of each latent channel."""
        values = torch.cat([c.float().flatten(1) for c in self.latents[::7]], 1)
        return values.mean(1), values.std(1)

    def batch(self, rng: np.random.Generator, length: int, size: int):
        """(latents [size, channels, length, 16, 16], their words)."""
        pool = self.long if length > 6 else range(len(self.latents))
        chosen = rng.choice(pool, size)
        latents = torch.stack([self.latents[i][:, :length] for i in chosen]).float()
        return latents, [self.words[i] for i in chosen]


def _rows(transformer) -> torch.Tensor:
    """Channels of all heads, each head's even ones first.

    Taken in this order in queries and keys alike, scores stay the same and rotary
    pairs become two plain halves.
    """
    heads = transformer.config.num_attention_heads
    dim = transformer.config.attention_head_dim
    halves = torch.arange(dim).view(-1, 2).T.flatten()
    return (torch.arange(heads)[:, None] * dim + halves).flatten()


def _normed(x, linear, norm, rows=slice(None)):
    """A projection and its RMS norm over all heads, channels taken in order `rows`."""
    x = F.linear(x, linear.weight[rows], linear.bias[rows])
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
    return x * scale.to(x.dtype) * norm.weight[rows].to(x.dtype)


def _attend(q, k, v, bias=0.0):
    """Attention written out: its backward pass beats the fused one on few tokens."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1])) + bias
    return scores.softmax(-1).to(v.dtype) @ v


def _self_attention(attn, x, rows, cos, sin):
    def turned(linear, norm):
        y = _normed(x, linear, norm, rows)
        a, b = y.unflatten(2, (attn.heads, -1)).transpose(1, 2).chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    q, k = turned(attn.to_q, attn.norm_q), turned(attn.to_k, attn.norm_k)
    v = attn.to_v(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
    attend = _attend if x.shape[1] <= 400 else F.scaled_dot_product_attention
    return attn.to_out[0](attend(q, k, v).transpose(1, 2).flatten(2))


def _cross_attention(attn, x, text):
    """Attention to `TEXT_LENGTH` tokens of which most are the same padding.

    The embeddings past a prompt's length are zero, so their keys and values are
    equal: the last one, with the logarithm of their number as a bias, stands for
    all. The result is that of the whole length at a fraction of the work.
    """

    def heads(y):
        return y.unflatten(2, (attn.heads, -1)).transpose(1, 2)

    q = heads(_normed(x, attn.to_q, attn.norm_q))
    k = heads(_normed(text, attn.to_k, attn.norm_k))
    bias = torch.zeros(text.shape[1], dtype=q.dtype)
    bias[-1] = math.log(TEXT_LENGTH - text.shape[1] + 1)
    out = _attend(q, k, heads(attn.to_v(text)), bias)
    return attn.to_out[0](out.transpose(1, 2).flatten(2))


def velocity(transformer, latents, sigma, text) -> torch.Tensor:
    """What `transformer` gives, laid out for the backward pass on a CPU.

    Args:
        transformer: a `WanTransformer3DModel`.
        latents: [batch, channels, frames, height, width].
        sigma: noise levels [batch, frames]; frames may differ, as in "diffusion
            forcing" (https://arxiv.org/abs/2407.01392).
        text: [batch, words + 1, text_dim], the last one standing for all padding.
    """
    batch, _, frames, height, width = latents.shape
    embedder, rows = transformer.condition_embedder, _rows(transformer)
    cos, sin = (part[0, :, 0, ::2] for part in transformer.rope(latents))
    # Patches of 1 x 2 x 2: a plain projection of their channels.
    x = latents.unflatten(4, (-1, 2)).unflatten(3, (-1, 2))
    x = x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
    x = F.linear(
        x,
        transformer.patch_embedding.weight.flatten(1),
        transformer.patch_embedding.bias,
    )
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    time = embedder.time_embedder(embedder.timesteps_proj(1000 * sigma.flatten()))
    turn = embedder.time_proj(F.silu(time)).unflatten(1, (6, -1))
    text = embedder.text_embedder(text)

    def modulated(y, shift, scale):
        """Layer norm, then each frame's own scale and shift."""
        y = F.layer_norm(y, y.shape[-1:], eps=transformer.config.eps)
        return by_frame(y, lambda z: z * (1 + scale) + shift)

    def by_frame(y, f):
        return f(y.view(batch * frames, -1, y.shape[-1])).view(y.shape)

    for block in transformer.blocks:
        six = (block.scale_shift_table + turn.float()).to(x.dtype).unsqueeze(2)
        shift, scale, gate, shift2, scale2, gate2 = six.unbind(1)
        y = _self_attention(block.attn1, modulated(x, shift, scale), rows, cos, sin)
        x = x + by_frame(y, lambda z, gate=gate: z * gate)
        norm = block.norm2
        y = F.layer_norm(
            x, x.shape[-1:], norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps
        )
        x = x + _cross_attention(block.attn2, y, text)
        y = block.ffn(modulated(x, shift2, scale2))
        x = x + by_frame(y, lambda z, gate=gate2: z * gate)

    two = transformer.scale_shift_table + time.float().unsqueeze(1)
    shift, scale = two.to(x.dtype).unsqueeze(2).unbind(1)
    x = transformer.proj_out(modulated(x, shift, scale))
    x = x.view(batch, frames, height // 2, width // 2, 2, 2, -1)
    return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)


class Models(torch.nn.Module):
    """The transformer and the text encoder, trained as one.

    The latents' mean and deviation by channel belong to the weights that learned on
    them: they are kept with them, whatever files a later run finds.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self):
        super().__init__()
        self.transformer = WanTransformer3DModel(**TRANSFORMER)
        self.text = UMT5EncoderModel(UMT5Config(**TEXT))
        for name, parameter in self.transformer.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
            elif ".attn2.norm_" in name:
                # Padding outnumbers words by fifty to one: sharper scores let the
                # words be heard from the first step.
                torch.nn.init.constant_(parameter, 2.0)
        torch.nn.init.zeros_(self.transformer.proj_out.weight)
        self.register_buffer("mean", torch.zeros(TRANSFORMER["in_channels"]))
        self.register_buffer("std", torch.ones(TRANSFORMER["in_channels"]))

    def embed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embeddings [batch, words + 1, text_dim], zero past each prompt's length."""
        states = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.pad(states * mask[..., None], (0, 0, 0, 1))


def noise_levels(count: int, frames: int, generator) -> torch.Tensor:
    """Random noise levels [count, frames].

    In one half of the clips every frame has the same level, as in sampling, spread
    evenly before the shift. In the other half one or two frames are nearly clean
    and the rest mostly noise, so that where a shape goes can only be told from the
    text: this teaches motion much sooner than even noise does.
    """
    u = torch.rand(count, generator=generator) + torch.randperm(
        count, generator=generator
    )
    u = (u / count)[:, None]
    even = SHIFT * u / (1 + (SHIFT - 1) * u)
    noisy = SHIFT**2 * u / (1 + (SHIFT**2 - 1) * u)
    order = torch.rand(count, frames, generator=generator).argsort(1)
    clean = order < torch.randint(1, 3, (count, 1), generator=generator)
    nearly = torch.rand(count, frames, generator=generator) / 2
    forced = torch.rand(count, 1, generator=generator).argsort(0) % 2 == 0
    return torch.where(forced & clean, nearly, torch.where(forced, noisy, even))


def flow_loss(models: Models, latents, ids, mask, generator) -> torch.Tensor:
    """Mean squared error of the velocity at random noise levels."""
    sigma = noise_levels(len(latents), latents.shape[2], generator)
    noise = torch.randn(latents.shape, generator=generator)
    level = sigma[:, None, :, None, None]
    noisy = (1 - level) * latents + level * noise
    with torch.autocast("cpu", torch.bfloat16):
        text = models.embed(ids, mask)
        guess = velocity(models.transformer, noisy, sigma, text)
    return F.mse_loss(guess.float(), noise - latents)


def optimizers(models: Models):
    """Muon for the matrices of the transformer's blocks, AdamW for all the rest.

    https://kellerjordan.github.io/posts/muon/. Their rates are set at every step.
    """
    matrices = [p for p in models.transformer.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in models.parameters() if id(p) not in chosen]
    return (
        torch.optim.Muon(
            matrices, lr=1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=1, weight_decay=0.01, betas=(0.9, 0.98)),
    )


def train(
    work: Path,
    steps: int,
    paths: list[Path],
    batches: dict[int, int] = BATCHES,
    seed: int = 0,
) -> list[float]:
    """Trains up to `steps` in all and returns the loss of the steps taken now."""
    share = np.array([SHARE[length] for length in batches])
    torch.manual_seed(seed)
    clips, models = Clips(paths), Models()
    models.mean, models.std = clips.statistics()
    average = copy.deepcopy(models)
    muon, adam = optimizers(models)
    progress = Progress(
        work / "transformer.pt", model=models, average=average, muon=muon, adam=adam
    )
    begin, losses, clock = progress.load(), [], time.monotonic()
    mean, std = (x[:, None, None, None] for x in (models.mean, models.std))
    for step in range(begin, steps):
        rng = np.random.default_rng((2, seed, step))
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        length = int(rng.choice(list(batches), p=share / share.sum()))
        latents, words = clips.batch(rng, length, batches[length])
        prompts = vocabulary.random_prompts(rng, words)
        ids, mask = (torch.from_numpy(x) for x in prompts)
        warm = min(1, (step + 1) / 200)
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in muon.param_groups + adam.param_groups:
            group["lr"] = RATE * warm * cosine + 1e-5
        value = flow_loss(models, (latents - mean) / std, ids, mask, generator)
        models.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        muon.step()
        adam.step()
        keep = min(0.997, (step + 1) / (step + 10))
        with torch.no_grad():
            for kept, new in zip(
                average.parameters(), models.parameters(), strict=True
            ):
                kept.lerp_(new, 1 - keep)
        losses.append(float(value.detach()))
        if step % 100 == 99 or step == steps - 1:
            progress.save(step + 1)
            print(
                f"step {step + 1}/{steps} loss {np.mean(losses[-100:]):.4f} "
                f"{time.monotonic() - clock:.0f} s",
                flush=True,
            )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--long-files", type=int, default=32)
    parser.add_argument("--short-files", type=int, default=0)
    arguments = parser.parse_args()
    latents = make_latents(arguments.work, arguments.long_files, arguments.short_files)
    train(arguments.work, arguments.steps, latents)
