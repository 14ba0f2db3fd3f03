import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import chip, tpu
from kernels.tiles import TileKind, TileShape, TileTable, TokenGrid
from pipeline import tiles
from pipeline.bench import peers

ROOT = Path(__file__).parents[2]
WAN, LONG = TokenGrid(21, 3600), TokenGrid(21, 14400)
GRIDS = st.builds(TokenGrid, st.integers(2, 40), st.integers(300, 15_000))


def live_tiles(table):
    """Tile by tile."""
    kinds = table.classify(np.arange(table.rows)[:, None], np.arange(table.columns))
    return int((kinds != TileKind.EMPTY).sum())


def kept_pairs(table):
    """Query by query."""
    tokens, sink, band = table.grid.tokens, table.grid.positions, table.band
    query = np.arange(sink, tokens)
    first = np.maximum(query - band, sink)
    last = np.minimum(query + band, tokens - 1)
    return sink * tokens + int((sink + last - first + 1).sum())


def listed(table, heads):
    """Bytes of the TPU kernel's own lists."""
    shapes = jax.eval_shape(
        lambda kinds, mine: tpu.work_list(table, kinds, mine),
        jax.ShapeDtypeStruct((heads,), np.int32),
        jax.ShapeDtypeStruct((heads,), np.bool_),
    )
    return 4 * sum(np.prod(x.shape) for x in shapes)


@settings(max_examples=25)
@given(grid=GRIDS, density=st.floats(0.1, 1.0), heads=st.integers(1, 40))
def test_the_best_tile_keeps_most_for_its_bundles(grid, density, heads):
    prices = {}
    for shape, bundles in tiles.costs().items():
        try:
            table = TileTable.within(density, grid, shape)
        except ValueError:
            continue
        if listed(table, heads) <= chip.SMEM_BYTES:
            prices[shape] = live_tiles(table) * bundles / kept_pairs(table)
    if not prices:
        with pytest.raises(ValueError, match="the least is|more tiles than"):
            tiles.best_tile(grid, density, heads)
        return
    chosen = tiles.best_tile(grid, density, heads)
    assert prices[chosen] == pytest.approx(min(prices.values()))


@given(
    grid=st.builds(TokenGrid, st.integers(1, 30), st.integers(1, 400)),
    shape=st.sampled_from([TileShape(128, 256), TileShape(384, 128)]),
    band=st.integers(0, 5000),
    heads=st.integers(1, 40),
)
def test_pairs_and_lists_are_counted_as_they_are(grid, shape, band, heads):
    table = TileTable(grid, shape, band)
    places = np.arange(table.grid.tokens)
    assert tiles.kept(table) == kept_pairs(table)
    if len(places) <= 2000:
        assert tiles.kept(table) == table.keeps(places[:, None], places).sum()
    assert chip.list_bytes(table, heads) == listed(table, heads)


@pytest.mark.parametrize("grid", [WAN, LONG])
def test_the_best_tile_of_a_clip_is_cheaper_than_the_usual(grid):
    def price(shape):
        table = TileTable.within(0.38, grid, shape)
        return tiles.cycles(table) / tiles.kept(table)

    assert price(tiles.best_tile(grid, 0.38)) <= price(TileShape(2048, 2048))


def test_a_shape_with_lists_too_long_is_not_taken(monkeypatch):
    costs = {TileShape(1024, 1024): 1, TileShape(2048, 2048): 1_000_000}
    monkeypatch.setattr(tiles, "costs", lambda: costs)
    assert tiles.best_tile(WAN, 0.38) == TileShape(1024, 1024)
    assert tiles.best_tile(LONG, 0.38) == TileShape(2048, 2048)
    with pytest.raises(ValueError, match="more tiles than a TPU's scalar memory"):
        tiles.best_tile(TokenGrid(99, 14400), 0.38)


def test_a_density_that_no_shape_has_names_the_least():
    with pytest.raises(
        ValueError, match=r"density of 0.05 .* the least is (0\.\d+)"
    ) as e:
        tiles.best_tile(WAN, 0.05)
    least = float(str(e.value).rpartition(" ")[2])
    tiles.best_tile(WAN, least)
    with pytest.raises(ValueError):
        tiles.best_tile(WAN, least - 0.001)


def test_what_tiles_cost_is_known_for_usable_shapes_with_its_versions():
    found = json.loads(tiles.COSTS.read_text())
    assert found["head_dim"] == peers.HEAD_DIM
    assert {*found["versions"]} == {"jax", "libtpu"}
    assert TileShape(2048, 2048) in tiles.costs()
    for tile in found["tiles"]:
        queries, keys = tile["tile"]
        assert queries % chip.LANES == keys % chip.LANES == 0
        # No more than half as much again as the matrix units need.
        floor = peers.floor(queries, keys)
        assert floor < tile["bounded"] < tile["online"] < 2 * floor


def test_planning_loads_neither_jax_nor_the_compiler():
    program = (
        "import sys\nfrom kernels.tiles import TokenGrid\n"
        "from pipeline.tiles import best_tile\nbest_tile(TokenGrid(21, 3600), 0.38)\n"
        "print('\\n'.join(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"jax", "libtpu"} & set(done.stdout.split())
