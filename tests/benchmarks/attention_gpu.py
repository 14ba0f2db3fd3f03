"""How fast is attention on this GPU? Checks it against the oracle and prints JSON.

    python -m tests.benchmarks.attention_gpu [--heads 12] [--density 0.38]

Wan's 75,600 tokens (81 pixel frames of 1280x720) in bfloat16; times are medians, and
TFLOP/s count the products of the tiles that are computed.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from kernels import gpu
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

GRID, HEAD_DIM = TokenGrid(21, 3600), 128
attend = jax.jit(gpu.attend, static_argnames="table")


def check(table: TileTable) -> None:
    """Against the oracle, with the tolerances of tests/kernels/test_gpu.py."""
    for dtype, atol in ((np.float32, 2e-5), (jnp.bfloat16, 0.02)):
        for head_dim in (24, 128):
            qkv = cases.random_qkv(0, 6, table.grid.tokens, head_dim, dtype)
            cases.check_oracle(attend, qkv, table, 2 * list(HeadKind), atol)


def measure(heads: int, density: float, function) -> dict[str, float]:
    """The median time of a call, which is compiled and run before."""
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    took = statistics.median(times[1:])
    tflops = 4e-12 * heads * GRID.tokens**2 * HEAD_DIM * density / took
    return {"density": density, "ms": 1e3 * took, "tflops": tflops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--density", type=float, default=0.38)
    heads, within = vars(parser.parse_args()).values()
    if jax.default_backend() != "gpu":
        raise SystemExit("this takes a GPU, and jax finds none: install jax[cuda13]")
    for tile in (TileShape(8, 6), TileShape(96, 80), TileShape(64, 64)):
        check(TileTable(TokenGrid(8, 61), tile, 110, "tile"))
        check(TileTable(TokenGrid(8, 61), tile, 110, "exact"))
    shape = (3, heads, GRID.tokens, HEAD_DIM)
    q, k, v = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    results: dict[str, object] = {"gpu": jax.devices()[0].device_kind}
    tables = [TileTable.within(within, GRID, TileShape(n, n)) for n in (64, 128)]
    tables.append(TileTable.within(within, GRID, TileShape(128, 128), "exact"))
    for table in tables:
        for kind in HeadKind:
            density = 1.0 if kind == HeadKind.DENSE else table.density
            call = functools.partial(attend, q, k, v, table, jnp.full(heads, kind))
            name = f"{kind.name.lower()}, {table.tile}, {table.rounding}"
            results[name] = measure(heads, density, call)
    qkv = (x.swapaxes(0, 1)[None] for x in (q, k, v))
    cudnn = jax.jit(jax.nn.dot_product_attention, static_argnames="implementation")
    call = functools.partial(cudnn, *qkv, implementation="cudnn")
    try:
        results["dense, cuDNN"] = measure(heads, 1.0, call)
    except Exception as error:  # what keeps cuDNN from it is the answer
        results["dense, cuDNN"] = str(error)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
