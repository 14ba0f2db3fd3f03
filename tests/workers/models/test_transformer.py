"""The transformer on stored outputs of diffusers; live in tests/peers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import profiling
from kernels.tiles import HeadKind, TileShape, TileTable, TokenGrid
from tests.references import ours_transformer as ours
from tests.references.transformer import STORED, TransformerCase, transformer_config
from workers.models import transformer
from workers.models.transformer import SparseStep, TransformerConfig, rotary_angles

OUTPUTS = np.load(Path(__file__).parents[2] / "references" / "transformer.npz")


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_velocity_is_that_of_diffusers(case: TransformerCase):
    error = ours.relative_error(ours.velocity(case), OUTPUTS[f"{case.name}/velocity"])
    assert error < 2e-4  # float32 rounding through a few layers


@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_guided_latents_are_those_of_diffusers(case: TransformerCase):
    latents = ours.sampled(case, steps=8, guidance=4.0, shift=3.0)
    error = ours.relative_error(latents, OUTPUTS[f"{case.name}/sampled"])
    assert error < 1e-3  # eight steps at guidance 4 multiply the rounding


# Three layers, two clips as guidance's branches are, three heads; five latent frames.
TILED = TransformerCase(
    "tiled", transformer_config(3, 16, 3, 4), (2, 5, 4, 6), (1, 512), seed=5
)
GRID = TokenGrid(5, 6)
NARROW = TileTable(GRID, TileShape(6, 6), 0)
WHOLE = TileTable(GRID, TileShape(4, 8), GRID.tokens)


def sparse_step(table: TileTable, tolerance: float, dense=False, dense_layers=1):
    return SparseStep(
        table=table,
        tolerance=tolerance,
        dense_layers=dense_layers,
        dense=jnp.asarray(dense),
        rows=profiling.sample(jax.random.key(0), GRID.tokens, 16),
    )


@pytest.mark.parametrize(
    "step",
    [
        sparse_step(WHOLE, 1000.0),
        sparse_step(NARROW, 0.0),
        sparse_step(NARROW, 1000.0, dense=True),
        sparse_step(NARROW, 1000.0, dense_layers=3),
    ],
    ids=["all tiles", "none good enough", "dense step", "dense layers"],
)
def test_where_all_tiles_are_computed_the_velocity_is_that_of_dense_attention(step):
    velocity, _ = ours.forward(TILED, step)
    # The order of sums is another: float32 rounding through three layers.
    assert ours.relative_error(velocity, ours.velocity(TILED)) < 2e-5


def test_each_head_of_each_branch_and_layer_has_its_own_kind():
    velocity, stats = ours.forward(TILED, sparse_step(NARROW, 1000.0))
    assert stats is not None
    kinds, errors = np.asarray(stats.kinds), np.asarray(stats.errors)
    assert kinds.shape == (3, 6) and errors.shape == (3, 6, 2)
    assert stats.online.shape == (3, 6)
    assert (kinds[0] == HeadKind.DENSE).all() and np.isnan(errors[0]).all()
    np.testing.assert_array_equal(kinds[1:], errors[1:].argmin(-1))
    assert len(np.unique(kinds[1:])) == 2
    assert (errors[1:, :3] != errors[1:, 3:]).all()
    assert ours.relative_error(velocity, ours.velocity(TILED)) > 1e-3

    median = float(np.median(errors[1:].min(-1)))
    _, stats = ours.forward(TILED, sparse_step(NARROW, median))
    assert stats is not None
    dense = np.asarray(stats.kinds) == HeadKind.DENSE
    assert dense[0].all() and 0 < dense[1:].mean() < 1


def test_a_dense_step_profiles_nothing():
    _, stats = ours.forward(TILED, sparse_step(NARROW, 1000.0, dense=True))
    assert stats is not None
    assert np.isnan(stats.errors).all() and (stats.kinds == HeadKind.DENSE).all()


def test_steps_of_both_kinds_are_one_program():
    config, params = ours.loaded(TILED)
    latents, timesteps, text = map(jnp.asarray, TILED.inputs())
    traced = []

    @jax.jit
    def forward(step: SparseStep) -> jax.Array:
        traced.append(step)
        return transformer.forward(params, config, latents, timesteps, text, step)[0]

    dense, sparse = (
        forward(sparse_step(NARROW, 1000.0, dense)) for dense in (True, False)
    )
    assert (dense != sparse).any() and len(traced) == 1


def test_rotary_angles_of_wan_are_dealt_44_42_42():
    case = STORED[0].config | {"attention_head_dim": 128}
    angles = rotary_angles(TransformerConfig.from_json(case), 3, 4, 5)
    assert angles.shape == (60, 64)
    token = angles.reshape(3, 4, 5, 64)[2, 3, 1]
    # The first frequency of each axis is 1, so its angle is the position.
    assert token[[0, 22, 43]].tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("qk_norm", None), ("cross_attn_norm", False), ("image_dim", 1280)],
)
def test_other_variants_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        TransformerConfig.from_json(STORED[0].config | {key: value})


def test_a_missing_size_is_named():
    config = dict(STORED[0].config)
    del config["ffn_dim"]
    with pytest.raises(ValueError, match="ffn_dim"):
        TransformerConfig.from_json(config)
