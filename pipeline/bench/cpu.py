"""How fast attention is on this machine's CPU, against dense and against torch.

All get the same arrays and threads, and take turns within one run, so that what else
the machine does slows them alike: the ratios are what to read.
"""

import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from kernels import attention, dense
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid

Dtype = Literal["float32", "bfloat16"]
# What is timed: a call that returns when it is done, with [heads, tokens, head_dim].
Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is attended to.

    Attributes:
        grid: The clip's tokens.
        heads: How many.
        head_dim: Elements of a head's queries, keys and values.
        tile: The shape of the tiles.
        density: The budget of the sparse heads.
    """

    grid: TokenGrid
    heads: int
    head_dim: int
    tile: TileShape
    density: float = 0.38


CASES = {
    # A clip of 81 frames at the size of configs/manifests/demo.yaml.
    "demo": Case(TokenGrid(21, 64), 12, 32, TileShape(64, 64)),
    # 81 frames of 480 x 208, with heads as Wan's.
    "long": Case(TokenGrid(21, 30 * 13), 4, 128, TileShape(256, 256)),
}


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one way took.

    Attributes:
        milliseconds: Median of a call.
        cpu_milliseconds: Median of what all threads together computed, which other
            work on the machine bears upon less. OpenMP's waiting in a loop counts too.
        difference: The farthest that an element is from ours of the same tiles.
    """

    milliseconds: float
    cpu_milliseconds: float
    difference: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `measure` found.

    Attributes:
        case: What was attended to.
        dtype: Of q, k and v.
        threads: That each way could use.
        density: Tiles that a sparse head computes, over all.
        sparse: Timings of those who computed these tiles alone, ours first.
        dense: Timings of those who computed all, ours first.
        missing: What was left out, and what to do about it.
    """

    case: Case
    dtype: Dtype
    threads: int
    density: float
    sparse: dict[str, Timing]
    dense: dict[str, Timing]
    missing: dict[str, str]

    @property
    def sparse_over_dense(self) -> float:
        """Time of ours through the live tiles, over that through all."""
        return _first(self.sparse).milliseconds / _first(self.dense).milliseconds

    @property
    def ours_over_flex(self) -> float | None:
        """Time of ours over that of torch's flex_attention, both through live tiles."""
        flex = self.sparse.get("torch flex_attention")
        return flex and _first(self.sparse).milliseconds / flex.milliseconds


def measure(case: Case, dtype: Dtype = "float32", repetitions: int = 9) -> Comparison:
    """Times every way to attend that this machine has.

    Args:
        case: What is attended to.
        dtype: Of q, k and v.
        repetitions: Timed calls of each, each after one that is not timed.

    Raises:
        ValueError: The case's density cannot be had.
    """
    table = TileTable.within(case.density, case.grid, case.tile)
    shape = (3, case.heads, case.grid.tokens, case.head_dim)
    qkv = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    threads = len(os.sched_getaffinity(0))
    missing = _missing()
    sparse, whole = _ours(qkv, table, dtype)
    if not missing:
        for ours, theirs in zip(
            (sparse, whole), _torch(qkv, table, dtype, threads), strict=True
        ):
            ours |= theirs

    differences = {}
    for calls in (sparse, whole):
        expected = None
        for name, call in calls.items():
            if name == "ours, TEMPORAL":
                continue  # the same tiles, of other tokens
            out = np.asarray(jnp.asarray(call(), jnp.float32))
            expected = out if expected is None else expected
            differences[name] = float(abs(out - expected).max())

    calls = sparse | whole
    wall, cpu = ({name: [] for name in calls} for _ in range(2))
    for _ in range(repetitions):
        for name, call in calls.items():
            # Threads of the one before may still be waiting in a loop for more.
            call()
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            cpu[name].append(1e3 * (time.process_time() - cpu_start))
            wall[name].append(1e3 * (time.perf_counter() - start))

    def timings(calls: dict[str, Call]) -> dict[str, Timing]:
        return {
            name: Timing(
                statistics.median(wall[name]),
                statistics.median(cpu[name]),
                differences.get(name, 0.0),
            )
            for name in calls
        }

    density = table.density
    return Comparison(
        case, dtype, threads, density, timings(sparse), timings(whole), missing
    )


def report(comparison: Comparison) -> Table:
    """The comparison as a table, each time also over that of ours through all tiles."""
    case = comparison.case
    table = Table(
        title=f"{case.grid.frames} x {case.grid.positions} tokens, {case.heads} heads "
        f"of {case.head_dim}, {comparison.dtype}, {comparison.threads} threads, tiles "
        f"of {case.tile}; density {comparison.density:.3f} (budget {case.density:g})",
        title_justify="left",
    )
    table.add_column("")
    for column in ("tiles", "ms", "CPU ms", "over dense", "difference"):
        table.add_column(column, justify="right")
    whole = _first(comparison.dense).milliseconds
    for tiles, timings in (("live", comparison.sparse), ("all", comparison.dense)):
        for name, timing in timings.items():
            table.add_row(
                name,
                tiles,
                f"{timing.milliseconds:.1f}",
                f"{timing.cpu_milliseconds:.1f}",
                f"{timing.milliseconds / whole:.3f}",
                f"{timing.difference:.1e}",
            )
    for name, remedy in comparison.missing.items():
        table.add_row(name, "", "", "", "", Text(remedy))
    return table


def _first(timings: dict[str, Timing]) -> Timing:
    return next(iter(timings.values()))


def _missing() -> dict[str, str]:
    """What the comparison with torch lacks, by name, with what to do."""
    if find_spec("torch") is None:
        return {"torch": 'not installed; pip install "tilereel[bench]"'}
    if not shutil.which(os.environ.get("CXX", "g++")):
        return {"torch": "flex_attention is compiled with g++; install it, or set CXX"}
    return {}


def _ours(
    qkv: np.ndarray, table: TileTable, dtype: Dtype
) -> tuple[dict[str, Call], dict[str, Call]]:
    """Our ways through the live tiles, and through all."""
    q, k, v = jnp.asarray(qkv, dtype)
    # Kinds are data: one program for all three.
    path = jax.jit(
        lambda q, k, v, kinds: attention.attend(q, k, v, table, kinds, "cpu").out
    )
    all_heads = jax.jit(dense.attend)

    def ours(kind: HeadKind) -> Call:
        kinds = jnp.full(len(q), kind)
        return lambda: jax.block_until_ready(path(q, k, v, kinds))

    return (
        {
            "ours, SPATIAL": ours(HeadKind.SPATIAL),
            "ours, TEMPORAL": ours(HeadKind.TEMPORAL),
        },
        {
            "ours, DENSE": ours(HeadKind.DENSE),
            "kernels.dense": lambda: jax.block_until_ready(all_heads(q, k, v)),
        },
    )


def _torch(
    qkv: np.ndarray, table: TileTable, dtype: Dtype, threads: int
) -> tuple[dict[str, Call], dict[str, Call]]:
    """Torch's ways through the live tiles, and through all."""
    # The product does without torch; this comparison alone asks for it.
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention.flex_attention import (  # pyright: ignore
        BlockMask,
        flex_attention,
    )

    torch.set_num_threads(threads)
    q, k, v = (x[None] for x in torch.from_numpy(qkv).to(getattr(torch, dtype)))
    kinds = table.classify(np.arange(table.rows)[:, None], np.arange(table.columns))
    counts = torch.tensor((kinds > 0).sum(1), dtype=torch.int32)[None, None]
    # Live columns first, in order.
    columns = torch.tensor(np.argsort(kinds == 0, 1, stable=True), dtype=torch.int32)
    tokens = table.grid.tokens
    mask = BlockMask.from_kv_blocks(
        # No block is masked element by element: tiles are computed whole.
        torch.zeros_like(counts),
        torch.zeros_like(columns)[None, None],
        counts,
        columns[None, None],
        BLOCK_SIZE=tuple(table.tile),
        seq_lengths=(tokens, tokens),
    )
    compiled = torch.compile(flex_attention)

    def flex() -> Any:
        with torch.inference_mode():
            return compiled(q, k, v, block_mask=mask)[0].float()

    def sdpa() -> Any:
        with torch.inference_mode():
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(q, k, v)[0].float()

    return {"torch flex_attention": flex}, {"torch sdpa": sdpa}
