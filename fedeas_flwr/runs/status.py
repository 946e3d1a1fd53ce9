"""The status of a run in its folder: running and in which processes, interrupted, finished or failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.processes import identify, is_alive, is_elsewhere
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.runs.files import STATUS_LOCK


class RunStatus:
    """The JSON files of a run's folder, and the run's status, which is one of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _status_lock(self) -> FileLock:
        """The lock of status.json, kept: Python would ignore a Ctrl-C that arrives while a used lock is deleted."""
        return FileLock(self.path / STATUS_LOCK)

    def set_status(
        self,
        status: str,
        error: str = "",
        pid: int | None = None,
        died: bool = False,
        gaps: str = "",
        warnings: Mapping[str, str] | None = None,
    ) -> None:
        """Write the status of the run. ``interrupted`` does not replace finished, nor failed unless processes died.

        A running run lists its processes (a launcher, and the ServerApp that it started) and is running while one of
        them is alive. It keeps the time of its first process's start. A lock keeps these processes from overwriting
        each other's status.

        ``pid`` is a process that was just started to run it, which replaces all listed ones; by default this process is
        added to them. ``error`` is why the run failed, and ``died`` whether because processes died, so that a launcher
        may resume it in new ones. ``gaps`` are the clients that a finished run lacks, by round; ``warnings`` has by
        callback why it failed. All texts are one line.
        """
        found: dict[str, Any] = {"status": status, "error": error, **({"died": True} if died else {})}
        found |= {"gaps": gaps} if gaps else {}
        found |= {"warnings": dict(warnings)} if warnings else {}
        with self._status_lock:
            if status == "interrupted" and self.status()[0] in ("finished", "failed") and not self.has_died():
                return
            if status == "running":
                found["since"] = time.time() if pid else time.time() - self.seconds_since_start()
                this = identify(pid)
                others = [] if pid else [other for other in self.processes() if other["pid"] != this["pid"]]
                found["processes"] = [*others, this]
            self.write_json("status.json", found)

    def seconds_since_start(self) -> float:
        """Return the seconds since the running run was launched, or started if it has no launcher; else 0."""
        try:
            since = self.read_json("status.json")["since"] if self.state() == "running" else time.time()
            return max(0.0, time.time() - float(since))
        except (RunError, KeyError, TypeError, ValueError, OverflowError):
            return 0.0

    def status(self) -> tuple[str, str]:
        """Return the recorded status, and the error if the run failed."""
        try:
            found = self.read_json("status.json")
            return one_line(found["status"]), one_line(found["error"], MAX_LINE)
        except (RunError, KeyError, TypeError):
            return "unknown", ""

    def warnings(self) -> dict[str, str]:
        """Return each callback that failed in a finished run, and why."""
        try:
            return {
                one_line(name): one_line(why, MAX_LINE)
                for name, why in self.read_json("status.json")["warnings"].items()
            }
        except (RunError, KeyError, AttributeError):
            return {}

    def has_died(self) -> bool:
        """Return whether the run failed because processes died."""
        try:
            return bool(self.read_json("status.json").get("died"))
        except (RunError, AttributeError):
            return False

    def refuse_if_it_runs(self) -> None:
        """Raise `RunError` if another process runs it: both would write the same files."""
        if others := [process["pid"] for process in self.processes() if process["pid"] != os.getpid()]:
            raise RunError(f"{self.path} is still running, in process {others[0]}")

    def processes(self) -> list[dict[str, Any]]:
        """Return the registered processes that are alive on this machine."""
        return [process for process in self.registered_processes() if is_alive(process)]

    def registered_processes(self) -> list[dict[str, Any]]:
        """Return all processes that registered as running it, dead ones too."""
        try:
            found = self.read_json("status.json").get("processes", [])
            return [one for one in found if {"started", "host"} <= one.keys() and _is_pid(one.get("pid"))]
        except (RunError, TypeError, AttributeError):
            return []

    def state(self) -> str:
        """Return running, elsewhere (running on another machine), interrupted, finished, failed or unknown.

        This is the actual state: a killed run is still recorded as running, and an exported record has no status.
        """
        status = self.status()[0]
        if status == "running" and not self.processes():
            return "elsewhere" if any(map(is_elsewhere, self.registered_processes())) else "interrupted"
        return "finished" if status == "unknown" and (self.path / "summary.json").exists() else status

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the run."""
        atomic_write(self.path / name, (json.dumps(value, indent=1) + "\n").encode())

    def read_json(self, name: str) -> Any:
        """Return the object in a JSON file of the run; raise `RunError` if there is none."""
        try:
            with read_errors_as_run_error(self.path / name):
                found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{self.path} is not a run directory: {name} is missing") from None
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.path / name} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise RunError(f"{self.path / name} is not a JSON object")
        return found


@contextmanager
def read_errors_as_run_error(path: Path) -> Iterator[None]:
    """Raise an OS error in the block as a `RunError`, except for a missing file, which the caller handles."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def _is_pid(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
