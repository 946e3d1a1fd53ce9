"""Records and arrays with a digest, so that damaged, edited or exchanged content is refused when it is read back.

The digest covers all of the content and its owner: the run, client or dataset that it belongs to. It protects against
accidents and mix-ups, not against somebody who can write the files and compute a new digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.npy import Arrays, arrays_digest, to_numpy

_DIGEST, _RECORD = "digest", "state"
DAMAGED = "its content does not match its digest: it is damaged, was edited, or belongs to something else"
NO_DIGEST = "it has no digest: an older version wrote it, or it is damaged"


def seal(record: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return a JSON record with a digest of its content and its owner."""
    return {**record, _DIGEST: _digest(record, owner)}


def unseal(record: Mapping[str, Any], owner: str, required: bool = True) -> dict[str, Any]:
    """Return the content of a sealed record; raise `ValueError` if it differs from what was sealed.

    Records of older versions and exported ones have no digest: they are returned as they are unless it is ``required``.
    """
    if not (required or _DIGEST in record):
        return dict(record)
    content = {key: value for key, value in record.items() if key != _DIGEST}
    if record.get(_DIGEST) != _digest(content, owner):
        raise ValueError(DAMAGED if _DIGEST in record else NO_DIGEST)
    return content


def write_checked(path: Path, record: Mapping[str, Any], arrays: Arrays, owner: str) -> None:
    """Write a record and arrays as one safetensors file with a digest, completely or not at all."""
    arrays = to_numpy(arrays)
    sealed = seal(record, owner + arrays_digest(arrays))
    atomic_write(path, save(arrays, metadata={_RECORD: json.dumps(sealed)}))


def read_checked(path: Path, owner: str) -> tuple[dict[str, Any], Arrays]:
    """Return the record and the arrays of a file that `write_checked` wrote.

    Raise `ValueError` with one line if the file is damaged, edited, or not the owner's.
    """
    arrays, metadata = read_arrays(path)
    try:
        return unseal(json.loads(metadata[_RECORD]), owner + arrays_digest(arrays)), arrays
    except KeyError:
        raise ValueError(f"{path} cannot be read: it holds no record") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Return the NumPy arrays in a safetensors file, and its metadata; raise `ValueError` with one line if damaged."""
    try:
        path.open("rb").close()  # its error gives the reason, such as a missing permission
        with safe_open(path, framework="np") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype that NumPy does not have
        raise ValueError(f"{path} cannot be read: {error}") from None


def _digest(record: Mapping[str, Any], owner: str) -> str:
    as_read = json.loads(json.dumps(record))  # keys become text, whose order differs from that of numbers
    text = json.dumps([owner, as_read], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
