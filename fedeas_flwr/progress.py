"""What a person sees while a run goes on: a bar on a terminal, a line a round elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedeas_flwr.runs import RunDirectory
from fedeas_flwr.sizes import show_seconds

if TYPE_CHECKING:
    from fedeas_flwr.generators.training import Progress as TrainingProgress

_LINE_EVERY = 10.0


def show_tries(console: Console) -> Callable[[int], None]:
    """Return what a partition reports its tries to: most need a handful, the hardest of the paper 10,826."""

    def show(tries: int) -> None:
        if tries % 2000 == 0:
            console.print(f"partition: {tries:,} tries so far (kept in the cache once found)", highlight=False)

    return show


def show_training(console: Console, batch: int) -> Callable[[TrainingProgress], None]:
    """Return what a generator's training reports to: a line every ten seconds."""
    _show_log(console)
    shown_at, shown_step = -1e9, 0

    def show(now: TrainingProgress) -> None:
        nonlocal shown_at, shown_step
        if now.seconds - shown_at < _LINE_EVERY and now.remaining > 0:
            return
        speed = batch * (now.step - shown_step) / (now.seconds - shown_at) if shown_step else 0.0
        shown_at, shown_step = now.seconds, now.step
        pace = f"  {speed:,.0f} images/s" if speed else ""
        left = f"{now.remaining / 60:.1f} min left"
        console.print(f"step {now.step:>7,}  loss {now.loss:.4f}{pace}  {now.seconds:.0f} s  {left}", highlight=False)

    return show


def _show_log(console: Console) -> None:
    """Let a person see what the package logs while this command runs."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(record.getMessage(), highlight=False, markup=False)

    logger = logging.getLogger("fedeas_flwr")
    logger.addHandler(Lines())
    logger.setLevel(logging.INFO)
    logger.propagate = False


class RoundProgress:
    """Reads a run directory's rounds as they appear and shows them."""

    def __init__(self, run: RunDirectory, rounds: int, done: int, console: Console) -> None:
        self._run, self._rounds, self._shown, self._console = run, rounds, done, console
        self._done = done  # before this sitting: the pace is that of the rounds since
        self._offset = 0
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
            found, self._offset = self._run.rounds_from(self._offset)
            records = [record for record in found if record["round"] > self._shown]
            for record in records:
                self._show(record)
                self._shown = record["round"]
            return bool(records)

    def _show(self, record: dict[str, Any]) -> None:
        scores = f"accuracy {100 * record['accuracy']:5.1f} %  generated {record['generated']:,}"
        if record["failures"]:
            scores += f"  {len(record['failures'])} failed"
        if self._bar is not None:
            self._bar.update(self._task, completed=record["round"], scores=scores)
        else:
            elapsed = time.monotonic() - self._began
            left = (self._rounds - record["round"]) * elapsed / max(1, record["round"] - self._done)
            ahead = f"  about {show_seconds(left)} left" if left else ""
            self._console.print(
                f"round {record['round']:>3}/{self._rounds}  {scores}  {elapsed:.0f} s{ahead}", highlight=False
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
