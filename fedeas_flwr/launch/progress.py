"""Show the progress of a run: a bar on a terminal, otherwise one line per round."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedeas_flwr.common.text import show_seconds
from fedeas_flwr.config import RunConfig
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.federated import with_folder
from fedeas_flwr.generators.interface import describe_generator
from fedeas_flwr.planning.run_plan import planned_counts, planned_images
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import round_warnings

if TYPE_CHECKING:
    from fedeas_flwr.generators.learn.trainer import TrainingProgress


_LINE_EVERY = 10.0


def show_tries(console: Console) -> Callable[[int], None]:
    """Return a callback that prints the number of partition tries; most need a few, the paper's hardest 10,826."""

    def show(tries: int) -> None:
        if tries % 2000 == 0:
            console.print(f"partition: {tries:,} tries so far (the result is cached)", highlight=False)

    return show


def show_training(console: Console, batch: int) -> Callable[[TrainingProgress], None]:
    """Return a callback that prints a line on a generator's training every ten seconds."""
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


@contextmanager
def showing_log(console: Console) -> Iterator[None]:
    """Print what the package logs during the block, and restore logging afterwards."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(record.getMessage(), highlight=False, markup=False)

    logger, lines = logging.getLogger("fedeas_flwr"), Lines()
    before = logger.level, logger.propagate
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class GenerationProgress:
    """Number of images that the clients of a simulated run plan to generate, and how many the cache still lacks.

    Clients generate in their own processes and report only after training, so the cache files are counted instead.
    """

    def __init__(self, config: RunConfig) -> None:
        self._about, self._seed = describe_generator(with_folder(config)), config.seed
        self._cache = ImageCache()
        self._planned = planned_images(config, planned_counts(config)).tolist()
        self.total = sum(map(sum, self._planned))

    def left(self) -> int:
        """Return the number of planned images that are not in the cache."""
        folder = self._cache.find(self._about, self._seed)
        if folder is None:
            return self.total
        return sum(self._cache.missing_in(folder, client, row) for client, row in enumerate(self._planned))


def rounds_done(training: RunConfig | None) -> int:
    """Return the number of recorded rounds of the training of a run's generator; 0 if it has none."""
    return len(RunDirectory(Path(training.run_dir)).rounds()) if training is not None else 0


class RoundProgress:
    """Shows the rounds of a run directory as they appear, and the clients' image generation between them.

    ``training`` is the config of the training of the run's generator, whose rounds come first.
    """

    def __init__(
        self,
        run: RunDirectory,
        rounds: int,
        done: int,
        console: Console,
        images: GenerationProgress | None = None,
        training: RunConfig | None = None,
    ) -> None:
        self._images = images if images and images.total else None
        self._training, self._trained = training, rounds_done(training)
        self._said_at = time.monotonic()
        self._looked = -1e9
        self._left = 0
        self._pace_from: tuple[float, int] | None = None  # when generation was first seen, and the images left then
        self._run, self._rounds, self._shown, self._console = run, rounds, done, console
        # Time and number of the first round seen since the start: start-up does not count for the time left.
        self._first_seen: tuple[float, int] | None = None
        self._offset = 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._bar: Progress | None = None
        self._warned: set[str] = set()

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

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> bool:
        """Show new rounds; return whether there were any."""
        with self._lock:
            now = time.monotonic()
            trained = self._show_training(now)
            found, self._offset = self._run.rounds_from(self._offset)
            records = [record for record in found if record["round"] > self._shown]
            for record in records:
                self._show(record, now)
                self._shown = record["round"]
            if records and self._first_seen is None:
                self._first_seen = now, self._shown
            if self._images is not None:
                self._watch_images(self._images, bool(records), now)
            return bool(records) or trained

    def _show_training(self, now: float) -> bool:
        """Show the generator's training every ten seconds; return whether it has new rounds."""
        if self._training is None or self._trained >= self._training.rounds:
            return False
        before, self._trained = self._trained, rounds_done(self._training)
        if self._trained == before:
            return False
        done = f"training the generator: round {self._trained}/{self._training.rounds}"
        if self._bar is not None:
            self._bar.update(self._task, scores=done)
        elif now - self._said_at >= _LINE_EVERY or self._trained == self._training.rounds:
            self._console.print(f"{done}  {now - self._began:.0f} s", highlight=False)
            self._said_at = now
        return True

    def _watch_images(self, images: GenerationProgress, round_ended: bool, now: float) -> None:
        """Show the number of generated images every ten seconds without a round; counting files is not free."""
        if round_ended:
            self._looked, self._pace_from = now, None
        if now - self._looked < _LINE_EVERY:
            return
        before, self._left, self._looked = self._left, images.left(), now
        if self._pace_from is None or self._left >= self._pace_from[1]:
            self._pace_from = now, self._left
        elif self._left < before:
            since, then = self._pace_from
            seconds = show_seconds(self._left * (now - since) / (then - self._left))
            remaining = f", about {seconds} left" if self._left else ""
            done = f"{images.total - self._left:,} of {images.total:,} images generated{remaining}"
            if self._bar is not None:
                self._bar.update(self._task, scores=done)
            else:
                self._console.print(f"  {done}", highlight=False)

    def _show(self, record: dict[str, Any], now: float) -> None:
        if "accuracy" in record:
            scores = f"accuracy {100 * record['accuracy']:5.1f} %  generated {record['generated']:,}"
        else:
            losses = {"train loss": record["train_loss"], "loss": record["loss"]}  # not every round is evaluated
            scores = "  ".join(f"{name} {loss:.5f}" for name, loss in losses.items() if loss is not None)
        if record["failures"]:
            scores += f"  {len(record['failures'])} failed"
        if self._bar is not None:
            self._bar.update(self._task, completed=record["round"], scores=scores)
        else:
            left, elapsed = 0.0, now - self._began
            if self._first_seen is not None:
                since, first = self._first_seen
                left = (self._rounds - record["round"]) * (now - since) / (record["round"] - first)
            remaining = f"  about {show_seconds(left)} left" if left else ""
            self._console.print(
                f"round {record['round']:>3}/{self._rounds}  {scores}  {elapsed:.0f} s{remaining}", highlight=False
            )
        for kind, warning in round_warnings(record, self._run.config()).items():
            if kind not in self._warned:
                self._console.print(f"warning: {warning}", highlight=False, soft_wrap=True, markup=False)
                self._warned.add(kind)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Show rounds from a background thread during the block, while this thread trains."""
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
