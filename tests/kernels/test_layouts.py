import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import layouts
from kernels.tiles import TokenGrid

grids = st.builds(TokenGrid, st.integers(1, 9), st.integers(1, 17))


def position_major(grid):
    """Frame-major tokens in the order that DESIGN gives, token by token."""
    order = [0] * grid.tokens
    for f in range(grid.frames):
        for s in range(grid.positions):
            place = s if f == 0 else grid.positions + s * (grid.frames - 1) + f - 1
            order[place] = f * grid.positions + s
    return order


@settings(max_examples=100)
@given(grid=grids, before=st.integers(0, 2), after=st.integers(0, 2), data=st.data())
@example(grid=TokenGrid(1, 5), before=1, after=1, data=None)
@example(grid=TokenGrid(5, 1), before=1, after=1, data=None)
@example(grid=TokenGrid(1, 1), before=0, after=0, data=None)
def test_tokens_are_where_the_formula_puts_them(grid, before, after, data):
    shape = (*range(2, 2 + before), grid.tokens, *range(2, 2 + after))
    x = np.arange(np.prod(shape)).reshape(shape)
    axis = before
    if data is not None and data.draw(st.booleans()):
        axis -= x.ndim
    moved = layouts.to_position_major(x, grid, axis)
    np.testing.assert_array_equal(moved, np.take(x, position_major(grid), axis))
    back = layouts.to_frame_major(moved, grid, axis)
    assert type(back) is type(moved) is np.ndarray
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("grid", [TokenGrid(1, 5), TokenGrid(5, 1), TokenGrid(4, 7)])
def test_jax_arrays_move_as_numpy_ones_do(grid):
    x = np.arange(6 * grid.tokens).reshape(2, grid.tokens, 3)
    moved = layouts.to_position_major(jnp.asarray(x), grid)
    assert isinstance(moved, jax.Array)
    np.testing.assert_array_equal(moved, layouts.to_position_major(x, grid))
    np.testing.assert_array_equal(layouts.to_frame_major(moved, grid), x)


@given(grid=grids)
def test_both_orders_begin_with_the_first_frame(grid):
    x = np.arange(grid.tokens)
    for move in (layouts.to_position_major, layouts.to_frame_major):
        first = move(x, grid, 0)[: grid.positions]
        np.testing.assert_array_equal(first, x[: grid.positions])


def test_a_position_is_followed_through_time():
    moved = layouts.to_position_major(np.arange(12), TokenGrid(4, 3), 0)
    np.testing.assert_array_equal(moved, [0, 1, 2, 3, 6, 9, 4, 7, 10, 5, 8, 11])


@pytest.mark.parametrize("move", [layouts.to_position_major, layouts.to_frame_major])
@pytest.mark.parametrize("tokens", [11, 13])
def test_another_number_of_tokens_is_refused(move, tokens):
    with pytest.raises(ValueError, match="axis 1 of .* is not 12 tokens long"):
        move(np.zeros((2, tokens, 3)), TokenGrid(4, 3))
