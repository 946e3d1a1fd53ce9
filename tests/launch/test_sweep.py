"""Sweeps: a killed sweep continues with what is left; invalid input is rejected before any run starts."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_runs import write_run
from rich.console import Console
from runners import black_bank, command, fedeas, run_in_process
from waiting import PausedRun, wait_until

from fedeas_flwr.commands.sweep import print_results
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.config import KEYS, parse_config
from fedeas_flwr.launch.sweep import cell_name, make_sweep, points
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]
DOCUMENTED = [
    shlex.split(line)[1:]
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.S)
    for line in block.splitlines()
]
"""The commands of docs/sweeps.md; the first is the sweep that these tests kill and look at."""


# ------------------------------------------------------------------------------------------ killed half way


@dataclass
class KilledSweep:
    """Kill a sweep and run it again; return what was observed."""

    place: Path
    killed_child: str
    orphan: str
    rounds_then: list[str]
    started_then: dict[str, int]
    again: subprocess.CompletedProcess[str]

    @property
    def folder(self) -> Path:
        return self.place / "runs" / "grid"


def lines(folder: Path) -> list[str]:
    path = folder / "rounds.jsonl"
    return path.read_text().splitlines(keepends=True) if path.exists() else []


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> KilledSweep:
    place = tmp_path_factory.mktemp("sweep")
    (place / "conf").symlink_to(ROOT / "conf")
    held = PausedRun(place / "held", 4)
    first = subprocess.Popen(command(*DOCUMENTED[0]), cwd=place, env=held.environment, stdout=subprocess.DEVNULL)
    folders = [place / "runs" / "grid" / f"policy-none_seed-{seed}" for seed in (1, 2)]
    wait_until(lambda: any(len(lines(folder)) >= 2 for folder in folders), "one run has two rounds")
    first.kill()
    first.wait()
    victim, orphan = sorted(folders, key=lambda folder: -len(lines(folder)))
    (process,) = RunDirectory(victim).processes()
    os.kill(process["pid"], signal.SIGKILL)
    wait_until(lambda: not RunDirectory(victim).processes(), "the killed run has ended")
    then = [line for line in lines(victim) if line.endswith("\n")]
    started = {folder.name: (folder / "run.toml").stat().st_mtime_ns for folder in folders}
    held.release()
    return KilledSweep(place, victim.name, orphan.name, then, started, fedeas(*DOCUMENTED[0], cwd=place))


@pytest.mark.slow
def test_killed_sweep_resumes_and_repeats_nothing(swept: KilledSweep) -> None:
    assert swept.again.returncode == 0, swept.again.stdout + swept.again.stderr
    assert 2 <= len(swept.rounds_then) < 6, "the run ended before the signal"
    # The killed run resumed from its checkpoint, so its earlier records are unchanged. Its last record may have had
    # no checkpoint yet.
    kept = len(swept.rounds_then) - 1
    assert lines(swept.folder / swept.killed_child)[:kept] == swept.rounds_then[:kept]
    assert f"{swept.killed_child}  resumed after round {len(swept.rounds_then)}" in swept.again.stdout
    # The other run was still running; the sweep waited for it and did not start it again.
    assert (swept.folder / swept.orphan / "run.toml").stat().st_mtime_ns == swept.started_then[swept.orphan]
    assert re.search(rf"{swept.orphan}  (is already running|skipped)", swept.again.stdout)
    for seed in (1, 2):
        assert f"policy-oversample_seed-{seed}  started" in swept.again.stdout
    for folder in swept.folder.glob("policy-*"):
        assert [record["round"] for record in RunDirectory(folder).rounds()] == list(range(1, 7))
        assert RunDirectory(folder).state() == "finished"
    assert len(list(swept.folder.glob("policy-*"))) == 4


@pytest.mark.slow
def test_finished_sweep_changes_nothing(swept: KilledSweep) -> None:
    before = {path: path.stat().st_mtime_ns for path in swept.folder.glob("policy-*/**/*")}
    done = fedeas(*DOCUMENTED[0], cwd=swept.place)
    assert done.returncode == 0 and done.stdout.count("skipped") == 4
    assert before == {path: path.stat().st_mtime_ns for path in swept.folder.glob("policy-*/**/*")}


@pytest.mark.slow
def test_sweep_results_equal_the_summaries_of_its_runs(swept: KilledSweep) -> None:
    record = json.loads((swept.folder / "sweep.json").read_text())
    assert record["grid"] == {"policy": ["none", "oversample"], "seed": [1, 2]}
    summaries = [RunDirectory(swept.folder / f"policy-oversample_seed-{seed}").summary() for seed in (1, 2)]
    point = record["points"][1]
    assert (point["policy"], point["finished"], point["runs"]) == ("oversample", 2, 2)
    a, b = (summary["last_20"] for summary in summaries)
    assert point["last_20"]["mean"] == pytest.approx((a + b) / 2)
    assert point["last_20"]["sd"] == pytest.approx(abs(a - b) / 2**0.5)
    assert f"{100 * (a + b) / 2:.1f} ± {100 * abs(a - b) / 2**0.5:.1f}" in swept.again.stdout
    with (swept.folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [f"policy-{p}_seed-{s}" for p in ("none", "oversample") for s in (1, 2)]
    assert float(rows[2]["peak"]) == summaries[0]["peak"]
    assert rows[0]["state"] == "finished" and rows[0]["rounds_done"] == "6"


@pytest.mark.slow
def test_sweep_rejects_another_config_but_not_more_seeds(swept: KilledSweep) -> None:
    args = [word.replace("rounds=6", "rounds=9") for word in DOCUMENTED[0]]
    done = fedeas(*args, cwd=swept.place)
    assert (done.returncode, done.stdout) == (2, "") and "holds another sweep, with rounds = 6, not 9" in done.stderr
    base = json.loads((swept.folder / "sweep.json").read_text())["config"]
    with pytest.raises(RunError, match="another sweep, over policy, seed, not seed"):
        make_sweep(base, ["seed=1"], swept.folder)._check_same()
    make_sweep(base, ["policy=none", "seed=1,2,3"], swept.folder)._check_same()


@pytest.mark.slow
@pytest.mark.parametrize("args", DOCUMENTED[1:], ids=" ".join)
def test_documented_runs_commands_work(swept: KilledSweep, tmp_path: Path, args: list[str]) -> None:
    shutil.copytree(swept.folder, tmp_path / "runs" / "grid")
    done = fedeas(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = {
        "ls": "policy-oversample_seed-2",
        "show": "local-epochs",
        "csv": "round,accuracy,",
        "prune": "pruned 4 runs",
        "rm": "removed 1 run,",
    }
    assert expected[args[1]] in done.stdout


# --------------------------------------------------------------------------------------------------- grid


def base(**changes: object) -> dict[str, object]:
    return {"clients": 4, "rounds": 3, "backend": "inline", **changes}


MISTAKES = {
    "unknown key": (["polcy=none"], ["polcy", "policy"]),
    "bad value": (["policy=none", "beta=1,-1"], ["beta = -1"]),
    "bad word": (["policy"], ["policy", "key=value"]),
    "no value": (["seed="], ["seed", "''"]),
    "twice": (["seed=1,2,1"], ["seed=1", "twice"]),
    "the same in other args": (["alpha=0.1,0.10"], ["alpha=0.1", "twice"]),
    "key twice": (["seed=1", "seed=2"], ["seed", "twice"]),
    "a folder of one's own": (["run-dir=/tmp/a,/tmp/b"], ["run-dir", "itself"]),
    "no clients": (["clients=4,0"], ["clients = 0"]),
    "a strategy's own, without it": (["fedprox-mu=0.1,1", "seed=1,2"], ["fedprox-mu=0.1,1.0", "no run", "identical"]),
    "a budget's, without one": (["policy=none,full-balance", "beta=3,6"], ["beta=3.0,6.0", "no run"]),
    "nothing": ([], ["--grid"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_grid_is_one_line_before_any_run(tmp_path: Path, name: str) -> None:
    args, parts = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        make_sweep(base(), args, tmp_path / "s")
    assert all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("given", "args"),
    [
        ({"dataset": "cifar10"}, ["generator=bank:A,bank:B"]),
        ({"min-batch": 40}, ["batch-size=64,128"]),
        ({"total": 50}, ["policy=uniform,waterfill"]),
        ({"evaluation": "federated"}, ["protocol=paper"]),
    ],
)
def test_common_keys_may_be_invalid_without_the_grid(tmp_path: Path, given: dict[str, object], args: list[str]) -> None:
    sweep = make_sweep(base(**given), args, tmp_path)
    sweep.open()
    make_sweep(base(**given), args, tmp_path).open()
    (key,) = given
    assert [cell.config.to_user_dict()[key] for cell in sweep.cells] == [given[key]] * len(sweep.cells)


@pytest.mark.parametrize("args", [["policy=none,fedeas", "beta=3,6"], ["fedprox-mu=0.1"], ["actors=1,2"]])
def test_grid_may_hold_keys_that_only_some_runs_use(tmp_path: Path, args: list[str]) -> None:
    assert make_sweep(base(), args, tmp_path).cells


def test_sweep_with_one_invalid_combination_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"min-batch = 40 must be at most batch-size = 32"):
        make_sweep(base(), ["min-batch=2,40", "batch-size=32,64"], tmp_path / "s")
    with pytest.raises(ConfigError, match="unknown key 'polcy'"):
        make_sweep(base(polcy="none"), ["seed=1"], tmp_path / "s")


@pytest.mark.parametrize(("key", "value"), [("run-dir", "/tmp/mine"), ("resume", True)])
def test_sweep_rejects_run_dir_and_resume(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} = {value!r}: a sweep"):
        make_sweep(base(**{key: value}), ["seed=1"], tmp_path / "s")


def test_invalid_grid_on_the_command_line_creates_nothing(tmp_path: Path) -> None:
    done = fedeas("sweep", str(ROOT / "conf/quickstart.toml"), "--grid", "policy=none,magic", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "magic" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value", ["../../etc", "/etc/passwd", "..", ".", "", "a\nb", "bank:/x/../../y", "x" * 400, "~", "-rf", "a\0b", "ü"]
)
def test_run_names_stay_inside_the_sweep_folder(tmp_path: Path, value: str) -> None:
    name = cell_name({"generator": value, "seed": 1})
    assert re.fullmatch(r"generator-[A-Za-z0-9.+_-]+", name) and len(name) < 255
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()


def test_similar_values_have_distinct_run_names(tmp_path: Path) -> None:
    values = ["a/b", "a-b", "a//b", "a:b", "x" * 99, "x" * 98]
    assert len({cell_name({"generator": value}) for value in values}) == len(values)
    sweep = make_sweep(base(), ["generator=../up,/abs", "beta=1,2"], tmp_path / "s")
    assert all(Path(cell.config.run_dir).parent == tmp_path / "s" for cell in sweep.cells)
    assert len(sweep.cells) == 4


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            ("momentum=0.9", "--grid", "strategy=fedavg,scaffold"),
            "momentum = 0.9: must be 0 with strategy = 'scaffold'",
        ),
        (("--grid", "strategy=fedavg,fedmix"), "disclose-mean-images"),
        (("--grid", "clients=4,1000"), "there can be 143 clients at most"),
        (("--grid", "device=cpu,cuda"), "cuda"),
        (("policy=none", "--grid", "dataset=digits,cifar10"), "dataset cifar10 was not found"),
        (("policy=none", "--grid", "dataset=digits,own:/nowhere"), "dataset: '/nowhere' is not there"),
        (("--grid", "data-dir=/nowhere", "dataset=cifar10", "policy=none"), "data-dir = '/nowhere': no such folder"),
        (("--grid", "generator=builtin,/nowhere"), "generator: there is no /nowhere/unet/config.json"),
        (("--grid", "generator=builtin,bank:/nowhere"), "generator: there is no bank '/nowhere'"),
        (("--grid", "policy=none,fedeas", "generator=sd-turbo:/nowhere"), "sd-turbo"),
        (("sampler=ddim", "--grid", "sampler-steps=250,300"), "sampler-steps: 300 is not allowed with ddim"),
        (("--grid", "model=small-cnn,nowhere:net"), "model: 'nowhere:net' cannot be imported"),
        (("model=resnet18", "stem=3x3", "--grid", "weights=none,/no.safetensors"), "weights: there is no file '/no"),
        (("--grid", "ray-address=,127.0.0.1:1"), "ray-address = '127.0.0.1:1': cannot connect"),
    ],
)
def test_sweep_with_one_invalid_run_is_rejected_at_start(tmp_path: Path, args: tuple[str, ...], why: str) -> None:
    done = run_in_process("sweep", str(ROOT / "conf/quickstart.toml"), *args, "--out", str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (2, "") and why in done.stderr
    assert not (tmp_path / "s").exists()


def test_sweep_with_too_small_bank_is_rejected_at_start(tmp_path: Path) -> None:
    bank = black_bank(tmp_path / "bank.npz", [18] * 9 + [10])
    args = (f"generator={bank}", "--grid", "beta=1,6", "--out", str(tmp_path / "s"))
    done = run_in_process("sweep", str(ROOT / "conf/quickstart.toml"), *args)
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "s").exists()
    why = "has 10 images of class '9', but a client needs 18 different ones"
    assert done.stderr == f"error: generator: {bank} {why}\n"


def test_finished_sweep_does_not_need_the_dataset(tmp_path: Path) -> None:
    args = ("policy=none", "rounds=2", "dataset=own:/nowhere", "--grid", "seed=1", "--out", str(tmp_path / "s"))
    keys = {"clients": 10, "policy": "none", "rounds": 2, "dataset": "own:/nowhere", "threshold": 0.9}
    write_run(tmp_path / "s" / "seed-1", [0.1, 0.2], **keys)
    done = run_in_process("sweep", str(ROOT / "conf/quickstart.toml"), *args)
    assert done.returncode == 0 and "seed-1  skipped" in done.stdout, done.stderr


def test_sweep_continues_after_a_key_was_added(tmp_path: Path) -> None:
    sweep = make_sweep(base(), ["seed=1"], tmp_path)
    sweep.open()
    path = tmp_path / "sweep.json"
    record = json.loads(path.read_text())
    del record["config"]["min-batch"]
    path.write_text(json.dumps(record))
    make_sweep(base(), ["seed=1"], tmp_path).open()
    del record["config"]["rounds"]  # its default differs from this sweep's value
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match="holds another sweep, with rounds = 20, not 3"):
        make_sweep(base(), ["seed=1"], tmp_path).open()


def test_record_is_read_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = make_sweep(base(), ["seed=1"], tmp_path).cells
    assert cell.reached() == {"rounds": 0}
    run = write_run(cell.run.path, [0.1, 0.2], finished=False)
    reads: list[Path] = []
    checked = RunDirectory.checked_rounds
    monkeypatch.setattr(RunDirectory, "checked_rounds", lambda self: reads.append(self.path) or checked(self))
    assert [cell.reached()["final"] for _ in range(3)] == [0.2, 0.2, 0.2] and len(reads) == 1
    run.append_round({**run.rounds()[1], "round": 3, "accuracy": 0.3})
    assert [cell.reached()["final"] for _ in range(3)] == [0.3, 0.3, 0.3] and len(reads) == 2
    (run.path / "rounds.jsonl").write_text("{}\n")
    assert "fix line 1 (round = null, must be 1)" in cell.reached()["damage"] and len(reads) == 3


def test_sweep_folder_with_another_run_is_rejected(tmp_path: Path) -> None:
    sweep = make_sweep(base(), ["seed=1"], tmp_path)
    RunDirectory.start(sweep.cells[0].config.with_changes(alpha=0.5), {})
    with pytest.raises(RunError, match=r"holds another run, with alpha = 0\.5, not 0\.1"):
        sweep.open()


def test_runs_with_relative_data_path_are_recognised(tmp_path: Path) -> None:
    """A run records the absolute path."""
    sweep = make_sweep(base(dataset="own:mine.npz", policy="none"), ["seed=1"], tmp_path)
    RunDirectory.start(sweep.cells[0].config.with_changes(dataset=f"own:{tmp_path}/mine.npz"), {})
    sweep.open()
    start = {"task": "generator", "policy": "none", "generator-training.start": "models/public"}
    trained = make_sweep(base(**start), ["seed=1"], tmp_path / "trained")
    recorded = {**trained.cells[0].config.to_user_dict(), "generator-training.start": f"{tmp_path}/models/public"}
    RunDirectory.start(parse_config(recorded), {})
    trained.open()
    other = make_sweep(base(dataset="cifar10", policy="none"), ["seed=1"], tmp_path / "other")
    RunDirectory.start(other.cells[0].config.with_changes(dataset="digits"), {})
    with pytest.raises(RunError, match="holds another run, with dataset = 'digits', not 'cifar10'"):
        other.open()


def test_points_by_hand() -> None:
    def row(policy: str, seed: int, last_20: float | None, state: str = "finished") -> dict[str, object]:
        return {
            "policy": policy,
            "seed": seed,
            "state": state,
            "last_20": last_20,
            "peak": last_20,
            "images": 10 * seed,
        }

    rows = [
        row("a", 1, 0.5),
        row("a", 2, 0.7),
        row("a", 3, 0.1, "failed"),
        row("b", 1, 0.4),
        row("c", 1, None, "waiting"),
    ]
    a, b, c = points(rows, {"policy": ["a", "b", "c"], "seed": [1, 2, 3]})
    assert a["last_20"] == {"mean": pytest.approx(0.6), "sd": pytest.approx(statistics.stdev([0.5, 0.7]))}
    assert (a["finished"], a["runs"], a["images"]["mean"]) == (2, 3, 15)
    assert b["last_20"] == {"mean": 0.4, "sd": None}
    assert c["peak"] == {"mean": None, "sd": None}


def test_images_that_differ_by_seed_show_their_spread(tmp_path: Path) -> None:
    sweep = make_sweep(base(), ["policy=none,fedeas", "seed=1,2"], tmp_path)
    for cell, images in zip(sweep.cells, (0, 0, 1151, 1179), strict=True):
        write_run(cell.run.path, [0.5] * cell.config.rounds, images=images, **cell.values)
    text = io.StringIO()
    print_results(sweep, Console(file=text, width=120))
    assert "1,165 ± 20" in text.getvalue() and " 0 ± 0" not in text.getvalue()


def test_result_columns_do_not_clash_with_keys(tmp_path: Path) -> None:
    sweep = make_sweep(base(), ["rounds=2,3"], tmp_path)
    assert set(sweep.cells[0].result()) & set(KEYS) == {"rounds"}
    assert sweep.cells[1].result()["rounds"] == 3
