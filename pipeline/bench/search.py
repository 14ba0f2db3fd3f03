"""Which shapes of tiles there are to choose from, and what each costs, for planning."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from kernels.tiles import TileShape, TokenGrid
from pipeline import tiles
from pipeline.bench import peers, v6e
from pipeline.errors import RequestError

# Powers of two, shapes between them, and that of the published work on these chips.
SHAPES = tuple(
    TileShape(*shape)
    for shape in (
        (1024, 1024),
        (1024, 2048),
        (2048, 1024),
        (1536, 1536),
        (4096, 1024),
        (2048, 2048),
        (1536, 3328),
        (3328, 1536),
        (2048, 3072),
        (3072, 2048),
        (2560, 2560),
        (2048, 4096),
        (4096, 2048),
        (3072, 3072),
        (4096, 3072),
        (4096, 4096),
    )
)


def search(
    shapes: Sequence[TileShape],
    say: Callable[[str], None],
    path: Path = tiles.COSTS,
    grid: TokenGrid = v6e.GRID,
) -> v6e.Comparison:
    """Compiles our kernels in tiles of several shapes and writes what they cost.

    Args:
        shapes: Of tiles; those that the core has no room for are left out.
        say: Is told what is compiled next.
        path: The file, for `pipeline.tiles`; it is written anew.
        grid: The clip that they are compiled for.

    Raises:
        RequestError: libtpu is not installed, nothing compiled, or the file cannot be
            written.
    """
    found = v6e.measure(shapes, say, with_peers=False, grid=grid)
    costs = {(cost.kernel, cost.tile): cost for cost in found.costs}
    lines = [
        json.dumps(
            {
                "tile": tile,
                "bounded": costs[v6e.BOUNDED, tile].bundles,
                "online": costs[v6e.ONLINE, tile].bundles,
            }
        )
        for tile in dict.fromkeys(cost.tile for cost in found.costs)
    ]
    if not lines:
        reasons = "; ".join(
            f"{name}: {reason}" for name, reason in found.failed.items()
        )
        raise RequestError(f"no shape of tiles compiled: {reasons}")
    head = {"device": "v6e", "head_dim": peers.HEAD_DIM, "versions": found.versions}
    text = json.dumps(head)[1:-1]
    try:
        path.parent.mkdir(exist_ok=True)
        # A line for each shape, so that a change can be read.
        path.write_text(f'{{{text},\n"tiles": [\n' + ",\n".join(lines) + "\n]}\n")
    except OSError as error:
        raise RequestError(f"what tiles cost cannot be written: {error}") from error
    tiles.costs.cache_clear()
    return found
