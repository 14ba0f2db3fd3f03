"""Random weights that a reference and a test can both make from a seed."""

import math

import numpy as np


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int
) -> dict[str, np.ndarray]:
    """Draws every tensor of a model, none of them all zeros or all ones.

    Norm weights (of one axis that is not 1, not called bias) are drawn from 0.5..1.5,
    biases have a standard deviation of 0.1, tables with a leading axis of 1 one of 1,
    and matrices and convolutions one of 1 / sqrt(fan-in), so that activations keep
    their size. A tensor that such a draw would leave without effect in a test (a norm's
    weight at one, a bias at zero) has one.

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
