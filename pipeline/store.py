"""The store: whole files under "/"-separated names, written at once or not at all.

A name appears only when all its bytes are on the disk, so a reader never meets
half a file, whatever kills the writer. What must be written by one writer only is
created (refused if it is there), everything else is replaced.
"""

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import google_crc32c

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_PREFIX = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)*([A-Za-z0-9][A-Za-z0-9._-]*)?")
# No writer holds a temporary file for this long: an older one is a dead writer's.
_ABANDONED_SECONDS = 3600.0

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class StoreError(Exception):
    """A name could not be read or written; the message says which, why, what to do."""


class Exists(StoreError):
    """`create` found the name taken."""


class Missing(StoreError):
    """`read` found nothing under the name."""


class Store(Protocol):
    """Files under one root. Every method may raise `StoreError`."""

    def create(self, name: str, data: bytes) -> None:
        """Writes `data` under a name that must be free; raises `Exists`."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Writes `data` under a name, in place of what may be there."""
        ...

    def read(self, name: str) -> bytes:
        """Returns all bytes of a name; raises `Missing`."""
        ...

    def folders(self, prefix: str) -> list[str]:
        """Returns the next path component of all deeper names, sorted.

        Args:
            prefix: "" or a name that ends in "/".
        """
        ...

    def delete(self, name: str) -> None:
        """Removes a name; one that is not there is no error."""
        ...

    def url(self, name: str) -> str:
        """Returns where a name lies, for other programs: a path or a URI."""
        ...

    def sweep(self) -> None:
        """Removes what writers that were killed have left behind, unseen."""
        ...

    # Last in the class: below it, `list` would name this method.
    def list(self, prefix: str) -> list[str]:
        """Returns all names that begin with `prefix`, sorted."""
        ...


def checksum(data: bytes) -> str:
    """Returns the crc32c of `data` as eight hexadecimal digits."""
    return f"{google_crc32c.value(data):08x}"


def open_store(uri: str) -> Store:
    """Opens the store at a folder's path; the folder need not exist yet.

    Raises:
        StoreError: The URI names a kind of store that this version has not.
    """
    if "://" in uri:
        scheme = uri.split("://", 1)[0]
        raise StoreError(
            f"{uri}: this version writes to local folders only, not to {scheme}://; "
            "give a folder's path"
        )
    return LocalStore(Path(uri))


class LocalStore:
    """A store in a folder of this machine (or of a disk that hosts share).

    Args:
        root: The folder. It is made when the first name is written.
    """

    def __init__(self, root: Path):
        self.root = Path(os.path.abspath(root))

    def create(self, name: str, data: bytes) -> None:
        """Writes `data` under a name that must be free; raises `Exists`."""
        path = self._path(name)
        with self._explained(path), self._temporary(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise Exists(f"{path} is there already") from None
            except OSError as error:
                if error.errno in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}:
                    raise StoreError(
                        f"{path}: this file system has no hard links, which writing "
                        "a file once and whole takes; choose an output on another disk"
                    ) from error
                raise
            _sync_folder(path.parent)

    def replace(self, name: str, data: bytes) -> None:
        """Writes `data` under a name, in place of what may be there."""
        path = self._path(name)
        with self._explained(path), self._temporary(path, data) as temporary:
            os.replace(temporary, path)
            _sync_folder(path.parent)

    def read(self, name: str) -> bytes:
        """Returns all bytes of a name; raises `Missing`."""
        path = self._path(name)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{path} is not there") from None
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error

    def folders(self, prefix: str) -> list[str]:
        """Returns the names of the folders directly under `prefix`, sorted."""
        if prefix and not _NAME.fullmatch(prefix.removesuffix("/")):
            raise ValueError(f"{prefix!r} is no folder of the store")
        try:
            entries = list(os.scandir(self.root / prefix))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(
                f"{self.root / prefix} cannot be read: {error.strerror}"
            ) from error
        return sorted(e.name for e in entries if e.is_dir() and _NAME.fullmatch(e.name))

    def delete(self, name: str) -> None:
        """Removes a name; one that is not there is no error."""
        path = self._path(name)
        with self._explained(path):
            path.unlink(missing_ok=True)

    def url(self, name: str) -> str:
        """Returns the absolute path of a name."""
        return str(self._path(name))

    def sweep(self) -> None:
        """Removes temporary files that writers killed in mid-write have left."""
        for parent, _, files in os.walk(self.root):
            for file in files:
                if file.startswith(".") and file.endswith(".part"):
                    path = Path(parent, file)
                    with contextlib.suppress(OSError):
                        if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                            path.unlink()

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of the store")
        return self.root / name

    @contextlib.contextmanager
    def _temporary(self, path: Path, data: bytes) -> Iterator[Path]:
        """Holds `data`, safe on the disk, in a hidden file beside `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """Turns what the system says about a write into a `StoreError`."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in _FULL:
                remedy = "free some space there, then run the same command again"
            elif error.errno in _FORBIDDEN:
                remedy = "choose another output, or let yourself write there"
            else:
                remedy = "check the output's path"
            raise StoreError(f"{path} cannot be written: {reason}; {remedy}") from error

    # Last in the class: below it, `list` would name this method.
    def list(self, prefix: str) -> list[str]:
        """Returns all names that begin with `prefix`, sorted."""
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"{prefix!r} cannot begin a name of the store")
        folder = prefix.rpartition("/")[0]
        names = []
        for parent, folders, files in os.walk(self.root / folder, onerror=_raise):
            base = Path(parent).relative_to(self.root).as_posix()
            base = "" if base == "." else base + "/"
            # Only folders that can hold such names are looked into.
            folders[:] = [
                f
                for f in folders
                if not f.startswith(".")
                and (base + f).startswith(prefix[: len(base + f)])
            ]
            names += [base + f for f in files if not f.startswith(".")]
        # What others have put here under other names is not the store's.
        return sorted(n for n in names if n.startswith(prefix) and _NAME.fullmatch(n))


def _raise(error: OSError) -> None:
    """Keeps a folder that cannot be listed from passing for an empty one."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise StoreError(f"{error.filename} cannot be listed: {error.strerror}")


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlast a power cut, not only its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
