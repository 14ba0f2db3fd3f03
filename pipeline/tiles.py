"""Which shape of tiles suits a clip, by what the compiler says that tiles cost.

Plain Python: planning neither loads jax nor asks a compiler. What tiles cost is in
configs/tiles, where `tilereel bench attention --search` writes it.
"""

import functools
import json
from pathlib import Path

import numpy as np

from kernels import chip
from kernels.tiles import TileShape, TileTable, TokenGrid

COSTS = Path(__file__).parent.parent / "configs" / "tiles" / "v6e.json"


def best_tile(
    grid: TokenGrid, density: float, heads: int = 40, head_dim: int = 128
) -> TileShape:
    """Returns the shape of tiles that gives a sparse head most for what it costs.

    It costs its live tiles times the bundles of one, and gives the pairs of a query and
    a key that its pattern keeps, of the widest band that the density leaves room for.
    The shape with the fewest cycles a pair is taken. So tiles that reach beyond the
    sink, the band or the clip weigh against coarse shapes, and leaving a part of the
    density unused makes no shape look cheap.

    Args:
        grid: The clip's tokens.
        density: The largest share of all tiles that may be computed.
        heads: The most that a chip computes at once.
        head_dim: Of each.

    Raises:
        ValueError: No shape's tiles can have the density, or all would be too many
            to list; names the least density that can be had.
    """
    narrowest = [TileTable(grid, shape, 0) for shape in costs()]
    narrowest = [table for table in narrowest if _fits(table, heads, head_dim)]
    if not narrowest:
        raise ValueError(
            f"{grid.tokens:,} tokens are more tiles than a TPU's scalar memory can "
            "list, in tiles of any shape measured: render shorter or smaller clips"
        )
    least = min(table.density for table in narrowest)
    if not least <= density:
        raise ValueError(
            f"a density of {density:g} is less than the first frame and the diagonal "
            f"take of {grid.frames} latent frames of {grid.positions} tokens, in tiles "
            f"of any shape measured; the least is {np.ceil(least * 1e4) / 1e4:.4f}"
        )
    tables = [
        TileTable.within(density, grid, table.tile)
        for table in narrowest
        if table.density <= density
    ]
    tables = [table for table in tables if _fits(table, heads, head_dim)]
    if not tables:
        raise ValueError(
            f"{grid.tokens:,} tokens at a density of {density:g} are more tiles than a "
            "TPU's scalar memory can list: render shorter clips, or ask for less"
        )
    return min(tables, key=lambda table: cycles(table) / kept(table)).tile


def _fits(table: TileTable, heads: int, head_dim: int) -> bool:
    try:
        chip.check(table, heads, head_dim)
    except ValueError:
        return False
    return True


def cycles(table: TileTable) -> int:
    """Predicts what a sparse head takes on a v6e, in cycles.

    A static schedule's figure: without waits for memory.

    Raises:
        KeyError: What a tile of this shape costs was not measured.
    """
    return table.tiles * costs()[table.tile]


def kept(table: TileTable) -> int:
    """Returns how many pairs of a query and a key the pattern keeps.

    `TileTable.keeps`, summed: the sink's rows and columns, and the band of the rest.
    """
    rest = table.grid.tokens - table.grid.positions
    band = min(table.band, max(rest - 1, 0))
    in_band = rest * (2 * band + 1) - band * (band + 1)
    return table.grid.tokens**2 - rest**2 + in_band


@functools.cache
def costs() -> dict[TileShape, int]:
    """Returns the bundles of a tile in the bounded kernel, by the tile's shape."""
    measured = json.loads(COSTS.read_text())
    return {TileShape(*tile["tile"]): tile["bounded"] for tile in measured["tiles"]}
