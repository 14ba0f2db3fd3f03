"""The TPU kernels, compiled for a v6e at the sizes that clips have."""

import importlib.util

import jax.numpy as jnp
import pytest

from kernels import chip
from kernels.tiles import HeadKind
from pipeline.bench import ours
from pipeline.bench.bundles import Kernel, compile_kernels

BUILD = f"{ours.__name__}:attend"
TILE = (2048, 2048)
WAN, LONG, LONGEST = (21, 3600), (21, 14400), (25, 16000)

pytestmark = pytest.mark.tpu_compile
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def case(grid, heads, rounding="tile", slow=False):
    marks = [pytest.mark.slow] if slow else []
    name = f"{grid[0] * grid[1]}-{heads}-{rounding}"
    return pytest.param(grid, heads, rounding, id=name, marks=marks)


@needs_compiler
@pytest.mark.parametrize(
    ("grid", "heads", "rounding"),
    [
        case(WAN, 12),  # 1.3B
        case(WAN, 12, "exact"),
        case(WAN, 40, slow=True),  # 14B
        case(LONG, 5),  # 14B on 8 chips
        case(LONGEST, 1),
        case(LONGEST, 40, slow=True),
    ],
)
def test_both_kernels_compile_within_the_cores_memory(grid, heads, rounding):
    arguments = {
        "grid": grid,
        "tile": TILE,
        "band": 3 * grid[1],
        "heads": heads,
        "rounding": rounding,
    }
    kernels = [Kernel(BUILD, name, arguments) for name in (ours.BOUNDED, ours.ONLINE)]
    bounded, online = compile_kernels(kernels, timeout=1800)
    # As many of each as there are groups of heads.
    assert len(bounded) == len(online) >= 1
    for schedule in (*bounded, *online):
        tile = schedule.tile()
        assert tile.matmul_cycles == 6144
        assert schedule.vmem <= chip.VMEM_BYTES
        # Masked element by element it may take longer.
        assert rounding == "exact" or tile.bundles < 1.3 * tile.matmul_cycles


def test_other_kinds_of_heads_are_the_same_program():
    attend, (q, k, v, _) = ours.attend(WAN, TILE, 11_000, heads=3)

    def program(*kinds):
        lowered = attend.trace(q, k, v, jnp.asarray(kinds, jnp.int32))
        return lowered.lower(lowering_platforms=("tpu",)).as_text()

    spatial, temporal, dense = HeadKind
    assert program(spatial, spatial, temporal) == program(dense, dense, dense)
