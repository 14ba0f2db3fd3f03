"""Reads models in the published diffusers layout.

    MODEL/transformer/config.json
    MODEL/transformer/diffusion_pytorch_model.safetensors          or, split in parts,
    MODEL/transformer/diffusion_pytorch_model.safetensors.index.json and its parts

Every tensor's name and shape is checked against the model before any is read.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

# Names that the weights of a part go by, in diffusers and in transformers.
_STEMS = ("diffusion_pytorch_model", "model")

Config = TypeVar("Config")


class CheckpointError(Exception):
    """A model folder that cannot be used, and what would be right."""


def read_config(folder: Path, parse: Callable[[dict[str, Any]], Config]) -> Config:
    """Reads a part's config.json.

    Raises:
        CheckpointError: the file is missing, is no JSON, or describes another model.
    """
    path = folder / "config.json"
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; a model is a folder in the diffusers layout, "
            "with transformer/, vae/, text_encoder/ and tokenizer/"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a part, those of its index where it is split.

    Raises:
        CheckpointError: there are none, the index names one that is missing, or the
            folder cannot be read.
    """
    try:
        return _weight_files(folder)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read ({error.strerror}); let yourself read "
            "the model's folder"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    for stem in _STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if index.exists():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
                paths = [folder / name for name in sorted(names)]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(
                    f"{index}: not an index of safetensors files ({error!r}); "
                    "fetch it again"
                ) from error
            for path in paths:
                if path.parent != folder or not path.exists():
                    raise CheckpointError(
                        f"{path}: named in {index.name} but not there; fetch it again"
                    )
            return paths
        if (whole := folder / f"{stem}.safetensors").exists():
            return [whole]
    raise CheckpointError(
        f"{folder}: no weights; expected {_STEMS[0]}.safetensors or its index "
        f"(text encoders: {_STEMS[1]}.safetensors)"
    )


def load_tensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: Any = np.float32,
    optional: Iterable[str] = (),
) -> dict[str, np.ndarray]:
    """Reads a part's tensors, converted to `dtype`.

    Args:
        folder: the part's folder.
        shapes: the tensors that the model needs, by name.
        dtype: of the result.
        optional: tensors that may be in the files and are not read.

    Raises:
        CheckpointError: tensors are missing, not the model's, or of another shape;
            or a file is cut short. Names the tensors.
    """
    homes: dict[str, Path] = {}
    faults: list[str] = []
    for path in weight_files(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                found = tuple(file.get_slice(name).get_shape())
                if name in shapes:
                    homes[name] = path
                    if found != shapes[name]:
                        faults.append(
                            f"{name} is {list(found)} and must be {list(shapes[name])}"
                        )
                elif name not in optional:
                    faults.append(f"{name} does not belong to the model")
    faults += [f"{name} is missing" for name in shapes if name not in homes]
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(
            f"{folder}: the weights do not fit its config.json: "
            f"{'; '.join(faults[:8])}{more}"
        )
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(set(homes.values())):
        with _open(path) as file:
            for name in (n for n, home in homes.items() if home == path):
                tensors[name] = np.asarray(file.get_tensor(name)).astype(dtype)
    return {name: tensors[name] for name in shapes}


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: cut short or no safetensors file ({error}); fetch it again"
        ) from error


def model_hash(model: Path) -> str:
    """SHA-256 over the names and contents of everything that decides a model's output.

    Files are the configs, weights and tokenizer of all parts; hex.
    """
    digest = hashlib.sha256()
    for path in sorted(model.rglob("*")):
        if path.suffix in (".json", ".safetensors") and path.is_file():
            digest.update(path.relative_to(model).as_posix().encode() + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_fit(model: Path, pairs: dict[str, tuple[int, int]]) -> None:
    """Refuses a model whose parts have sizes that must be equal and are not.

    Raises:
        CheckpointError: names the sizes.
    """
    for what, (one, other) in pairs.items():
        if one != other:
            raise CheckpointError(
                f"{model}: {what} must be equal, are {one} and {other}; "
                "the parts come from different models"
            )
