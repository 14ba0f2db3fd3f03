"""Turns a checkpoint's flat list of tensors into the tree that a model takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Nested dicts of arrays, one level for each dot in the checkpoint's names.
Params = dict[str, Any]


def nest(flat: dict[str, Any], stacked: tuple[str, ...] = ()) -> Params:
    """Splits tensor names at their dots, and stacks the layers of a repeated block.

    With `stacked=("blocks",)` the tensors "blocks.0.x", "blocks.1.x", ... become one
    array `tree["blocks"]["x"]` with a leading axis of layers, as `jax.lax.scan` takes
    it. Stacking copies; all else is passed through as it is.

    Args:
        flat: Arrays by their names in the checkpoint, of numpy or of jax.
        stacked: Prefixes, without the last dot, whose next part counts layers.

    Returns:
        The nested tree. Stacked numpy arrays stay numpy arrays.

    Raises:
        ValueError: if a stacked prefix has no layers, if layers are missing or differ,
            or if one name is the beginning of another.
    """
    layers: dict[str, dict[int, Any]] = {}
    tree: Params = {}
    for name, array in flat.items():
        prefix = next((p for p in stacked if name.startswith(p + ".")), None)
        if prefix is None:
            _put(tree, name, array)
            continue
        number, _, rest = name[len(prefix) + 1 :].partition(".")
        if not number.isdecimal() or not rest:
            raise ValueError(f"tensor {name!r}: expected {prefix}.NUMBER.NAME")
        layers.setdefault(f"{prefix}.{rest}", {})[int(number)] = array

    for prefix in stacked:
        counts = {n: sorted(a) for n, a in layers.items() if n.startswith(prefix + ".")}
        depth = 1 + max((max(c) for c in counts.values()), default=-1)
        if not depth:
            raise ValueError(f"no tensor's name begins with {prefix!r}")
        for name, count in counts.items():
            if absent := sorted(set(range(depth)) - set(count)):
                rest = name[len(prefix) + 1 :]
                raise ValueError(
                    f"tensor {prefix}.{absent[0]}.{rest} is missing: "
                    f"{prefix} has {depth} layers"
                )
    for name, arrays in layers.items():
        _put(tree, name, _stack([arrays[i] for i in range(len(arrays))]))
    return tree


def _stack(arrays: list[Any]) -> Any:
    return (jnp if isinstance(arrays[0], jax.Array) else np).stack(arrays)


def _put(tree: Params, name: str, array: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            break
        tree = branch
    else:
        if last not in tree:
            tree[last] = array
            return
    raise ValueError(f"tensor {name!r}: one of the two names begins with the other")
