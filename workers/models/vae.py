"""The video autoencoder of Wan 2.1, causal in time.

Follows diffusers' `AutoencoderKLWan`, tensor for tensor. A latent frame stands for
`time_scale` frames of `space_scale` times its height and width; a clip's first latent
frame stands for one frame only. Both ways run one latent frame at a time: a causal
convolution sees the last frames of its own input from a cache, so memory does not grow
with the clip, and the frames are those of a run over the whole clip.

Activations are channel-last, [batch, time, height, width, channels], in the dtype of
the weights; norms and softmax are computed in float32.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from workers.models.params import Params

# What the convolutions remember of the frames so far, in the order in which they run:
# [batch, frames, height, width, channels] each, of the same shapes after every frame.
Cache = tuple[Float[Array, "batch frames height width channels"], ...]

# Queries of the attention computed at once. A 1440p frame has 57,600 tokens, and all
# its scores would take 13.3 GB; this many rows of them take 0.24 GB.
QUERY_CHUNK = 1024

# XLA's CPU backend takes up to 15 times as long for a 3D convolution as for the same
# sum done with 2D ones. There are two ways to do that: stack three frames in the
# channels of one 2D convolution, or add up three 2D convolutions. Milliseconds on 2
# cores (3D, stacked, added): 4 frames of 128 x 128 x 12: 131, 8.6, 19.6; of 64 x 64 x
# 24: 40, 4.7, 4.8; of 64 x 64 x 96: 196, 72, 64; one of 16 x 16 x 384: 39, 51, 38. So
# up to this many channels are stacked; more are not, which also spares large frames a
# copy of three times their size. Compiled for a v6e:2x4 with the width sharded, the
# added form takes 1.9 GB of temporaries a chip at 720p in float32.
STACKED_CHANNELS = 48


@dataclasses.dataclass(frozen=True)
class VAEConfig:
    """Sizes of the autoencoder. Hashable, so that it can be a static argument.

    Attributes:
        base_dim: Channels at full resolution.
        z_dim: Channels of the latents.
        dim_mult: Channels at each resolution, from full to latent, over `base_dim`.
        num_res_blocks: Residual blocks at each resolution (the decoder has one more).
        temporal_downsample: Whether the step down from each resolution but the last
            halves the frames too.
        latents_mean: Mean of each latent channel, taken off by normalising.
        latents_std: Standard deviation of each latent channel.
    """

    base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temporal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    def __post_init__(self):
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"vae config: temperal_downsample has {len(self.temporal_downsample)} "
                f"entries, and dim_mult's {len(self.dim_mult)} resolutions take "
                f"{len(self.dim_mult) - 1}"
            )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(
                    f"vae config: {name} has {len(getattr(self, name))} entries, and "
                    f"z_dim is {self.z_dim}"
                )

    @property
    def time_scale(self) -> int:
        """Frames that a latent frame stands for, the first one apart."""
        return 2 ** sum(self.temporal_downsample)

    @property
    def space_scale(self) -> int:
        """Pixels that a latent one stands for, along height and along width."""
        return 2 ** (len(self.dim_mult) - 1)

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> "VAEConfig":
        """Reads a checkpoint's vae/config.json (which spells it `temperal_downsample`).

        Raises:
            ValueError: if a key is missing, or if the config asks for what Wan 2.1's
                autoencoder does not have (residual down and up blocks and patches are
                Wan 2.2's; attention outside the middle is in no checkpoint, and
                diffusers fails to encode with it).
        """
        only = {
            "is_residual": (None, False),
            "patch_size": (None, 1),
            "in_channels": (None, 3),
            "out_channels": (None, 3),
            "decoder_base_dim": (None, d.get("base_dim")),
            "attn_scales": (None, []),
        }
        for key, accepted in only.items():
            if d.get(key) not in accepted:
                raise ValueError(
                    f"vae config: {key} is {d[key]!r}, and only {accepted[1]!r} is "
                    "supported (the autoencoder of Wan 2.1)"
                )
        names = {f.name: f.name for f in dataclasses.fields(cls)}
        names["temporal_downsample"] = "temperal_downsample"
        if absent := sorted(set(names.values()) - set(d)):
            raise ValueError(f"vae config: {', '.join(absent)} missing")
        values: dict[str, Any] = {
            name: tuple(d[key]) if isinstance(d[key], list) else d[key]
            for name, key in names.items()
        }
        return cls(**values)


class _Layer(NamedTuple):
    name: str
    kind: str
    inputs: int
    outputs: int


def _encoder_layers(config: VAEConfig) -> list[_Layer]:
    layers: list[_Layer] = []

    def add(kind: str, outputs: int) -> None:
        inputs = layers[-1].outputs if layers else config.base_dim
        layers.append(_Layer(f"down_blocks.{len(layers)}", kind, inputs, outputs))

    for level, mult in enumerate(config.dim_mult):
        channels = config.base_dim * mult
        for _ in range(config.num_res_blocks):
            add("residual", channels)
        if level < len(config.temporal_downsample):
            time = config.temporal_downsample[level]
            add("downsample3d" if time else "downsample2d", channels)
    return layers + _mid_layers(layers[-1].outputs)


def _decoder_layers(config: VAEConfig) -> list[_Layer]:
    layers = _mid_layers(config.base_dim * config.dim_mult[-1])
    for level, mult in enumerate(reversed(config.dim_mult)):
        block, channels = f"up_blocks.{level}", config.base_dim * mult
        for i in range(config.num_res_blocks + 1):
            inputs = layers[-1].outputs
            name = f"{block}.resnets.{i}"
            layers.append(_Layer(name, "residual", inputs, channels))
        if level < len(config.temporal_downsample):
            time = config.temporal_downsample[-1 - level]
            kind = "upsample3d" if time else "upsample2d"
            name = f"{block}.upsamplers.0"
            layers.append(_Layer(name, kind, channels, channels // 2))
    return layers


def _mid_layers(channels: int) -> list[_Layer]:
    kinds = ("resnets.0", "residual"), ("attentions.0", "attention")
    return [
        _Layer(f"mid_block.{name}", kind, channels, channels)
        for name, kind in (*kinds, ("resnets.1", "residual"))
    ]


def tensor_shapes(config: VAEConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, as diffusers saves them."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inputs: int, outputs: int, *kernel: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, *kernel)
        shapes[f"{name}.bias"] = (outputs,)

    encoder, decoder = _encoder_layers(config), _decoder_layers(config)
    for model, layers, inputs, outputs in (
        ("encoder", encoder, 3, 2 * config.z_dim),
        ("decoder", decoder, config.z_dim, 3),
    ):
        conv(f"{model}.conv_in", inputs, layers[0].inputs, 3, 3, 3)
        for layer in layers:
            name, last = f"{model}.{layer.name}", layer.outputs
            match layer.kind:
                case "residual":
                    shapes[f"{name}.norm1.gamma"] = (layer.inputs, 1, 1, 1)
                    conv(f"{name}.conv1", layer.inputs, last, 3, 3, 3)
                    shapes[f"{name}.norm2.gamma"] = (last, 1, 1, 1)
                    conv(f"{name}.conv2", last, last, 3, 3, 3)
                    if layer.inputs != last:
                        conv(f"{name}.conv_shortcut", layer.inputs, last, 1, 1, 1)
                case "attention":
                    shapes[f"{name}.norm.gamma"] = (last, 1, 1)
                    conv(f"{name}.to_qkv", last, 3 * last, 1, 1)
                    conv(f"{name}.proj", last, last, 1, 1)
                case _:
                    conv(f"{name}.resample.1", layer.inputs, last, 3, 3)
            if layer.kind == "downsample3d":
                conv(f"{name}.time_conv", last, last, 3, 1, 1)
            if layer.kind == "upsample3d":
                conv(f"{name}.time_conv", layer.inputs, 2 * layer.inputs, 3, 1, 1)
        shapes[f"{model}.norm_out.gamma"] = (layers[-1].outputs, 1, 1, 1)
        conv(f"{model}.conv_out", layers[-1].outputs, outputs, 3, 3, 3)
    conv("quant_conv", 2 * config.z_dim, 2 * config.z_dim, 1, 1, 1)
    conv("post_quant_conv", config.z_dim, config.z_dim, 1, 1, 1)
    return shapes


def decode_first(
    params: Params, config: VAEConfig, z: Float[Array, "batch height width z_dim"]
) -> tuple[Float[Array, "batch 1 pixel_height pixel_width 3"], Cache]:
    """Decodes a clip's first latent frame, which stands for one frame.

    Args:
        params: The checkpoint's tensors, nested (`params.nest`).
        config: Sizes of the autoencoder.
        z: The latent frame, normalised.

    Returns:
        The frame, float32 in -1..1, and the cache for `decode_next`.
    """
    return _decode(params, config, z, _Past(None))


def decode_next(
    params: Params,
    config: VAEConfig,
    z: Float[Array, "batch height width z_dim"],
    cache: Cache,
) -> tuple[Float[Array, "batch time_scale pixel_height pixel_width 3"], Cache]:
    """Decodes any later latent frame, given the cache of the one before.

    Args:
        params: The checkpoint's tensors, nested.
        config: Sizes of the autoencoder.
        z: The latent frame, normalised.
        cache: What the call for the frame before returned.

    Returns:
        The `time_scale` frames, float32 in -1..1, and the cache for the next frame, of
        the same shapes.
    """
    return _decode(params, config, z, _Past(cache))


def encode(
    params: Params,
    config: VAEConfig,
    video: Float[Array, "batch frames pixel_height pixel_width 3"],
) -> Float[Array, "batch latent_frames height width z_dim"]:
    """Encodes a clip, one latent frame after the other.

    Args:
        params: The checkpoint's tensors, nested.
        config: Sizes of the autoencoder.
        video: Frames in -1..1, `time_scale` times k + 1 of them.

    Returns:
        The posterior's mean, normalised, float32.

    Raises:
        ValueError: if the clip's length, height or width does not fit.
    """
    _, frames, height, width, _ = video.shape
    time, space = config.time_scale, config.space_scale
    if frames % time != 1 % time:
        raise ValueError(f"cannot encode {frames} frames: takes {time} * k + 1")
    if height % space or width % space:
        raise ValueError(
            f"cannot encode frames of {width} x {height} pixels: takes multiples of "
            f"{space}"
        )
    z, cache = _encode_first(params, config, video[:, :1])
    latents = [z]
    for start in range(1, frames, time):
        chunk = video[:, start : start + time]
        z, cache = _encode_next(params, config, chunk, cache)
        latents.append(z)
    return jnp.concatenate(latents, 1)


class _Past:
    """Hands each causal convolution its past, in the order in which they run.

    Lives only while a program is traced: outside it, the past is a tuple of arrays.
    """

    def __init__(self, cache: Cache | None):
        self.first = cache is None
        self._old = iter(cache or ())
        self._new: list[Array] = []

    def cache(self) -> Cache:
        return tuple(self._new)

    def keep(self, x: Array) -> None:
        """Remembers x itself."""
        self._new.append(x)

    def extend(self, x: Array, frames: int) -> Array:
        """Puts the frames before x in front of it; before a clip's first are zeros."""
        blank = jnp.zeros((x.shape[0], frames, *x.shape[2:]), x.dtype)
        x = jnp.concatenate([blank if self.first else next(self._old), x], 1)
        self.keep(x[:, -frames:])
        return x


def _decode(params: Params, config: VAEConfig, z: Array, past: _Past):
    x = z.astype(jnp.float32) * jnp.array(config.latents_std)
    x = (x + jnp.array(config.latents_mean))[:, None]
    x = _pointwise(params["post_quant_conv"], x)
    x = _run(params["decoder"], _decoder_layers(config), x, past)
    return jnp.clip(x.astype(jnp.float32), -1, 1), past.cache()


def _encode(params: Params, config: VAEConfig, video: Array, past: _Past):
    x = _run(params["encoder"], _encoder_layers(config), video, past)
    moments = _pointwise(params["quant_conv"], x).astype(jnp.float32)
    mean = moments[..., : config.z_dim] - jnp.array(config.latents_mean)
    return mean / jnp.array(config.latents_std), past.cache()


@jax.jit(static_argnames="config")
def _encode_first(params: Params, config: VAEConfig, video: Array):
    return _encode(params, config, video, _Past(None))


@jax.jit(static_argnames="config")
def _encode_next(params: Params, config: VAEConfig, video: Array, cache: Cache):
    return _encode(params, config, video, _Past(cache))


def _run(params: Params, layers: list[_Layer], x: Array, past: _Past) -> Array:
    x = _causal_conv(params["conv_in"], x, past)
    for layer in layers:
        tensors = params
        for part in layer.name.split("."):
            tensors = tensors[part]
        match layer.kind:
            case "residual":
                x = _residual(tensors, x, past)
            case "attention":
                x = _attention(tensors, x)
            case "downsample2d" | "downsample3d":
                x = _downsample(tensors, x, past)
            case _:
                x = _upsample(tensors, x, past)
    x = jax.nn.silu(_norm(params["norm_out"], x))
    return _causal_conv(params["conv_out"], x, past)


def _residual(params: Params, x: Array, past: _Past) -> Array:
    y = jax.nn.silu(_norm(params["norm1"], x))
    y = _causal_conv(params["conv1"], y, past)
    y = jax.nn.silu(_norm(params["norm2"], y))
    y = _causal_conv(params["conv2"], y, past)
    shortcut = params.get("conv_shortcut")
    return y + (x if shortcut is None else _pointwise(shortcut, x))


def _attention(params: Params, x: Array) -> Array:
    """Attention with one head, within each frame."""
    batch, time, height, width, channels = x.shape
    tokens = height * width
    y = _pointwise(params["to_qkv"], _norm(params["norm"], x))
    q, k, v = jnp.split(y.reshape(batch * time, tokens, 3 * channels), 3, axis=-1)

    def attend(q: Array) -> Array:
        scores = jnp.einsum("bqc,bkc->bqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores / math.sqrt(channels)).astype(v.dtype)
        return jnp.einsum("bqk,bkc->bqc", weights, v)

    chunks = -(-tokens // QUERY_CHUNK)
    if chunks == 1:
        y = attend(q)
    else:
        q = jnp.pad(q, ((0, 0), (0, chunks * QUERY_CHUNK - tokens), (0, 0)))
        q = q.reshape(batch * time, chunks, QUERY_CHUNK, channels)
        y = jnp.moveaxis(jax.lax.map(attend, jnp.moveaxis(q, 1, 0)), 0, 1)
        y = y.reshape(batch * time, chunks * QUERY_CHUNK, channels)[:, :tokens]
    return x + _pointwise(params["proj"], y.reshape(x.shape))


def _downsample(params: Params, x: Array, past: _Past) -> Array:
    """Halves height and width, and the frames too where there is a `time_conv`."""
    x = _conv2d(params["resample"]["1"], x, stride=2, padding=(0, 1))
    if "time_conv" not in params:
        return x
    if past.first:
        past.keep(x)
        return x
    return _time_conv(params["time_conv"], past.extend(x, 1), stride=2)


def _upsample(params: Params, x: Array, past: _Past) -> Array:
    """Doubles height and width, and the frames too where there is a `time_conv`."""
    batch, time, height, width, channels = x.shape
    if "time_conv" in params and past.first:
        # The first frame is not doubled, and for the second it has not been.
        past.keep(jnp.zeros((batch, 2, height, width, channels), x.dtype))
    elif "time_conv" in params:
        x = _time_conv(params["time_conv"], past.extend(x, 2))
        x = jnp.moveaxis(x.reshape(batch, time, height, width, 2, channels), 4, 2)
        time *= 2
    x = x.reshape(batch, time, height, 1, width, 1, channels)
    x = jnp.broadcast_to(x, (batch, time, height, 2, width, 2, channels))
    x = x.reshape(batch, time, 2 * height, 2 * width, channels)
    return _conv2d(params["resample"]["1"], x)


def _norm(params: Params, x: Array) -> Array:
    """Scales each pixel's channels to a root mean square of gamma."""
    y = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(y * y, -1, keepdims=True))
    y = y / jnp.maximum(length, 1e-12) * math.sqrt(x.shape[-1])
    return (y * params["gamma"].reshape(-1)).astype(x.dtype)


def _causal_conv(params: Params, x: Array, past: _Past) -> Array:
    """A 3 x 3 x 3 convolution that sees each frame and the two before it."""
    weight, frames = params["weight"], x.shape[1]
    x = past.extend(x, 2)
    if x.shape[-1] <= STACKED_CHANNELS:
        weight = jnp.concatenate([weight[:, :, i] for i in range(3)], 1)
        return _conv2d({"weight": weight, "bias": params["bias"]}, _windows(x))
    taps = [
        _conv2d({"weight": weight[:, :, i]}, x[:, i : i + frames]) for i in range(3)
    ]
    return taps[0] + taps[1] + taps[2] + params["bias"]


def _windows(x: Array, stride: int = 1) -> Array:
    """Every frame from the third on with the two before it, stacked in the channels."""
    last = x.shape[1] - 2
    return jnp.concatenate([x[:, i : last + i : stride] for i in range(3)], -1)


def _time_conv(params: Params, x: Array, stride: int = 1) -> Array:
    """A convolution over three frames of each pixel, without padding."""
    weight = jnp.swapaxes(params["weight"][..., 0, 0], 1, 2)
    weight = weight.reshape(len(weight), -1)
    return _pointwise({"weight": weight, "bias": params["bias"]}, _windows(x, stride))


def _conv2d(
    params: Params, x: Array, stride: int = 1, padding: tuple[int, int] = (1, 1)
) -> Array:
    """Convolves each frame."""
    weight = params["weight"]
    y = jax.lax.conv_general_dilated(
        x.reshape(-1, *x.shape[2:]).astype(weight.dtype),
        jnp.transpose(weight, (2, 3, 1, 0)),
        (stride, stride),
        (padding, padding),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = y + params["bias"] if "bias" in params else y
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _pointwise(params: Params, x: Array) -> Array:
    """A convolution with a kernel of one pixel of one frame."""
    weight = params["weight"].reshape(params["weight"].shape[:2])
    return x.astype(weight.dtype) @ weight.T + params["bias"]
