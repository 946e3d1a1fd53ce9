"""What a person sees while a run goes on: a bar on a terminal, a line a round elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedeas_flwr.runs import RunDirectory


def show_tries(console: Console) -> Callable[[int], None]:
    """Return what a partition reports its tries to: most need a handful, the hardest of the paper 10,826."""

    def show(tries: int) -> None:
        if tries % 2000 == 0:
            console.print(f"partition: {tries:,} tries so far (kept in the cache once found)", highlight=False)

    return show


class RoundProgress:
    """Reads a run directory's rounds as they appear and shows them."""

    def __init__(self, run: RunDirectory, rounds: int, done: int, console: Console) -> None:
        self._run, self._rounds, self._shown, self._console = run, rounds, done, console
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> RoundProgress:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[scores]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("round", total=self._rounds, completed=self._shown, scores="starting …")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> bool:
        """Show rounds that are new; tell whether there were any."""
        with self._lock:
            records = self._run.rounds()[self._shown :] if self._run.path.exists() else []
            for record in records:
                self._show(record)
            self._shown += len(records)
            return bool(records)

    def _show(self, record: dict[str, Any]) -> None:
        scores = f"accuracy {100 * record['accuracy']:5.1f} %  generated {record['generated']:,}"
        if record["failures"]:
            scores += f"  {len(record['failures'])} failed"
        if self._bar is not None:
            self._bar.update(self._task, completed=record["round"], scores=scores)
        else:
            elapsed = time.monotonic() - self._began
            self._console.print(
                f"round {record['round']:>3}/{self._rounds}  {scores}  {elapsed:.0f} s", highlight=False
            )

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Keep showing rounds from a thread while this one is busy training."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.2):
                self.update()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
