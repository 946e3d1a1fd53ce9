"""Where things are kept, and how a file or folder appears there whole or not at all."""

from __future__ import annotations

import errno
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk says to a write; such an error names no file."""


def cache_root() -> Path:
    """Return the user's cache folder: ``$FEDEAS_CACHE``, or ``~/.cache/fedeas``.

    It is read anew at every call, so that a test or a launcher may change it.

    Returns
    -------
    Path
        An absolute path. It may not exist yet.
    """
    return expanded(os.environ.get("FEDEAS_CACHE") or "~/.cache/fedeas", "FEDEAS_CACHE").absolute()


def cache_hint(error: BaseException) -> str:
    """What an error about a file of the cache is to say of where that is, in brackets; of other errors nothing."""
    named = getattr(error, "filename", None)
    if not isinstance(error, OSError) or not isinstance(named, str):
        return ""
    try:
        path, root = Path(named).absolute(), cache_root()
    except ValueError:  # a home that nobody has, of which whoever needs the cache tells
        return ""
    if not path.is_relative_to(root) and (os.path.isdir(path) or not root.is_relative_to(path)):
        return ""
    given = os.environ.get("FEDEAS_CACHE")
    return f" (FEDEAS_CACHE = {given!r})" if given else " (the user's cache; FEDEAS_CACHE names another folder)"


def expanded(path: str | Path, key: str = "") -> Path:
    """Return a path that a user wrote, with a home folder in place of ``~`` and ``~user``.

    Parameters
    ----------
    path
        As it was written.
    key
        Where it was written, for the error.

    Raises
    ------
    ValueError
        If nobody knows that home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        named = f"{key} = {str(path)!r}" if key else repr(str(path))
        raise ValueError(f"{named}: its home folder is not known; give the whole path") from None


def existing_part(path: Path) -> Path:
    """Return `path` if it is there, else the nearest folder above it that is."""
    return next(part for part in (path, *path.parents) if part.exists())


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name to write to; it becomes `path` when the block ends well.

    The temporary file lies in the same folder, because a rename is atomic only within one file system. When the
    block raises, `path` is left as it was.

    Parameters
    ----------
    path
        The file to write. Missing parent folders are made.

    Yields
    ------
    Path
        The temporary file, not yet made.
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
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part.

    Parameters
    ----------
    path
        The file to write. Missing parent folders are made.
    content
        All of the file's bytes.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary folder to fill; it becomes `path` when the block ends well.

    A folder cannot replace another one in one step, so an old `path` is moved away first, and removed when the new one
    has its name. Callers that may race hold a lock around this; what a killed one has left is removed.

    Parameters
    ----------
    path
        The folder to make or to replace. Missing parent folders are made.

    Yields
    ------
    Path
        The temporary folder, empty.
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
    """Let an error name the file that is written: a full disk names none.

    The temporary one nobody knows, and it is gone by then.
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
        found = re.search(r"\(os error (\d+)\)$", str(error))  # safetensors' own kind, as Rust words it
        if found is None or int(found[1]) not in DISK_ERRORS:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(target)) from error


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files and folders below one that nobody writes to now: killed writers left them."""
    for left in list(folder.rglob(".*.tmp")):
        _remove(left)


def _remove(path: Path) -> None:
    """Remove a file or a folder as far as that can be done."""
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
    # Without it a power cut after the rename can leave a whole name on an empty file.
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
