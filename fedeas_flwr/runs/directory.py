"""Read and write a run directory: config, rounds, checkpoint, model and summary.

A crash loses nothing that was written. files.py lists the files of a run directory. status.py reads and
writes the run's status.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors.numpy import save

from fedeas_flwr.common.checked import read_arrays, seal, unseal
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.files import atomic_path, atomic_write, errors_naming, existing_part, remove_unfinished
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.common.randomness import Noise
from fedeas_flwr.common.text import MAX_LINE, counted, one_line
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_keys import identity
from fedeas_flwr.runs.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from fedeas_flwr.runs.files import CHECKPOINT, PREVIOUS_CHECKPOINT, WARNING, holds_others_files
from fedeas_flwr.runs.round_records import RoundLog, read_records
from fedeas_flwr.runs.status import RunStatus, read_errors_as_run_error


class RunDirectory(RunStatus):
    """The folder of one run."""

    @classmethod
    def start(cls, config: RunConfig, environment: Mapping[str, Any]) -> RunDirectory:
        """Create the folder of a new run, or open the folder of a run to resume."""
        run = cls(Path(config.run_dir))
        run._refuse_another(config)
        remove_unfinished(run.path)
        with run._write_errors_as_run_error():
            run.path.mkdir(parents=True, exist_ok=True)
            kept = run.facts() if config.resume else {}
            run._write_facts({**kept, "config": config.to_user_dict(), "environment": dict(environment)})
        run.set_status("running")
        return run

    def check_ready(self, config: RunConfig, previous: bool = False) -> None:
        """Raise `RunError` if the run cannot start or resume here; call this before anything is prepared.

        With ``previous``, the run resumes from the checkpoint before its last one, which may be damaged.
        """
        self.refuse_if_it_runs()
        self._refuse_another(config)
        with self._write_errors_as_run_error(), TemporaryFile(dir=existing_part(self.path)):
            pass
        load = self.load_previous_checkpoint if previous else self.load_checkpoint
        checkpoint = load() if config.resume else None
        if checkpoint is not None:
            self._rounds_until(checkpoint.round)

    def is_complete(self, config: RunConfig) -> bool:
        """Return whether the run has finished with this config, which asks for no further round."""
        if self.state() != "finished" or not (self.path / "model.safetensors").exists():
            return False
        self._check_same(config)
        return config.rounds <= self.config().rounds

    def _refuse_another(self, config: RunConfig) -> None:
        """Raise `RunError` if the folder holds files of the user or a run that this config does not resume."""
        if config.resume:
            self._check_same(config)
        elif self.has_rounds():
            raise RunError(f"run-dir = '{self.path}' already holds a run: resume it or name another folder")
        elif holds_others_files(self.path):
            raise RunError(f"run-dir = '{self.path}' is not empty and holds no run; name a new folder")

    @contextmanager
    def _write_errors_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"run-dir = '{self.path}' cannot be written: {error.strerror or error}") from None

    def _refuse_record(self) -> None:
        """Raise `RunError` if the folder is an exported record, since such a record has no weights."""
        of_a_run = ("status.json", CHECKPOINT, "model.safetensors")
        if (self.path / "summary.json").exists() and not any((self.path / name).exists() for name in of_a_run):
            raise RunError(f"{self.path} is an exported record without weights: use the run directory of this record")

    def _check_same(self, config: RunConfig) -> None:
        self._refuse_record()
        self.facts(to_resume=True)
        started = self.config()
        free = ("rounds",) if config.clients else ("rounds", "clients")
        before, now = identity(started, free), identity(config, free)
        if changed := next((key for key in now if before.get(key) != now[key]), None):
            old, new = started.to_user_dict()[changed], config.to_user_dict()[changed]
            raise RunError(f"{changed} = {new!r}, but the run to resume has {changed} = {old!r} in {self.path}")
        depends = "learning-rate-schedule = 'cosine'" if config.learning_rate_schedule == "cosine" else ""
        depends = "learning rate" if config.task == "generator" else depends
        if config.trains_generator and not config.generator_training.rounds:
            depends = "generator's training (generator-training.rounds = 0)"
        if depends and config.rounds != started.rounds:
            raise RunError(
                f"rounds = {config.rounds}: must be {started.rounds}, as in the run to resume in {self.path}; its "
                f"{depends} depends on it"
            )
        checkpoints = [(self.path / name).exists() for name in (CHECKPOINT, PREVIOUS_CHECKPOINT)]
        if (self.path / "summary.json").exists() and not any(checkpoints):
            raise RunError(f"{self.path} has finished and was pruned: there is no checkpoint to resume from")
        if config.rounds < len(self.rounds()):
            raise RunError(f"rounds = {config.rounds}, but the run to resume has already done {len(self.rounds())}")

    def identity(self) -> str:
        """Return the run's unique name, which it keeps when it is resumed or its folder is moved."""
        path = self.path / "identity"
        if not path.exists():
            atomic_write(path, uuid.uuid4().hex.encode())
        return path.read_text(encoding="utf-8")

    def noise(self, begun: bool = False) -> Noise:
        """Return the noise source of `dp`; raise `RunError` if the run has ``begun`` and its noise key is missing."""
        path = self.path / "noise-key"
        if begun and not path.exists():
            raise RunError(
                f"{path} is missing. The noise already added to the run's models cannot be computed without it; "
                "start a new run"
            )
        try:
            with read_errors_as_run_error(path):
                return Noise(path)
        except ValueError as error:
            raise RunError(str(error)) from None

    def record_clients(self, clients: int) -> None:
        """Record the number of clients of the federation."""
        found = self.facts()
        found["config"]["clients"] = clients
        self._write_facts(found)

    def record_inputs(
        self, dataset: str, classes: Sequence[str], files: Mapping[str, str], generator_warning: str = ""
    ) -> None:
        """Record the class names of the dataset, the hashes of the input files and a warning of the generator.

        A resumed run must have the same class names. An input file may be missing, since the images made from it are
        in the cache.
        """
        self.check_classes(dataset, classes)
        self.check_own_inputs(files)
        found: dict[str, Any] = {"classes": classes, "files": {**self.files(), **files}}
        found |= {WARNING: generator_warning} if generator_warning else {}
        self._write_facts({**self.facts(), **found})

    def check_classes(self, dataset: str, classes: Sequence[str]) -> None:
        """Raise `RunError` if the class names differ from those that the run started with."""
        before = self.classes()
        if before in ([], list(classes)):
            return
        pairs = list(zip_longest(classes, before))
        label = next(label for label, (now, then) in enumerate(pairs) if now != then)
        now, then = ("missing" if name is None else repr(name) for name in pairs[label])
        raise RunError(
            f"dataset = {dataset!r}: its class {label} is {now}, but {then} in the run {self.path}: "
            "restore its classes, or start a new run"
        )

    def check_own_inputs(self, found: Mapping[str, str]) -> None:
        """Raise `RunError` if the user's own images or code (`hash_own_inputs`) differ from those of the run so far.

        With `data-change` = "replan" the images may.
        """
        before, config = self.files(), self.config()
        for key in ("dataset", "policy", "strategy", "model", "partition"):
            if before.get(key, found.get(key)) == found.get(key, before.get(key)):
                continue
            if key == "dataset" and config.data_change == "replan":
                continue
            what = "images or labels" if key == "dataset" else "source"
            raise RunError(
                f"{key} = {config.to_user_dict()[key]!r}: its {what} changed since the run {self.path} began: "
                "undo the change, or start a new run"
            )

    def classes(self) -> list[str]:
        """Return the class names that the run started with; empty in records of older versions."""
        found = self.facts().get("classes", [])
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise RunError(f"{self.path / 'config.json'} is not a run's config: classes = {str(found)[:100]}")
        return found

    def files(self) -> dict[str, str]:
        """Return the hashes of the run's input files (`hash_input_files`); empty in records of older versions."""
        found = self.facts().get("files", {})
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise RunError(f"{self.path / 'config.json'} is not a run's config: files = {str(found)[:100]}")
        return found

    def generator_warning(self) -> str:
        """Return the warning of the run's generator; empty if there was none."""
        return str(self.facts().get(WARNING, ""))

    def config(self) -> RunConfig:
        """Return the run-config that this run was started with."""
        try:
            return parse_config({**self.facts()["config"]})
        except (ConfigError, KeyError, TypeError) as error:
            newer = ", or is from another version" if str(error).startswith("unknown key") else ""
            raise RunError(f"{self.path / 'config.json'} is not a run's config{newer}: {error}") from None

    def environment(self) -> dict[str, Any]:
        """Return the machine and package versions that the run used."""
        try:
            return dict(self.facts()["environment"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.path / 'config.json'} is not a run's config: {error}") from None

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        self.write_json("config.json", seal(facts, self.identity()))

    def facts(self, to_resume: bool = False) -> dict[str, Any]:
        """Return the content of config.json; without a digest, only if it is not ``to_resume`` the run."""
        found: dict[str, Any] = self.read_json("config.json")
        try:
            return unseal(found, self.owner(), required=to_resume)
        except ValueError as error:
            reason = f"{self.path / 'config.json'} cannot be used: {error}; restore it"
            if not (self.path / "identity").exists():
                reason = f"{self.path / 'identity'}, which the run's files refer to, is missing: restore it"
            raise RunError(f"{reason}, or start a new run") from None

    def owner(self) -> str:
        """Return the run's identity; empty for an exported record, which has none and no digests either."""
        return self.identity() if (self.path / "identity").exists() else ""

    def rounds(self) -> list[dict[str, Any]]:
        """Return the recorded rounds up to the first invalid line; a line that a crash cut short is skipped."""
        return self._recorded().records

    def rounds_from(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return the rounds recorded after a byte offset, and the offset to read from next time.

        A caller that follows a run thus reads every record once. If `truncate_rounds` removed rounds and the offset is
        no longer at the start of a line, the caller gets all records again.
        """
        found = self._recorded(offset)
        return found.records, found.offset

    def _recorded(self, offset: int = 0) -> RoundLog:
        path = self.path / "rounds.jsonl"
        with read_errors_as_run_error(path):
            return read_records(path, self.owner(), offset) if path.exists() else RoundLog()

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Append the record of a finished round."""
        path = self.path / "rounds.jsonl"
        with errors_naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(seal(record, self.identity())) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def truncate_rounds(self, count: int) -> None:
        """Remove all records after the first ``count``, since a resumed run repeats the rounds after its checkpoint."""
        kept = self._rounds_until(count)
        lines = "".join(json.dumps(seal(record, self.identity())) + "\n" for record in kept)
        atomic_write(self.path / "rounds.jsonl", lines.encode())

    def _rounds_until(self, checkpoint: int) -> list[dict[str, Any]]:
        """Return the rounds up to that of the checkpoint; raise `RunError` if one is missing."""
        found = self._recorded()
        self._refuse_fewer(found, checkpoint, f"the checkpoint is of round {checkpoint}")
        return found.records[:checkpoint]

    def _refuse_fewer(self, found: RoundLog, count: int, why: str) -> None:
        if len(found.records) < count:
            valid, line = counted(len(found.records), "valid record"), len(found.records) + 1
            error = f" ({found.error})" if found.error else ""
            raise RunError(f"{self.path / 'rounds.jsonl'} holds {valid}, but {why}: fix line {line}{error}")

    def checked_rounds(self) -> list[dict[str, Any]]:
        """Return the recorded rounds; raise `RunError` if a line is invalid or a round of the summary is missing."""
        count = self._rounds_by_summary()  # read before the rounds, since a run writes the summary last
        found = self._recorded()
        self._refuse_fewer(found, count, f"summary.json counts {counted(count, 'round')}")
        self._refuse_fewer(found, found.lines, f"has {counted(found.lines, 'line')}")
        return found.records

    def _rounds_by_summary(self) -> int:
        """Return the number of rounds in the summary, 0 if there is no summary yet."""
        if not (self.path / "summary.json").exists():
            return 0
        try:
            return int(self.summary()["rounds"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"{self.path / 'summary.json'} is not a run's summary: {error}") from None

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a new checkpoint and keep the one before it; a reader never sees a part of either."""
        path = self.path / CHECKPOINT
        if path.exists():
            with atomic_path(self.path / PREVIOUS_CHECKPOINT) as temporary:
                try:
                    os.link(path, temporary)
                except OSError:  # a file system without links
                    shutil.copyfile(path, temporary)
        write_checkpoint(path, checkpoint, self.identity())

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the last checkpoint, or ``None`` if there is none yet.

        If it is damaged, `RunError` names the round of the checkpoint before it, from which the run can be resumed.
        """
        path, before = self.path / CHECKPOINT, self.path / PREVIOUS_CHECKPOINT
        if not path.exists() and not before.exists():
            return None
        try:
            return read_checkpoint(path, self.owner())
        except ValueError as error:
            previous = self.load_previous_checkpoint()
            advice = "start a new run"
            if previous is not None:
                advice = (
                    f"`fedeas resume {self.path} --previous` continues from the one before it, round {previous.round}"
                )
            raise RunError(f"{error}; {advice}") from None

    def load_previous_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint before the last one, or ``None`` if there is none that can be read."""
        try:
            return read_checkpoint(self.path / PREVIOUS_CHECKPOINT, self.owner())
        except ValueError:
            return None

    def return_to_previous_checkpoint(self) -> None:
        """Replace the last checkpoint by the one before it; clients keep the states that either needs."""
        if self.load_previous_checkpoint() is None:
            raise RunError(f"{self.path} has no earlier checkpoint that can be read: resume without --previous")
        os.replace(self.path / PREVIOUS_CHECKPOINT, self.path / CHECKPOINT)

    def save_model(self, arrays: Arrays) -> None:
        """Write the final model."""
        atomic_write(self.path / "model.safetensors", save(to_numpy(arrays)))

    def load_model(self) -> Arrays:
        """Return the state dict of the final model."""
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
        """Write the summary."""
        self.write_json("summary.json", summary)

    def summary(self) -> dict[str, Any]:
        """Return the summary."""
        return dict(self.read_json("summary.json"))

    def stop_reason(self) -> str:
        """Return why a callback stopped the run before its last round; empty if none did, or if it continued since."""
        if not (self.path / "summary.json").exists():
            return ""
        found = self.summary()
        return one_line(found.get("stopped", ""), MAX_LINE) if found.get("rounds") == len(self.rounds()) else ""

    def has_rounds(self) -> bool:
        """Return whether rounds.jsonl exists: the run has begun, or its record, where it comes last, is complete."""
        return (self.path / "rounds.jsonl").exists()

    def save_service(self, stats: Mapping[str, Any]) -> None:
        """Write the statistics of the shared generator."""
        self.write_json("service.json", stats)
