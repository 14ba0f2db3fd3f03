"""Compiling for a v6e, and the counts of kernels whose work is known."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pipeline.bench.bundles import (
    CompileError,
    Kernel,
    VmemError,
    compile_kernel,
    environment,
)
from pipeline.bench.schedule import ScheduleError
from pipeline.errors import RequestError

needs_compiler = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
]

SIZE = 512


def product(trips=None, bodies=1, dynamic_grid=False, spare=8, vmem=None):
    """A sum of products of [SIZE, SIZE] matrices, built in one of several forms.

    Args:
        trips: products of 128 columns each, in a loop; None for one of all columns;
            0 for a number that only the data say.
        bodies: how many bodies a step chooses from.
        dynamic_grid: whether the data say how long the grid is.
        spare: rows of 512 bytes that the kernel asks for and never uses.
        vmem: bytes that the kernel may take.
    """

    def body(count_ref, x_ref, y_ref, o_ref, sum_ref, spare_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        def add(columns):
            x, y = x_ref[:, columns], y_ref[columns, :]
            sum_ref[...] += jnp.dot(x, y, preferred_element_type=jnp.float32)

        for number in range(bodies):

            @pl.when((bodies == 1) | (count_ref[pl.program_id(0)] == number))
            def _():
                if trips is None:
                    add(pl.ds(0, SIZE))
                    return
                bound = trips or count_ref[0]
                jax.lax.fori_loop(0, bound, lambda i, _: add(pl.ds(i * 128, 128)), None)

        @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
        def _():
            o_ref[...] = sum_ref[...].astype(o_ref.dtype)

    def call(count, x, y):
        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(count[0] if dynamic_grid else 4,),
                in_specs=[
                    pl.BlockSpec((SIZE, SIZE), lambda i, count: (i, 0)),
                    pl.BlockSpec((SIZE, SIZE), lambda i, count: (0, 0)),
                ],
                out_specs=pl.BlockSpec((SIZE, SIZE), lambda i, count: (0, 0)),
                scratch_shapes=[
                    pltpu.VMEM((SIZE, SIZE), jnp.float32),
                    pltpu.VMEM((spare, 128), jnp.float32),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16),
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem),
            name="product",
        )(count, x, y)

    return jax.jit(call), (
        jax.ShapeDtypeStruct((4,), jnp.int32),
        jax.ShapeDtypeStruct((4 * SIZE, SIZE), jnp.bfloat16),
        jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16),
    )


def asks_for_the_chip():
    """A builder that fails unless it is told that it compiles for a v6e."""
    assert "v6" in str(pltpu.get_tpu_info().chip_version).lower()
    return product()


def compiled(**arguments):
    return compile_kernel(Kernel(f"{__name__}:product", "product", arguments))


# What the MXUs take for [512, columns] x [columns, 512], at 262,144 multiply-adds a
# cycle, where depths below 256 take as long as 256.
def cycles(columns):
    return SIZE * max(columns, 256) * SIZE // 262_144


class TestCompiles:
    pytestmark = needs_compiler

    def test_a_kernels_work_is_all_there(self):
        schedule = compiled()
        tile = schedule.tile()
        assert tile.matmul_cycles == cycles(SIZE)
        # No better than the MXUs can, and nearer to it than to twice that: the start
        # and the end of a row are left out, and steps overlap with nothing.
        assert tile.matmul_cycles < tile.bundles < schedule.total
        assert tile.bundles < 2 * tile.matmul_cycles
        # Each of the 256 registers of the sum is stored once.
        assert tile.units["VSTORE"] == SIZE * SIZE // 1024
        assert tile.spills == 0
        # x twice (its next block is on the way), y, the output; the sum is float32.
        assert schedule.vmem == (2 * 2 + 2 + 2 + 4) * SIZE * SIZE

    @pytest.mark.parametrize("trips", [2, 4])
    def test_a_loop_counts_as_often_as_it_runs(self, trips):
        tile = compiled(trips=trips).tile()
        assert tile.matmul_cycles == trips * cycles(128)
        assert tile.units["VSTORE"] == trips * SIZE * SIZE // 1024

    def test_a_loop_bound_by_data_takes_its_trips_from_the_caller(self):
        schedule = compiled(trips=0)
        with pytest.raises(ScheduleError, match="give its trips"):
            schedule.tile()
        assert schedule.tile(trips=3).matmul_cycles == 3 * cycles(128)

    def test_each_body_of_a_kernel_is_counted_by_itself(self):
        schedule = compiled(bodies=2)
        bodies = schedule.step.bodies()
        assert [body.matmul_cycles for body in bodies] == 2 * [cycles(SIZE)]
        assert sum(body.bundles for body in bodies) > schedule.total * 0.8
        with pytest.raises(ScheduleError, match="2 bodies"):
            schedule.tile()

    def test_a_grid_whose_length_the_data_say_has_steps_like_any(self):
        schedule = compiled(dynamic_grid=True)
        assert schedule.step.kind == "grid"
        assert schedule.tile().matmul_cycles == cycles(SIZE)

    def test_a_kernel_too_large_for_its_share_of_vmem_says_so(self):
        with pytest.raises(VmemError, match="exceeded scoped vmem limit"):
            compiled(vmem=2**20)

    def test_a_kernel_too_large_for_all_vmem_says_so(self):
        with pytest.raises(VmemError, match="product .*exceed"):
            compiled(spare=2**19)  # 256 MiB

    def test_a_kernel_may_ask_which_chip_it_is_for(self):
        kernel = Kernel(f"{__name__}:asks_for_the_chip", "product")
        assert compile_kernel(kernel).tile().matmul_cycles == cycles(SIZE)

    def test_a_failing_builder_is_an_error_with_its_message(self):
        with pytest.raises(CompileError, match="product .*keyword.*'colour'"):
            compiled(colour="red")

    def test_a_compile_that_takes_too_long_is_stopped(self):
        with pytest.raises(CompileError, match=r"did not compile within 0\.01 s"):
            compile_kernel(Kernel(f"{__name__}:product", "product"), timeout=0.01)


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(RequestError, match=r'pip install "tilereel\[tpu\]"'):
        compiled()


def test_the_environment_has_the_dump_and_the_callers_flags():
    variables = environment(Path("/dump"), ["--xla_one=1", "--xla_two=2"])
    flags = variables["LIBTPU_INIT_ARGS"].split()
    assert flags[0] == "--xla_jf_dump_to=/dump"
    assert flags[-2:] == ["--xla_one=1", "--xla_two=2"]
    assert variables["TPU_LOG_DIR"] == "/dump"
