import errno
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store import (
    Exists,
    LocalStore,
    Missing,
    StoreError,
    checksum,
    open_store,
)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "root")


def test_create_then_read_gives_the_same_bytes(store):
    store.create("a/b/c.bin", b"\x00\xff")
    assert store.read("a/b/c.bin") == b"\x00\xff"


def test_create_refuses_to_overwrite(store):
    store.create("a", b"1")
    with pytest.raises(Exists):
        store.create("a", b"2")
    assert store.read("a") == b"1"


def test_of_many_writers_that_create_one_name_exactly_one_succeeds(store):
    outcomes = []
    start = threading.Barrier(8)

    def write(index):
        start.wait()
        try:
            store.create("lease/0001.json", b"%d" % index)
            outcomes.append(index)
        except Exists:
            pass

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert store.read("lease/0001.json") == b"%d" % outcomes[0]


def test_replace_overwrites(store):
    store.replace("a", b"1")
    store.replace("a", b"2")
    assert store.read("a") == b"2"


def test_missing_names_are_told_apart_from_other_errors(store):
    with pytest.raises(Missing, match="nothing"):
        store.read("nothing")
    assert store.list("") == []
    assert store.folders("") == []
    store.delete("nothing")


def test_list_takes_any_prefix_and_sorts(store):
    for name in ["x/b", "x/a", "xy", "z/1/2"]:
        store.create(name, b"")
    assert store.list("") == ["x/a", "x/b", "xy", "z/1/2"]
    assert store.list("x") == ["x/a", "x/b", "xy"]
    assert store.list("x/") == ["x/a", "x/b"]
    assert store.list("z/1/") == ["z/1/2"]
    assert store.folders("") == ["x", "z"]
    assert store.folders("z/") == ["1"]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    store, monkeypatch
):
    store.create("a/b", b"")

    def fail(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "a")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StoreError, match="a cannot be listed: Permission denied"):
        store.list("a/")
    with pytest.raises(StoreError, match="Permission denied"):
        store.folders("")


def test_a_file_half_written_is_never_listed(store):
    store.create("a/whole", b"1")
    (store.root / "a" / ".whole.1234abcd.part").write_bytes(b"ha")
    assert store.list("") == ["a/whole"]
    assert store.list("a/") == ["a/whole"]


def test_what_others_put_into_the_folder_is_not_listed(store):
    store.create("a/whole", b"1")
    for stray in ("a/My Notes.txt", "a/~whole", "My Videos/x", "__pycache__/x"):
        path = store.root / stray
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert store.list("") == ["a/whole"]
    assert store.folders("") == ["a"]


def test_sweep_removes_only_what_dead_writers_left(store):
    store.create("a/whole", b"1")
    old = store.root / "a" / ".x.1234abcd.part"
    new = store.root / "a" / ".y.1234abcd.part"
    old.write_bytes(b"")
    new.write_bytes(b"")
    yesterday = time.time() - 86400
    os.utime(old, (yesterday, yesterday))
    store.sweep()
    assert not old.exists() and new.exists()
    assert store.list("") == ["a/whole"]


@pytest.mark.parametrize(
    "name", ["", "/a", "../a", "a/../b", "a//b", ".a", "a/", "a b"]
)
def test_names_that_could_leave_the_root_are_refused(store, name):
    with pytest.raises(ValueError):
        store.create(name, b"")
    with pytest.raises(ValueError):
        store.read(name)


@given(st.text(max_size=20))
def test_no_name_ever_resolves_outside_the_root(name):
    store = LocalStore(Path("/nowhere/root"))
    try:
        url = store.url(name)
    except ValueError:
        return
    assert os.path.normpath(url).startswith("/nowhere/root/")


def test_checksum_is_crc32c():
    # The check value of CRC-32C in the catalogue of parametrised CRC algorithms.
    assert checksum(b"123456789") == "e3069283"


def test_other_schemes_are_refused_by_name(tmp_path):
    with pytest.raises(StoreError, match="gs://"):
        open_store("gs://bucket/prefix")
    assert isinstance(open_store(str(tmp_path)), LocalStore)


def test_a_root_under_a_file_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/root/a cannot be written: .*; "):
        LocalStore(tmp_path / "file" / "root").create("a", b"")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EACCES, "another output")],
)
def test_errors_say_what_to_do_and_leave_nothing_behind(
    store, monkeypatch, number, remedy
):
    store.create("a", b"1")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=remedy):
        store.create("b", b"2")
    with pytest.raises(StoreError, match=remedy):
        store.replace("a", b"2")
    assert os.listdir(store.root) == ["a"]
    assert store.read("a") == b"1"


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(Exists("x is there already")))
    assert isinstance(error, Exists) and str(error) == "x is there already"
