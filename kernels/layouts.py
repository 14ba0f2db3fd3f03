"""The two orders of a clip's tokens, and the way from one to the other.

Frame-major: token (f, s) is at f * S + s, so that near in space is near in memory.
Sink-first position-major: the first frame's S tokens first, then token (f, s) at
S + s * (F - 1) + (f - 1), so that near in time is near in memory and the sink stays one
block. Both begin with the first frame's tokens in the same order.
"""

import jax.numpy as jnp
import numpy as np

from kernels.tiles import AnyArray, TokenGrid


def to_position_major(x: AnyArray, grid: TokenGrid, axis: int = -2) -> AnyArray:
    """Reorders frame-major tokens along an axis into sink-first position-major."""
    return _swap(x, grid.positions, (grid.frames - 1, grid.positions), axis)


def to_frame_major(x: AnyArray, grid: TokenGrid, axis: int = -2) -> AnyArray:
    """Undoes `to_position_major`."""
    return _swap(x, grid.positions, (grid.positions, grid.frames - 1), axis)


def _swap(x: AnyArray, sink: int, shape: tuple[int, int], axis: int) -> AnyArray:
    """Takes what follows the sink for a matrix and transposes it."""
    axis %= x.ndim
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if x.shape[axis] != sink + shape[0] * shape[1]:
        raise ValueError(
            f"axis {axis} of {x.shape} is not {sink + shape[0] * shape[1]} tokens long"
        )
    first, rest = (
        x[(slice(None),) * axis + (slice(sink),)],
        x[(slice(None),) * axis + (slice(sink, None),)],
    )
    rest = rest.reshape(*before, *shape, *after).swapaxes(axis, axis + 1)
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.concatenate(  # pyright: ignore[reportReturnType, reportCallIssue]
        [first, rest.reshape(*before, -1, *after)], axis
    )
