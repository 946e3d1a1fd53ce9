"""The run directory: checkpoints, round records, atomic writes, and export."""

import errno
import json
import os
import platform
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_runs import write_run
from ordinary_user import ordinary_user
from runners import run_in_process, small
from safetensors import numpy as safetensors_numpy
from safetensors.torch import save, save_file

from fedeas_flwr.common import project
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.files import atomic_folder, atomic_write
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import parse_config
from fedeas_flwr.runs.checkpoints import Checkpoint, StrategyState
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export
from fedeas_flwr.runs.metrics import (
    accuracy_drops,
    describe_gaps,
    images_not_made,
    rounds_to_threshold,
    summarise,
    took_no_steps,
)


def config(folder: Path, **changes: object):
    return parse_config({"run-dir": str(folder), "clients": 4, **{k.replace("_", "-"): v for k, v in changes.items()}})


def record(number: int, accuracy: float, generated: int = 0) -> dict[str, object]:
    seconds = {"clients": 1.0}
    return {"round": number, "accuracy": accuracy, "generated": generated, "failures": [], "seconds": seconds}


def checkpoint() -> Checkpoint:
    return Checkpoint(
        round=3,
        trainable={"w": np.arange(6, dtype=np.float32).reshape(2, 3).T, "scalar": np.float32(2.5)},
        buffers={"steps": np.array(7, dtype=np.int64)},
        accepted={0: 1, 12: 3},
        generated={0: 9},
        strategy=StrategyState({"m_t/000000/w": np.ones(2, np.float64)}, {"clipping_norm": 0.1 + 0.2}),
    )


def test_checkpoint_round_trip_keeps_dtypes_and_shapes(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    assert run.load_checkpoint() is None
    run.save_checkpoint(checkpoint())
    back = run.load_checkpoint()
    assert back is not None
    assert (back.round, back.accepted, back.generated) == (3, {0: 1, 12: 3}, {0: 9})
    assert np.array_equal(back.trainable["w"], checkpoint().trainable["w"])
    assert back.trainable["scalar"].shape == ()
    assert back.buffers["steps"].dtype == np.int64
    assert back.buffers["steps"].shape == ()
    assert back.strategy.numbers == {"clipping_norm": 0.1 + 0.2}
    assert back.strategy.arrays["m_t/000000/w"].dtype == np.float64
    assert set(back.trainable) == {"w", "scalar"}


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_checkpoint_is_rejected_by_name(tmp_path: Path, damage: bytes | None) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.save_checkpoint(checkpoint())
    path = run.path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    with pytest.raises(RunError, match=r"checkpoint\.safetensors cannot be read"):
        run.load_checkpoint()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"state": "{"},
        {"state": "[]"},
        {"state": '{"round": 3}'},
        {"state": '{"round": "three", "accepted": {}, "generated": {}}'},
        {"state": '{"round": 3, "accepted": [], "generated": {}}'},
        {"state": "[" * 100_000},
    ],
)
def test_checkpoint_without_server_state_is_rejected(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    (run.path / "checkpoint.safetensors").write_bytes(safetensors_numpy.save({"trainable/w": np.ones(2)}, metadata))
    with pytest.raises(RunError, match=r"checkpoint\.safetensors cannot be read: .*; start a new run"):
        run.load_checkpoint()


def test_checkpoint_without_permission_is_not_called_missing(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.save_checkpoint(checkpoint())
    (run.path / "checkpoint.safetensors").chmod(0)
    with ordinary_user(), pytest.raises(RunError, match=r"checkpoint\.safetensors cannot be read: Permission denied"):
        run.load_checkpoint()


def test_damaged_earlier_checkpoint_does_not_replace_the_last(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.save_checkpoint(checkpoint())
    run.save_checkpoint(checkpoint())
    (run.path / "checkpoint-previous.safetensors").write_bytes(b"garbage")
    with pytest.raises(RunError, match="has no earlier checkpoint that can be read: resume without --previous"):
        run.return_to_previous_checkpoint()
    assert run.load_checkpoint() is not None


def test_missing_checkpoint_is_no_new_run_if_there_is_an_earlier_one(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.save_checkpoint(checkpoint())
    run.save_checkpoint(checkpoint())
    (run.path / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match=r"--previous` continues from the one before it, round 3"):
        run.load_checkpoint()


def test_finished_run_without_last_checkpoint_can_resume_from_the_one_before(tmp_path: Path) -> None:
    given = config(tmp_path / "r")
    run = RunDirectory.start(given, {})
    run.save_checkpoint(checkpoint())
    run.save_checkpoint(checkpoint())
    run.save_summary({})
    (run.path / "checkpoint.safetensors").unlink()
    resumed = given.with_changes(resume=True)
    with pytest.raises(RunError, match="--previous"):
        run.check_ready(resumed)
    run._check_same(resumed)
    (run.path / "checkpoint-previous.safetensors").unlink()
    with pytest.raises(RunError, match="has finished and was pruned"):
        run.check_ready(resumed)


def test_missing_identity_is_named(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    (run.path / "identity").unlink()
    with pytest.raises(RunError, match=r"r/identity, which the run's files refer to, is missing: restore it"):
        run.facts(to_resume=True)


def test_damaged_model_is_rejected_by_name(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.save_model({"w": np.arange(3)})
    assert run.load_model()["w"].tolist() == [0, 1, 2]
    (run.path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read"):
        run.load_model()
    (run.path / "model.safetensors").write_bytes(save({"w": torch.zeros(3, dtype=torch.bfloat16)}))
    with pytest.raises(RunError, match=r"model\.safetensors cannot be read: data type 'bfloat16' not understood"):
        run.load_model()


def test_start_does_not_overwrite_a_run(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.append_round(record(1, 0.5))
    with pytest.raises(RunError, match="already holds a run"):
        RunDirectory.start(config(tmp_path / "r"), {})
    assert len(run.rounds()) == 1


def test_resume_with_another_config_names_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    run = RunDirectory.start(config(folder), {})
    run.append_round(record(1, 0.5))
    with pytest.raises(RunError, match=r"beta = 7\.0, but .* beta = 6\.0"):
        RunDirectory.start(config(folder, resume=True, beta=7.0), {})
    RunDirectory.start(config(folder, resume=True, rounds=40, backend="inline", actors=2), {})
    with pytest.raises(RunError, match="not a run directory"):
        RunDirectory.start(config(tmp_path / "other", resume=True), {})


def test_resumed_run_keeps_its_recorded_inputs(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.record_inputs("digits", ["a", "b"], {"model": "12"}, "few images")
    RunDirectory.start(config(tmp_path / "r", resume=True), {"python": "4"})
    assert (run.classes(), run.files(), run.generator_warning()) == (["a", "b"], {"model": "12"}, "few images")
    assert run.environment() == {"python": "4"}
    run.record_inputs("digits", ["a", "b"], {"bank": "34"})  # the model's file is missing now
    assert run.files() == {"model": "12", "bank": "34"}
    with pytest.raises(RunError, match=r"its class 1 is 'c', but 'b' in the run"):
        run.record_inputs("digits", ["a", "c"], {})


def test_stop_reason_is_that_of_the_last_round_only(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    run.append_round(record(1, 0.5))
    run.save_summary({"rounds": 1, "stopped": "enough"})
    assert run.stop_reason() == "enough"
    run.append_round(record(2, 0.5))  # resumed without the callback
    assert run.stop_reason() == ""


def test_resume_without_a_number_of_clients_takes_the_recorded_one(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r", clients=0), {})
    run.record_clients(4)
    run.check_ready(config(tmp_path / "r", clients=0, resume=True))
    with pytest.raises(RunError, match=r"clients = 5, but .* clients = 4"):
        run.check_ready(config(tmp_path / "r", clients=5, resume=True))


def test_truncated_line_is_ignored_and_truncate_drops_rounds(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    for number in (1, 2, 3):
        run.append_round(record(number, number / 10))
    with (run.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    assert [r["round"] for r in run.rounds()] == [1, 2, 3]
    run.truncate_rounds(2)
    assert [r["round"] for r in run.rounds()] == [1, 2]
    assert json.loads((run.path / "rounds.jsonl").read_text().splitlines()[1])["round"] == 2


def test_rounds_from_returns_each_record_once(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    assert run.rounds_from(0) == ([], 0)
    for number in (1, 2):
        run.append_round(record(number, 0.5))
    found, place = run.rounds_from(0)
    assert [r["round"] for r in found] == [1, 2]
    assert run.rounds_from(place) == ([], place)
    with (run.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, ')
    assert run.rounds_from(place) == ([], place), "an incomplete line was read"
    run.truncate_rounds(1)
    run.append_round(record(2, 0.75))
    run.append_round(record(3, 0.75))
    found, _ = run.rounds_from(place + 5)
    assert [(r["round"], r["accuracy"]) for r in found] == [(1, 0.5), (2, 0.75), (3, 0.75)]


def test_unwritable_run_dir_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match="cannot be written"):
        RunDirectory.start(config(tmp_path / "file" / "r"), {})


def test_write_error_names_the_target_not_the_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    target = tmp_path / "shut" / "new"
    with ordinary_user(), pytest.raises(PermissionError) as of_file:
        atomic_write(target, b"x")
    with ordinary_user(), pytest.raises(PermissionError) as of_folder, atomic_folder(target):
        pass
    assert of_file.value.filename == of_folder.value.filename == str(target)
    with pytest.raises(FileNotFoundError) as inside, atomic_folder(tmp_path / "new") as folder:
        (folder / "a" / "b").write_text("x")
    assert inside.value.filename == str(tmp_path / "new" / "a" / "b")
    with pytest.raises(FileNotFoundError) as elsewhere, atomic_folder(tmp_path / "new"):
        (tmp_path / "other").read_text()
    assert elsewhere.value.filename == str(tmp_path / "other"), "paths outside the folder must stay as they are"


def test_disk_error_in_safetensors_becomes_an_os_error(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found, atomic_folder(tmp_path / "unet") as folder:
            save_file({"w": torch.zeros(1 << 16)}, folder / "w")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.value.filename == str(tmp_path / "unet") and found.value.errno == errno.EFBIG


def test_full_disk_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    (run.path / "rounds.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as of_record:
        run.append_round(record(1, 0.5))
    assert of_record.value.filename == str(run.path / "rounds.jsonl")
    noise = run.noise()
    (run.path / "noise-key").unlink()
    (run.path / "noise-key").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as of_noise:
        noise.draws(1, [b"reply"])
    assert of_noise.value.filename == str(run.path / "noise-key")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left") as of_folder, atomic_folder(tmp_path / "new"):
        full()
    assert of_folder.value.filename == str(tmp_path / "new")
    with pytest.raises(OSError, match="refused") as of_network, atomic_folder(tmp_path / "new"):
        raise OSError(errno.ECONNREFUSED, "Connection refused")
    assert of_network.value.filename is None
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as of_file:
        atomic_write(tmp_path / "file", b"x")
    assert of_file.value.filename == str(tmp_path / "file")


def test_summary_by_hand() -> None:
    rounds = [record(i, a, 10 * i) for i, a in enumerate([0.1] * 5 + [0.5] * 10 + [0.9] * 10, start=1)]
    summary = summarise(rounds, threshold=0.5)
    assert summary["last_20"] == pytest.approx(0.7)
    assert (summary["peak"], summary["peak_round"], summary["final"]) == (0.9, 16, 0.9)
    assert (summary["rounds_to_threshold"], summary["total_generated"]) == (6, 250)
    assert summary["seconds"] == {"clients": 25.0}
    assert rounds_to_threshold([0.1, 0.2], 0.5) is None


def test_accuracy_drop_is_from_the_median_of_the_13_rounds_around_it() -> None:
    accuracies = [0.5] * 14 + [0.6, 0.3] + [0.6] * 9  # around round 16: five times 0.5, seven times 0.6
    assert accuracy_drops(accuracies) == {16: pytest.approx(0.3)}
    early = [accuracy_drops([0.5] * before + [0.3] + [0.5] * 12) for before in (9, 10)]
    assert early == [{}, {11: pytest.approx(0.2)}]  # rounds up to the tenth do not count


def test_images_not_made_are_those_of_a_clients_last_round() -> None:
    limited = [{"client": client, "images": 10 * client} for client in (1, 2, 3)]
    rounds = [
        {"clients": [1, 2, 3], "not_made": limited[::-1]},
        {"clients": [2]},  # no limit any more
        {"clients": [3], "not_made": [{"client": 3, "images": 7}]},
    ]
    assert images_not_made(rounds) == [{"client": 1, "images": 10}, {"client": 3, "images": 7}]


def test_only_classifiers_that_reply_can_lack_steps() -> None:
    assert took_no_steps({"steps": 0, "clients": [2], "accuracy": 0.5})
    assert not took_no_steps({"steps": 0, "clients": [2], "loss": 0.5})  # a generator's
    assert not took_no_steps({"steps": 0, "clients": [], "accuracy": 0.5})
    assert not took_no_steps({"steps": 3, "clients": [2], "accuracy": 0.5})


@pytest.mark.parametrize(
    ("failed", "not_joined", "told"),
    [
        ({}, {}, ""),
        ({2: [3]}, {}, "1 reply missing in 1 of 10 rounds (client 3 in round 2)"),
        (
            {1: [0, 3], 2: [3], 3: [3], 7: [3]},
            {},
            "5 replies missing in 4 of 10 rounds (client 3 in rounds 1–3, 7; client 0 in round 1)",
        ),
        ({1: [5, 5]}, {}, "2 replies missing in 1 of 10 rounds (client 5 in round 1)"),  # of the plan and of the round
        ({}, {1: 2, 2: 1}, "2 clients not joined in rounds 1, 2"),
        (
            {1: list(range(8)), 2: [7]},
            {4: 1},
            "9 replies missing in 2 of 10 rounds (client 7 in rounds 1, 2; client 0 in round 1; client 1 in round 1; "
            "client 2 in round 1; client 3 in round 1; client 4 in round 1; 2 more clients); "
            "1 client not joined in round 4",
        ),
    ],
)
def test_gaps_by_hand(failed: dict[int, list[int]], not_joined: dict[int, int], told: str) -> None:
    rounds = [
        {
            **record(number, 0.5),
            "failures": [{"client": client, "reason": "offline"} for client in failed.get(number, [])],
            **({"not_joined": not_joined[number]} if number in not_joined else {}),
        }
        for number in range(1, 11)
    ]
    assert describe_gaps(rounds) == told
    assert summarise(rounds, 0.5).get("gaps", "") == told


@pytest.mark.parametrize(
    ("generator", "kept"),
    [
        ("/home/me/ddpm", "ddpm"),
        ("bank:/home/me/images.npz", "bank:images.npz"),
        ("/home/me/10:30/ddpm", "ddpm"),
        ("sd-turbo:/home/me/10:30/turbo", "sd-turbo:turbo"),
        ("builtin", "builtin"),
    ],
)
def test_export_omits_weights_and_paths(tmp_path: Path, generator: str, kept: str) -> None:
    """The kind of generator is kept, because it is part of the experiment."""
    paths = {"data_dir": "/home/me/data", "weights": "/home/me/start.safetensors"}
    run = RunDirectory.start(config(tmp_path / "r", generator=generator, **paths), {"device": "cpu"})
    run.append_round(record(1, 0.5))
    run.save_model({"w": np.zeros(3)})
    run = RunDirectory.start(run.config().with_changes(resume=True), {"device": "cpu"})  # and was resumed
    run.save_summary(summarise(run.rounds(), 0.5))
    run.set_status("finished")
    export(run, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "rounds.jsonl", "summary.json"]
    text = "".join(p.read_text() for p in (tmp_path / "out").iterdir())
    assert "/home/me" not in text
    assert str(tmp_path) not in text
    copy = RunDirectory(tmp_path / "out")
    assert (copy.config().generator, copy.config().weights) == (kept, "start.safetensors")
    assert copy.rounds() == run.rounds()
    assert copy.environment() == {"device": "cpu"}


REASONS = {
    "FileNotFoundError: there is no /home/me/ddpm/unet/config.json; it must be one": "FileNotFoundError: there is no …",
    "OSError: '/home/J. Doe/x' cannot be read": "OSError: …",
    "error: C:\\Users\\me\\x is missing": "error: …",
    "lost me@gpu7 (1)": "lost …",
    "ConnectionError: 10.1.2.3 refused": "ConnectionError: …",
    "ConnectionError: gpu7.lab.example:9092 refused": "ConnectionError: …",
    "ConnectionError: [fe80::1ff:fe23:4567:890a] refused": "ConnectionError: …",
    f"Flower: {platform.node()} died": "Flower: …",
    "array layer1.0.bn1.weight holds NaN or infinity": "array layer1.0.bn1.weight holds NaN or infinity",
    "no reply within 45 s": "no reply within 45 s",
    "generated = 10, but its plan cannot exceed 6": "generated = 10, but its plan cannot exceed 6",
}


def test_export_leaves_out_paths_hosts_and_addresses(tmp_path: Path) -> None:
    own = {"dataset": "own:/home/me/pets", "generator": "bank:pets.npz", "ray_address": "10.1.2.3:6379"}
    run = RunDirectory.start(config(tmp_path / "r", **own), {"device": "cpu"})
    failures = [{"client": client, "reason": reason} for client, reason in enumerate(REASONS)]
    run.append_round({**record(1, 0.5), "failures": failures})
    run.save_summary(summarise(run.rounds(), 0.5))
    run.set_status("finished")
    for _ in range(2):  # the second time over its earlier record
        export(run, tmp_path / "out")
    copy = RunDirectory(tmp_path / "out")
    assert (copy.config().dataset, copy.config().ray_address) == ("own:pets", "")
    assert [failure["reason"] for failure in copy.rounds()[0]["failures"]] == list(REASONS.values())
    assert [failure["reason"] for failure in run.rounds()[0]["failures"]] == list(REASONS)


def finished(folder: Path, *accuracies: float, **changes: Any) -> RunDirectory:
    """Write a finished run with these accuracies and return it."""
    run = RunDirectory.start(config(folder, **changes), {})
    for number, accuracy in enumerate(accuracies, start=1):
        run.append_round(record(number, accuracy))
    run.save_summary(summarise(run.rounds(), 0.5))
    run.set_status("finished")
    return run


def test_export_leaves_out_paths_in_the_reason_for_a_stop(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [0.5])
    run.save_summary({**run.summary(), "stopped": "enough, see /home/me/notes.txt"})
    export(run, tmp_path / "record")
    assert RunDirectory(tmp_path / "record").summary()["stopped"] == "enough, see …"


def test_export_replaces_an_earlier_record_of_the_same_run(tmp_path: Path) -> None:
    run = finished(tmp_path / "r", 0.5)
    first = run_in_process("export", str(run.path), str(tmp_path / "out"))
    assert (first.returncode, first.stdout) == (0, f"exported 1 round → {tmp_path}/out\n")
    run.append_round(record(2, 0.6))
    run.set_status("running", pid=os.getpid())
    with pytest.raises(RunError, match="is running, not finished: there is nothing to export"):
        export(run, tmp_path / "out")  # its summary is that of one round
    run.set_status("finished")
    again = run_in_process("export", str(run.path), str(tmp_path / "out"))
    assert (again.returncode, again.stdout) == (
        0,
        f"exported 2 rounds → {tmp_path}/out, replacing its earlier record\n",
    )
    assert RunDirectory(tmp_path / "out").rounds() == run.rounds()


def test_export_rejects_unfinished_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5], rounds=2, finished=False)
    with pytest.raises(RunError, match=r"run is .*, not finished: there is nothing to export"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kept", "damage"), [(0, ""), (1, '{"round": 2, "accu'), (1, "\0\n{}\n"), (2, "")])
def test_export_rejects_run_with_lost_rounds(tmp_path: Path, kept: int, damage: str) -> None:
    run = finished(tmp_path / "r", 0.5, 0.6, 0.7)
    path = run.path / "rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]) + damage)
    done = run_in_process("export", str(run.path), str(tmp_path / "out"))
    why = f"{path} holds {counted(kept, 'valid record')}, but summary.json counts 3 rounds: fix line {kept + 1}"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {why}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("summary", ["{}", '{"rounds": null}', '{"rounds": "many"}'])
def test_export_rejects_invalid_summary(tmp_path: Path, summary: str) -> None:
    run = finished(tmp_path / "r", 0.5)
    (run.path / "summary.json").write_text(summary)
    with pytest.raises(RunError, match=r"summary\.json is not a run's summary: "):
        export(run, tmp_path / "out")


@pytest.mark.parametrize("damaged", ["{}", "[]", '{"config": []}', '{"config": {"rounds": "many"}}'])
def test_export_rejects_invalid_config(tmp_path: Path, damaged: str) -> None:
    run = finished(tmp_path / "r", 0.5)
    (run.path / "config.json").write_text(damaged)
    done = run_in_process("export", str(run.path), str(tmp_path / "out"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{run.path / 'config.json'} is not a " in done.stderr
    assert not (tmp_path / "out").exists()


def test_export_does_not_overwrite_other_files(tmp_path: Path) -> None:
    export(finished(tmp_path / "other", 0.5, 0.7, seed=7, policy="none"), tmp_path / "record")
    run = finished(tmp_path / "r", 0.5, 0.6)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for folder, why in (
        ("record", "holds the record of another run (none, fedavg, digits, seed 7, 2 rounds): name another folder"),
        ("r", "is a run directory"),
        ("other", "is a run directory"),
        ("mine", "is not empty and holds no record"),
    ):
        done = run_in_process("export", str(run.path), str(tmp_path / folder))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"error: {tmp_path / folder} {why}")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "record" / "rounds.jsonl").write_text("damaged")
    assert run_in_process("export", str(run.path), str(tmp_path / "record")).returncode == 2


def test_unknown_key_in_config_hints_at_another_version(tmp_path: Path) -> None:
    run = RunDirectory.start(config(tmp_path / "r"), {})
    kept = run.facts()
    run.write_json("config.json", {**kept, "config": {**kept["config"], "to-come": 1}})
    with pytest.raises(RunError, match="or is from another version: unknown key 'to-come' = 1"):
        run.config()


def test_code_digest_changes_with_content_and_names(tmp_path: Path) -> None:
    """Changed lines and renamed files change the digest; compiled files do not."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner" / "b.py").write_text("y = 2\n")
    first = project.code_digest(tmp_path)
    (tmp_path / "a.pyc").write_text("compiled")
    assert project.code_digest(tmp_path) == first
    (tmp_path / "inner" / "b.py").write_text("y = 3\n")
    second = project.code_digest(tmp_path)
    (tmp_path / "inner" / "b.py").rename(tmp_path / "inner" / "c.py")
    assert len({first, second, project.code_digest(tmp_path)}) == 3
    assert project.describe_environment("cpu")["code"] == project.code_digest()


DAMAGES = {
    "doubled": (lambda a, b, c: [a, b, b, c], 2, "fix line 3 (round = 2, must be 3)"),
    "doubled at the end": (lambda a, b, c: [a, b, c, c], 3, "fix line 4 (round = 3, must be 4)"),
    "swapped": (lambda a, b, c: [b, a, c], 0, "fix line 1 (round = 2, must be 1)"),
    "left out": (lambda a, b, c: [a, c], 1, "fix line 2 (round = 3, must be 2)"),
    "a word": (
        lambda a, b, c: [a, b.replace('"round": 2', '"round": "2"'), c],
        1,
        'fix line 2 (round = "2", must be 2)',
    ),
    **{
        f"accuracy {value}": (
            lambda a, b, c, value=value: [a, b.replace('"accuracy": 0.2', f'"accuracy": {value}'), c],
            1,
            f"fix line 2 (accuracy = {value}, must be from 0 to 1)",
        )
        for value in ("59.3", "-0.1", "NaN", "Infinity", "null", "true", '"0.2"', "[0.2]")
    },
}


@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_checked_rounds_names_the_first_invalid_line(tmp_path: Path, damage: str, summary: bool) -> None:
    run = write_run(tmp_path / "r", [0.1, 0.2, 0.3], finished=summary)
    record = run.path / "rounds.jsonl"
    apply_damage, good, error = DAMAGES[damage]
    lines = apply_damage(*record.read_text().splitlines(keepends=True))
    record.write_text("".join(lines))
    assert len(run.rounds()) == good
    few = "summary.json counts 3 rounds" if summary and good < 3 else f"has {len(lines)} lines"
    with pytest.raises(RunError) as refused:
        run.checked_rounds()
    assert str(refused.value) == f"{record} holds {counted(good, 'valid record')}, but {few}: {error}"


def test_checked_rounds_without_summary_finds_lost_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [0.1, 0.2, 0.3], finished=False)
    record = run.path / "rounds.jsonl"
    first, second, third = record.read_text().splitlines(keepends=True)
    for damaged in (first + second[:9] + "\n" + third, first + "\n" + third, first + "[]\n"):
        record.write_text(damaged)
        with pytest.raises(RunError, match=r"holds 1 valid record, but has \d lines: fix line 2$"):
            run.checked_rounds()
    record.write_text(first + second + third[:9])  # as after a crash
    run.checked_rounds()
    record.unlink()
    run.checked_rounds()


def test_resume_accepts_a_changed_key_that_the_run_ignores(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "r", policy="none"), {})
    run.set_status("interrupted")
    run.check_ready(run.config().with_changes(resume=True, beta=9.0))
    with pytest.raises(RunError, match=r"alpha = 0\.5, but the run to resume has alpha = "):
        run.check_ready(run.config().with_changes(resume=True, alpha=0.5))
