"""The contact sheet: a clip at a glance, as one small picture."""

import io
from collections.abc import Sequence

from PIL import Image

_MOST_FRAMES = 12
_LONGEST_SIDE = 320
_GAP = 4
_QUALITY = 85


def pick(frames: int) -> list[int]:
    """Returns which frames of a clip to show: first, last and evenly between.

    Args:
        frames: How many the clip has.

    Returns:
        At most 12 frame numbers, from 0, ascending.
    """
    count = min(frames, _MOST_FRAMES)
    if count == 1:
        return [0]
    return [round(i * (frames - 1) / (count - 1)) for i in range(count)]


def thumbnail(pixels: bytes, size: tuple[int, int]) -> Image.Image:
    """Returns a frame made small; small ones stay as they are.

    Args:
        pixels: Raw rgb24, height x width x 3 bytes.
        size: (width, height) in pixels.
    """
    image = Image.frombytes("RGB", size, pixels)
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    return image


def contact_sheet(thumbnails: Sequence[Image.Image]) -> bytes:
    """Lays thumbnails out in reading order.

    The same thumbnails give the same bytes.

    Args:
        thumbnails: At least one, all of one size.

    Returns:
        A WebP picture, transparent between the thumbnails: 4 wide for landscape
        frames, 6 for others.
    """
    width, height = thumbnails[0].size
    columns = min(len(thumbnails), 4 if width > height else 6)
    rows = -(-len(thumbnails) // columns)
    size = (
        columns * (width + _GAP) - _GAP,
        rows * (height + _GAP) - _GAP,
    )
    sheet = Image.new("RGBA", size, (0, 0, 0, 0))
    for n, image in enumerate(thumbnails):
        row, column = divmod(n, columns)
        sheet.paste(image, (column * (width + _GAP), row * (height + _GAP)))
    data = io.BytesIO()
    sheet.save(data, "WEBP", quality=_QUALITY, method=6)
    return data.getvalue()
