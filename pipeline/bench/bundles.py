"""Compiles a kernel for a v6e on a machine that has none, and reads its schedule.

One process per compile: libtpu reads its options once, when it is loaded.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.bench import schedule
from pipeline.errors import RequestError

# Any topology of the chip gives the same code for one of its chips.
TOPOLOGY = "v6e:2x4"
ACCELERATOR = "v6e-8"
DEVICE_KIND = "TPU v6 lite"

_ROOT = Path(__file__).parents[2]


class CompileError(Exception):
    """The compiler refused a kernel; the message is the compiler's own."""


class VmemError(CompileError):
    """The kernel does not fit into VMEM."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel to compile.

    Args:
        build: `module:function`. The function takes `arguments` and returns a jitted
            function and the `jax.ShapeDtypeStruct`s to call it with.
        name: the name that it gives to `pallas_call`.
        arguments: what JSON can hold.
    """

    build: str
    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def environment(dump: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables that a compiling process needs before it imports jax.

    Args:
        dump: an existing folder, for the schedule's text and libtpu's logs.
        flags: further options of libtpu.
    """
    options = [f"--xla_jf_dump_to={dump}", "--xla_jf_dump_llo_text=true", *flags]
    return {
        "JAX_PLATFORMS": "cpu",
        # A kernel that comes out of a cache leaves no text.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": ACCELERATOR,
        # libtpu holds a lock for the chip's sake; there is none to share.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Else it logs into a folder that Ray tails into a driver's output.
        "TPU_LOG_DIR": str(dump),
        "LIBTPU_INIT_ARGS": " ".join(options),
    }


def compile_kernel(
    kernel: Kernel, *, flags: Sequence[str] = (), timeout: float = 600.0
) -> schedule.Schedule:
    """Compiles a kernel for one v6e chip and reads its schedule.

    Args:
        kernel: what to compile.
        flags: further options of libtpu.
        timeout: seconds.

    Raises:
        RequestError: libtpu is not installed.
        VmemError: the kernel does not fit into VMEM.
        CompileError: it does not compile, or not in time.
        schedule.ScheduleError: the compiler's text cannot be read, or the program has
            no such kernel, or several.
    """
    with _compiled([kernel], flags, timeout) as dump:
        return schedule.read(dump, kernel.name)


def compile_kernels(
    kernels: Sequence[Kernel], *, flags: Sequence[str] = (), timeout: float = 600.0
) -> list[list[schedule.Schedule]]:
    """Compiles a program of several kernels, and reads the schedules of each.

    Args:
        kernels: what to read of the program, with the same `build` and `arguments`.
        flags: further options of libtpu.
        timeout: seconds.

    Returns:
        For each kernel its schedules: several where the program has several of its
        name, for operands of different shapes.

    Raises:
        as `compile_kernel`, but for a kernel that is there several times.
    """
    with _compiled(kernels, flags, timeout) as dump:
        return [schedule.read_all(dump, kernel.name) for kernel in kernels]


@contextlib.contextmanager
def _compiled(
    kernels: Sequence[Kernel], flags: Sequence[str], timeout: float
) -> Iterator[Path]:
    """Gives the folder with the compiler's text of the program of some kernels."""
    if importlib.util.find_spec("libtpu") is None:
        raise RequestError(
            "compiling for a TPU takes libtpu, which is not installed here: "
            'pip install "tilereel[tpu]"'
        )
    [(build, arguments)] = {(k.build, json.dumps(dict(k.arguments))) for k in kernels}
    names = " and ".join(kernel.name for kernel in kernels)
    with tempfile.TemporaryDirectory(prefix="tilereel-bundles-") as folder:
        dump = Path(folder)
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pipeline.bench.bundles"]
        command += [build, arguments, folder]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                env={**os.environ, "PYTHONPATH": path, **environment(dump, flags)},
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                f"{names} did not compile within {timeout:g} s"
            ) from error
        if done.returncode:
            message = done.stderr.strip()
            kind = VmemError if _exceeds_vmem(message) else CompileError
            raise kind(f"{names} ({build}): {message}")
        yield dump


def _exceeds_vmem(message: str) -> bool:
    lower = message.lower()
    return "vmem" in lower and ("ran out of memory" in lower or "exceed" in lower)


def _compile(build: str, arguments: Mapping[str, Any]) -> str:
    """Compiles in this process; returns the scheduled HLO."""
    # Here and not above: only the process that compiles loads jax.
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh

    module, _, function = build.partition(":")
    builder: Callable[..., Any] = getattr(importlib.import_module(module), function)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    one = jax.sharding.SingleDeviceSharding(topology.devices[0])
    # Kernels that ask which chip they run on are told so by the mesh.
    chip = AbstractDevice(device_kind=DEVICE_KIND, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("chip",), abstract_device=chip)
    ):
        jitted, shapes = builder(**arguments)
        placed = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=one),
            shapes,
        )
        traced = jitted.trace(*placed)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def _main() -> None:
    build, arguments, dump = sys.argv[1:]
    try:
        text = _compile(build, json.loads(arguments))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    (Path(dump) / "compiled.txt").write_text(text)


if __name__ == "__main__":
    _main()
