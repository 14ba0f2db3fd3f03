"""The transformer on stored outputs of diffusers; live in tests/peers."""

from pathlib import Path

import numpy as np
import pytest

from tests.references import ours_transformer as ours
from tests.references.transformer import STORED, TransformerCase
from workers.models.transformer import TransformerConfig, rotary_angles

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
