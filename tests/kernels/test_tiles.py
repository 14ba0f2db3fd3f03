import tracemalloc

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.tiles import TileKind, TileShape, TileTable, TokenGrid
from tests.kernels import cases

EMPTY, BOUNDARY, FULL = TileKind

# 81 pixel frames of 2,560 x 1,440: 302,400 tokens.
LONG = TokenGrid(21, 14_400)


def brute_force(table):
    """Kinds of all tiles by looking at every element of the pattern."""
    tokens, sink = table.grid.tokens, table.grid.positions
    kinds = np.empty((table.rows, table.columns), np.int8)
    kept = np.array(
        [
            [i < sink or j < sink or abs(i - j) <= table.band for j in range(tokens)]
            for i in range(tokens)
        ]
    )
    height, width = table.tile
    for row in range(table.rows):
        for column in range(table.columns):
            tile = kept[row * height :, column * width :][:height, :width]
            kinds[row, column] = (
                FULL if tile.all() else BOUNDARY if tile.any() else EMPTY
            )
    return kinds


@settings(max_examples=150)
@given(table=cases.tables())
@example(table=TileTable(TokenGrid(1, 1), TileShape(1, 1), 0))
@example(table=TileTable(TokenGrid(1, 13), TileShape(4, 64), 0))
@example(table=TileTable(TokenGrid(7, 11), TileShape(128, 128), 0))
@example(table=TileTable(TokenGrid(5, 7), TileShape(1, 1), 3))
@example(table=TileTable(TokenGrid(97, 1), TileShape(8, 8), 0))
def test_tiles_are_what_their_elements_say(table):
    kinds = brute_force(table)
    rows, columns = np.indices(kinds.shape)
    np.testing.assert_array_equal(table.classify(rows, columns), kinds)
    live = np.argwhere(kinds != EMPTY)
    np.testing.assert_array_equal(table.live(), live)
    assert table.tiles == len(live)
    assert table.all_tiles == kinds.size
    assert table.density == len(live) / kinds.size


@settings(max_examples=150)
@given(table=cases.tables())
def test_runs_are_the_live_columns_and_the_second_is_apart(table):
    live = brute_force(table) != EMPTY
    assert table.runs.shape == (table.rows, 3)
    for row, (near, start, end) in zip(live, table.runs, strict=True):
        columns = [*range(near), *range(start, end)]
        np.testing.assert_array_equal(np.flatnonzero(row), columns)
        assert (start == end == near) or near < start < end


@settings(max_examples=50)
@given(table=cases.tables(), data=st.data())
def test_the_pattern_is_kept_element_by_element(table, data):
    places = st.integers(0, table.grid.tokens - 1)
    query, key = data.draw(places), data.draw(places)
    sink = table.grid.positions
    kept = query < sink or key < sink or abs(query - key) <= table.band
    assert table.keeps(np.array(query), np.array(key)) == kept


@pytest.mark.parametrize("tile", [TileShape(2048, 2048), TileShape(128, 128)], ids=str)
def test_a_long_clip_takes_little_memory(tile):
    tracemalloc.start()
    try:
        table = TileTable.within(0.38, LONG, tile)
        live = table.live()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(live) == table.tiles
    # A bool for each element of the matrix would take 91 GB.
    assert peak < 100e6
    assert all(np.size(x) <= 3 * table.rows for x in vars(table).values())


@settings(max_examples=100)
@given(table=cases.tables(), density=st.floats(0, 1))
def test_the_band_is_the_widest_within_the_density(table, density):
    grid, tile, least = table.grid, table.tile, TileTable(table.grid, table.tile, 0)
    density = max(density, least.density)
    found = TileTable.within(density, grid, tile, table.rounding)
    assert (found.grid, found.tile, found.rounding) == (grid, tile, table.rounding)
    assert found.density <= density
    wider = TileTable(grid, tile, found.band + 1)
    assert wider.density > density or found.density == 1


@settings(max_examples=50)
@given(table=cases.tables())
def test_a_density_of_one_is_the_whole_matrix(table):
    assert TileTable.within(1, table.grid, table.tile).tiles == table.all_tiles


@settings(max_examples=100)
@given(table=cases.tables(), share=st.floats(0, 0.999))
def test_too_little_density_is_refused_and_the_least_named_is_accepted(table, share):
    narrowest = TileTable(table.grid, table.tile, 0)
    with pytest.raises(ValueError, match="is less than the first frame") as error:
        TileTable.within(share * narrowest.density, table.grid, table.tile)
    named = float(str(error.value).rsplit(" ", 1)[1])
    assert TileTable.within(named, table.grid, table.tile).density <= named
    # Four digits, rounded up.
    assert named - narrowest.density <= 1e-4


def test_no_number_is_no_density():
    with pytest.raises(ValueError, match="is less than"):
        TileTable.within(float("nan"), TokenGrid(5, 8), TileShape(8, 8))


@pytest.mark.parametrize("frames", [1, 2, 5, 21])
def test_the_sink_takes_its_share_where_tiles_divide_frames(frames):
    share = sink_share(TokenGrid(frames, 24), TileShape(8, 12))
    assert share == pytest.approx(1 - (1 - 1 / frames) ** 2)


@pytest.mark.parametrize(("pixel_frames", "share"), [(17, 0.40), (81, 0.10)])
def test_the_sink_of_720p_takes_what_design_says(pixel_frames, share):
    grid = TokenGrid((pixel_frames - 1) // 4 + 1, 3_600)
    # 0.36 and 0.09 of the elements; tiles reach past the frame.
    assert sink_share(grid, TileShape(2048, 2048)) == pytest.approx(share, abs=0.006)


def sink_share(grid, tile):
    """The share of tiles with the first frame in them, all of which are live."""
    table = TileTable(grid, tile, 0)
    rows, columns = np.indices((table.rows, table.columns))
    in_sink = (rows * tile.queries < grid.positions) | (
        columns * tile.keys < grid.positions
    )
    assert (table.classify(rows, columns) != EMPTY)[in_sink].all()
    return in_sink.mean()


@pytest.mark.parametrize(
    ("grid", "tile", "band"),
    [
        (TokenGrid(0, 4), TileShape(4, 4), 0),
        (TokenGrid(4, 0), TileShape(4, 4), 0),
        (TokenGrid(4, -1), TileShape(4, 4), 0),
        (TokenGrid(4, 4), TileShape(0, 4), 0),
        (TokenGrid(4, 4), TileShape(4, 0), 0),
        (TokenGrid(4, 4), TileShape(4, 4), -1),
    ],
)
def test_sizes_that_cannot_be_are_refused(grid, tile, band):
    with pytest.raises(ValueError, match="sizes must be 1 or more"):
        TileTable(grid, tile, band)


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match='give "tile" or "exact"'):
        TileTable(TokenGrid(4, 4), TileShape(4, 4), 0, "up")  # pyright: ignore


def test_equal_tables_compile_once():
    traced = []

    def count(x, table):
        traced.append(table.band)
        return x * table.tiles

    count = jax.jit(count, static_argnums=1)
    for band in (3, 3, 4, 3):
        table = TileTable(TokenGrid(5, 7), TileShape(4, 4), band)
        assert count(1, table) == table.tiles
        table.live()
    assert traced == [3, 4]


def test_tables_that_differ_in_rounding_are_not_equal():
    tables = {
        TileTable(TokenGrid(5, 7), TileShape(4, 4), 3, rounding)
        for rounding in ("tile", "exact", "tile")
    }
    assert len(tables) == 2


def test_the_least_density_named_is_not_rounded_above_itself():
    # 28 of 100 tiles; 0.28 * 1e4 is more than 2800 in floats.
    with pytest.raises(ValueError, match=r"the least is 0\.2800$"):
        TileTable.within(0.27, TokenGrid(10, 64), TileShape(64, 64))
