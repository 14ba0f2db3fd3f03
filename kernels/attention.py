"""Attention of a clip's tokens to each other, by heads of different kinds.

`attend` is the one entry; behind it stand a kernel for TPUs, one for GPUs, and a path
in XLA for all else, such as tiles too small for a TPU's registers. They agree with
`kernels.oracle` and with each other.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels import chip, cpu, dense, gpu, tpu
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid

Backend = Literal["tpu", "gpu", "cpu"]

# Of dense attention: large, for a TPU's matrix units; fewer tokens are XLA's.
DENSE_TILE = TileShape(2048, 2048)
LEAST_TOKENS = 4096


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: [heads, tokens, head_dim], frame-major, in the dtype of the values.
        online: the heads whose softmax kept a running maximum, which in a TPU's kernel
            is the slower way, taken where the bound in its place could underflow;
            elsewhere all heads do (`has_choice`).
    """

    out: Float[Array, "heads tokens head_dim"]
    online: Bool[Array, " heads"]


def attend(
    q: Float[Array, "heads tokens head_dim"],
    k: Float[Array, "heads tokens head_dim"],
    v: Float[Array, "heads tokens head_dim"],
    table: TileTable,
    kinds: Int[Array, " heads"],
    backend: Backend | None = None,
) -> Attended:
    """Softmax attention, scaled by 1/sqrt(head_dim), through each head's live tiles.

    Scores and sums are float32 whatever the dtype of the arguments. There is no
    gradient.

    Args:
        q: Queries, tokens in frame-major order; beyond the table's tokens there may be
            padding, which nothing reads and whose rows come out as zeros.
        k: Keys, likewise.
        v: Values, likewise.
        table: The live tiles of SPATIAL and TEMPORAL heads.
        kinds: Each head's `kernels.tiles.HeadKind`; data, so that new kinds compile
            nothing again.
        backend: What to compute with; by default what jax runs on.

    Raises:
        ValueError: The shapes do not belong together, or the backend cannot serve them.
        NotImplementedError: A gradient is asked for.
    """
    if not q.shape == k.shape == v.shape or q.ndim != 3 or kinds.shape != q.shape[:1]:
        raise ValueError(
            "attention takes q, k, v [heads, tokens, head_dim] and kinds [heads]; got "
            f"q {q.shape}, k {k.shape}, v {v.shape}, kinds {kinds.shape}"
        )
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, k, v))
    if not floating or not jnp.issubdtype(kinds.dtype, jnp.integer) or not q.shape[2]:
        raise ValueError(
            "attention takes q, k, v of floating point, head_dim 1 or more, and kinds "
            f"of integers; got {q.dtype}, {k.dtype}, {v.dtype}, head_dim {q.shape[2]} "
            f"and kinds of {kinds.dtype}"
        )
    tokens, given = table.grid.tokens, q.shape[1]
    if given < tokens:
        raise ValueError(f"{given} tokens for a table of {tokens}")
    if backend is None:
        backend = _default_backend()
    q, k, v = (x[:, :tokens] for x in (q, k, v))
    out, online = _attend(q, k, v, kinds, table, backend)
    return Attended(jnp.pad(out, ((0, 0), (0, given - tokens), (0, 0))), online)


def attend_all(
    q: Float[Array, "heads tokens head_dim"],
    k: Float[Array, "heads tokens head_dim"],
    v: Float[Array, "heads tokens head_dim"],
    backend: Backend | None = None,
) -> Float[Array, "heads tokens head_dim"]:
    """Softmax attention of all tokens to all, scaled by 1/sqrt(head_dim).

    By the kernels' dense heads where there are kernels, else by `kernels.dense`.

    Raises:
        ValueError: The shapes do not belong together.
        NotImplementedError: A gradient is asked for, of a kernel.
    """
    heads, tokens, _ = q.shape
    if (backend or _default_backend()) == "cpu" or tokens < LEAST_TOKENS:
        return dense.attend(q, k, v)
    # Any table will do: no head looks at which of its tiles are live.
    table = TileTable(TokenGrid(tokens, 1), DENSE_TILE, 0)
    kinds = jnp.full(heads, HeadKind.DENSE, jnp.int32)
    return attend(q, k, v, table, kinds, backend).out


def has_choice(table: TileTable, backend: Backend | None = None) -> bool:
    """Whether heads go without a running maximum where they can."""
    return (backend or _default_backend()) == "tpu" and chip.serves(table.tile)


def _default_backend() -> Backend:
    platform = jax.default_backend()
    return platform if platform in ("tpu", "gpu") else "cpu"


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _attend(
    q: Array, k: Array, v: Array, kinds: Array, table: TileTable, backend: Backend
) -> tuple[Array, Array]:
    if backend == "tpu" and chip.serves(table.tile):
        return tpu.attend(q, k, v, table, kinds)
    path = gpu.attend if backend == "gpu" else cpu.attend
    return path(q, k, v, table, kinds), jnp.ones(q.shape[0], bool)


@_attend.defjvp
def _no_gradient(table: TileTable, backend: Backend, primals, tangents):
    raise NotImplementedError(
        "kernels.attention.attend has no gradient, since Tilereel renders and does not "
        "train; kernels.dense.attend has one"
    )
