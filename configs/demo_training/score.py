"""Reads colour, shape and direction of motion off the frames of a clip."""

import numpy as np

from configs.demo_training.draw import COLOURS


def score(frames: np.ndarray) -> tuple[str, str, str] | None:
    """What the frames, uint8 [frames, height, width, 3], show.

    Returns:
        (colour, shape, direction), or None where nothing stands out from the
        background.
    """
    frames = frames.astype(np.float32)
    edges = (frames[:, :2], frames[:, -2:], frames[:, :, :2], frames[:, :, -2:])
    border = np.concatenate([edge.reshape(-1, 3) for edge in edges])
    away = np.abs(frames - np.median(border, 0)).max(-1)
    peak = np.percentile(away, 98)
    if peak < 40:
        return None
    # Half of the way to the shape's own colour is where its edge is.
    mask = away > peak / 2
    seen = np.flatnonzero(mask.sum((1, 2)) >= 16)
    if len(seen) < 2:
        return None

    core = np.median(frames[away > 0.85 * peak], 0)
    colour = min(COLOURS, key=lambda name: np.abs(core - COLOURS[name]).sum())

    fills, centres = [], []
    for i in seen:
        rows, columns = np.nonzero(mask[i])
        centres.append((columns.mean(), rows.mean()))
        # The box leaves out stray pixels: 1% at each end of either axis.
        x0, x1 = np.quantile(columns, (0.005, 0.995))
        y0, y1 = np.quantile(rows, (0.005, 0.995))
        fills.append(len(rows) / ((x1 - x0 + 1) * (y1 - y0 + 1)))
    fill = float(np.median(fills))
    # Shares of the bounding box: triangle 1/2, circle pi/4, square 1.
    shape = "triangle" if fill < 0.66 else "circle" if fill < 0.89 else "square"

    part = max(1, len(centres) // 5)
    x, y = np.mean(centres[-part:], 0) - np.mean(centres[:part], 0)
    if abs(x) >= abs(y):
        direction = "right" if x > 0 else "left"
    else:
        direction = "down" if y > 0 else "up"
    return colour, shape, direction
