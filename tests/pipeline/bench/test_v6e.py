"""The v6e's figures: what is reckoned from them, and that they come about."""

import importlib.util
import json
import sys

import pytest
from rich.console import Console

from kernels.tiles import TileShape, TileTable, TokenGrid
from pipeline import cli, tiles
from pipeline.bench import peers, v6e
from pipeline.bench.search import search

SQUARE, WIDE = TileShape(2048, 2048), TileShape(3328, 1536)
CLIP = v6e.Clip(TokenGrid(21, 3600), 0.38)
TOKAMAX = "Tokamax splash, constant max"


def cost(kernel, tile, bundles, padded=None):
    return v6e.Cost(kernel, tile, bundles, peers.floor(*tile), 400, 12, 2**23, padded)


FOUND = v6e.Comparison(
    costs=[
        cost(v6e.BOUNDED, SQUARE, 7_000, 7_000),
        cost(v6e.ONLINE, SQUARE, 8_000, 8_000),
        cost("two matmuls, transposed", SQUARE, 6_500),
        cost(TOKAMAX, SQUARE, 9_000),
        cost(v6e.BOUNDED, WIDE, 8_000, 8_000),
        cost(TOKAMAX, WIDE, 10_000),
    ],
    failed={"JAX splash, 3328x1536": "does not fit"},
    missing={},
    versions={"jax": "1.2.3", "libtpu": "4.5.6"},
)


@pytest.fixture
def tilereel(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["tilereel", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_a_whole_clip_takes_its_tiles_and_its_rows():
    square, wide = (CLIP.table(tile) for tile in (SQUARE, WIDE))
    wholes = {
        (w.cost.kernel, w.cost.tile, w.dense): w.cycles for w in v6e.whole(FOUND, CLIP)
    }
    assert wholes == {
        (v6e.BOUNDED, SQUARE, False): square.tiles * 7_000 + square.rows * 400,
        (v6e.BOUNDED, SQUARE, True): 37 * 37 * 7_000 + 37 * 400,
        (v6e.ONLINE, SQUARE, False): square.tiles * 8_000 + square.rows * 400,
        (v6e.ONLINE, SQUARE, True): 37 * 37 * 8_000 + 37 * 400,
        (TOKAMAX, SQUARE, True): 37 * 37 * 9_000 + 37 * 400,
        (v6e.BOUNDED, WIDE, False): wide.tiles * 8_000 + wide.rows * 400,
        (v6e.BOUNDED, WIDE, True): 23 * 50 * 8_000 + 23 * 400,
        (TOKAMAX, WIDE, True): 23 * 50 * 10_000 + 23 * 400,
    }


def test_each_kernel_is_compared_at_its_own_best_shape():
    said = v6e.as_json(FOUND, CLIP)
    best = {
        (one["kernel"], one["dense"]): one for one in said["attention"] if one["best"]
    }
    assert best[TOKAMAX, True]["tile"] == [3328, 1536]
    assert best[v6e.BOUNDED, False]["tile"] == [2048, 2048]
    over = (
        best[v6e.BOUNDED, False]["cycles_per_head"]
        / best[TOKAMAX, True]["cycles_per_head"]
    )
    assert said["sparse_over_dense_tokamax"] == pytest.approx(over)
    assert 0.2 < over < 0.4


def test_the_report_says_what_was_left_out_and_assumed():
    console = Console(width=160)
    with console.capture() as capture:
        console.print(v6e.report(FOUND, CLIP))
    text = capture.get()
    for words in (
        "jax 1.2.3, libtpu 4.5.6",
        "6,144",
        "left out: JAX splash, 3328x1536: does not fit",
        "ours sparse, bounded, over Tokamax dense",
        "no TPU was used",
        "waits for DMA",
        "1.75 GHz",
    ):
        assert words in text
    json.dumps(v6e.as_json(FOUND, CLIP))


def test_without_tokamax_there_is_no_ratio_and_the_remedy_is_named():
    costs = [one for one in FOUND.costs if one.kernel != TOKAMAX]
    found = v6e.Comparison(costs, {}, v6e.MISSING, FOUND.versions)
    said = v6e.as_json(found, CLIP)
    assert said["sparse_over_dense_tokamax"] is None
    assert 'pip install "tilereel[bench]"' in said["missing"]["Tokamax"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tile", "2048"], "--tile: '2048' is no tile"),
        (["--tile", "2048x64"], "both sides are multiples of 128"),
        (["--clip", "21x45"], "--clip '21x45' is no clip"),
        (["--clip", "21x0x80"], "FRAMESxROWSxCOLUMNS"),
        (["--density", "0.01"], "density of 0.01 is less than"),
        (["--target", "cpu", "--search"], "are for --target v6e"),
    ],
)
def test_wrong_requests_are_refused_before_any_work(tilereel, arguments, words):
    code, _, errors = tilereel("bench", "attention", *arguments)
    assert code == 2
    assert words in errors


@pytest.mark.parametrize("arguments", [[], ["--search"]])
def test_without_libtpu_the_remedy_is_named(tilereel, monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    code, output, errors = tilereel("bench", "attention", *arguments)
    assert (code, output) == (2, "")
    assert 'pip install "tilereel[tpu]"' in errors


@pytest.mark.tpu_compile
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
class TestCompiles:
    TILE = TileShape(512, 512)
    CLIP = v6e.Clip(TokenGrid(5, 300), 0.9)

    def test_ours_and_others_are_measured_side_by_side(self):
        said = []
        found = v6e.measure([self.TILE], said.append, grid=self.CLIP.grid)
        assert not found.failed
        names = [cost.kernel for cost in found.costs]
        expected = [v6e.BOUNDED, v6e.ONLINE, *peers.kernels(512, 512, 512)]
        if found.missing:
            expected = [name for name in expected if "Tokamax" not in name]
        assert names == expected
        assert len(said) == len(names) - 1
        assert all(0.2 < cost.share < 1 for cost in found.costs)
        assert (v6e.as_json(found, self.CLIP)["missing"] == {}) == (
            "tokamax" in found.versions
        )

    def test_a_search_leaves_what_plans_read(self, tmp_path, monkeypatch):
        path = tmp_path / "tiles" / "v6e.json"
        too_large = TileShape(8192, 8192)
        found = search([self.TILE, too_large], lambda line: None, path, self.CLIP.grid)
        [(name, reason)] = found.failed.items()
        assert name == "ours, bounded and ours, online, 8192x8192"
        assert "take smaller tiles" in reason
        monkeypatch.setattr(tiles, "COSTS", path)
        tiles.costs.cache_clear()
        try:
            costs = {cost.kernel: cost.bundles for cost in found.costs}
            assert tiles.costs() == {self.TILE: costs[v6e.BOUNDED]}
            table = TileTable.within(0.9, self.CLIP.grid, self.TILE)
            assert tiles.cycles(table) == table.tiles * costs[v6e.BOUNDED]
        finally:
            tiles.costs.cache_clear()
