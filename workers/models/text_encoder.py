"""The text encoder of Wan 2.1: the encoder half of UMT5.

Follows transformers' `UMT5EncoderModel`, tensor for tensor. Unlike T5's, each layer has
its own relative position bias; like T5's, scores are not scaled. Norms, softmax and the
residual stream are in float32, products in the dtype of the weights.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from workers.models.params import Params

# Stack these with `params.nest`: the layers are scanned.
STACKED = ("encoder.block",)


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Sizes of the encoder. Hashable, so that it can be a static argument.

    Attributes:
        vocab_size: Tokens in the vocabulary.
        d_model: Width of the embeddings.
        d_kv: Width of each head.
        d_ff: Width of the feed-forward layer.
        num_layers: Layers.
        num_heads: Heads of each layer.
        relative_attention_num_buckets: Distances that the position bias tells apart,
            both directions together.
        relative_attention_max_distance: From here on all distances share a bucket.
        layer_norm_epsilon: Added to the mean square.
    """

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> "TextConfig":
        """Reads a checkpoint's text_encoder/config.json.

        Raises:
            ValueError: if a key is missing, or if the feed-forward layer is not UMT5's.
        """
        if (activation := d.get("feed_forward_proj", "gated-gelu")) != "gated-gelu":
            raise ValueError(
                f"text_encoder config: feed_forward_proj is {activation!r}, "
                "and only 'gated-gelu' is supported (UMT5)"
            )
        fields = dataclasses.fields(cls)
        required = {f.name for f in fields if f.default is dataclasses.MISSING}
        if absent := sorted(required - set(d)):
            raise ValueError(f"text_encoder config: {', '.join(absent)} missing")
        return cls(**{f.name: d[f.name] for f in fields if f.name in d})


def tensor_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, as transformers saves them.

    `encoder.embed_tokens.weight` is `shared.weight` under another name, and not saved.
    """
    width, inner = config.d_model, config.num_heads * config.d_kv
    buckets = config.relative_attention_num_buckets
    layer = {
        "layer.0.SelfAttention.q.weight": (inner, width),
        "layer.0.SelfAttention.k.weight": (inner, width),
        "layer.0.SelfAttention.v.weight": (inner, width),
        "layer.0.SelfAttention.o.weight": (width, inner),
        "layer.0.SelfAttention.relative_attention_bias.weight": (
            buckets,
            config.num_heads,
        ),
        "layer.0.layer_norm.weight": (width,),
        "layer.1.DenseReluDense.wi_0.weight": (config.d_ff, width),
        "layer.1.DenseReluDense.wi_1.weight": (config.d_ff, width),
        "layer.1.DenseReluDense.wo.weight": (width, config.d_ff),
        "layer.1.layer_norm.weight": (width,),
    }
    shapes = {
        f"encoder.block.{i}.{name}": shape
        for i in range(config.num_layers)
        for name, shape in layer.items()
    }
    shapes["encoder.final_layer_norm.weight"] = (width,)
    return shapes | {"shared.weight": (config.vocab_size, width)}


def encode(
    params: Params,
    config: TextConfig,
    ids: Int[Array, "batch tokens"],
    mask: Int[Array, "batch tokens"],
) -> Float[Array, "batch tokens d_model"]:
    """Encodes prompts into what the transformer's cross-attention reads.

    Args:
        params: The checkpoint's tensors, nested and with the layers `STACKED`.
        config: Sizes of the encoder.
        ids: Token ids, padded at the end.
        mask: 1 for a prompt's own tokens, 0 for padding.

    Returns:
        float32 embeddings, zero past each prompt's end, as diffusers' `WanPipeline`
        hands them on.
    """
    tokens = ids.shape[1]
    buckets = jnp.array(_buckets(config, tokens))
    hidden_from = jnp.where(mask > 0, 0, jnp.finfo(jnp.float32).min)[:, None, None]

    def layer(x: Array, params: Params) -> tuple[Array, None]:
        attention, dense = params["layer"]["0"], params["layer"]["1"]
        y = _norm(attention["layer_norm"], x, config)
        x = x + _attention(attention["SelfAttention"], y, config, buckets, hidden_from)
        y = _norm(dense["layer_norm"], x, config)
        return x + _feed_forward(dense["DenseReluDense"], y), None

    x = params["shared"]["weight"][ids].astype(jnp.float32)
    x, _ = jax.lax.scan(layer, x, params["encoder"]["block"])
    x = _norm(params["encoder"]["final_layer_norm"], x, config)
    return jnp.where(mask[..., None] > 0, x, 0)


def _attention(
    params: Params, x: Array, config: TextConfig, buckets: Array, hidden_from: Array
) -> Array:
    shape = (*x.shape[:2], config.num_heads, config.d_kv)
    q, k, v = (_linear(params[name], x).reshape(shape) for name in "qkv")
    q, k, v = (y.astype(params["o"]["weight"].dtype) for y in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    bias = params["relative_attention_bias"]["weight"].astype(jnp.float32)
    scores = scores + bias.T[:, buckets] + hidden_from
    weights = jax.nn.softmax(scores).astype(v.dtype)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v, preferred_element_type=jnp.float32)
    return _linear(params["o"], y.reshape(*x.shape[:2], -1))


def _feed_forward(params: Params, x: Array) -> Array:
    gate = jax.nn.gelu(_linear(params["wi_0"], x), approximate=True)
    return _linear(params["wo"], gate * _linear(params["wi_1"], x))


def _linear(params: Params, x: Array) -> Array:
    weight = params["weight"]
    return jnp.einsum(
        "bti,oi->bto",
        x.astype(weight.dtype),
        weight,
        preferred_element_type=jnp.float32,
    )


def _norm(params: Params, x: Array, config: TextConfig) -> Array:
    square = jnp.mean(x * x, -1, keepdims=True)
    return x * jax.lax.rsqrt(square + config.layer_norm_epsilon) * params["weight"]


def _buckets(config: TextConfig, tokens: int) -> np.ndarray:
    """The position bias' bucket of each pair of tokens, int32 [queries, keys].

    Half of the buckets are for keys after the query. Of each half, one half is for the
    nearest distances one by one, the other for ever wider ranges of farther ones.
    """
    distance = np.arange(tokens) - np.arange(tokens)[:, None]
    half = config.relative_attention_num_buckets // 2
    near = half // 2
    # In float32, and the logarithms divided first: a distance on a range's edge falls
    # on the side that the reference puts it.
    far = np.log(np.maximum(np.abs(distance), near).astype(np.float32) / near)
    far = far / np.float32(math.log(config.relative_attention_max_distance / near))
    far = near + (far * (half - near)).astype(np.int32)
    bucket = np.where(
        np.abs(distance) < near, np.abs(distance), np.minimum(far, half - 1)
    )
    return (bucket + half * (distance > 0)).astype(np.int32)
