"""Run directories: their state, what `rm` removes and keeps, quickstart, and the printed tables."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_runs import write_run
from ordinary_user import ordinary_user
from rich.console import Console
from runners import SMALL, fedeas, finish, quick, run_in_process, small
from test_sweep import ROOT

from fedeas_flwr.commands import app
from fedeas_flwr.commands.quickstart import quickstart_config
from fedeas_flwr.commands.sweep import status_table
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation.client_state import ClientState, ClientStore
from fedeas_flwr.generators.cache import MANIFEST, ImageCache
from fedeas_flwr.launch import prepare
from fedeas_flwr.launch import run as run_module
from fedeas_flwr.launch.sweep import make_sweep
from fedeas_flwr.launch.sweep_jobs import SweepStatus
from fedeas_flwr.reproduce.results import find_results
from fedeas_flwr.runs import listing
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import files_of_run
from fedeas_flwr.runs.listing import check_removable, describe
from fedeas_flwr.runs.metrics import summarise


def test_state_depends_on_whether_the_process_is_alive(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    assert run.state() == "running" and [p["pid"] for p in run.processes()] == [os.getpid()]
    path = run.path / "status.json"
    found = json.loads(path.read_text())
    for change, state in (({"started": 1.0}, "interrupted"), ({"host": "another"}, "elsewhere")):
        path.write_text(json.dumps({**found, "processes": [{**found["processes"][0], **change}]}))
        assert run.state() == state and run.processes() == []


@pytest.mark.parametrize(
    "processes",
    [
        *(None, 5, [5], [None], [{"host": "another"}], {"pid": 1}, "all"),
        *([{"pid": pid, "started": 1, "host": "h"}] for pid in ("x", 0, -1, 2**31, True)),
    ],
)
def test_damaged_status_counts_as_interrupted(tmp_path: Path, processes: object) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    (run.path / "status.json").write_text(json.dumps({"status": "running", "error": "", "processes": processes}))
    assert run.registered_processes() == [] and run.state() == "interrupted"


def test_describe_ignores_files_that_disappear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "r", [0.5])
    gone = run.path / "clients" / "0" / "state-000004.safetensors"
    monkeypatch.setattr(listing, "files_of_run", lambda path: [*files_of_run(path), gone])
    found = listing.describe(run)
    assert found["rounds_done"] == 1 and found["bytes"] == sum(path.stat().st_size for path in files_of_run(run.path))


def test_rm_removes_runs_and_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "done"), {})
    run.set_status("interrupted")
    RunDirectory.start(small(tmp_path / "going"), {})  # its process is this one, which is alive
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"config": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "done")
    for bad, why in (
        ("going", "is running, in process"),
        ("other", "not a run directory"),
        ("link", "not a run directory"),
        ("nowhere", "not a run directory"),
        (".", "not a run directory"),
    ):
        with pytest.raises(RunError, match=why):
            check_removable(tmp_path / bad)
    done = run_in_process("runs", "rm", "done", "going", "--yes", cwd=tmp_path)
    assert done.returncode == 2 and "going is running" in done.stderr and len(done.stderr.splitlines()) == 1
    asked = run_in_process("runs", "rm", "done", cwd=tmp_path)
    assert asked.returncode == 2 and "--yes" in asked.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"done", "going", "other", "link"}
    assert fedeas("resume", "going", cwd=tmp_path).stderr.startswith(f"error: {tmp_path}/going is still running")
    assert run_in_process("runs", "rm", "done", "--yes", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "done").exists() and (tmp_path / "going").exists()


def test_rm_keeps_files_that_no_run_wrote(tmp_path: Path) -> None:
    outer = with_all_files(write_run(tmp_path / "precious", [0.5]))
    inner = write_run(outer.path / "later" / "inner", [0.6])
    elsewhere = tmp_path / "elsewhere" / "0"
    elsewhere.mkdir(parents=True)
    (elsewhere / "state-000001.safetensors").write_text("another's")
    (outer.path / "thesis.txt").write_text("x")
    (outer.path / "clients" / "notes.txt").write_text("y")
    (outer.path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    done = run_in_process("runs", "rm", "precious", "--yes", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[1:] == [
        f"{outer.path} stays: no run wrote clients and 3 more"
    ]
    left = {str(path.relative_to(outer.path)) for path in outer.path.rglob("*") if path.is_file()}
    of_a_run = ("config.json", "identity", "rounds.jsonl", "status.json", ".status.lock", "summary.json")
    of_inner = {f"later/inner/{name}" for name in of_a_run}
    assert left == {"thesis.txt", "clients/notes.txt", *of_inner}
    assert inner.state() == "finished" and (elsewhere / "state-000001.safetensors").exists()


def test_run_removed_while_it_is_listed_is_damaged(tmp_path: Path) -> None:
    row = describe(RunDirectory(tmp_path / "gone"))
    assert (row["state"], row["bytes"]) == ("damaged", 0)


def test_rm_of_a_run_and_one_inside_it_removes_both(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "clients" / "b", [0.6])
    with_all_files(write_run(tmp_path / "c", [0.5]))
    RunDirectory(tmp_path / "a").write_json("config.json", {"config": {}, "environment": {}})
    assert run_in_process("runs", "rm", "a", "a/clients/b", "c", "--yes", cwd=tmp_path).stdout.startswith(
        "removed 3 runs, "
    )
    assert list(tmp_path.iterdir()) == []


def test_run_named_by_several_paths_counts_once(tmp_path: Path) -> None:
    runs = [with_all_files(write_run(tmp_path / "d" / name, [0.5])) for name in ("a", "b")]
    (tmp_path / "link").symlink_to(runs[0].path)
    paths = ["d", "d/a", str(runs[0].path), "d/../d/a", "link"]
    listed = run_in_process("runs", "ls", *paths, "--format", "json", cwd=tmp_path)
    assert [row["path"] for row in json.loads(listed.stdout)] == ["d/a", "d/b"]
    pruned = run_in_process("runs", "prune", *paths, cwd=tmp_path)
    assert (pruned.returncode, pruned.stderr) == (0, "") and pruned.stdout.startswith("pruned 2 runs, ")
    removed = run_in_process("runs", "rm", *paths[1:-1], "--yes", cwd=tmp_path)
    assert removed.returncode == 0 and removed.stdout.startswith("removed 1 run, ")
    assert not runs[0].path.exists() and runs[1].path.exists()


def test_unreadable_folder_is_named_once(tmp_path: Path) -> None:
    write_run(tmp_path / "d" / "whole", [0.5])
    shut = tmp_path / "d" / "shut"
    shut.mkdir(mode=0)
    (tmp_path / "link").symlink_to(shut)
    paths = ["d", "d/shut", str(shut), "d/../d/shut", "link"]
    with ordinary_user():
        listed, reported = (run_in_process(*words, *paths, cwd=tmp_path) for words in (("runs", "ls"), ("report",)))
        found = find_results([], "full", [tmp_path / way for way in paths], {})
    shut.chmod(0o700)  # so that pytest can remove it
    assert (listed.returncode, listed.stderr) == (0, "d/shut: Permission denied\n")
    left_out = [line for line in reported.stdout.splitlines() if line.startswith("Left out")]
    assert reported.returncode == 0 and left_out == ["Left out: d/shut: Permission denied"]
    assert found.unreadable == [f"{shut}: Permission denied"]


def test_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    pruned = run_in_process("runs", "prune", "circle", cwd=tmp_path)
    assert pruned.returncode == 1 and pruned.stderr.startswith("error: circle: ") and pruned.stderr.count("\n") == 1


def test_show_prints_non_ascii_paths(tmp_path: Path) -> None:
    run = write_run(tmp_path / "été", [0.5])
    assert "été" in run_in_process("runs", "show", str(run.path)).stdout.partition("\n")[2]


def with_all_files(run: RunDirectory) -> RunDirectory:
    """Add a run's optional files: of a sweep, of Flower, of a killed writer, and a client's state; return the run."""
    for name in ("run.toml", "output.log", "flower.log", "superlink.log", ".rounds.jsonl.17-00ff.tmp"):
        (run.path / name).write_text("x")
    run.identity()
    run.noise()
    run.save_service({})
    run.save_model({})
    run.save_checkpoint(Checkpoint(1, {}, {}))
    ClientStore(run.path / "clients" / "0").save(1, ClientState(memory={"m": np.zeros(2)}), [])
    return run


def test_run_starts_only_in_a_folder_without_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "config.json").write_text('{"mine": 1}')
    refused = run_in_process(
        "run", str(ROOT / "conf" / "quickstart.toml"), f"run-dir={folder}", "backend=inline", cwd=tmp_path
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: run-dir = '{folder}' is not empty and holds no run; name a new folder\n"
    with pytest.raises(RunError, match="is not empty and holds no run"):  # as under `flwr run`
        RunDirectory.start(small(folder), {})
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    (folder / "config.json").unlink()
    RunDirectory.start(small(folder), {})  # an empty folder
    (folder / "run.toml").write_text("x")
    RunDirectory.start(small(folder), {})  # a sweep's or launcher's, before its first round


def test_temporary_file_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    """The writer was killed while it wrote config.json, before there was a run."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / ".config.json.4711-0a1b2c3d.tmp").write_text('{"conf')
    RunDirectory(folder).check_ready(small(folder))
    run = RunDirectory.start(small(folder), {})
    assert {path.name for path in run.path.iterdir()} == {"config.json", "identity", "status.json", ".status.lock"}


@pytest.fixture
def started_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return a list of a quickstart's started runs, which do not train: (policy, whether the run was resumed)."""
    found: list[tuple[str, bool]] = []

    def finish_at_once(config: RunConfig, console: Console) -> RunDirectory:
        found.append((config.policy, config.resume))
        run = RunDirectory.start(config, describe_environment("cpu"))
        for number in range(len(run.rounds()) + 1, config.rounds + 1):
            run.append_round({**ROUND, "round": number})
        run.save_summary(summarise(run.rounds(), config.threshold))
        run.set_status("finished")
        return run

    monkeypatch.setattr(prepare, "prepare", lambda config, console: config)
    monkeypatch.setattr(run_module, "launch", finish_at_once)
    return found


ROUND = {"accuracy": 0.5, "clients": [0], "failures": [], "generated": 7, "seconds": {"clients": 1.0}}


def test_quickstart_runs_what_is_missing_and_writes_the_figure(
    tmp_path: Path, started_runs: list[tuple[str, bool]]
) -> None:
    folder = tmp_path / "q"
    keys = {"clients": 10, "threshold": 0.9, "rounds": 20}
    kept = write_run(folder / "none", [0.25] * 20, **keys)
    write_run(folder / "fedeas", [0.5] * 3, policy="fedeas", finished=False, **keys)
    write_run(folder / "uniform", [], policy="uniform", finished=False, **keys)
    first = run_in_process("quickstart", "--out", str(folder))
    assert (first.returncode, first.stderr) == (0, "")
    assert started_runs == [("fedeas", True), ("uniform", False), ("missing-only", False)]
    assert (
        f"none: already finished and kept; to repeat it, first: fedeas runs rm {kept.path}" in first.stdout.splitlines()
    )
    assert " 25.0 " in first.stdout, "the kept run is missing from the table"
    picture = folder / "quickstart.png"
    picture.unlink()
    again = run_in_process("quickstart", "--out", str(folder))
    assert again.returncode == 0 and len(started_runs) == 3 and again.stdout.count("already finished") == 4
    assert picture.exists() and str(picture) in again.stdout and (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "thesis.txt").write_text("x"), "--out '{}': holds thesis.txt and no quickstart"),
        (lambda folder: (folder / "report.html").write_text("x"), "--out '{}': holds report.html and no quickstart"),
        (lambda folder: (folder / "uniform").write_text("x"), "{}/uniform' cannot be written: Not a directory"),
        (
            lambda folder: atomic_write(folder / "missing-only" / "thesis.txt", b"x"),
            "run-dir = '{}/missing-only' is not empty and holds no run; name a new folder",
        ),
        (
            lambda folder: write_run(folder / "uniform", [0.5], policy="uniform", alpha=0.5),
            "{}/uniform holds another run, with clients = 4, not 10",
        ),
        (
            lambda folder: RunDirectory.start(quickstart_config("uniform", "inline", folder), {}).set_status(
                "running", pid=os.getppid()
            ),
            "{}/uniform is still running, in process ",
        ),
        (
            lambda folder: write_run(
                folder / "uniform", [0.5] * 20, clients=10, threshold=0.9, policy="uniform"
            ).truncate_rounds(9),
            "{}/uniform/rounds.jsonl holds 9 valid records, but summary.json counts 20 rounds: fix line 10",
        ),
    ],
)
def test_quickstart_rejects_a_folder_with_other_files(
    tmp_path: Path, started_runs: list[tuple[str, bool]], damage: Callable[[Path], object], says: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    damage(folder)
    before = sorted(folder.rglob("*"))
    refused = run_in_process("quickstart", "--out", str(folder))
    assert refused.returncode == 2 and says.format(folder) in refused.stderr and refused.stderr.count("\n") == 1
    assert started_runs == [] and sorted(folder.rglob("*")) == before


def test_quickstart_prints_how_to_resume_after_ctrl_c(
    tmp_path: Path, started_runs: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: RunConfig, console: Console) -> RunDirectory:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "launch", stop)
    named = run_in_process("quickstart", "--out", "a b", cwd=tmp_path)
    assert (named.returncode, named.stderr) == (130, "stopped; resume with: fedeas quickstart --out 'a b'\n")
    assert run_in_process("quickstart", cwd=tmp_path).stderr == "stopped; resume with: fedeas quickstart\n"


@pytest.mark.parametrize("keys", [{"strategy": "scaffold"}, {"dp": "server-fixed"}])
def test_files_of_run_lists_every_file_of_a_run(tmp_path: Path, keys: dict[str, str]) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=1, **keys))
    assert {path for path in run.path.rglob("*") if path.is_file()} == set(files_of_run(run.path))
    assert (run.path / "clients").is_dir() and (run.path / "flower.log").exists()
    assert (run.path / "noise-key").exists() == ("dp" in keys)


@pytest.fixture
def output_at_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command and returns its output on a terminal of ``columns`` columns."""

    def shown(*words: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", "25")  # without it Rich assumes 80 columns on a dumb terminal
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        app.app(list(words), standalone_mode=False)
        text = capsys.readouterr().out
        assert "…" not in text
        return text

    return shown


def test_tables_cut_no_name_or_date_in_80_columns(
    tmp_path: Path, output_at_width: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "runs/sw/policy-missing-only_learning-rate-0.05_seed-13"
    write_run(Path(name).absolute(), [0.5] * 100)
    table = output_at_width("runs", "ls").splitlines()[1:-1]
    assert "".join(line.split("  ")[0].strip() for line in table) == name
    assert max(map(len, table)) <= 80
    assert re.search(r"finished +100/100 +50\.0 +\d{4}-\d\d-\d\d \d\d:\d\d +\S+ \S+$", table[0])
    strategies = output_at_width("strategies")
    assert all(key in strategies for key in ("moon-temperature", "disclose-label-counts", "fedtrimmedavg"))
    assert "disclose-label-counts" in output_at_width("keys")


def test_listing_shows_final_and_last_20_of_long_runs_only(
    tmp_path: Path, output_at_width: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/20").absolute(), [0.2, *[0.6] * 19])
    head, row, _ = output_at_width("runs", "ls", columns=120).splitlines()
    assert "last-20" not in head and re.search(r"final % +peak %", head)
    assert re.search(r"finished +20/20 +60\.0 +60\.0 ", row), "last-20 would be the mean of all rounds"
    write_run(Path("runs/21").absolute(), [0.2, *[0.4] * 19, 0.6])
    head, *rows, _ = output_at_width("runs", "ls", columns=120).splitlines()
    assert re.search(r"last-20 % +final % +peak %", head)
    assert re.search(r" 20/20 +- +60\.0 +60\.0 ", rows[0]) and re.search(r" 21/21 +41\.0 +60\.0 +60\.0 ", rows[1])


@pytest.mark.parametrize("columns", [10, 40, 50])
def test_tables_exceed_narrow_terminals_instead_of_cutting(
    tmp_path: Path, output_at_width: Callable[..., str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "runs/sw/policy-missing-only_learning-rate-0.05_seed-13"
    write_run(Path(name).absolute(), [0.5] * 100)
    table = output_at_width("runs", "ls", columns=columns).splitlines()[1:-1]
    assert "".join(line.split("  ")[0].strip() for line in table) == name
    assert re.search(r"finished +100/100 +50\.0 +\d{4}-\d\d-\d\d \d\d:\d\d +\S+ \S+$", table[0])
    shown = output_at_width("runs", "show", name, columns=columns)
    assert all(word in shown for word in ("rounds_to_threshold", "run-dir", '"fedeas"', "default"))


@pytest.mark.parametrize("columns", [40, 80])
def test_report_table_cuts_no_name_or_number(tmp_path: Path, output_at_width: Callable[..., str], columns: int) -> None:
    names = ("cifar-small-of-november", "cifar-large-of-december")
    for seed, name in enumerate((*names, *names)):
        keys = {"policy": "fedeas", "generator": f"/models/{name}", "seed": seed}
        write_run(tmp_path / str(seed), [0.5 + 0.01 * seed] * 9, images=12_345, **keys)
    table = output_at_width("report", str(tmp_path), columns=columns).splitlines()[:-1]
    text = " ".join(table)
    assert text.count("generator = ") == 2 and text.count("12,345") == 2
    assert [text.count(word) for word in ("51.0", "52.0", "±", "1.4")] == [3, 3, 6, 6]  # mean, final and peak
    assert all("".join(line.split("  ")[0] for line in table).count(name) == 1 for name in names)


def test_cache_ls_cuts_nothing_in_80_columns(
    tmp_path: Path, output_at_width: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    generator = "/home/somebody/generators/cifar-small-of-november"
    folder = ImageCache().root / ("a" * 64)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"generator": generator, "dataset": "cifar100", "seed": 1}))
    table = output_at_width("cache", "ls").splitlines()[1:-1]
    assert "".join(line[14:].split("  ")[0].strip() for line in table) == generator
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d$", table[0])
    assert re.search(
        r"^a{12}  .*cifar100 +1 +0 +\S+ \S+ +\d{4}-", output_at_width("cache", "ls", columns=40).splitlines()[1]
    )


def test_sweep_table_folds_names_in_80_columns(tmp_path: Path) -> None:
    found = make_sweep(SMALL, ["policy=missing-only", "generator=" + "g" * 70], tmp_path)
    board, text = SweepStatus(found, slots=1), io.StringIO()
    board.look_at(found.cells[0], "waiting")
    Console(file=text, width=80).print(status_table(board, 80))
    rows = [line.split()[0] for line in text.getvalue().splitlines()[1:-1]]
    assert "".join(rows) == found.cells[0].name and "…" not in text.getvalue()


def test_committed_record_works_with_ls_show_and_csv() -> None:
    rows = json.loads(run_in_process("runs", "ls", "results/quickstart", "--format", "json", cwd=ROOT).stdout)
    found = {Path(row["path"]).name: row for row in rows}
    summary = RunDirectory(ROOT / "results" / "quickstart" / "fedeas").summary()
    assert found["fedeas"]["state"] == "finished" and found["fedeas"]["last_20"] == pytest.approx(summary["last_20"])
    shown = json.loads(
        run_in_process("runs", "show", "results/quickstart/uniform", "--format", "json", cwd=ROOT).stdout
    )
    assert shown["changes"]["policy"] == {"value": "uniform", "default": "fedeas"}
    assert "alpha" not in shown["changes"] and shown["summary"]["total_generated"] == 893
    table = list(
        csv.DictReader(run_in_process("runs", "csv", "results/quickstart/fedeas", cwd=ROOT).stdout.splitlines())
    )
    record = RunDirectory(ROOT / "results" / "quickstart" / "fedeas").rounds()[4]
    assert float(table[4]["seconds.clients"]) == record["seconds"]["clients"]
    assert json.loads(table[4]["clients"]) == record["clients"]
