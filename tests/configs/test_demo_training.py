"""The drawn clips and the program that reads them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.demo_training import draw, score, vocabulary


@pytest.mark.parametrize("frames", [9, 81])
def test_the_scorer_reads_drawn_clips(frames):
    rng = np.random.default_rng(frames)
    seen = [
        score.score(draw.draw(draw.random_scene(rng, combination), frames))
        for combination in draw.COMBINATIONS
    ]
    right = np.mean([a == b for a, b in zip(seen, draw.COMBINATIONS, strict=True)])
    assert right >= 0.99


def test_the_scorer_sees_nothing_in_noise_and_plain_backgrounds():
    assert score.score(np.full((5, 32, 32, 3), 40, np.uint8)) is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_path_stays_inside_the_picture(seed):
    scene = draw.random_scene(np.random.default_rng(seed))
    frames = draw.draw(scene, draw.LONGEST, 64)[[0, -1]].astype(int)
    inside = np.abs(frames - scene.background).max(-1) > 0
    area = inside.sum((1, 2))
    # A corner may be cut by an edge of the picture, no more.
    assert abs(area[0] - area[1]) < 0.1 * area.max()


def test_held_out_combinations_are_never_drawn_for_training():
    assert not set(draw.HELD_OUT) & set(draw.TRAINED)
    assert len(draw.HELD_OUT) + len(draw.TRAINED) == len(draw.COMBINATIONS) == 72
    rng = np.random.default_rng(0)
    scenes = [draw.random_scene(rng) for _ in range(500)]
    drawn = {(s.colour, s.shape, s.direction) for s in scenes}
    assert not drawn & set(draw.HELD_OUT)


def test_every_sentence_is_known_to_the_tokenizer():
    tokenizer = vocabulary.tokenizer()
    unknown = tokenizer.token_to_id("<unk>")
    scene = draw.random_scene(np.random.default_rng(0))
    for phrase in draw.PHRASES:
        ids = tokenizer.encode(scene.sentence(phrase)).ids
        assert unknown not in ids and len(ids) <= vocabulary.LONGEST
