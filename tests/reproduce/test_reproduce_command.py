"""`fedeas reproduce`: it reads committed runs, runs missing ones and resumes interrupted ones."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import runners
from records import record
from rich.console import Console
from runners import start_interruptible
from test_reproduce import ROOT, TWENTY
from waiting import LONG, PausedRun, wait_until

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.launch import prepare, sweep_jobs
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN, all_cells, cell
from fedeas_flwr.reproduce.items import ITEMS
from fedeas_flwr.reproduce.missing_runs import archive_finished_runs
from fedeas_flwr.reproduce.results import find_results
from fedeas_flwr.runs.directory import RunDirectory

fedeas, run_in_process = partial(runners.fedeas, "reproduce"), partial(runners.run_in_process, "reproduce")


def test_committed_runs_fill_their_cells_and_others_are_missing(tmp_path: Path) -> None:
    args = ["table1", "gamma", "--scale", "full", "--runs", str(ROOT / "results"), "--out", str(tmp_path / "out")]
    done = run_in_process(*args, "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    table = answer["items"][0]
    there = {value["cell"]: value for value in table["values"] if value["ours"] is not None}
    assert set(there) >= {f"{DEFAULT_COLUMN}/{m}" for m in ("fedavg", "fedeas", "missing-only", "uniform")}
    assert there[f"{DEFAULT_COLUMN}/fedavg"]["seeds"] == [1, 2, 3]
    fedavg = [
        RunDirectory(ROOT / "results" / "cifar10-k100-a0.1" / f"none-s{s}").summary()["last_20"] for s in (1, 2, 3)
    ]
    assert there[f"{DEFAULT_COLUMN}/fedavg"]["ours"] == pytest.approx(100 * sum(fedavg) / 3)
    assert abs(there[f"{DEFAULT_COLUMN}/fedeas"]["difference"]) < 3
    assert all(budget["met"] for budget in answer["budgets"]) and len(answer["budgets"]) >= 3
    assert "c100-k20-a0.1/full-balance seed 1" in table["missing"]
    command = "to run them: fedeas reproduce table1 gamma --scale full --run"
    missing = re.search(rf"Missing: (\d+) runs of \d+ cells; {command}", done.stderr)
    asked = sum(len(set(cell(name).seeds("full")) & set(value["seeds"])) for name, value in there.items())
    gamma = set(answer["items"][1]["missing"]) - set(table["missing"])  # missing in this form of Γ̂
    assert missing and int(missing[1]) + asked == 84 + len(gamma)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "results.csv").read_text())))
    assert len(rows) == len({(row["cell"], row["measure"]) for row in rows}) >= 76
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "name what to reproduce: all"),
        (["--columns", DEFAULT_COLUMN], "name what to reproduce: all"),
        (["table9"], "'table9': must be all, claims, fig1, fig2, fig3, table1"),
        (["table2"], "'table2': say ablation (the paper's Table 2) or peak (supplement, E)"),
        (
            [BETA_SWEEP_COLUMN],
            f"'{BETA_SWEEP_COLUMN}' is a column: add an item, such as table1, or give '{BETA_SWEEP_COLUMN}/*' for "
            f"its cells",
        ),
        (
            ["gamma", "--columns", DEFAULT_COLUMN],
            f"'gamma' has nothing in {DEFAULT_COLUMN}, only in {BETA_SWEEP_COLUMN}",
        ),
        (["fig1", DEFAULT_COLUMN], f"'fig1' has nothing in {DEFAULT_COLUMN}, only in {BETA_SWEEP_COLUMN}"),
        (
            [f"{BETA_SWEEP_COLUMN}/*", "--columns", DEFAULT_COLUMN],
            f"'{BETA_SWEEP_COLUMN}/*' has no cell in {DEFAULT_COLUMN}",
        ),
        (
            [f"{BETA_SWEEP_COLUMN}/fedeas-sd-turbo"],
            f"'{BETA_SWEEP_COLUMN}/fedeas-sd-turbo' has no cell at scale smoke: SD-Turbo cannot",
        ),
        (["c1000-*"], "cell 'c1000-*/*': there is none of that name"),
        (["all", "--scale", "half"], "scale = 'half': must be smoke or full"),
        (["all", "--columns", "c10-k5-a1"], "column 'c10-k5-a1': must be one of"),
        (["all", "--runs", "nowhere"], "runs = 'nowhere': no such folder"),
        (["all", "--set", "precison=bf16"], "unknown key 'precison' = 'bf16'; did you mean 'precision'?"),
        (["all", "--set", "seed=2"], "--set seed=2: every cell sets this key; see --seeds"),
        (
            ["all", "--set", "policy=none"],
            "--set policy=none: every cell sets this key; choose among the cells of --list",
        ),
        (["all", "--set", "alpha=0.5"], "--set alpha=0.5: every cell sets this key"),
        (["all", "--set", "protocol=clean"], "--set protocol=clean: every cell sets this key"),
        (["drawn", "--set", "guidance=2"], "--set guidance=2: c100-k100-a0.1/fedeas-logsnr-guided sets its own"),
        ([f"{BETA_SWEEP_COLUMN}/fedeas*", "--set", "beta=5"], "--set beta=5: every cell sets this key; tables compare"),
        (["table1", "--set", "partition-seed=7"], "--set partition-seed=7: every cell sets this key; tables compare"),
        (["all", "--seeds", "one"], "seeds = 'one': must be different integers"),
        (["all", "--seeds=-1", "--no-run"], "seeds = '-1': must be different integers of at least 0"),
        (["all", "--seeds", "1,2,1", "--no-run"], "seeds = '1,2,1': must be different integers of at least 0"),
        (["--into", "nowhere.md"], "into = 'nowhere.md': no such file"),
        (["all", "--no-run", "--export", "ex"], "--export 'ex': remove the option, or give --run"),
        (["all", "--scale", "full", "--export", "ex"], "--export 'ex': remove the option, or give --run"),
        (["all", "--format", "xml"], "format = 'xml': must be table or json"),
    ],
)
def test_invalid_arguments_are_one_line_and_exit_code_2(tmp_path: Path, args: list[str], says: str) -> None:
    done = run_in_process(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and says in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_list_shows_every_cell_with_its_run_command(tmp_path: Path) -> None:
    done = run_in_process("--list", "--scale", "full", "--set", "precision=bf16", "--format", "json", cwd=tmp_path)
    listed = {row["cell"]: row for row in json.loads(done.stdout)}
    assert set(listed) == {one.name for one in all_cells()}
    command = listed["c10-k20-a0.3/fedeas+scaffold"]["command"]
    assert command.startswith("fedeas run conf/cifar10-k20.toml alpha=0.3 strategy=scaffold precision=bf16")
    assert listed[f"{DEFAULT_COLUMN}/uniform"]["seeds"] == [1, 2, 3]
    few = json.loads(run_in_process("--list", "--columns", DEFAULT_COLUMN, "--format", "json", cwd=tmp_path).stdout)
    assert [row["cell"] for row in few] == [name for name in listed if name.startswith(f"{DEFAULT_COLUMN}/")]


def test_finished_run_keeps_its_model_but_no_checkpoint(tmp_path: Path) -> None:
    args, run = (
        [f"{BETA_SWEEP_COLUMN}/scaffold", "--out", "out"],
        RunDirectory(tmp_path / "out/runs" / f"{BETA_SWEEP_COLUMN}_scaffold_s1"),
    )
    args += ["--set", "rounds=2"]
    done = run_in_process(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not run.load_checkpoint() and not list((run.path / "clients").rglob("*.*"))
    assert run.load_model() and len(run.rounds()) == run.summary()["rounds"] == 2
    again = run_in_process(*args, cwd=tmp_path)
    assert again.returncode == 0 and "at once" not in again.stdout


def test_missing_runs_are_run_once_and_exported(tmp_path: Path, digits_generator: Path) -> None:
    args = [
        f"{BETA_SWEEP_COLUMN}/fedavg",
        f"{BETA_SWEEP_COLUMN}/linear",
        "--out",
        "out",
        "--export",
        "records",
        "--set",
        "rounds=2",
    ]
    done = run_in_process(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs, " in done.stdout and f"{BETA_SWEEP_COLUMN}_linear_s1  finished" in done.stdout
    exported = [RunDirectory(tmp_path / "records" / BETA_SWEEP_COLUMN / name) for name in ("fedavg-s1", "linear-s1")]
    assert [len(run.rounds()) for run in exported] == [2, 2]
    began = [
        (tmp_path / "out" / "runs" / f"{BETA_SWEEP_COLUMN}_{m}_s1" / "rounds.jsonl").stat().st_mtime
        for m in ("fedavg", "linear")
    ]
    again = run_in_process(*args[:4], *args[6:], "--no-run", "--format", "json", cwd=tmp_path)
    values = json.loads(again.stdout)["items"][0]["values"]
    assert values[0]["ours"] == pytest.approx(100 * exported[0].summary()["last_20"])
    once_more = run_in_process(*args, cwd=tmp_path)
    assert once_more.returncode == 0 and "at once" not in once_more.stdout
    now = [
        (tmp_path / "out" / "runs" / f"{BETA_SWEEP_COLUMN}_{m}_s1" / "rounds.jsonl").stat().st_mtime
        for m in ("fedavg", "linear")
    ]
    assert began == now


def test_printed_command_runs_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a {} b").mkdir()
    args = [
        f"{BETA_SWEEP_COLUMN}/fedav*",
        BETA_SWEEP_COLUMN,
        "--seeds",
        "2",
        "--set",
        "rounds=2",
        "--runs",
        "a {} b",
        "--out",
        "o{u}t",
    ]
    printed = run_in_process(*args, "--no-run", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    command = printed.stdout.partition("to run them: ")[2].partition("\n")[0]
    assert shlex.split(command)[:3] == ["fedeas", "reproduce", f"{BETA_SWEEP_COLUMN}/fedav*"]
    on_page = (tmp_path / "o{u}t" / "index.md").read_text().partition("To do them: `")[2].partition("`")[0]
    assert on_page == command.replace(f"'{BETA_SWEEP_COLUMN}/fedav*'", f"{BETA_SWEEP_COLUMN}/fedavg")
    done = run_in_process(*shlex.split(on_page)[2:], cwd=tmp_path)
    assert done.returncode == 0 and "Missing" not in done.stdout, done.stdout + done.stderr
    (run,) = (RunDirectory(path) for path in (tmp_path / "o{u}t" / "runs").glob("*/"))
    assert (run.config().seed, len(run.rounds())) == (2, 2)


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (
            ["table1", BETA_SWEEP_COLUMN],
            f"table1 --scale full --run --columns {BETA_SWEEP_COLUMN} --set data-dir=DIR --set generator=DIR "
            f"--set backend=inline",
        ),
        (["table1"], "table1 --scale full --run --set data-dir=DIR --set backend=inline"),
        (
            [
                f"{DEFAULT_COLUMN}/fedeas",
                f"{BETA_SWEEP_COLUMN}/uniform-sd-turbo",
                "--set",
                "data-dir=/data",
                "--set",
                "precision=bf16",
            ],
            f"{DEFAULT_COLUMN}/fedeas {BETA_SWEEP_COLUMN}/uniform-sd-turbo --scale full --run --set "
            f"data-dir=/data --set precision=bf16 "
            "--set generator=DIR --set backend=inline",
        ),
        (
            [f"{DEFAULT_COLUMN}/fedavg"],
            f"{DEFAULT_COLUMN}/fedavg --scale full --run --set data-dir=DIR --set backend=inline",
        ),
        (
            ["gamma", "--set", "generator=/g", "--set", "backend=ray", "--set", "data-dir=/d", "--jobs", "2"],
            "gamma --scale full --run --jobs 2 --set generator=/g --set backend=ray --set data-dir=/d",
        ),
    ],
)
def test_printed_command_has_given_values_and_placeholders(tmp_path: Path, args: list[str], command: str) -> None:
    printed = run_in_process(*args, "--scale", "full", cwd=tmp_path)
    assert printed.stdout.partition("to run them: ")[2].startswith(f"fedeas reproduce {command}\n"), printed.stdout
    page = (tmp_path / "runs" / "reproduce-full" / "index.md").read_text()
    assert f"To do them: `fedeas reproduce {command}`" in page


def test_output_names_default_folders_if_generators_differ(tmp_path: Path) -> None:
    looked_in = (
        "The runs use the generators in generators/cifar10 and generators/cifar100; "
        "`fedeas train-generator` trains them."
    )
    printed = run_in_process("table1", "--scale", "full", cwd=tmp_path)
    assert f"--set backend=inline\n{looked_in}\n" in printed.stdout
    assert f"--set backend=inline`\n\n{looked_in}" in (tmp_path / "runs" / "reproduce-full" / "index.md").read_text()
    given = run_in_process("table1", BETA_SWEEP_COLUMN, "--scale", "full", cwd=tmp_path)
    assert "--set generator=DIR" in given.stdout and "use the generators in" not in given.stdout


def test_printed_command_after_a_failure_keeps_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedeas_flwr.commands.sweep.run_sweep", lambda *args: [])
    failed = run_in_process(f"{BETA_SWEEP_COLUMN}/fedavg", "--export", "records", cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stdout.partition("to run them: ")[2].startswith(
        f"fedeas reproduce {BETA_SWEEP_COLUMN}/fedavg --scale smoke --run --export records\n"
    )


@pytest.mark.parametrize("exporting", [True, False])
def test_unarchived_finished_run_loses_its_checkpoint(tmp_path: Path, exporting: bool) -> None:
    run = RunDirectory(record(tmp_path / "runs" / "unheard", f"{DEFAULT_COLUMN}/scaffold", 1, TWENTY))
    for name in ("checkpoint.safetensors", "model.safetensors", "clients/3/state-000200.safetensors"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_bytes(b"arrays")
    results = find_results(all_cells(), "full", [run.path.parent], {})
    archive_finished_runs(results, run.path.parent, tmp_path / "records" if exporting else None)
    left = {path.name for path in run.path.rglob("*") if path.is_file()}
    assert "model.safetensors" in left and not left & {"checkpoint.safetensors", "state-000200.safetensors"}
    assert (tmp_path / "records").exists() == exporting and len(run.rounds()) == 200


def test_unarchived_finished_run_is_exported_by_next_command(tmp_path: Path) -> None:
    """Ctrl-C may arrive between the end of a run and its export."""
    runs, records = tmp_path / "runs", tmp_path / "records"
    record(runs / "unheard", f"{DEFAULT_COLUMN}/fedavg", 1, TWENTY)
    record(tmp_path / "elsewhere" / "known", f"{DEFAULT_COLUMN}/fedavg", 2, TWENTY)
    results = find_results(all_cells(), "full", [tmp_path / "elsewhere", runs], {})
    place = records / "cifar10-k100-a0.1"
    archive_finished_runs(results, runs, records)
    assert [path.name for path in place.iterdir()] == ["fedavg-s1"]
    assert [r["accuracy"] for r in RunDirectory(place / "fedavg-s1").rounds()] == TWENTY
    (place / "fedavg-s1" / "rounds.jsonl").unlink()  # as if the export had been interrupted
    archive_finished_runs(results, runs, records)
    stamp = (place / "fedavg-s1" / "rounds.jsonl").stat().st_mtime_ns
    archive_finished_runs(results, runs, records)
    assert (place / "fedavg-s1" / "rounds.jsonl").stat().st_mtime_ns == stamp


def test_missing_generator_or_dataset_is_one_line_at_start(tmp_path: Path) -> None:
    args = ["table1", "--scale", "full", "--run", "--set", "weights=none"]
    lacking = run_in_process(*args, cwd=tmp_path)
    assert (lacking.returncode, lacking.stdout) == (2, "")
    assert lacking.stderr.startswith("error: generator: there is no generators/cifar10/unet/config.json")
    lacking = run_in_process(f"{BETA_SWEEP_COLUMN}/fedavg", *args[1:], cwd=tmp_path)
    assert lacking.returncode == 2 and lacking.stderr.startswith("error: dataset cifar10 was not found")
    assert lacking.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_export_does_not_overwrite_records_of_other_runs(tmp_path: Path) -> None:
    """Neither runs that are still missing, which is checked before they start, nor a finished one overwrite them."""
    record(tmp_path / "records" / BETA_SWEEP_COLUMN / "fedavg-s1", f"{DEFAULT_COLUMN}/fedavg", 1, TWENTY)
    args = [f"{BETA_SWEEP_COLUMN}/fedavg", "--out", "out", "--export", "records", "--set", "rounds=2"]
    done = run_in_process(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"{BETA_SWEEP_COLUMN}/fedavg-s1 holds the record of another run" in done.stderr
        and not (tmp_path / "out").exists()
    )
    ours = record(tmp_path / "runs" / "ours", f"{DEFAULT_COLUMN}/fedavg", 1, [0.987, *TWENTY[1:]])
    results = find_results(all_cells(), "full", [ours.parent], {})
    record(tmp_path / "records" / "cifar10-k100-a0.1" / "fedavg-s1", f"{DEFAULT_COLUMN}/fedavg", 1, TWENTY)
    with pytest.raises(RunError, match="holds the record of another run"):
        archive_finished_runs(results, ours.parent, tmp_path / "records")


def test_generator_is_trained_only_while_the_folder_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, trained = tmp_path / "out" / "runs", []

    def train(console: Console) -> None:
        with pytest.raises(RunError, match="another sweep is already running in"), sweep_jobs._lock_folder(runs):
            pass
        trained.append(list(runs.glob("*/")))
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "ensure_digits_generator", train)
    args = [f"{BETA_SWEEP_COLUMN}/linear", "--out", "out", "--set", "rounds=2"]
    with sweep_jobs._lock_folder(runs):
        refused = run_in_process(*args, cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, f"error: another sweep is already running in {runs}\n")
    assert trained == [], "trained although the folder is locked"
    stopped = run_in_process(*args, cwd=tmp_path)
    assert stopped.returncode == 130 and "stopped; resume with: fedeas reproduce" in stopped.stderr
    assert trained == [[]], "not trained exactly once, before the first run"


def test_builtin_generator_is_not_trained_for_runs_with_another(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Console] = []
    monkeypatch.setattr(prepare, "ensure_digits_generator", trained.append)
    monkeypatch.setattr(sweep_jobs, "_work", lambda *_: [])
    args = [f"{BETA_SWEEP_COLUMN}/linear", "--out", "out", "--set", "rounds=2"]
    for own in ([], ["--set", f"generator={digits_generator}"]):
        done = run_in_process(*args, *own, cwd=tmp_path)
        assert (done.returncode, "Missing: " in done.stdout) == (1, True), done.stderr
    assert len(trained) == 1


@pytest.mark.slow
def test_interrupted_parallel_runs_are_resumed(tmp_path: Path) -> None:
    args = [f"{BETA_SWEEP_COLUMN}/fedavg", "--seeds", "1,2,3", "--jobs", "3", "--out", "out", "--export", "records"]
    args += ["--set", "rounds=40", "--set", "checkpoint-every=50"]
    runs = [RunDirectory(tmp_path / "out" / "runs" / f"{BETA_SWEEP_COLUMN}_fedavg_s{seed}") for seed in (1, 2, 3)]
    command = [sys.executable, "-m", "fedeas_flwr", "reproduce", *args]
    first = start_interruptible(command, cwd=tmp_path, env=PausedRun(tmp_path, 30).environment)
    wait_until(lambda: all(run.rounds() for run in runs), "every run has finished a round")
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=LONG)
    assert first.returncode == 130 and "stopped; resume with: fedeas reproduce" in errors
    assert [run.processes() for run in runs] == [[], [], []]
    done = [len(run.rounds()) for run in runs]
    checkpoints = [run.load_checkpoint() for run in runs]
    assert [checkpoint.round for checkpoint in checkpoints if checkpoint] == done
    assert max(done) < 40, "all runs ended before the signal"
    records = [(run.path / "rounds.jsonl").read_text() for run in runs]
    again = fedeas(*args, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    for run, before in zip(runs, records, strict=True):
        assert (run.path / "rounds.jsonl").read_text().startswith(before), "rounds were repeated"
        assert len(run.rounds()) == 40
    exported = sorted(path.name for path in (tmp_path / "records" / BETA_SWEEP_COLUMN).iterdir())
    assert exported == ["fedavg-s1", "fedavg-s2", "fedavg-s3"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_items_at_smoke_scale_with_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    began = time.monotonic()
    done = fedeas("all", "--format", "json", "--out", "out", cwd=tmp_path)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert [item["name"] for item in answer["items"]] == [name for name, item in ITEMS.items() if item.in_smoke]
    assert not any(item["missing"] or item["note"] for item in answer["items"])
    assert answer["budgets"] and all(budget["met"] for budget in answer["budgets"])
    document = (tmp_path / "out" / "index.html").read_text()
    assert document.count('src="data:image/svg+xml;base64,') == 7
    print(f"{seconds:.0f} s")
