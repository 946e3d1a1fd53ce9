"""Run a command in its own network namespace, whose ports no other user and no other machine can reach.

This file is also a script that imports only the standard library: it creates a namespace or joins that of a process,
and then executes the command in its place. The namespace has a loopback interface and no other. Root needs only the
network namespace; other users get a user namespace around it that maps their user and group to themselves, so that
files keep their owner.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
"""Linux's CLONE_NEWUSER and CLONE_NEWNET."""
_SET_FLAGS, _UP = 0x8914, 1
"""Linux's SIOCSIFFLAGS and IFF_UP."""


def inside(pid: int | None = None) -> list[str]:
    """Return the words before a command that run it in the namespace of a process, or in a new namespace."""
    return [sys.executable, "-I", "-S", __file__, "new" if pid is None else str(pid)]


def is_permitted() -> bool:
    """Return whether this system lets this user create a network namespace."""
    return sys.platform == "linux" and not subprocess.run([*inside(), "true"], capture_output=True).returncode


def listens_inside(pid: int, port: int) -> bool:
    """Return whether a port of the loopback interface is open in the namespace of a process, once it has its own."""
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        if (process / "ns" / "net").readlink() != Path("/proc/self/ns/net").readlink():
            return f":{port:04X} 00000000:0000 0A " in (process / "net" / "tcp").read_text(encoding="utf-8")
    return False


def main() -> None:
    """Execute a command in a new namespace, or in that of a process."""
    where, *command = sys.argv[1:]
    if where == "new":
        _create()
    else:
        _join(where)
    os.execvp(command[0], command)


def _create() -> None:
    import fcntl  # which Windows does not have

    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEW_NET)
    except PermissionError:
        _call("unshare", _NEW_USER | _NEW_NET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="utf-8")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))


def _join(pid: str) -> None:
    for name in ("user", "net"):
        there = Path("/proc", pid, "ns", name)
        if there.readlink() != Path("/proc/self/ns", name).readlink():  # joining one's own user namespace is an error
            with there.open("rb") as namespace:
                _call("setns", namespace.fileno(), 0)


def _call(function: str, *numbers: int) -> None:
    """Call a function of the C library; raise `OSError` if it fails. (Python has both from version 3.12 on.)"""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*numbers):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), function)


if __name__ == "__main__":
    main()
