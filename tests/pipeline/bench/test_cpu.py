import dataclasses
import json

import pytest
from rich.console import Console

from kernels.tiles import TileShape, TokenGrid
from pipeline.bench import cpu

TINY = cpu.Case(TokenGrid(5, 16), 2, 16, TileShape(16, 16), 0.6)


def printed(comparison):
    console = Console(width=160)
    with console.capture() as capture:
        console.print(cpu.report(comparison))
    return capture.get()


def test_without_torch_ours_are_compared_and_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    comparison = cpu.measure(TINY, repetitions=1)
    assert [*comparison.sparse] == ["ours, SPATIAL", "ours, TEMPORAL"]
    assert [*comparison.dense] == ["ours, DENSE", "kernels.dense"]
    assert comparison.density <= TINY.density
    assert comparison.sparse_over_dense > 0
    assert comparison.ours_over_flex is None
    json.dumps(dataclasses.asdict(comparison))
    text = printed(comparison)
    assert "5 x 16 tokens, 2 heads of 16, float32" in text
    assert 'pip install "tilereel[bench]"' in text


@pytest.mark.peers
# torch.compile calls what torch itself deprecates.
@pytest.mark.filterwarnings("ignore:`torch:DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_computes_the_same_through_the_same_tiles(dtype):
    pytest.importorskip("torch")
    # Tokens that no tile divides: the last ones are ragged.
    case = dataclasses.replace(TINY, grid=TokenGrid(5, 15))
    comparison = cpu.measure(case, dtype, repetitions=1)
    assert not comparison.missing
    assert comparison.ours_over_flex is not None
    # Rounding of the weights, and in bfloat16 that of the output as well.
    most = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    for timing in (comparison.sparse | comparison.dense).values():
        assert timing.difference < most
    assert "torch flex_attention" in printed(comparison)
