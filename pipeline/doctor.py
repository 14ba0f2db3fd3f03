"""What this machine has of what rendering needs, and what to do about the rest."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.errors import RequestError

# Of a 720p clip of 81 frames, the frames take about 0.1 GB, and Ray and ffmpeg want
# room to work in.
_LEAST_BYTES = 2**30
# Beam, Ray and jax take some seconds each to import on a cold disk.
_ANSWER_SECONDS = 180.0

# Modules that rendering imports, and the distributions that bring them.
_MODULES = {
    "apache_beam": "apache-beam",
    "ffmpeg": "ffmpeg-python",
    "ftfy": "ftfy",
    "google_crc32c": "google-crc32c",
    "jax": "jax",
    "jaxtyping": "jaxtyping",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "PIL": "pillow",
    "pydantic": "pydantic",
    "ray": "ray",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "yaml": "pyyaml",
}
_IMPORT_ALL = """
import importlib, importlib.metadata, json, sys
found = {}
for module, distribution in json.loads(sys.argv[1]).items():
    try:
        importlib.import_module(module)
        found[module] = [True, importlib.metadata.version(distribution)]
    except Exception as error:
        found[module] = [False, f"{type(error).__name__}: {error}"]
print(json.dumps(found))
"""
_LIST_DEVICES = """
import json, jax
print(json.dumps([[d.platform, d.device_kind] for d in jax.devices()]))
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        ok: Whether it serves; None where rendering goes without.
        found: What is there.
        remedy: What to do, "" where there is nothing to do.
    """

    name: str
    ok: bool | None
    found: str
    remedy: str = ""


def examine(folder: Path) -> list[Check]:
    """Looks at all that rendering into a folder needs."""
    return [
        check_python(sys.version_info[:3]),
        *_check_packages(),
        _check_ffmpeg(),
        _check_devices(),
        _check_ray(),
        *check_folder("output", folder),
        *_check_temporary(),
        *_check_models(),
    ]


def report(checks: list[Check]) -> Table:
    """Returns the checks as a person is shown them."""
    table = Table(box=None, pad_edge=False, show_header=False)
    marks = {
        True: Text("ok", style="green"),
        False: Text("lacking", style="bold red"),
        None: Text("-"),
    }
    for check in checks:
        found = Text(check.found)
        if check.remedy:
            found.append(f"\n{check.remedy}", style="bold")
        table.add_row(marks[check.ok], check.name, found)
    return table


def check_python(version: tuple[int, int, int]) -> Check:
    """Checks the version of Python."""
    found = f"{'.'.join(map(str, version))}, {sys.executable}"
    remedy = "" if version >= (3, 11) else "Install Python 3.11 or newer"
    return Check("Python", not remedy, found, remedy)


def check_disk(name: str, folder: Path, free: int) -> Check:
    """Checks the free bytes of a folder's disk."""
    found = f"{free / 2**30:.1f} GiB free at {folder.absolute()}"
    remedy = ""
    if free < _LEAST_BYTES:
        remedy = f"Free some space: {_LEAST_BYTES / 2**30:.0f} GiB is the least"
    return Check(name, not remedy, found, remedy)


def check_folder(name: str, folder: Path) -> list[Check]:
    """Checks that a folder can be written, and that its disk has room."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"tilereel")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{folder.absolute()} cannot be written: {error.strerror}"
        remedy = "Work in another folder (for temporary files, TMPDIR)"
        return [Check(name, False, found, remedy)]
    return [
        Check(name, True, f"{folder.absolute()} can be written"),
        check_disk(f"disk for {name}", folder, free),
    ]


def _check_packages() -> list[Check]:
    name = "Python packages"
    remedy = "Install Tilereel's packages again: `make setup`, or `pip install -e .`"
    answer, trouble = _ask(_IMPORT_ALL, json.dumps(_MODULES))
    if trouble:
        return [Check(name, False, trouble, remedy)]
    good = [f"{_MODULES[m]} {said}" for m, (ok, said) in answer.items() if ok]
    bad = [(m, said) for m, (ok, said) in answer.items() if not ok]
    checks = [Check(_MODULES[m], False, said, remedy) for m, said in bad]
    return [Check(name, True, ", ".join(good)), *checks]


def _check_ffmpeg() -> Check:
    try:
        from pipeline.ffmpeg import find_ffmpeg

        found = find_ffmpeg()
    except (RequestError, ImportError) as error:
        remedy = "Install one: `pip install imageio-ffmpeg`, or your system's package"
        return Check("ffmpeg", False, str(error), remedy)
    return Check("ffmpeg", True, f"{found.version} with libx264, {found.path}")


def _check_devices() -> Check:
    answer, trouble = _ask(_LIST_DEVICES)
    if trouble:
        remedy = "If another process holds the accelerator, end it; else reinstall jax"
        return Check("jax devices", False, trouble, remedy)
    kinds = sorted({f"{kind} ({platform})" for platform, kind in answer})
    found = f"{len(answer)}: {', '.join(kinds)}"
    if all(platform == "cpu" for platform, _ in answer):
        found += "; no accelerator: right for the demo model, slow for large ones"
    return Check("jax devices", True, found)


def _check_ray() -> Check:
    if address := os.environ.get("RAY_ADDRESS"):
        found = f"the cluster at RAY_ADDRESS={address}"
    else:
        found = "started on this machine for each render (RAY_ADDRESS is not set)"
    return Check("Ray", None, found)


def _check_temporary() -> list[Check]:
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        remedy = "Set TMPDIR to a folder that you may write to"
        return [Check("temporary files", False, str(error), remedy)]
    return check_folder("temporary files", folder)


def _check_models() -> list[Check]:
    checks = []
    try:
        from pipeline.models import find_model, missing_weights, preset_names
    except ImportError as error:
        return [Check("models", None, f"not looked at: {error}")]
    for name in preset_names():
        try:
            model = find_model(name, Path())
            missing = missing_weights(model)
            checks.append(
                Check(f"model {name}", None, "not here", missing)
                if missing
                else Check(f"model {name}", True, str(model.path))
            )
        except (RequestError, ImportError) as error:
            checks.append(Check(f"model {name}", None, str(error)))
    return checks


def _ask(program: str, *arguments: str) -> tuple[Any, str]:
    """Runs a program in a Python of its own; returns its JSON answer, or the trouble.

    Another process, since importing these may hang, crash, or hold an accelerator.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_ANSWER_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [str(error)]
        return None, last[0]
    except (OSError, ValueError, IndexError) as error:
        return None, str(error)
