"""What a container engine and systemd give a service, by Linux's own commands: a user, folders, a read-only root."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

USER = 10001
"""Number of an ordinary user; it needs no entry in /etc/passwd."""
_SET_UP = f"""
set -eu
mount -t tmpfs tmpfs /opt
while [ "$1" != -- ]; do
    [ -e "$2" ] || mkdir -p "$2"
    mount --bind "$1" "$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$2"
    shift 3
done
python="$2" closed="$3" folder="$4"
shift 4
if [ -n "$closed" ]; then # this Python is in a folder that other users cannot read
    mkdir /opt/python
    mount --bind "$python" /opt/python
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    mkdir -p "$python"
    mount --bind /opt/python "$python"
fi
mount -o remount,ro /opt
mount --bind / /
mount -o remount,bind,ro /
mount -t tmpfs tmpfs /tmp
cd "$folder"
exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs "$@"
"""


def sandbox(folder: str, mounts: Mapping[str, tuple[Path, str]]) -> list[str]:
    """Return the words before a command that run it as an ordinary user in ``folder``.

    The command sees a read-only root file system and an empty /tmp.

    Parameters
    ----------
    folder
        Working directory.
    mounts
        Path below /opt, or of a file that exists → a folder or file of this machine, and "rw" or "ro".
    """
    for command in ("unshare", "setpriv"):
        if shutil.which(command) is None:
            pytest.skip(f"this system has no {command}")
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/opt"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("this system does not permit mount namespaces")
    words = [word for target, (source, mode) in mounts.items() for word in (str(source), target, mode)]
    python = Path(sys.base_prefix)
    closed = [str(parent) for parent in reversed(python.parents) if not parent.stat().st_mode & 0o001]
    where = [str(python), closed[0] if closed else "", folder]
    return ["unshare", "--mount", "sh", "-c", _SET_UP, "sandbox", *words, "--", *where]
