"""Keep the image cache in order: what is in it, whether it is whole, what may go, and whether a run will fit."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedeas_flwr.common.files import existing_part
from fedeas_flwr.common.text import counted, parse_bytes, show_bytes
from fedeas_flwr.generators.cache import MANIFEST, ImageCache, read_manifest, read_shard
from fedeas_flwr.generators.interface import Generator

LIMIT_VARIABLE = "FEDEAS_CACHE_LIMIT"
# A shard is a NumPy header of 128 bytes and a checksum of 32, in a file that takes whole blocks of the disk.
_BLOCK = 4096
_SHARD_OVERHEAD = _BLOCK + 160


@dataclass(frozen=True)
class Entry:
    """One generator's images of one experiment."""

    key: str
    path: Path
    bytes: int
    images: int
    last_used: float
    manifest: dict[str, Any]


def entries(cache: ImageCache) -> list[Entry]:
    """List what the cache holds, the least recently used first.

    Parameters
    ----------
    cache
        Where to look.

    Returns
    -------
    list of Entry
    """
    found = []
    for folder in sorted(cache.root.glob("*")) if cache.root.is_dir() else ():
        if not re.fullmatch("[0-9a-f]{64}", folder.name) or folder.is_symlink():
            continue
        manifest = folder / MANIFEST
        try:
            last_used, facts = manifest.lstat().st_mtime, read_manifest(manifest)
        except OSError:  # a cache from before there were manifests
            if not folder.is_dir():  # removed meanwhile
                continue
            last_used, facts = folder.stat().st_mtime, {}
        blocks = [-(-_size(path) // _BLOCK) for path in folder.rglob("*")]
        found.append(Entry(folder.name, folder, _BLOCK * sum(blocks), _count_images(folder), last_used, facts))
    return sorted(found, key=lambda entry: (entry.last_used, entry.key))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:  # removed meanwhile
        return 0


def _count_images(folder: Path) -> int:
    ranges = (re.fullmatch(r"(\d+)-(\d+)\.npy", path.name) for path in folder.glob("client-*/class-*/*.npy"))
    return sum(int(found[2]) - int(found[1]) for found in ranges if found)


def verify(cache: ImageCache) -> tuple[int, list[Path]]:
    """Check every shard against its checksum; nothing is changed.

    Parameters
    ----------
    cache
        What to check.

    Returns
    -------
    checked : int
        Shards read.
    damaged : list of Path
        Those that will be set aside and made again when they are next needed.
    """
    shards = sorted(cache.root.glob("*/client-*/class-*/[0-9]*-[0-9]*.npy"))
    return len(shards), [path for path in shards if read_shard(path) is None]


def prune(
    cache: ImageCache,
    *,
    max_bytes: int | None = None,
    older_than: float | None = None,
    key: str | None = None,
    keep: Collection[str] = (),
) -> list[Entry]:
    """Remove whole entries, the least recently used first; one that a process is writing to stays.

    Parameters
    ----------
    cache
        What to make smaller.
    max_bytes
        Remove until no more than this is left.
    older_than
        Remove what has not been used for so many seconds.
    key
        Remove the entry whose key begins so.
    keep
        Keys never to remove.

    Returns
    -------
    list of Entry
        What was removed.
    """
    for left in cache.root.glob(".pruned-*"):  # by a process that died over it
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
                if client.is_symlink():  # locking would empty the file it leads to
                    continue
                stack.enter_context(FileLock(client, timeout=0))
            # Out of sight in one step: a reader finds all of it or nothing.
            hidden = entry.path.with_name(f".pruned-{secrets.token_hex(4)}")
            os.rename(entry.path, hidden)
        except (Timeout, FileNotFoundError):  # the latter: another process made room at the same moment
            return False
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def stored_bytes(image_shape: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
    """Return the disk that images take, rounded up: `rows` has how many of each class, a row a client."""
    height, width, channels = image_shape
    numbers = [count for row in rows for count in row if count]
    return sum(numbers) * height * width * channels + len(numbers) * _SHARD_OVERHEAD


def ensure_space(
    cache: ImageCache, generator: Generator, seed: int, rows: Sequence[Sequence[int]], limit: str
) -> list[Entry]:
    """See that a run's images will fit on the disk and under the cache's limit, pruning others' if need be.

    Parameters
    ----------
    cache
        Where they will go.
    generator, seed
        Of the run: its own entry is never pruned.
    rows
        How many images of each class every client will ask for.
    limit
        Bytes such as ``20GB``; empty: ``FEDEAS_CACHE_LIMIT``, or none.

    Returns
    -------
    list of Entry
        What was removed to make room.
    """
    lacking = [cache.missing(generator, seed=seed, client=k, wanted=row) for k, row in enumerate(rows)]
    share = sum(lacking) / max(1, sum(map(sum, rows)))
    whole = stored_bytes(generator.image_shape, rows)
    needed = round(whole * share)
    removed, most = [], cache_limit(limit)
    if most is not None:
        if whole > most:
            raise ValueError(
                f"cache-limit = {show_bytes(most)}: this run's images alone take {show_bytes(whole)}; allow that much"
            )
        removed = prune(cache, max_bytes=most - needed, keep=[cache.key(generator, seed)])
    free = shutil.disk_usage(existing_part(cache.root)).free
    if needed > free:
        raise ValueError(
            f"{counted(sum(lacking), 'image')} of the run take {show_bytes(needed)} in {cache.root}, which has "
            f"{show_bytes(free)} free; make room or set FEDEAS_CACHE to a folder on a larger disk"
        )
    return removed


def cache_limit(given: str) -> int | None:
    """Return the limit in bytes: the one given, else the environment's, else None."""
    text = given or os.environ.get(LIMIT_VARIABLE, "")
    return parse_bytes(text, "cache-limit" if given else LIMIT_VARIABLE) if text else None
