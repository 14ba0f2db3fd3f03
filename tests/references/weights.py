"""Random weights that a reference and a test can both make from a seed."""

import math

import numpy as np


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int
) -> dict[str, np.ndarray]:
    """Draws every tensor of a model, none of them all zeros or all ones.

    A norm's weight at one or a bias at zero would hide a mistake, so vectors (norm
    weights) are drawn from 0.5..1.5 and biases have a standard deviation of 0.1. Tables
    with a leading axis of 1 have one of 1, matrices and convolutions one of
    1 / sqrt(fan-in), so that activations keep their size.

    Args:
        shapes: Shape of each tensor by its name in the checkpoint.
        seed: The same seed and shapes give the same tensors.

    Returns:
        float32 arrays by name, drawn in the order of the sorted names.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith("bias"):
            values = 0.1 * rng.standard_normal(shape)
        elif math.prod(shape) == max(shape):
            values = rng.uniform(0.5, 1.5, shape)
        elif shape[0] == 1:
            values = rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
        tensors[name] = values.astype(np.float32)
    return tensors
