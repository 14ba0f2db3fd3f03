import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import RequestError
from pipeline.likeness import Scores, frame_psnr, ssim_meter
from tests.pipeline.drawn import draw


def noisy(frames, amplitude, seed):
    """Returns uint8 frames, each with uniform noise up to its own amplitude."""
    noise = np.random.default_rng(seed).uniform(-1, 1, frames.shape)
    scaled = noise * np.reshape(amplitude, (-1, 1, 1, 1))
    return (frames + scaled).clip(0, 255).round().astype(np.uint8)


@given(st.integers(0, 2**32 - 1), st.integers(1, 255))
def test_psnr_is_that_of_the_formula(seed, reach):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 40, 2)
    a = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    b = (a + rng.uniform(-reach, reach, a.shape)).clip(0, 255).astype(np.uint8)
    mean_square = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    found = frame_psnr(a, b)
    if mean_square == 0:
        assert found is None
    else:
        # Both are float64 of exact sums: some units in the last place.
        assert found == pytest.approx(10 * np.log10(255**2 / mean_square), rel=1e-12)


def test_psnr_of_black_against_white_is_zero():
    # Of 4K frames: their summed squares are far beyond 32 bits.
    black = np.zeros((2160, 3840, 3), np.uint8)
    assert frame_psnr(black, black + np.uint8(255)) == 0.0


def ssim_by_definition(a, b, shrink):
    """SSIM (Wang et al., 2004) with 8x8 windows every 4 pixels, mean over colours.

    `shrink` divides the paper's first constant.
    """
    c1, c2 = (0.01 * 255) ** 2 / shrink, (0.03 * 255) ** 2
    values = []
    for colour in range(3):
        x, y = (
            np.lib.stride_tricks.sliding_window_view(z[..., colour], (8, 8))[::4, ::4]
            .reshape(-1, 64)
            .astype(np.float64)
            for z in (a, b)
        )
        mean_x, mean_y = x.mean(1), y.mean(1)
        covariance = [np.cov(p, q) for p, q in zip(x, y, strict=True)]
        var_x, var_xy, var_y = np.array(
            [(c[0, 0], c[0, 1], c[1, 1]) for c in covariance]
        ).T
        light = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
        values.append(np.mean(light * (2 * var_xy + c2) / (var_x + var_y + c2)))
    return np.mean(values)


def ssim(a, b):
    with ssim_meter("clip", a.shape[2], a.shape[1]) as meter:
        for frame_a, frame_b in zip(a, b, strict=True):
            meter.add(frame_a, frame_b)
        return meter.finish()


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(8, 40), st.integers(8, 40))
def test_ssim_is_that_of_its_definition(seed, width, height):
    rng = np.random.default_rng(seed)
    most = rng.integers(2, 256)
    a = rng.integers(0, most, (3, height, width, 3), dtype=np.uint8)
    b = noisy(a, [2, 20, 200], seed)
    found = ssim(a, b)
    for n in range(3):
        # ffmpeg gives six decimals, of constants rounded to whole numbers.
        assert found[n] == pytest.approx(ssim_by_definition(a[n], b[n], 64), abs=1e-5)


def test_ssim_is_near_the_papers_where_frames_are_not_black():
    a = draw(3, 64, 48)[..., :2].mean(-1, keepdims=True).repeat(3, -1) / 2 + 60
    a = a.astype(np.uint8)
    b = noisy(a, [2, 10, 30], 0)
    for n, found in enumerate(ssim(a, b)):
        # What the first constant can do, by its definition, at a mean of 60 and more:
        # errors of the means of 30 / 8 change `light` by less than 1e-3.
        assert found == pytest.approx(ssim_by_definition(a[n], b[n], 1), abs=1e-3)


def test_ssim_is_one_for_the_same_and_alike_both_ways_round():
    a = draw(4, 48, 32)
    b = noisy(a, [0, 3, 9, 27], 0)
    forth = ssim(a, b)
    assert forth[0] == 1.0
    assert list(forth) == sorted(forth, reverse=True) and forth[3] < forth[1] < 1
    assert ssim(b, a) == forth


def test_frames_too_small_for_ssim_are_refused():
    refused = pytest.raises(RequestError, match="^opening: frames of 32x6 pixels have")
    with refused, ssim_meter("opening", 32, 6):
        pass


def test_scores_stand_for_all_frames():
    scores = Scores((30.0, None, 20.0, 40.0, 20.0), (0.9, 1.0, 0.7, 0.95, 0.6))
    assert (scores.psnr_mean, scores.psnr_least, scores.identical) == (27.5, 20.0, 1)
    assert scores.ssim_mean == pytest.approx(0.83) and scores.ssim_least == 0.6
    assert scores.worst(1, 1) == [2]
    assert Scores((None,), (1.0,)).psnr_mean is None


@given(
    st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 10),
)
def test_the_worst_frames_are_apart_and_none_worse_is_passed_over(psnr, most, apart):
    picked = Scores(tuple(psnr), (1.0,) * len(psnr)).worst(most, apart)
    values = [psnr[n] for n in picked]
    assert None not in values and values == sorted(values) and len(picked) <= most
    assert all(abs(x - y) >= apart for x in picked for y in picked if x != y)
    for n, value in enumerate(psnr):
        if value is not None and n not in picked:
            better = [p for p in picked if (psnr[p], p) < (value, n)]
            near = any(abs(p - n) < apart for p in better)
            assert near or len(better) == most
