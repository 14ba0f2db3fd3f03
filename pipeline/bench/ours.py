"""Our own attention for TPUs, to be compiled by `pipeline.bench.bundles`."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kernels import tpu
from kernels.tiles import TileShape, TileTable, TokenGrid

# What kernels/tpu.py calls its kernels; both are in every program of `attend`.
BOUNDED, ONLINE = "tilereel_bounded", "tilereel_online"


def attend(
    grid: tuple[int, int],
    tile: tuple[int, int],
    band: int,
    heads: int,
    head_dim: int = 128,
    rounding: Literal["tile", "exact"] = "tile",
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """Builds attention of bfloat16, for any kinds of heads: they are an argument.

    Args:
        grid: latent frames, and tokens of each.
        tile: queries and keys of a tile.
        band: of the sparse heads' pattern, in tokens.
        heads: how many.
        head_dim: elements of a head's queries, keys and values.
        rounding: see `kernels.tiles.TileTable`.
    """
    table = TileTable(TokenGrid(*grid), TileShape(*tile), band, rounding)
    x = jax.ShapeDtypeStruct((heads, table.grid.tokens, head_dim), jnp.bfloat16)
    kinds = jax.ShapeDtypeStruct((heads,), jnp.int32)
    attend = jax.jit(lambda q, k, v, kinds: tpu.attend(q, k, v, table, kinds))
    return attend, (x, x, x, kinds)
