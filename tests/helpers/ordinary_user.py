"""Permissions as an ordinary user meets them, also where the tests run as root."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION_3 = 0x20080522
_OVERRIDE, _READ_SEARCH = 1 << 1, 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what makes root's way through any file's mode."""


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Take from this thread what lets root pass a file's permissions by; an ordinary user has nothing to lose."""
    if sys.platform != "linux":
        pytest.skip("capabilities are Linux's")
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(held[0] & ~(_OVERRIDE | _READ_SEARCH), *held[1:])  # the effective ones come first
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0
