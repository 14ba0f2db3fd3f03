"""Finds the model that a manifest names, and what its preset says."""

import dataclasses
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.document import read_document
from pipeline.errors import RequestError
from pipeline.manifest import Settings
from pipeline.schema import Checked, check

PRESETS = Path(__file__).parent.parent / "configs" / "models"
# Where the weights of presets that do not carry their own are looked up.
MODELS_VARIABLE = "TILEREEL_MODELS"

_PRESET_FILE = "preset.yaml"
_PARTS = ("transformer", "vae", "text_encoder")
# What Wan 2.1 was published with; a preset says what it has otherwise.
_WAN = Settings(
    size="832x480",
    frames=81,
    fps=Fraction(16),
    steps=50,
    guidance=5.0,
    flow_shift=3.0,
    sampler="unipc",
    negative_prompt="",
    seed=0,
    priority=0,
)


class Preset(Checked):
    """What a model is best rendered with: its folder's preset.yaml."""

    description: str = Field(default="", description="text")
    source: str | None = Field(
        default=None, description="the name of its repository on the Hugging Face Hub"
    )
    native_frames: int = Field(
        default=81, ge=1, description="the frames of the clips that it was trained on"
    )
    defaults: Settings = Field(
        default=Settings(), description="a mapping of settings, as in a manifest"
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """What of a model's size the plan needs.

    Attributes:
        pixels: Width and height are multiples of this.
        frames: Pixel frames of each latent frame but the first, which has one.
        heads: Heads of the transformer.
        head_dim: Width of each.
        ffn_dim: Inner width of its feed-forward layers.
        layers: Number of its blocks.
    """

    pixels: int
    frames: int
    heads: int
    head_dim: int
    ffn_dim: int
    layers: int

    @property
    def dim(self) -> int:
        """Width of the transformer: all heads together."""
        return self.heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class ModelLocation:
    """A model that a manifest names.

    Attributes:
        name: What the manifest calls it.
        path: Its folder, in the diffusers layout.
        preset: What its preset says.
        settings: The settings that hold where a manifest says nothing.
        shape: Its size.
    """

    name: str
    path: Path
    preset: Preset
    settings: Settings
    shape: Shape


def preset_names() -> list[str]:
    """Returns the names of the presets that come with Tilereel."""
    return sorted(path.parent.name for path in PRESETS.glob(f"*/{_PRESET_FILE}"))


def find_model(name: str, folder: Path) -> ModelLocation:
    """Finds a model; its weights need not be there yet (see `require_weights`).

    Args:
        name: A preset's name, or the path of a folder.
        folder: What a relative path counts from.

    Raises:
        RequestError: There is no such preset or folder, it cannot be read, or its
            configuration is damaged.
    """
    if "://" in name:
        raise RequestError(
            f"model {name}: this version reads models from local folders only; copy it "
            "to one and give its path"
        )
    if name in preset_names():
        configuration = PRESETS / name
        path = _with_weights(configuration)
    else:
        configuration = path = Path(os.path.abspath(folder / os.path.expanduser(name)))
        if not os.path.isdir(path):
            raise RequestError(
                f"model {name}: neither a preset ({', '.join(preset_names())}) nor a "
                f"folder: there is no {path}"
            )
    try:
        has_preset = (configuration / _PRESET_FILE).exists()
        shaped = path if (path / "transformer").is_dir() else configuration
    except OSError as error:
        raise RequestError(
            f"model {name}: {error.filename} cannot be read: {error.strerror}; let "
            "yourself read the model's folder"
        ) from error
    preset = Preset()
    if has_preset:
        preset = check(read_document(configuration / _PRESET_FILE), Preset)
    shape = _shape(shaped)
    settings = Settings(**preset.defaults.over(_WAN))
    return ModelLocation(name, path, preset, settings, shape)


def missing_weights(model: ModelLocation) -> str:
    """Returns what a model's folder lacks and how to get it, "" for a whole one."""
    # Only here: it imports numpy, which the command line's start must not.
    from workers.checkpoint import CheckpointError, weight_files

    missing = []
    for part in _PARTS:
        try:
            weight_files(model.path / part)
        except CheckpointError as error:
            missing.append(str(error))
    tokenizer = model.path / "tokenizer" / "tokenizer.json"
    if not os.path.isfile(tokenizer):
        missing.append(f"{tokenizer}: not there, or not for you to read")
    if len(missing) > len(_PARTS):
        missing = [f"no weights in {model.path}"]
    return f"{'; '.join(missing)}.{_remedy(model)}" if missing else ""


def require_weights(model: ModelLocation) -> None:
    """Checks that all parts of a model are there, before anything is begun.

    Raises:
        RequestError: One is missing; says which and how to get it.
    """
    if missing := missing_weights(model):
        raise RequestError(f"model {model.name} is not whole: {missing}")


def _with_weights(preset: Path) -> Path:
    """Returns the folder of a preset's weights: its own, or one of that name outside.

    Where neither is there, it is the one where they should be.
    """
    root = os.environ.get(MODELS_VARIABLE)
    if root and not any((preset / "transformer").glob("*.safetensors")):
        return Path(os.path.abspath(os.path.expanduser(root))) / preset.name
    return preset


def _remedy(model: ModelLocation) -> str:
    if model.preset.source is None:
        return " Put back what is missing; a model has the diffusers layout"
    fetch = f" Fetch it: `hf download {model.preset.source} --local-dir"
    if os.environ.get(MODELS_VARIABLE):
        return f"{fetch} {model.path}`"
    return f"{fetch} ~/models/{model.name}`, and set {MODELS_VARIABLE}=~/models"


def _shape(folder: Path) -> Shape:
    transformer = _Config(folder / "transformer" / "config.json")
    vae = _Config(folder / "vae" / "config.json")
    patch = transformer.numbers("patch_size", [1, 2, 2])
    halvings = len(vae.numbers("dim_mult", [1, 2, 4, 4])) - 1
    slowings = sum(vae.numbers("temperal_downsample", [False, True, True]))
    if patch[0] != 1 or len(set(patch[1:])) != 1 or not patch[1]:
        raise RequestError(
            f"{transformer.path}: patch_size is {patch}; Wan 2.1 text to video has "
            "[1, 2, 2]"
        )
    return Shape(
        pixels=patch[1] * 2**halvings,
        frames=2**slowings,
        heads=transformer.numbers("num_attention_heads")[0],
        head_dim=transformer.numbers("attention_head_dim")[0],
        ffn_dim=transformer.numbers("ffn_dim")[0],
        layers=transformer.numbers("num_layers")[0],
    )


class _Config:
    """The config.json of a part of a model, of which the plan needs some numbers."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._values = json.loads(path.read_bytes())
        except OSError as error:
            raise RequestError(
                f"{path} cannot be read: {error.strerror}; a model is a folder in the "
                "diffusers layout: transformer/, vae/, text_encoder/ and tokenizer/"
            ) from error
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{path} is not JSON ({error}); fetch it again"
            ) from error
        if not isinstance(self._values, dict):
            raise RequestError(f"{path} is not a JSON object; fetch it again")

    def numbers(self, key: str, default: Any = None) -> list[int]:
        """Returns a number, or a list of them, as a list of whole numbers from 0."""
        value = self._values.get(key, default)
        found = value if isinstance(value, list) else [value]
        if not found or not all(isinstance(n, int) and 0 <= n < 10**6 for n in found):
            raise RequestError(
                f"{self.path}: {key} is {value!r}, not a whole number or a list of "
                "them; fetch it again"
            )
        return found
