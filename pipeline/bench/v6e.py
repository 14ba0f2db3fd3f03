"""What attention takes on a v6e, by the compiler's schedule: ours, others', the floor.

No TPU is needed and none is used. See `pipeline.bench.schedule` for what the figures
are and what they leave out.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kernels.tiles import TileShape, TileTable, TokenGrid
from pipeline import tiles
from pipeline.bench import ours, peers
from pipeline.bench.bundles import CompileError, Kernel, VmemError, compile_kernels

# At which the peak is 918 TFLOP/s; see `pipeline.bench.schedule`.
CLOCK_HZ = 1.75e9
# Of a program that is compiled for a tile's cost, which does not depend on it much: a
# 1.3B model's clip of 81 frames at 1280x720.
GRID = TokenGrid(21, 45 * 80)
HEADS = 12
DENSITY = 0.38
# Keys that others compute at once: of 256, 512, 1024 and 2048 the fastest for Tokamax's
# online max, and within 0.2% of that for its constant one (docs/kernels.md).
KV_COMPUTE = 1024

BOUNDED, ONLINE = "ours, bounded", "ours, online"
ASSUMPTIONS = (
    "no TPU was used: these are bundles of the compiler's static schedule, one a cycle",
    "left out: waits for DMA, the start of a grid step beyond its own bundles, and "
    "whether the clock holds 1.75 GHz",
    "a tile's bundles hold its step's bookkeeping; a row of tiles adds what else the "
    "kernel holds (start and end of a row, prologue), once",
    "ours masks padding in the part of the array that a head of 128 leaves unused: one "
    "program serves full and padded tiles. Others' padding is not counted",
    f"others compute {KV_COMPUTE} keys at once, or the largest divisor of it that "
    "divides the tile",
)
MISSING = {"Tokamax": 'not installed; pip install "tilereel[bench]"'}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a kernel's tile of one shape costs.

    Attributes:
        kernel: Whose.
        tile: The shape of the tile.
        bundles: Of a tile that is computed whole.
        floor: The fewest that the MXUs need.
        other: The kernel's bundles beside a tile's.
        spills: Vector registers stored for want of room, of a tile.
        vmem: Bytes.
        padded: Bundles of a tile with padding, where it is known.
    """

    kernel: str
    tile: TileShape
    bundles: int
    floor: int
    other: int
    spills: int
    vmem: int
    padded: int | None

    @property
    def share(self) -> float:
        """The floor over the tile's bundles."""
        return self.floor / self.bundles

    def cycles(self, table: TileTable, dense: bool) -> int:
        """What a head takes through the live tiles of a table, or through all."""
        count = table.all_tiles if dense else table.tiles
        return count * self.bundles + table.rows * self.other


@dataclasses.dataclass(frozen=True)
class Clip:
    """What is attended to: the clip's tokens, and the budget of its sparse heads."""

    grid: TokenGrid = GRID
    density: float = DENSITY

    def table(self, tile: TileShape) -> TileTable:
        """The tiles of the clip.

        Raises:
            ValueError: The density cannot be had.
        """
        return TileTable.within(self.density, self.grid, tile)


@dataclasses.dataclass(frozen=True)
class Whole:
    """What attention of one head over a whole clip takes.

    Attributes:
        cost: Of a tile.
        dense: Whether all tiles are computed.
        tiles: That are.
        density: These over all.
        cycles: They take.
    """

    cost: Cost
    dense: bool
    tiles: int
    density: float
    cycles: int

    @property
    def seconds(self) -> float:
        """At the clock that the chip is said to have."""
        return self.cycles / CLOCK_HZ


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `measure` found.

    Attributes:
        costs: What compiled.
        failed: What did not, by kernel and tile, with the reason.
        missing: What is not installed, with what to do.
        versions: Of what compiled.
    """

    costs: list[Cost]
    failed: dict[str, str]
    missing: dict[str, str]
    versions: dict[str, str]


def measure(
    shapes: Sequence[TileShape],
    say: Callable[[str], None],
    with_peers: bool = True,
    grid: TokenGrid = GRID,
) -> Comparison:
    """Compiles attention in tiles of several shapes and counts its bundles.

    Args:
        shapes: Of tiles.
        say: Is told what is compiled next: each takes 5 to 60 seconds.
        with_peers: Whether others' kernels are compiled too.
        grid: The clip that ours is compiled for.

    Raises:
        RequestError: libtpu is not installed.
    """
    costs, failed = [], {}
    missing = {} if find_spec("tokamax") or not with_peers else dict(MISSING)
    programs = list(_programs(shapes, grid, with_peers, missing))
    for number, (tile, program) in enumerate(programs, 1):
        names = " and ".join(program)
        say(f"compiling {number} of {len(programs)}: {names}, tiles of {tile}")
        try:
            schedules = compile_kernels(list(program.values()))
        except CompileError as error:
            reason = str(error).strip().splitlines()[-1]
            if isinstance(error, VmemError):
                reason = "does not fit into a core's memory (VMEM)"
            failed[f"{names}, {tile}"] = reason
            continue
        for name, [schedule] in zip(program, schedules, strict=True):
            work = schedule.tile()
            costs.append(
                Cost(
                    kernel=name,
                    tile=tile,
                    bundles=work.bundles,
                    floor=peers.floor(*tile),
                    # Loops count once in the total, and as often as they run in a tile.
                    other=max(0, schedule.total - work.bundles),
                    spills=work.spills,
                    vmem=schedule.vmem,
                    padded=work.bundles if name in (BOUNDED, ONLINE) else None,
                )
            )
    known = ["jax", "libtpu"] + ["tokamax"] * (with_peers and not missing)
    return Comparison(costs, failed, missing, {name: version(name) for name in known})


def _programs(
    shapes: Sequence[TileShape],
    grid: TokenGrid,
    with_peers: bool,
    missing: dict[str, str],
) -> Iterable[tuple[TileShape, dict[str, Kernel]]]:
    """What to compile: a tile, and a program's kernels by what a table calls them."""
    for tile in shapes:
        # Of the band the program takes nothing but the length of its lists.
        arguments = {"grid": grid, "tile": tile, "band": max(tile), "heads": HEADS}
        build = f"{ours.__name__}:attend"
        yield (
            tile,
            {
                BOUNDED: Kernel(build, ours.BOUNDED, arguments),
                ONLINE: Kernel(build, ours.ONLINE, arguments),
            },
        )
        if with_peers:
            at_once = math.gcd(tile.keys, KV_COMPUTE)
            for name, kernel in peers.kernels(*tile, at_once).items():
                if name.split()[0] not in missing:
                    yield tile, {name: kernel}


def whole(comparison: Comparison, clip: Clip) -> list[Whole]:
    """What attention of the whole clip takes: ours sparse and dense, peers dense.

    The two matmuls alone are no attention, and left out.

    Raises:
        ValueError: Tiles of a shape cannot have the density.
    """
    found = []
    for cost in comparison.costs:
        if cost.kernel.startswith("two matmuls"):
            continue
        table = clip.table(cost.tile)
        for dense in [False, True] if cost.kernel in (BOUNDED, ONLINE) else [True]:
            count = table.all_tiles if dense else table.tiles
            density = count / table.all_tiles
            cycles = cost.cycles(table, dense)
            found.append(Whole(cost, dense, count, density, cycles))
    return found


def best(wholes: Sequence[Whole], clip: Clip) -> list[Whole]:
    """Of each kernel the best shape: by cycles, in sparse ones for a pair kept."""

    def price(one: Whole) -> float:
        table = clip.table(one.cost.tile)
        return one.cycles / (1 if one.dense else tiles.kept(table))

    ways = dict.fromkeys((one.cost.kernel, one.dense) for one in wholes)
    return [
        min((w for w in wholes if (w.cost.kernel, w.dense) == way), key=price)
        for way in ways
    ]


def ratio(wholes: Sequence[Whole]) -> float | None:
    """Ours sparse over Tokamax dense, of the best of each; None without Tokamax."""
    tokamax = [w.cycles for w in wholes if w.cost.kernel.startswith("Tokamax")]
    sparse = [w.cycles for w in wholes if w.cost.kernel == BOUNDED and not w.dense]
    return min(sparse) / min(tokamax) if sparse and tokamax else None


def as_json(comparison: Comparison, clip: Clip) -> dict[str, Any]:
    """The comparison, for programs."""
    wholes = whole(comparison, clip)
    chosen = best(wholes, clip)
    return {
        "target": "v6e",
        "versions": comparison.versions,
        "assumptions": list(ASSUMPTIONS),
        "clock_hz": CLOCK_HZ,
        "tiles": [
            dataclasses.asdict(cost) | {"share": cost.share}
            for cost in comparison.costs
        ],
        "clip": {
            "frames": clip.grid.frames,
            "positions": clip.grid.positions,
            "density": clip.density,
        },
        "attention": [
            {
                "kernel": one.cost.kernel,
                "tile": list(one.cost.tile),
                "dense": one.dense,
                "tiles": one.tiles,
                "density": one.density,
                "cycles_per_head": one.cycles,
                "seconds_per_head": one.seconds,
                "best": one in chosen,
            }
            for one in wholes
        ],
        "sparse_over_dense_tokamax": ratio(chosen),
        "failed": comparison.failed,
        "missing": comparison.missing,
    }


def report(comparison: Comparison, clip: Clip) -> Group:
    """The comparison, as tables and the assumptions behind them."""
    wholes = whole(comparison, clip)
    chosen = best(wholes, clip)
    made = ", ".join(f"{name} {said}" for name, said in comparison.versions.items())
    costs = _table(
        f"A tile of attention on a v6e, heads of {peers.HEAD_DIM}, bfloat16 ({made})",
        ("tile", "bundles", "floor", "share", "padded/full", "spills", "VMEM MiB"),
    )
    for cost in comparison.costs:
        costs.add_row(
            cost.kernel,
            str(cost.tile),
            f"{cost.bundles:,}",
            f"{cost.floor:,}",
            f"{cost.share:.0%}",
            f"{cost.padded / cost.bundles:.2f}" if cost.padded else "",
            f"{cost.spills:,}",
            f"{cost.vmem / 2**20:.1f}",
        )
    clips = _table(
        f"One head over {clip.grid.frames} x {clip.grid.positions} tokens, density "
        f"{clip.density:g}; * is a kernel's best shape",
        ("tile", "tiles", "density", "cycles", "ms"),
    )
    for one in wholes:
        clips.add_row(
            f"{one.cost.kernel}, {'dense' if one.dense else 'sparse'}",
            f"{one.cost.tile}{' *' if one in chosen else '  '}",
            f"{one.tiles:,}",
            f"{one.density:.3f}",
            f"{one.cycles:,}",
            f"{1e3 * one.seconds:.2f}",
        )
    lines = []
    if (over := ratio(chosen)) is not None:
        lines.append(
            f"ours sparse, bounded, over Tokamax dense, best of each: {over:.3f}"
        )
    said = comparison.missing | comparison.failed
    lines += [f"left out: {name}: {reason}" for name, reason in said.items()]
    lines += ["", *(f"- {line}" for line in ASSUMPTIONS)]
    return Group(costs, clips, Text("\n".join(lines)))


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
