"""Locate the cache, and write files and folders atomically."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a failing disk; the OS error of such a write names no file."""

CHECKSUMS = "checksums.json"
"""File with the checksums of the other files in its folder."""


def cache_root() -> Path:
    """Return the absolute path of the user's cache folder, which may not exist yet.

    It is ``$FEDEAS_CACHE``, read at every call so that a test or a launcher may change it, or else ``fedeas`` in
    ``$XDG_CACHE_HOME``, on Linux and if it is absolute as its specification wants, or ``~/.cache/fedeas``.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    default = f"{caches if sys.platform == 'linux' and os.path.isabs(caches) else '~/.cache'}/fedeas"
    return expanded(os.environ.get("FEDEAS_CACHE") or default, "FEDEAS_CACHE").absolute()


def cache_hint(error: BaseException) -> str:
    """Return a hint in brackets on how to move the cache if the error is about a file in it, otherwise empty text."""
    named = getattr(error, "filename", None)
    if not isinstance(error, OSError) or not isinstance(named, str):
        return ""
    try:
        path, root = Path(named).absolute(), cache_root()
    except ValueError:  # unknown home folder; code that needs the cache reports it
        return ""
    if not path.is_relative_to(root) and (os.path.isdir(path) or not root.is_relative_to(path)):
        return ""
    given = os.environ.get("FEDEAS_CACHE")
    return f" (FEDEAS_CACHE = {given!r})" if given else " (the user's cache; FEDEAS_CACHE names another folder)"


def expanded(path: str | Path, key: str = "") -> Path:
    """Return a path that a user wrote, with a home folder in place of ``~`` and ``~user``.

    If the home folder is unknown, `ValueError` names the ``key`` that the path belongs to.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        named = f"{key} = {str(path)!r}" if key else repr(str(path))
        raise ValueError(f"{named}: its home folder is unknown; give the full path") from None


def absolute_in(folder: Path, path: str, key: str) -> str:
    """Return a path of a user, which may be relative to ``folder``, as an absolute one; see `expanded`."""
    return os.path.normpath(folder.absolute() / expanded(path, key))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksums of the files in a folder to one more file in it."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums = {name: sha256_of(folder / name) for name in files if name != CHECKSUMS}
    atomic_write(folder / CHECKSUMS, json.dumps(sums, indent=1).encode())


def is_whole(folder: Path) -> bool:
    """Return whether a folder has checksums, and every file that they name is as it was written."""
    try:
        sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(sha256_of(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def refuse_special(path: Path) -> None:
    """Raise `ValueError` if a folder, pipe, socket or device is in the place of a file: reading it may never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def existing_part(path: Path) -> Path:
    """Return `path` if it exists, otherwise the nearest existing folder above it."""
    return next(part for part in (path, *path.parents) if part.exists())


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a temporary file, not created yet, which is renamed to `path` if the block succeeds.

    The temporary file is in the same folder, because a rename is atomic only within one file system. If the block
    raises, `path` is unchanged. Missing parent folders are created.
    """
    target = Path(path)
    temporary = _temporary_path(target)
    with errors_naming(target, temporary):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part; see `atomic_path`."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder, empty, which is renamed to `path` if the block succeeds.

    A folder cannot replace another atomically, so an old `path` is renamed first and removed at the end. Concurrent
    callers must hold a lock. Leftovers of killed writers are removed, and missing parent folders are created.
    """
    target = Path(path)
    temporary, old = _temporary_path(target), _temporary_path(target)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        if re.fullmatch(r"\d+-[0-9a-f]{8}", left.name[len(target.name) + 2 : -len(".tmp")]):  # not that of NAME.2
            _remove(left)
    with errors_naming(target, temporary):
        temporary.mkdir()
        try:
            yield temporary
            for inside in sorted(temporary.rglob("*")):
                _sync(inside)
            if target.exists():
                os.rename(target, old)
            os.rename(temporary, target)
            _sync(target.parent)
        finally:
            if old.exists() and not target.exists():
                os.rename(old, target)
            _remove(temporary)
            _remove(old)


@contextmanager
def errors_naming(target: Path, temporary: Path | None = None) -> Iterator[None]:
    """Add the name of the written file to an error of the block: the error of a full disk names no file.

    The name of a temporary file, which no longer exists, is replaced by that of its target.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in DISK_ERRORS:
            error.filename = str(target)
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes | os.PathLike) else None
        if named is not None and temporary is not None and named.is_relative_to(temporary):
            error.filename = str(target / named.relative_to(temporary))
        raise
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)$", str(error))  # safetensors' own error, with Rust's text
        if found is None or int(found[1]) not in DISK_ERRORS:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(target)) from error


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files that killed writers left below a folder; no process may be writing to it."""
    for left in list(folder.rglob(".*.tmp")):
        _remove(left)


def _remove(path: Path) -> None:
    """Remove a file or a folder, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _temporary_path(target: Path) -> Path:
    # Not tempfile.mkstemp: its files are readable by their owner only, and a cache may be shared.
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _sync(path: Path) -> None:
    # Without it, a power cut after the rename can leave an empty file under the final name.
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
