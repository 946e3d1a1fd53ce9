"""List, verify and prune the image cache, and check that a run's images fit in it."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedeas_flwr.common.files import existing_part
from fedeas_flwr.common.text import counted, parse_bytes, show_bytes
from fedeas_flwr.generators.cache import MANIFEST, ImageCache, read_manifest, read_shard, shards
from fedeas_flwr.generators.interface import Generator

LIMIT_VARIABLE = "FEDEAS_CACHE_LIMIT"
# A shard has a NumPy header of 128 bytes and a checksum of 32 bytes, and its file takes whole blocks of the disk.
_BLOCK = 4096
_SHARD_OVERHEAD = _BLOCK + 160


@dataclass(frozen=True)
class Entry:
    """Cached images of one generator and seed."""

    key: str
    path: Path
    bytes: int
    images: int
    last_used: float
    manifest: dict[str, Any]


def entries(cache: ImageCache) -> list[Entry]:
    """Return the entries of the cache, the least recently used first."""
    found = []
    for folder in sorted(cache.root.glob("*")) if cache.root.is_dir() else ():
        if re.fullmatch("[0-9a-f]{64}", folder.name) and folder.is_dir() and not folder.is_symlink():
            with suppress(FileNotFoundError):  # another process has just removed it
                found.append(_entry(folder))
    return sorted(found, key=lambda entry: (entry.last_used, entry.key))


def _entry(folder: Path) -> Entry:
    manifest = folder / MANIFEST
    try:
        last_used, facts = manifest.lstat().st_mtime, read_manifest(manifest)
    except OSError:  # its writer was killed before it wrote the manifest
        last_used, facts = folder.stat().st_mtime, {}
    blocks = [-(-_size(path) // _BLOCK) for path in folder.rglob("*")]
    ranges = itertools.chain.from_iterable(map(shards, folder.glob("client-*/class-*")))
    images = sum(stop - start for _, start, stop in ranges)
    return Entry(folder.name, folder, _BLOCK * sum(blocks), images, last_used, facts)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:  # another process has just removed it
        return 0


def verify(cache: ImageCache) -> tuple[int, list[Path]]:
    """Return the number of shards, and those with a wrong checksum; change nothing.

    Images of damaged shards are generated again when next needed.
    """
    paths = sorted(cache.root.glob("*/client-*/class-*/[0-9]*-[0-9]*.npy"))
    return len(paths), [path for path in paths if read_shard(path) is None and os.path.lexists(path)]


def prune(
    cache: ImageCache,
    *,
    max_bytes: int | None = None,
    older_than: float | None = None,
    key: str | None = None,
    keep: Collection[str] = (),
) -> list[Entry]:
    """Remove whole entries, the least recently used first, and return them; keep those that a process is writing to.

    Removed are entries not used for ``older_than`` seconds, entries whose key starts with ``key``, and as many as leave
    at most ``max_bytes``. Entries with a key in ``keep`` stay in any case.
    """
    for left in cache.root.glob(".pruned-*"):  # left by a process that died while removing
        shutil.rmtree(left, ignore_errors=True)
    present = entries(cache)
    total, now, removed = sum(entry.bytes for entry in present), time.time(), []
    for entry in present:
        too_much = max_bytes is not None and total > max_bytes
        too_old = older_than is not None and now - entry.last_used > older_than
        named = key is not None and entry.key.startswith(key)
        if entry.key not in keep and (too_much or too_old or named) and _remove(entry):
            removed.append(entry)
            total -= entry.bytes
    return removed


def _remove(entry: Entry) -> bool:
    with ExitStack() as stack:
        try:
            for client in entry.path.glob("client-*.lock"):
                if not client.is_symlink():  # locking would truncate its target
                    stack.enter_context(FileLock(client, timeout=0))
            # Renamed in one step: a reader finds the whole entry or nothing.
            hidden = entry.path.with_name(f".pruned-{secrets.token_hex(4)}")
            os.rename(entry.path, hidden)
        except (Timeout, FileNotFoundError):  # the latter: another process removed it
            return False
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def stored_bytes(image_shape: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
    """Return an upper bound of the bytes on disk of images; `rows` has their number per client and class."""
    height, width, channels = image_shape
    numbers = [count for row in rows for count in row if count]
    return sum(numbers) * height * width * channels + len(numbers) * _SHARD_OVERHEAD


def ensure_space(
    cache: ImageCache, generator: Generator, seed: int, rows: Sequence[Sequence[int]], limit: str
) -> list[Entry]:
    """Make a run's images fit on the disk and under the cache's limit; return the other entries pruned for it.

    ``rows`` has the number of images per client and class. ``limit`` is a size such as ``20GB``; empty:
    ``FEDEAS_CACHE_LIMIT``, or no limit.
    """
    lacking = [cache.missing(generator, seed=seed, client=k, wanted=row) for k, row in enumerate(rows)]
    share = sum(lacking) / max(1, sum(map(sum, rows)))
    whole = stored_bytes(generator.image_shape, rows)
    needed = round(whole * share)
    removed, max_bytes = [], cache_limit(limit)
    if max_bytes is not None:
        if whole > max_bytes:
            raise ValueError(
                f"cache-limit = {show_bytes(max_bytes)}: this run's images alone take {show_bytes(whole)}; raise it"
            )
        removed = prune(cache, max_bytes=max_bytes - needed, keep=[cache.key(generator, seed)])
    free = shutil.disk_usage(existing_part(cache.root)).free
    if needed > free:
        raise ValueError(
            f"{counted(sum(lacking), 'image')} of the run take {show_bytes(needed)} in {cache.root}, which has "
            f"{show_bytes(free)} free; free space or set FEDEAS_CACHE to a folder on a larger disk"
        )
    return removed


def cache_limit(given: str) -> int | None:
    """Return the limit in bytes: the one given, that of the environment, or None."""
    text = given or os.environ.get(LIMIT_VARIABLE, "")
    return parse_bytes(text, "cache-limit" if given else LIMIT_VARIABLE) if text else None
