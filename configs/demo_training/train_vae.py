"""Trains the demo model's VAE on crops of drawn clips.

    python -m configs.demo_training.train_vae --work FOLDER [--steps 2000]

Uses diffusers' own `AutoencoderKLWan`, so that the weights are in the published
layout from the first step. Needs the `bench` extra. Stop it at any time: the same
command goes on from FOLDER/vae.pt.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders import autoencoder_kl_wan

from configs.demo_training import draw
from configs.demo_training.progress import Progress

CONFIG = {
    "base_dim": 12,
    "z_dim": 8,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "latents_mean": [0.0] * 8,
    "latents_std": [1.0] * 8,
}
# Per latent element. Small enough that edges stay sharp, large enough that the
# latents are smooth, which is what the transformer needs.
KL_WEIGHT = 5e-4

# Until which share of the steps: clips in a batch, frames, pixels a side. Pictures
# first, then short crops, then longer ones. The last ones are as long as the memory
# of the convolutions in time: after short crops alone, colours drift from the tenth
# frame on.
COURSE = ((0.32, 16, 1, 64), (0.64, 8, 5, 48), (0.8, 4, 9, 64), (1, 2, 49, 32))


def fast_norms() -> None:
    """Replaces the reduction of diffusers' RMS norm by an equal, faster one.

    `torch.linalg.vector_norm` over the channel axis takes a quarter of a training
    step on a CPU; the sum of squares takes little.
    """

    def forward(self, x):
        norm = x.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
        return x / norm * (self.scale * self.gamma) + self.bias

    autoencoder_kl_wan.WanRMS_norm.forward = forward


def initialise(vae: AutoencoderKLWan) -> None:
    """A start from which a small VAE learns in minutes.

    Every convolution keeps the variance of its input, residual branches start at
    zero and biases too, so that the picture reaches the latents and comes back from
    the first step on; PyTorch's own start loses it in a dozen layers. The posterior
    starts narrow: drowned in noise of size one, the decoder would learn to ignore
    its input. Of the convolutions in time only the newest tap has weights, and
    changes of frame rate drop or repeat frames, so that what the first, cheap steps
    learn on single pictures holds for clips as well.
    """
    for name, module in vae.named_modules():
        if not isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            continue
        weight, taps = module.weight.data, module.weight.shape[2]
        module.bias.data.zero_()
        if name.endswith((".conv2", ".proj")):
            weight.zero_()
        elif name.endswith("time_conv"):
            out, channels = weight.shape[:2]
            weight.zero_()
            weight[:, :, -1, 0, 0] = torch.eye(channels).repeat(out // channels, 1)
        else:
            weight *= math.sqrt(3)
            if isinstance(module, torch.nn.Conv3d) and taps > 1:
                weight[:, :, -1] *= math.sqrt(taps)
                weight[:, :, :-1] = 0
    vae.quant_conv.bias.data[CONFIG["z_dim"] :] = -6


def crops(rng: np.random.Generator, batch: int, frames: int, size: int) -> torch.Tensor:
    """Crops around moving shapes, float32 [batch, 3, frames, size, size] in -1..1."""
    clips = []
    for _ in range(batch):
        scene = draw.random_scene(rng)
        moved = scene.speed * int(rng.integers(draw.LONGEST - frames + 1))
        start = (
            np.array(scene.start) + np.array(draw.DIRECTIONS[scene.direction]) * moved
        )
        scene = dataclasses.replace(scene, start=(start[0], start[1]))
        corner = (start + rng.uniform(-1, 1, 2) * 0.2) * 128 - size / 2
        x, y = np.clip(np.rint(corner), 0, 128 - size).astype(int)
        clip = draw.draw(scene, frames)[:, y : y + size, x : x + size]
        clips.append(clip)
    video = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3)
    return video.float() / 127.5 - 1


def loss(vae: AutoencoderKLWan, video: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The training loss, and the mean absolute error in levels of 255."""
    with torch.autocast("cpu", torch.bfloat16):
        posterior = vae.encode(video).latent_dist
        picture = vae.decode(posterior.sample()).sample
    difference = picture.float() - video
    error = difference.abs().mean()
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    total = error + difference.square().mean() + KL_WEIGHT * kl
    return total, float(error.detach()) * 127.5


def train(work: Path, steps: int, seed: int = 0) -> list[float]:
    """Trains up to `steps` in all and returns the loss of the steps taken now."""
    fast_norms()
    torch.manual_seed(seed)
    vae = AutoencoderKLWan(**CONFIG)
    initialise(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1, weight_decay=1e-4)
    progress = Progress(work / "vae.pt", model=vae, optimizer=optimizer)
    begin, losses, clock = progress.load(), [], time.monotonic()
    for step in range(begin, steps):
        rng = np.random.default_rng((seed, step))
        batch, frames, size = next(c[1:] for c in COURSE if step < c[0] * steps)
        video = crops(rng, batch, frames, size)
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = min(1, (step + 1) / 50) * (2.5e-3 * cosine + 2e-5)
        value, levels = loss(vae, video)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        losses.append(float(value.detach()))
        if step % 25 == 24 or step == steps - 1:
            progress.save(step + 1)
            print(
                f"step {step + 1}/{steps} loss {np.mean(losses[-25:]):.4f} "
                f"error {levels:.2f}/255 {time.monotonic() - clock:.0f} s",
                flush=True,
            )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    train(arguments.work, arguments.steps)
