import pytest

from pipeline import names
from pipeline.store import LocalStore


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (names.lease(3), "lease/0003.json"),
        (names.event("a-1", 7), "clips/a-1/state/0007.json"),
        (names.checkpoint("a", 20), "clips/a/checkpoints/step-0020.safetensors"),
        (names.frame("a", 2, 0, 80), "clips/a/shards/0002/000/frame-000080.png"),
        (names.shard_json("a", 2, 1), "clips/a/shards/0002/001/shard.json"),
        (names.video("a"), "videos/a.mp4"),
        (names.provenance("a"), "videos/a.json"),
        (names.sheet("a"), "videos/a.webp"),
    ],
)
def test_names_are_those_of_the_design_and_the_store_takes_them(
    tmp_path, name, expected
):
    assert name == expected
    LocalStore(tmp_path).create(name, b"")


def test_numbers_are_read_back_from_names():
    assert names.number(names.event("a", 12345)) == 12345
    assert names.number(names.checkpoint("a-2", 20)) == 20
    assert names.number(names.lease(4)) == 4
    assert names.number("clips/a/state/notes.txt") is None
