"""The bundles of a Pallas kernel, read from the TPU compiler's schedule.

A TPU core is statically scheduled: a bundle takes a cycle, apart from waits on memory.
The bundles that one step of a kernel's grid takes are therefore a repeatable figure,
and the ratio of two such figures is a fair comparison. They leave out the waits for
DMA, the cost of starting a grid step and the clock.

The compiler writes the text that this module reads when `LIBTPU_INIT_ARGS` has
`--xla_jf_dump_to` (see `pipeline.bench.bundles`). That text has no specification:
what follows was made out from libtpu 0.0.42.1, and whatever does not fit raises an
error rather than yield a wrong figure.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

# After a branch, the next four bundles still run before it takes effect: the end of a
# loop's region is always marked four bundles behind its branch.
DELAY_SLOTS = 4

# A matmul instruction multiplies a register of rows by a 256 x 256 matrix, and one of
# the two MXUs takes 131,072 multiply-adds a cycle (918 TFLOP/s at 1.75 GHz over both):
# 8 cycles for 16 rows of bfloat16, 4 for 8 rows of float32, which it rounds to
# bfloat16, and 8 for 32 rows of int8, which go twice as fast.
CYCLES = {"bf16": 8, "f32": 4, "s8": 8}
MXUS = 2

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +[A-Z ]*:[ >]*(?=\{)", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)")
_MATMUL = re.compile(r"= vmatmul\.mubr\.(?:msk\.)?(\w+)")


class ScheduleError(Exception):
    """The compiler's text is not as this module knows it."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a run of bundles costs.

    Args:
        bundles: the bundles that are issued: cycles, apart from waits.
        mxu_cycles: what its matmuls take, summed over both MXUs.
        units: slots used of each unit, by the compiler's own names (VALU, XLU, EUP,
            VLOAD, VSTORE, SALU, ...). `VLOAD:FILL` and `VSTORE:SPILL` are registers
            that did not fit. `MXU` is what the scheduler saw when it issued, which
            queued matmuls outlast: `mxu_cycles` is the MXUs' true load.
    """

    bundles: int = 0
    mxu_cycles: int = 0
    units: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def matmul_cycles(self) -> int:
        """The fewest bundles in which both MXUs together can do the matmuls."""
        return self.mxu_cycles // MXUS

    @property
    def spills(self) -> int:
        """Vector registers that are stored for want of room."""
        return self.units.get("VSTORE:SPILL", 0)

    def __add__(self, other: Self) -> "Work":
        units = {
            name: self.units.get(name, 0) + other.units.get(name, 0)
            for name in self.units | other.units
        }
        return Work(
            self.bundles + other.bundles, self.mxu_cycles + other.mxu_cycles, units
        )

    def __mul__(self, times: int) -> "Work":
        units = {name: count * times for name, count in self.units.items()}
        return Work(self.bundles * times, self.mxu_cycles * times, units)


@dataclasses.dataclass(frozen=True)
class Block:
    """A run of bundles: the kernel, a loop's body, or what a branch may skip.

    Args:
        kind: `grid` is the loop over the kernel's grid, `loop` any other.
        first: address of the first bundle.
        last: address of the last one.
        trips: how often a loop runs, where its bounds are constants.
        own: the work of the bundles that are in none of `blocks`.
        blocks: the blocks within, in the order of their addresses.
    """

    kind: Literal["kernel", "grid", "loop", "branch"]
    first: int
    last: int
    trips: int | None
    own: Work
    blocks: tuple["Block", ...]

    @property
    def has_matmuls(self) -> bool:
        """Whether there are matmuls in the block or in any within."""
        return bool(self.own.mxu_cycles) or any(b.has_matmuls for b in self.blocks)

    def bodies(self, trips: int | None = None) -> list[Work]:
        """What the block can cost, for each way of computing a tile.

        Loops count as often as they run. What a branch may skip counts where it has
        matmuls, one such branch at a time: a kernel with a body for full tiles and
        one for boundary tiles has two results, in the order of their addresses. What
        has no matmuls is left out: the start and the end of a row, DMA's start and
        wait.

        Args:
            trips: how often a loop runs whose bounds the compiler does not know.

        Raises:
            ScheduleError: a loop's trips are unknown, or loops differ by branch.
        """
        fixed, ways = self.own, list[Work]()
        for block in self.blocks:
            if not block.has_matmuls and block.kind == "branch":
                continue
            inner = block.bodies(trips)
            if block.kind == "branch":
                ways += inner
                continue
            times = block.trips if block.trips is not None else trips
            if times is None:
                raise ScheduleError(
                    f"the loop at bundle {block.first:#x} runs as often as a value "
                    "says that the compiler does not know: give its trips"
                )
            if len(inner) > 1:
                raise ScheduleError(
                    f"the loop at bundle {block.first:#x} holds several bodies: its "
                    "cost depends on which ones run"
                )
            fixed += inner[0] * times
        if fixed.mxu_cycles or not ways:
            ways.insert(0, Work())
        return [fixed + way for way in ways]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's schedule.

    Args:
        kernel: the kernel's name in the compiled program.
        total: all bundles, each counted once.
        root: the whole kernel.
        vmem: bytes of VMEM that the kernel takes, buffers and scratch included.
    """

    kernel: str
    total: int
    root: Block
    vmem: int

    @property
    def step(self) -> Block:
        """One step of the grid: the kernel itself where the grid is a single step."""
        return _grid(self.root) or self.root

    def tile(self, trips: int | None = None) -> Work:
        """What one step of the grid costs that computes a tile.

        Raises:
            ScheduleError: as `Block.bodies`, or the kernel has several bodies, or it
                has no matmuls and so nothing that tells a tile from the rest.
        """
        if not self.step.has_matmuls:
            raise ScheduleError(f"{self.kernel} has no matmuls: see its `root`")
        bodies = self.step.bodies(trips)
        if len(bodies) > 1:
            raise ScheduleError(
                f"{self.kernel} has {len(bodies)} bodies: choose from `step.bodies()`"
            )
        return bodies[0]


def read(dump: Path, kernel: str) -> Schedule:
    """Reads a kernel's schedule from a folder that the compiler wrote.

    Args:
        dump: the folder, with the program's HLO as `compiled.txt`.
        kernel: the name given to `pallas_call`, with or without the number that the
            compiler adds.

    Raises:
        ScheduleError: there is not exactly one such kernel, or its text is not as
            this module knows it.
    """
    programs = _programs(dump)
    found = _named(kernel, programs)
    if len(found) != 1:
        raise ScheduleError(
            f"there should be one kernel named {kernel!r}, and {len(found)} are; the "
            f"compiled program has: {', '.join(programs) or 'none'}"
        )
    return _read(dump, found[0], programs)


def read_all(dump: Path, kernel: str) -> list[Schedule]:
    """Reads the schedules of all kernels of a name; see `read`.

    Raises:
        ScheduleError: there is no such kernel, or its text is not as this module knows
            it.
    """
    programs = _programs(dump)
    found = _named(kernel, programs)
    if not found:
        raise ScheduleError(
            f"there is no kernel named {kernel!r}; the compiled program has: "
            f"{', '.join(programs) or 'none'}"
        )
    return [_read(dump, name, programs) for name in found]


def _programs(dump: Path) -> dict[str, Path]:
    """The text of each kernel, by the name that the compiler gave it."""
    pattern = re.compile(r"^\d+-([^<].*)-\d+-final_bundles\.txt$")
    return {
        match[1]: path
        for path in sorted(dump.iterdir())
        if (match := pattern.match(path.name))
    }


def _named(kernel: str, programs: Iterable[str]) -> list[str]:
    return [name for name in programs if kernel in (name, re.sub(r"\.\d+$", "", name))]


def _read(dump: Path, name: str, programs: Mapping[str, Path]) -> Schedule:
    [use] = dump.glob(f"*-{name}-*-final_hlo-static-per-bundle-utilization.txt")
    root = parse(programs[name].read_text(), use.read_text())
    vmem = _vmem((dump / "compiled.txt").read_text(), name)
    return Schedule(name, root.last + 1, root, vmem)


def parse(bundles: str, utilization: str) -> Block:
    """The blocks of a kernel.

    Args:
        bundles: the text of `*-final_bundles.txt`.
        utilization: that of `*-final_hlo-static-per-bundle-utilization.txt`.

    Raises:
        ScheduleError: the text is not as this module knows it.
    """
    texts = _bundles(bundles)
    works = _works(texts, utilization)
    starts = {
        int(region): address
        for address, text in enumerate(texts)
        for region in _REGION.findall(text)
    }
    spans = []  # (first, last, kind, trips)
    for address, text in enumerate(texts):
        bare = _COMMENT.sub("", text)
        branches = _BRANCH.findall(bare)
        if len(branches) != bare.count("= sbr"):
            raise ScheduleError(f"the branch at bundle {address:#x} is unlike others")
        for predicate, region in branches:
            to = starts.get(int(region))
            if to is None:
                raise ScheduleError(f"bundle {address:#x} jumps to an unknown region")
            behind = address + DELAY_SLOTS + 1
            if to <= address:
                grid = "iteration index, stage" in texts[to]
                trips = _trips(bundles, predicate)
                spans.append((to, behind - 1, "grid" if grid else "loop", trips))
            elif to > behind:
                spans.append((behind, to - 1, "branch", None))
    # Outer spans before those within them.
    spans.sort(key=lambda span: (span[0], -span[1]))
    return _nest((0, len(texts) - 1, "kernel", None), spans, works)


def _grid(block: Block) -> Block | None:
    """The outermost loop over a grid; a branch goes round it where it may be empty."""
    if block.kind == "grid":
        return block
    return next(filter(None, map(_grid, block.blocks)), None)


def _nest(span: tuple, spans: list[tuple], works: list[Work]) -> Block:
    """The block of a span, taking the spans within it from the front of `spans`."""
    first, last, kind, trips = span
    blocks: list[Block] = []
    own = Work()
    address = first
    while address <= last:
        if spans and spans[0][0] == address:
            inner = spans.pop(0)
            if inner[1] > last:
                raise ScheduleError(
                    f"the {inner[2]} at bundle {address:#x} reaches out of the {kind} "
                    f"at {first:#x}"
                )
            blocks.append(_nest(inner, spans, works))
            address = inner[1] + 1
        else:
            own += works[address]
            address += 1
    return Block(kind, first, last, trips, own, tuple(blocks))


def _bundles(text: str) -> list[str]:
    """The text of each bundle, by address."""
    marks = list(_BUNDLE.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for address, mark in enumerate(marks):
        if int(mark[1], 16) != address:
            raise ScheduleError(f"bundle {address:#x} is missing")
    if not marks:
        raise ScheduleError("no bundles")
    return [text[mark.end() : end] for mark, end in zip(marks, ends, strict=True)]


def _works(texts: list[str], utilization: str) -> list[Work]:
    """The work of each bundle."""
    head, _, table = utilization.partition("== UTILIZATION:\n")
    names = [name.strip() for name in head.splitlines()[1].split(",")]
    rows = [list(map(int, row.split())) for row in table.splitlines() if row.strip()]
    if len(rows) != len(texts):
        raise ScheduleError(
            f"{len(texts)} bundles, but the use of units is given for {len(rows)}"
        )
    works = []
    for text, row in zip(texts, rows, strict=True):
        types = _MATMUL.findall(text)
        if unknown := set(types) - set(CYCLES):
            raise ScheduleError(f"a matmul of {unknown.pop()}: how long is not known")
        cycles = sum(CYCLES[name] for name in types)
        works.append(Work(1, cycles, dict(zip(names, row, strict=True))))
    return works


def _trips(bundles: str, predicate: str) -> int | None:
    """How often a loop runs that goes on by `predicate`; None if no constants say."""

    def definition(name: str, instruction: str) -> re.Match[str] | None:
        # An instruction may itself be predicated.
        operation, operands = instruction.split(" ", 1)
        pattern = rf"{name} = {operation} (?:\(!?%\w+\), )?{operands}"
        return re.search(pattern, bundles)

    if not predicate.startswith("!"):
        return None
    test = definition(
        predicate[1:], r"scmp\.ge\.s32\.totalorder (%\w+), (\d+) /\* loop exit test"
    )
    if not test:
        return None
    step = definition(test[1], r"sadd\.s32 (\d+), (%\w+)")
    phi = step and definition(step[2], rf"sphi (%\w+), {test[1]}\b")
    start = phi and definition(phi[1], r"smov (\d+)")
    if not (step and start):
        return None
    return -(-(int(test[2]) - int(start[1])) // int(step[1]))


def _vmem(hlo: str, kernel: str) -> int:
    """Bytes of VMEM of a kernel, from the scheduled HLO's backend config."""
    # An instruction may take several lines. Memory space 1 is VMEM.
    size = re.search(
        rf"^ *(?:ROOT )?%{re.escape(kernel)} = (?:(?!\n *(?:ROOT )?%).)*"
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+",'
        r'"size":"(\d+)"',
        hlo,
        re.MULTILINE | re.DOTALL,
    )
    if not size:
        raise ScheduleError(f"the program does not say how much VMEM {kernel} takes")
    return int(size[1])
