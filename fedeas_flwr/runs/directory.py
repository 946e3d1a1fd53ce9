"""The run directory: what a run leaves behind, written so that no moment of death loses it.

Its files are named in files.py.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.files import atomic_write, errors_naming, existing_part, remove_unfinished
from fedeas_flwr.common.randomness import Noise
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_keys import identity
from fedeas_flwr.runs.checkpoints import (
    Arrays,
    Checkpoint,
    read_arrays,
    read_checkpoint,
    write_arrays,
    write_checkpoint,
)
from fedeas_flwr.runs.files import holds_others_files
from fedeas_flwr.runs.round_records import RoundLog, read_records
from fedeas_flwr.runs.status import RunStatus, read_errors_as_run_error


class RunDirectory(RunStatus):
    """The folder of one run."""

    @classmethod
    def start(cls, config: RunConfig, environment: Mapping[str, Any]) -> RunDirectory:
        """Make the folder of a new run, or open the one that is to be resumed."""
        run = cls(Path(config.run_dir))
        run._refuse_another(config)
        remove_unfinished(run.path)
        with run._write_errors_as_run_error():
            run.path.mkdir(parents=True, exist_ok=True)
            kept = {"classes": run.classes(), "files": run.files()} if config.resume else {}
            run.write_json("config.json", {"config": config.to_user_dict(), "environment": dict(environment), **kept})
        run.set_status("running")
        return run

    def check_ready(self, config: RunConfig) -> None:
        """Refuse what could not start or go on here, before anything is written, or prepared for minutes."""
        self.refuse_if_it_runs()
        self._refuse_another(config)
        with self._write_errors_as_run_error(), TemporaryFile(dir=existing_part(self.path)):
            pass
        checkpoint = self.load_checkpoint() if config.resume else None
        if checkpoint is not None:
            self._rounds_at_least(checkpoint.round, f"the checkpoint is of round {checkpoint.round}")

    def _refuse_another(self, config: RunConfig) -> None:
        if config.resume:
            self._check_same(config)
        else:
            self._refuse_if_taken()

    @contextmanager
    def _write_errors_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"run-dir = '{self.path}' cannot be written: {error.strerror or error}") from None

    def _refuse_if_taken(self) -> None:
        """Let no new run begin where one has begun, or where somebody's own files lie."""
        if (self.path / "rounds.jsonl").exists():
            raise RunError(f"run-dir = '{self.path}' already holds a run: resume it or name another folder")
        if holds_others_files(self.path):
            raise RunError(f"run-dir = '{self.path}': is not empty and holds no run; name a new folder")

    def _refuse_record(self) -> None:
        """Tell that what `export` left is not the run itself, which would have more than that."""
        of_a_run = ("status.json", "checkpoint.safetensors", "model.safetensors")
        if (self.path / "summary.json").exists() and not any((self.path / name).exists() for name in of_a_run):
            raise RunError(f"{self.path} is a record, which has no weights: give the run directory it was made from")

    def _check_same(self, config: RunConfig) -> None:
        self._refuse_record()
        started = self.config()
        free = ("rounds",) if config.clients else ("rounds", "clients")
        before, now = identity(started, free), identity(config, free)
        if changed := next((key for key in now if before.get(key) != now[key]), None):
            old, new = started.to_user_dict()[changed], config.to_user_dict()[changed]
            raise RunError(f"{changed} = {new!r}, but the run to resume has {changed} = {old!r} in {self.path}")
        if (self.path / "summary.json").exists() and not (self.path / "checkpoint.safetensors").exists():
            raise RunError(f"{self.path} has finished and was pruned: there is no checkpoint to go on from")
        if config.rounds < len(self.rounds()):
            raise RunError(f"rounds = {config.rounds}, but the run to resume has done {len(self.rounds())}")

    def identity(self) -> str:
        """A name that no other run has and that a resumed run keeps, wherever the folder lies by then."""
        path = self.path / "identity"
        if not path.exists():
            atomic_write(path, uuid.uuid4().hex.encode())
        return path.read_text(encoding="utf-8")

    def noise(self, begun: bool = False) -> Noise:
        """Where the noise of `dp` comes from; a run that was ``begun`` goes on with it, and not without."""
        path = self.path / "noise-key"
        if begun and not path.exists():
            raise RunError(
                f"{path} is not there, and which noise the run's models have is not known without: begin anew"
            )
        try:
            with read_errors_as_run_error(path):
                return Noise(path)
        except ValueError as error:
            raise RunError(str(error)) from None

    def record_clients(self, clients: int) -> None:
        """Note how many clients the federation turned out to have."""
        found = self.read_json("config.json")
        found["config"]["clients"] = clients
        self.write_json("config.json", found)

    def record_inputs(self, dataset: str, classes: Sequence[str], files: Mapping[str, str]) -> None:
        """Note what the labels of its dataset are called, to which a resumed run is held, and what is in its files.

        A resumed run may do without a file: its images lie in the cache.
        """
        self.check_classes(dataset, classes)
        found = {"classes": classes, "files": {**self.files(), **files}}
        self.write_json("config.json", {**self.read_json("config.json"), **found})

    def check_classes(self, dataset: str, classes: Sequence[str]) -> None:
        """Refuse a dataset whose labels are called otherwise than when the run began: they would mean other classes."""
        before = self.classes()
        if before in ([], list(classes)):
            return
        pairs = list(zip_longest(classes, before))
        label = next(label for label, (now, then) in enumerate(pairs) if now != then)
        now, then = ("not there" if name is None else repr(name) for name in pairs[label])
        raise RunError(
            f"dataset = {dataset!r}: its class {label} is {now}, and {then} in the run {self.path}: put its classes "
            "back, or begin anew"
        )

    def classes(self) -> list[str]:
        """What the labels were called when the run began; nothing in records of older versions."""
        found = self.read_json("config.json").get("classes", [])
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise RunError(f"{self.path / 'config.json'} is not a run's config: classes = {str(found)[:100]}")
        return found

    def files(self) -> dict[str, str]:
        """What was in the files that the run was given (`hash_input_files`); nothing in records of older versions."""
        found = self.read_json("config.json").get("files", {})
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise RunError(f"{self.path / 'config.json'} is not a run's config: files = {str(found)[:100]}")
        return found

    def config(self) -> RunConfig:
        """The run-config this run was started with."""
        try:
            return parse_config({**self.read_json("config.json")["config"]})
        except (ConfigError, KeyError, TypeError) as error:
            newer = ", or another version's" if str(error).startswith("unknown key") else ""
            raise RunError(f"{self.path / 'config.json'} is not a run's config{newer}: {error}") from None

    def environment(self) -> dict[str, Any]:
        """What the run ran on."""
        try:
            return dict(self.read_json("config.json")["environment"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / 'config.json'} is not a run's config: {error}") from None

    def rounds(self) -> list[dict[str, Any]]:
        """The recorded rounds, up to the first line that is not its round's; one cut short by a crash is left out."""
        return self._recorded().records

    def rounds_from(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The rounds recorded behind a place in their file, and the place to look from next time.

        Whoever follows a run then reads every record once, or again from the first where rounds were taken back
        (`truncate_rounds`) and the place is no longer between two of them.
        """
        found = self._recorded(offset)
        return found.records, found.offset

    def _recorded(self, offset: int = 0) -> RoundLog:
        path = self.path / "rounds.jsonl"
        with read_errors_as_run_error(path):
            return read_records(path, offset) if path.exists() else RoundLog()

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add one finished round."""
        path = self.path / "rounds.jsonl"
        with errors_naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate_rounds(self, count: int) -> None:
        """Drop the records after ``count``: rounds that no checkpoint covers are done again on resume."""
        found = self._rounds_at_least(count, f"the checkpoint is of round {count}")[:count]
        lines = "".join(json.dumps(record) + "\n" for record in found)
        atomic_write(self.path / "rounds.jsonl", lines.encode())

    def _rounds_at_least(self, count: int, why: str) -> list[dict[str, Any]]:
        found = self._recorded()
        self._refuse_fewer(found, count, why)
        return found.records

    def _refuse_fewer(self, found: RoundLog, count: int, why: str) -> None:
        if len(found.records) < count:
            whole, line = counted(len(found.records), "whole record"), len(found.records) + 1
            flaw = f" ({found.error})" if found.error else ""
            raise RunError(f"{self.path / 'rounds.jsonl'} holds {whole}, but {why}: mend line {line}{flaw}")

    def checked_rounds(self) -> list[dict[str, Any]]:
        """The recorded rounds, of which none that has a line or that its own summary counts may be lost."""
        count = self._rounds_by_summary()  # first: a run at work writes it last
        found = self._recorded()
        self._refuse_fewer(found, count, f"summary.json counts {counted(count, 'round')}")
        self._refuse_fewer(found, found.lines, f"has {counted(found.lines, 'line')}")
        return found.records

    def _rounds_by_summary(self) -> int:
        """How many rounds the summary counts, none before there is one."""
        if not (self.path / "summary.json").exists():
            return 0
        try:
            return int(self.summary()["rounds"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"{self.path / 'summary.json'} is not a run's summary: {error}") from None

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint; a reader sees the old one or the new one, never a part."""
        write_checkpoint(self.path / "checkpoint.safetensors", replace(checkpoint, run=self.identity()))

    def load_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or ``None`` if the run died before its first."""
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        try:
            checkpoint = read_checkpoint(path)
        except ValueError as error:
            raise RunError(str(error)) from None
        if checkpoint.run and (self.path / "identity").exists() and checkpoint.run != self.identity():
            raise RunError(f"{path} is of another run: put back the run's own, or begin anew")
        return checkpoint

    def save_model(self, arrays: Arrays) -> None:
        """Write the final model."""
        write_arrays(self.path / "model.safetensors", arrays)

    def load_model(self) -> Arrays:
        """The final model's state dict."""
        self._refuse_record()
        path = self.path / "model.safetensors"
        if not path.exists():
            why = "it was pruned" if (self.path / "summary.json").exists() else "the run has not finished"
            raise RunError(f"{self.path} has no model.safetensors: {why}")
        try:
            return read_arrays(path)[0]
        except ValueError as error:
            raise RunError(str(error)) from None

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the run in a few numbers."""
        self.write_json("summary.json", summary)

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers."""
        return dict(self.read_json("summary.json"))

    def is_record(self) -> bool:
        """Whether this is the whole record of a run: listing.py writes its rounds last."""
        return (self.path / "rounds.jsonl").exists()

    def save_service(self, stats: Mapping[str, Any]) -> None:
        """Note where the shared generator stands."""
        self.write_json("service.json", stats)

    def service(self) -> dict[str, Any]:
        """Where the shared generator stood last."""
        return dict(self.read_json("service.json"))
