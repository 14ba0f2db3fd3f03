import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.sheet import contact_sheet, pick, thumbnail
from tests.pipeline.drawn import draw


def sheet_of(frames):
    size = (frames.shape[2], frames.shape[1])
    return contact_sheet(
        [thumbnail(frames[i].tobytes(), size) for i in pick(len(frames))]
    )


@given(st.integers(1, 100_000))
def test_the_picked_frames_span_the_clip_evenly(frames):
    picked = pick(frames)
    assert picked[0] == 0 and picked[-1] == frames - 1
    assert len(picked) == min(frames, 12)
    gaps = np.diff(picked)
    if len(gaps):
        assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((81, 128, 128), (6 * 132 - 4, 2 * 132 - 4)),
        ((81, 720, 1280), (4 * 324 - 4, 3 * 184 - 4)),
        ((81, 64, 32), (6 * 36 - 4, 2 * 68 - 4)),
        ((5, 64, 64), (5 * 68 - 4, 64)),
        ((1, 64, 64), (64, 64)),
        ((3, 2, 2), (14, 2)),
        ((2, 2, 2000), (2 * 324 - 4, 1)),
    ],
    ids=str,
)
def test_the_sheet_holds_the_frames_in_rows(shape, size):
    frames, height, width = shape
    drawn = np.zeros((frames, height, width, 3), np.uint8)
    with Image.open(io.BytesIO(sheet_of(drawn))) as image:
        assert image.format == "WEBP" and image.size == size


def test_frames_are_in_reading_order():
    frames = np.stack([np.full((32, 32, 3), 20 * n, np.uint8) for n in range(12)])
    with Image.open(io.BytesIO(sheet_of(frames))) as image:
        pixels = np.asarray(image.convert("RGBA"))
    centres = [pixels[36 * r + 16, 36 * c + 16] for r in range(2) for c in range(6)]
    for n, centre in enumerate(centres):
        assert np.abs(centre[:3].astype(int) - 20 * n).max() <= 3
        assert centre[3] == 255
    assert pixels[16, 34, 3] == 0


def test_the_same_frames_give_the_same_bytes():
    frames = draw(9, 64, 48)
    assert sheet_of(frames) == sheet_of(frames)
