import jax
import jax.numpy as jnp
import numpy as np
import pytest

from workers.models.params import nest


def test_names_are_split_at_their_dots():
    tree = nest({"a.b.weight": np.ones(2), "a.b.bias": np.zeros(1), "c": np.ones(3)})
    assert tree["a"]["b"]["weight"].shape == (2,)
    assert tree["a"]["b"]["bias"].shape == (1,)
    assert tree["c"].shape == (3,)


@pytest.mark.parametrize("arrays", [np, jnp])
def test_layers_are_stacked_in_the_order_of_their_numbers(arrays):
    flat = {
        f"blocks.{i}.to.q": arrays.full((3,), float(i)) for i in reversed(range(11))
    }
    flat["out"] = arrays.ones(2)
    tree = nest(flat, stacked=("blocks",))
    assert isinstance(tree["blocks"]["to"]["q"], jax.Array) == (arrays is jnp)
    np.testing.assert_array_equal(tree["blocks"]["to"]["q"][:, 0], np.arange(11.0))
    assert tree["out"].shape == (2,)


def test_a_prefix_with_dots_is_stacked():
    flat = {f"encoder.block.{i}.layer.0.w": np.full(2, i) for i in range(2)}
    tree = nest(flat | {"encoder.norm": np.ones(2)}, stacked=("encoder.block",))
    assert tree["encoder"]["block"]["layer"]["0"]["w"].shape == (2, 2)
    assert tree["encoder"]["norm"].shape == (2,)


def test_a_missing_layer_is_named():
    flat = {"blocks.0.a": 1, "blocks.1.a": 1, "blocks.2.a": 1, "blocks.0.b": 1}
    flat["blocks.2.b"] = 1
    with pytest.raises(ValueError, match=r"blocks\.1\.b is missing"):
        nest(flat, stacked=("blocks",))


def test_a_prefix_without_layers_is_refused():
    with pytest.raises(ValueError, match="'blocks'"):
        nest({"a": np.ones(1)}, stacked=("blocks",))


def test_a_layer_without_a_number_is_refused():
    with pytest.raises(ValueError, match=r"blocks\.NUMBER\.NAME"):
        nest({"blocks.first.a": np.ones(1)}, stacked=("blocks",))


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_a_name_that_begins_another_is_refused(names):
    with pytest.raises(ValueError, match="begins"):
        nest(dict.fromkeys(names, np.ones(1)))
