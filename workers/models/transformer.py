"""Wan 2.1's text-to-video transformer (https://arxiv.org/abs/2503.20314).

Parameters are the tensors of the published diffusers layout as a nested dict, with
the blocks stacked on a leading axis and scanned. Linear weights keep their
[out, in] layout. Activations are [batch, tokens, dim], tokens in frame-major order.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels import attention as tiled
from kernels import dense, profiling
from kernels.tiles import HeadKind, TileTable


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of the transformer, as its config.json says."""

    num_attention_heads: int
    attention_head_dim: int
    num_layers: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    patch_size: tuple[int, int, int]
    eps: float
    rope_max_seq_len: int

    @property
    def dim(self) -> int:
        """Width of the tokens: all heads together."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TransformerConfig":
        """Reads config.json.

        Raises:
            ValueError: the file asks for a variant of Wan other than text to video.
        """
        for key, served in (
            ("qk_norm", "rms_norm_across_heads"),
            ("cross_attn_norm", True),
            ("image_dim", None),
            ("added_kv_proj_dim", None),
            ("pos_embed_seq_len", None),
        ):
            if values.get(key, served) != served:
                raise ValueError(
                    f"{key} is {values[key]!r}; Wan 2.1 text to video has {served!r}"
                )
        names = [field.name for field in dataclasses.fields(cls)]
        chosen: dict[str, Any] = {
            n: v for n, v in (_DEFAULTS | values).items() if n in names
        }
        if missing := [n for n in names if n not in chosen]:
            raise ValueError(f"{', '.join(missing)} missing")
        chosen["patch_size"] = tuple(chosen["patch_size"])
        return cls(**chosen)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["dense", "rows"],
    meta_fields=["table", "tolerance", "dense_layers"],
)
@dataclasses.dataclass(frozen=True)
class SparseStep:
    """How self-attention goes through tiles in one step.

    Attributes:
        table: the tiles of sparse heads.
        tolerance: the largest error of a sparse head.
        dense_layers: first layers in which all heads are dense.
        dense: whether all heads are dense in this step; data, so that steps of both
            kinds are one program.
        rows: queries that heads are profiled at.
    """

    table: TileTable
    tolerance: float
    dense_layers: int
    dense: Bool[Array, ""]
    rows: Int[Array, " samples"]


class HeadStats(NamedTuple):
    """What self-attention's heads did, of each layer; branches' heads in a row.

    Attributes:
        kinds: the `kernels.tiles.HeadKind` of each head.
        errors: of `kernels.profiling.Profile`; NaN where a head was not profiled.
        online: heads whose softmax kept a running maximum.
    """

    kinds: Int[Array, "layers heads"]
    errors: Float[Array, "layers heads 2"]
    online: Bool[Array, "layers heads"]


_DEFAULTS: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "freq_dim": 256,
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}


def tensor_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its name, with its shape."""
    dim, patch = config.dim, int(np.prod(config.patch_size))
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (dim, config.in_channels, *config.patch_size),
        "patch_embedding.bias": (dim,),
        "scale_shift_table": (1, 2, dim),
    }

    def linear(name: str, fan_in: int, fan_out: int) -> None:
        shapes[f"{name}.weight"] = (fan_out, fan_in)
        shapes[f"{name}.bias"] = (fan_out,)

    embedder = "condition_embedder"
    linear(f"{embedder}.time_embedder.linear_1", config.freq_dim, dim)
    linear(f"{embedder}.time_embedder.linear_2", dim, dim)
    linear(f"{embedder}.time_proj", dim, 6 * dim)
    linear(f"{embedder}.text_embedder.linear_1", config.text_dim, dim)
    linear(f"{embedder}.text_embedder.linear_2", dim, dim)
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        for name in ("attn1", "attn2"):
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                linear(f"{block}.{name}.{part}", dim, dim)
            shapes[f"{block}.{name}.norm_q.weight"] = (dim,)
            shapes[f"{block}.{name}.norm_k.weight"] = (dim,)
        shapes[f"{block}.norm2.weight"] = (dim,)
        shapes[f"{block}.norm2.bias"] = (dim,)
        linear(f"{block}.ffn.net.0.proj", dim, config.ffn_dim)
        linear(f"{block}.ffn.net.2", config.ffn_dim, dim)
        shapes[f"{block}.scale_shift_table"] = (1, 6, dim)
    linear("proj_out", dim, config.out_channels * patch)
    return shapes


def _linear(p: dict, x: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, p["weight"]) + p["bias"]


def _layer_norm(x: Array, eps: float) -> Array:
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps)


def _rms_norm(p: dict, x: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + eps)
    return (wide * scale * p["weight"]).astype(x.dtype)


def rotary_angles(
    config: TransformerConfig, frames: int, height: int, width: int
) -> np.ndarray:
    """Rotary angles [frames * height * width, head_dim / 2] of a token grid.

    A head's pairs of channels are dealt to time, height and width; angles are made
    in float64, as position times theta^(-2i/n) (https://arxiv.org/abs/2104.09864).
    """
    across = 2 * (config.attention_head_dim // 6)
    along = config.attention_head_dim - 2 * across

    def angles(length: int, channels: int) -> np.ndarray:
        frequencies = 1e4 ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
        return np.arange(length, dtype=np.float64)[:, None] * frequencies

    grid = (frames, height, width)
    parts = [
        np.broadcast_to(angles(frames, along)[:, None, None], (*grid, along // 2)),
        np.broadcast_to(angles(height, across)[:, None], (*grid, across // 2)),
        np.broadcast_to(angles(width, across), (*grid, across // 2)),
    ]
    return np.concatenate(parts, -1).reshape(frames * height * width, -1)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turns interleaved pairs of x [batch, tokens, heads, head_dim] by their angles."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)


def _profiled(
    q: Array, k: Array, v: Array, sparse: SparseStep
) -> tuple[Array, HeadStats]:
    """Self-attention of heads [heads, tokens, head_dim], each by its profile."""
    heads = q.shape[0]

    def dense_heads() -> profiling.Profile:
        return profiling.Profile(
            jnp.full(heads, HeadKind.DENSE, jnp.int32), jnp.full((heads, 2), jnp.nan)
        )

    def chosen() -> profiling.Profile:
        return profiling.choose(q, k, v, sparse.table, sparse.rows, sparse.tolerance)

    profile = jax.lax.cond(sparse.dense, dense_heads, chosen)
    out, online = tiled.attend(q, k, v, sparse.table, profile.kinds)
    return out, HeadStats(profile.kinds, profile.errors, online)


def _attention(
    p: dict,
    config: TransformerConfig,
    x: Array,
    context: Array,
    rotary: tuple[Array, Array] | None,
    sparse: SparseStep | None = None,
) -> tuple[Array, HeadStats | None]:
    batch, heads = x.shape[0], config.num_attention_heads

    def split(y: Array) -> Array:
        return y.reshape(batch, -1, heads, config.attention_head_dim)

    def fold(y: Array) -> Array:
        y = y.transpose(0, 2, 1, 3)
        return y.reshape(batch * heads, -1, config.attention_head_dim)

    # The norm runs over all heads together, before they are split.
    q = split(_rms_norm(p["norm_q"], _linear(p["to_q"], x), config.eps))
    k = split(_rms_norm(p["norm_k"], _linear(p["to_k"], context), config.eps))
    v = split(_linear(p["to_v"], context))
    if rotary is not None:
        q, k = _rotate(q, *rotary), _rotate(k, *rotary)
    q, k, v = fold(q), fold(k), fold(v)
    stats = None
    if sparse is not None:
        out, stats = _profiled(q, k, v, sparse)
    elif rotary is not None:
        out = tiled.attend_all(q, k, v)
    else:
        out = dense.attend(q, k, v)
    out = out.reshape(batch, heads, -1, config.attention_head_dim)
    out = out.transpose(0, 2, 1, 3).reshape(x.shape)
    return _linear(p["to_out"]["0"], out), stats


def _block(
    p: dict,
    config: TransformerConfig,
    x: Array,
    text: Array,
    modulation: Array,
    rotary: tuple[Array, Array],
    sparse: SparseStep | None,
) -> tuple[Array, HeadStats | None]:
    """One block; norms, modulation and residual sums are float32."""
    dtype = x.dtype
    table = p["scale_shift_table"].astype(jnp.float32) + modulation
    shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(table, 6, 1)

    h = (_layer_norm(x, config.eps) * (1 + scale1) + shift1).astype(dtype)
    h, stats = _attention(p["attn1"], config, h, h, rotary, sparse)
    x = (x.astype(jnp.float32) + h * gate1).astype(dtype)

    norm2 = p["norm2"]
    h = _layer_norm(x, config.eps) * norm2["weight"] + norm2["bias"]
    x = x + _attention(p["attn2"], config, h.astype(dtype), text, None)[0]

    h = (_layer_norm(x, config.eps) * (1 + scale2) + shift2).astype(dtype)
    h = jax.nn.gelu(_linear(p["ffn"]["net"]["0"]["proj"], h), approximate=True)
    h = _linear(p["ffn"]["net"]["2"], h)
    return (x.astype(jnp.float32) + h * gate2).astype(dtype), stats


def _timestep_features(timestep: Array, channels: int) -> Array:
    """Cosines, then sines, of t * 10000^(-i / half)."""
    half = channels // 2
    frequencies = np.exp(-np.log(1e4) * np.arange(half) / half).astype(np.float32)
    angles = timestep.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def forward(
    params: dict,
    config: TransformerConfig,
    latents: Float[Array, "batch frames height width in_channels"],
    timestep: Float[Array, " batch"],
    text: Float[Array, "batch words text_dim"],
    attention: SparseStep | None = None,
) -> tuple[Float[Array, "batch frames height width out_channels"], HeadStats | None]:
    """The velocity, float32, that the model predicts for noisy latents.

    Args:
        params: the checkpoint's tensors, nested, blocks stacked.
        config: the shape of the model.
        latents: noisy latents; frames, height and width divide by the patch.
        timestep: the noise level of each clip, 1000 * sigma.
        text: embeddings of the prompts, zero past their length.
        attention: how self-attention goes through tiles; None for dense.

    Returns:
        The velocity, and what the heads did where attention goes through tiles.
    """
    pt, ph, pw = config.patch_size
    batch, frames, height, width, channels = latents.shape
    grid = (frames // pt, height // ph, width // pw)
    dtype = params["patch_embedding"]["weight"].dtype

    def patches(x: Array) -> Array:
        x = x.reshape(batch, grid[0], pt, grid[1], ph, grid[2], pw, channels)
        return x.transpose(0, 1, 3, 5, 7, 2, 4, 6).reshape(
            batch, int(np.prod(grid)), -1
        )

    embedding = params["patch_embedding"]
    kernel = embedding["weight"].reshape(config.dim, -1)
    x = _linear(
        {"weight": kernel, "bias": embedding["bias"]}, patches(latents).astype(dtype)
    )

    embedder = params["condition_embedder"]
    time = _timestep_features(timestep, config.freq_dim).astype(dtype)
    time = _linear(embedder["time_embedder"]["linear_1"], time)
    time = _linear(embedder["time_embedder"]["linear_2"], jax.nn.silu(time))
    modulation = _linear(embedder["time_proj"], jax.nn.silu(time)).astype(jnp.float32)
    modulation = modulation.reshape(batch, 6, config.dim)
    words = _linear(embedder["text_embedder"]["linear_1"], text.astype(dtype))
    words = jax.nn.gelu(words, approximate=True)
    words = _linear(embedder["text_embedder"]["linear_2"], words)

    angles = rotary_angles(config, *grid)
    rotary = (
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )

    def layer(x: Array, block: tuple[dict, Array]) -> tuple[Array, HeadStats | None]:
        p, number = block
        sparse = attention
        if sparse is not None:
            first = number < sparse.dense_layers
            sparse = dataclasses.replace(sparse, dense=sparse.dense | first)
        return _block(p, config, x, words, modulation, rotary, sparse)

    layers = jnp.arange(config.num_layers)
    x, stats = jax.lax.scan(layer, x, (params["blocks"], layers))

    table = params["scale_shift_table"].astype(jnp.float32)
    shift, scale = jnp.split(table + time.astype(jnp.float32)[:, None], 2, 1)
    x = (_layer_norm(x, config.eps) * (1 + scale) + shift).astype(dtype)
    x = _linear(params["proj_out"], x).astype(jnp.float32)
    x = x.reshape(batch, *grid, pt, ph, pw, config.out_channels)
    x = x.transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return x.reshape(batch, frames, height, width, config.out_channels), stats
