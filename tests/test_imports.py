"""Who may import what: DESIGN's rules, checked over the tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pipeline", "workers", "kernels", "configs")
FILES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
]

# Of our own packages, what each may import.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "workers": {"workers", "kernels"},
    "pipeline": {"pipeline", "workers", "kernels", "configs"},
    "configs": {"configs", "workers", "kernels"},
}
# Other people's packages that few files may import, by the file's path.
ONLY_IN = {
    "apache_beam": ("pipeline/stitch.py",),
    "google.cloud": ("pipeline/store.py",),
    "ray": ("workers/fleet.py", "workers/host.py"),
    "jax": ("workers/", "kernels/", "pipeline/bench/", "configs/demo_training/"),
    # References, never what a render runs on.
    "torch": ("configs/demo_training/", "pipeline/bench/cpu.py"),
    "diffusers": ("configs/demo_training/",),
    "transformers": ("configs/demo_training/",),
    "tests": (),
}
# What the command line's start does without.
HEAVY = ("apache_beam", "google.cloud", "jax", "numpy", "PIL", "pydantic", "ray")
HEAVY += ("rich.console", "safetensors", "tokenizers", "yaml")


def name(path):
    return path.relative_to(ROOT).as_posix()


def imports(source):
    """Yields every module that a source imports, wherever in it, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def within(module, package):
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_run_one_way(path):
    here = path.relative_to(ROOT).parts[0]
    for module, line in imports(path.read_text()):
        assert not module.startswith("."), f"line {line}: imports are absolute"
        for package in PACKAGES:
            if within(module, package):
                assert package in MAY_IMPORT[here], f"line {line}: imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_packages_are_imported_only_where_they_may_be(path):
    for module, line in imports(path.read_text()):
        for package, places in ONLY_IN.items():
            if within(module, package):
                allowed = name(path).startswith(places) if places else False
                assert allowed, f"line {line}: imports {module}"


def test_kernels_know_only_jax_and_numpy():
    allowed = {"jax", "numpy", "jaxtyping", "kernels"} | sys.stdlib_module_names
    for path in (ROOT / "kernels").rglob("*.py"):
        for module, line in imports(path.read_text()):
            assert module.split(".")[0] in allowed, f"{name(path)}:{line}: {module}"


def test_the_finder_sees_every_form_of_import():
    source = (
        "import a.b as c, d\n"
        "def f():\n    from e.g import h\n"
        "if x:\n    from . import i\n"
    )
    assert dict(imports(source)) == {
        "a.b": 1,
        "d": 1,
        "e.g": 3,
        "e.g.h": 3,
        ".": 5,
        "..i": 5,
    }


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_python_3_11_and_not_too_long(path):
    source = path.read_text()
    ast.parse(source, feature_version=(3, 11))
    assert "from __future__ import annotations" not in source
    assert source.count("\n") < 600


def test_the_command_line_starts_light():
    program = "import sys, pipeline.cli; print('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(HEAVY) & set(done.stdout.split())
