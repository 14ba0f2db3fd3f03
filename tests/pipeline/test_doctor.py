from pathlib import Path

import pytest
from rich.console import Console

from pipeline import cli, doctor
from pipeline.ffmpeg import find_ffmpeg


@pytest.fixture(scope="module")
def checks():
    return doctor.examine(Path())


@pytest.fixture
def no_ffmpeg(tmp_path, monkeypatch):
    """No ffmpeg, neither on PATH nor in the wheel."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "ffmpeg"))
    find_ffmpeg.cache_clear()
    yield
    find_ffmpeg.cache_clear()


def lacking(checks):
    return {check.name for check in checks if check.ok is False}


def test_where_the_tests_run_nothing_is_lacking(checks):
    assert not lacking(checks)
    found = {check.name: check for check in checks}
    assert "jax" in found["Python packages"].found
    assert "libx264" in found["ffmpeg"].found
    assert found["jax devices"].ok
    assert found["Ray"].ok is None
    assert {f"model {name}" for name in ("demo", "wan2.1-t2v-14b")} <= set(found)


def test_what_is_lacking_has_a_remedy(checks):
    assert all(check.remedy for check in checks if check.ok is False)
    assert "hf download" in {c.name: c for c in checks}["model wan2.1-t2v-14b"].remedy


def test_every_check_is_shown(checks, capsys):
    Console(width=400).print(doctor.report(checks))
    shown = capsys.readouterr().out
    for check in checks:
        assert check.name in shown
        assert check.remedy in shown


@pytest.mark.parametrize(
    ("version", "ok"),
    [((3, 10, 14), False), ((3, 11, 0), True), ((3, 14, 2), True), ((2, 7, 18), False)],
)
def test_an_old_python_is_told(version, ok):
    check = doctor.check_python(version)
    assert check.ok == ok
    assert bool(check.remedy) != ok


@pytest.mark.parametrize(
    ("free", "ok"), [(0, False), (2**30 - 1, False), (2**30, True)]
)
def test_a_full_disk_is_told(tmp_path, free, ok):
    check = doctor.check_disk("disk", tmp_path, free)
    assert check.ok == ok
    assert str(tmp_path) in check.found
    assert ("Free some space" in check.remedy) != ok


@pytest.mark.usefixtures("no_ffmpeg")
def test_a_missing_ffmpeg_ends_with_status_1_and_a_remedy(monkeypatch, capsys):
    # The other checks have their own tests, and take long.
    monkeypatch.setattr(doctor, "_MODULES", {"yaml": "pyyaml"})
    monkeypatch.setattr("sys.argv", ["tilereel", "doctor"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "lacking  ffmpeg" in shown
    assert "pip install imageio-ffmpeg" in shown


def test_a_package_that_does_not_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    modules = {"yaml": "pyyaml", "half": "half-dist", "absent": "absent-dist"}
    monkeypatch.setattr(doctor, "_MODULES", modules)
    good, half, absent = doctor._check_packages()
    assert good.ok
    assert good.found.startswith("pyyaml ")
    assert (half.name, half.found) == ("half-dist", "RuntimeError: half installed")
    assert "No module named 'absent'" in absent.found
    assert lacking([good, half, absent]) == {"half-dist", "absent-dist"}


def test_a_package_that_kills_python_is_told(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_MODULES", {"deadly": "deadly"})
    (check,) = doctor._check_packages()
    assert lacking([check]) == {"Python packages"}
    assert "SIGABRT" in check.found


def test_a_jax_without_devices_is_told(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "none-such")
    check = doctor._check_devices()
    assert lacking([check]) == {"jax devices"}
    assert "none-such" in check.found


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (check,) = doctor.check_folder("output", tmp_path / "gone")
    assert lacking([check]) == {"output"}
    assert "cannot be written: No such file" in check.found


def test_a_folder_that_can_be_written_stays_empty(tmp_path):
    assert not lacking(doctor.check_folder("output", tmp_path))
    assert not list(tmp_path.iterdir())
