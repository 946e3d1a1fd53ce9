"""The command line: one-line errors, exit codes and output."""

from __future__ import annotations

import errno
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runners import command, fedeas, finish, run_in_process, small

from fedeas_flwr.commands.app import exit_code
from fedeas_flwr.commands.run import reserved_folder, run_name
from fedeas_flwr.common.errors import ProcessesDiedError
from fedeas_flwr.common.files import cache_hint
from fedeas_flwr.common.project import read_project
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import parse_config
from fedeas_flwr.launch import prepare
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]
COUNTS = str(ROOT / "tests" / "helpers" / "three_clients.csv")
QUICKSTART, CIFAR = (str(ROOT / "conf" / f"{name}.toml") for name in ("quickstart", "cifar10-k20"))
RECORD = str(ROOT / "results" / "shared-images" / "uniform-s1")
NOBODYS, UNKNOWN = "~no-one/x", "its home folder is unknown; give the full path"


def test_run_name_states_the_settings() -> None:
    config = parse_config({"clients": 10, "policy": "none", "strategy": "fedprox", "seed": 2})
    assert run_name(config) == "digits-k10-a0.1-none-fedprox-s2"
    free = config.with_changes(loss="class-weighted", views="flip-crop")
    assert run_name(free) == "digits-k10-a0.1-none-fedprox-class-weighted-flip-crop-s2"


MISTAKES = {
    "negative beta": (("run", QUICKSTART, "beta=-1"), ["beta", "-1", "0"]),
    "alpha zero": (("run", QUICKSTART, "alpha=0"), ["alpha", "0"]),
    "unknown key": (("run", QUICKSTART, "betta=1"), ["betta", "beta"]),
    "more clients than data": (("run", QUICKSTART, "clients=2000"), ["clients", "2000", "143"]),
    "no config file": (("run", "nowhere.toml"), ["nowhere.toml"]),
    "word that is no override": (("run", QUICKSTART, "beta"), ["beta", "key=value"]),
    "no clients": (("run", QUICKSTART, "clients=0"), ["clients", "0"]),
    "graphs without a GPU": (
        ("run", QUICKSTART, "engine=graphed"),
        ["engine = 'graphed': must be auto or eager", "GPU"],
    ),
    "no dataset": (("run", QUICKSTART, "dataset=cifar10", "policy=none"), ["cifar10.npz", "torchvision", "download"]),
    "no generator": (("run", QUICKSTART, "generator=/nowhere"), ["generator", "/nowhere"]),
    "no model": (("run", QUICKSTART, "policy=none", "model=nowhere:net"), ["model", "nowhere"]),
    "a model that takes other words": (
        ("run", QUICKSTART, "policy=none", "model=torchvision.models:resnet18"),
        ["model", "num_classes", "image_shape"],
    ),
    "no run": (("evaluate", "/nowhere"), ["/nowhere"]),
    "a record to test": (
        ("evaluate", RECORD),
        [RECORD, "exported record without weights", "the run directory"],
    ),
    "a record to go on with": (("resume", RECORD), [RECORD, "exported record without weights", "the run directory"]),
    "nothing to resume": (("resume", "/nowhere"), ["/nowhere"]),
    "resumed elsewhere": (("resume", RECORD, "run-dir=/else"), ["run-dir = '/else': remove the key", "resume"]),
    "resumed from its start": (("resume", RECORD, "resume=false"), ["resume = False: remove the key", "resume"]),
    "unknown command": (("fly",), ["fly"]),
    "unknown option": (("plan", "--fast"), ["--fast"]),
    "own data nowhere": (("run", QUICKSTART, "dataset=own:"), ["dataset = 'own:': must be", "own:PATH"]),
    "a dataset that is none": (("plan", "--dataset", "mnist"), ["dataset = 'mnist': must be", "cifar100", "own:PATH"]),
    "a policy in capitals to plan": (("plan", "policy=FedEAS"), ["policy='FedEAS': must be", "did you mean 'fedeas'?"]),
    "own data nowhere to plan": (("plan", "--dataset", "own:"), ["dataset = 'own:': must be", "own:PATH"]),
    "data-dir nowhere": (
        ("run", QUICKSTART, "dataset=cifar10", "policy=none", "data-dir=/nope"),
        ["data-dir = '/nope': no such folder"],
    ),
    "a rate that is no number": (("run", QUICKSTART, "learning-rate=nan"), ["learning-rate = nan: must be a finite"]),
    "a rate in quotes": (
        ("run", QUICKSTART, "learning-rate='nan'"),
        ["learning-rate = 'nan': must be a finite number"],
    ),
    "an infinite rate": (("run", QUICKSTART, "learning-rate=inf"), ["learning-rate = inf: must be a finite number"]),
    "ignored beside counts": (
        ("plan", "--counts", COUNTS, "--clients", "7"),
        ["--clients", "--counts", "remove the option"],
    ),
    "dataset beside counts": (("plan", "--counts", COUNTS, "--dataset", "digits"), ["--dataset", "--counts"]),
    "seconds of counts": (
        ("plan", "--counts", COUNTS, "--max-seconds", "0.1"),
        ["--max-seconds with --counts needs --dataset and --generator"],
    ),
    "estimate of counts": (
        ("plan", "--counts", COUNTS, "--estimate"),
        ["--estimate with --counts needs --dataset and --generator"],
    ),
    "a key in the grid and beside it": (
        ("sweep", QUICKSTART, "policy=none", "--grid", "policy=none,oversample"),
        ["policy = 'none'", "--grid"],
    ),
    "figures in a file": (("plan", "--figures", COUNTS), [f"--figures '{COUNTS}': is a file, must be a folder"]),
    "a sweep in a file": (("sweep", QUICKSTART, "--grid", "seed=1", "--out", COUNTS), [f"--out '{COUNTS}': is a file"]),
    "images in a file": (("generate", "--out", f"{COUNTS}/a"), [f"--out '{COUNTS}/a': {COUNTS} is a file, must be"]),
    "a report in a file": (("report", str(ROOT), "--out", COUNTS), [f"--out '{COUNTS}': is a file, must be a folder"]),
    "a page in a folder": (
        ("report", str(ROOT), "--html", str(ROOT)),
        [f"--html '{ROOT}': is a folder, must be a file"],
    ),
    "a generator in a file": (
        ("train-generator", "--dataset", "digits", "--out", COUNTS),
        [f"--out '{COUNTS}': is a file, must be a folder"],
    ),
    "a generator where nobody may write": (
        ("train-generator", "--dataset", "digits", "--out", "/proc/g", "--steps", "1"),
        ["--out '/proc/g': cannot be written to: "],
    ),
    "a page where nobody may write": (
        ("report", str(ROOT / "results"), "--html", "/proc/page.html"),
        ["--html '/proc': cannot be written to: "],
    ),
    "checkpoints before the beginning": (
        ("train-generator", "--dataset", "digits", "--out", "g", "--steps", "1", "--checkpoint-every", "-3"),
        ["checkpoint-every: -3 is not allowed; give more than 0"],
    ),
    "checkpoints at every moment": (
        ("train-generator", "--dataset", "digits", "--out", "g", "--steps", "1", "--checkpoint-every", "0"),
        ["checkpoint-every: 0 is not allowed; give more than 0"],
    ),
    "checkpoints at no moment": (
        ("train-generator", "--dataset", "digits", "--out", "g", "--steps", "1", "--checkpoint-every", "nan"),
        ["checkpoint-every: nan is not allowed; give more than 0"],
    ),
    "unknown policy": (("plan", "--policy", "magic"), ["policy", "magic", "fedeas"]),
    "unknown format": (("plan", "--format", "xml"), ["format", "xml", "json"]),
    "no counts": (("plan", "--counts", "/nowhere.csv"), ["/nowhere.csv"]),
    "estimate without a generator": (
        ("plan", CIFAR, "--estimate", "--generator", "builtin"),
        ["generator", "builtin", "cifar10"],
    ),
    "seconds without a generator": (
        ("plan", "--dataset", "cifar10", "--max-seconds", "9"),
        ["generator", "builtin", "cifar10"],
    ),
    "no share": (("plan", "--min-removed", "50"), ["--min-removed", "50", "0 to 1"]),
    "no grid": (("plan", "--min-removed", "0.5", "--grid", "4;8"), ["grid", "4;8", "commas"]),
    "grid of nothing": (("plan", "--min-removed", "0.5", "--grid", "nan"), ["grid", "nan", "finite"]),
    "grid without a limit": (("plan", "--grid", "4,8"), ["grid", "4,8", "--min-removed", "--max-seconds"]),
    "names of no counts": (("plan", "--id-column", "none"), ["--id-column: remove the option", "without --counts"]),
    "no clients to plan": (("plan", QUICKSTART, "clients=0"), ["clients = 0: a plan needs the number of clients"]),
    "unknown key of a plan": (("plan", QUICKSTART, "betta=1"), ["betta", "beta"]),
    "a key and its option": (("plan", "beta=3", "--beta", "4"), ["--beta: remove the option, since beta = 3 is given"]),
    "a key beside counts": (("plan", "clients=7", "--counts", COUNTS), ["clients = 7: remove the key", "--counts"]),
    "a key that a policy ignores": (
        ("plan", QUICKSTART, "policy=uniform", "total=5", "gamma=1"),
        ["gamma = 1: remove the key, since total = 5 sets the number of images"],
    ),
    "β chosen twice": (("plan", "--min-removed", "0.5", "beta=3"), ["beta = 3: remove the key", "limits"]),
    "limits for uniform": (("plan", "--max-images", "9", "--policy", "uniform"), ["policy", "uniform", "fedeas"]),
    "figures of nothing": (("plan", "--beta", "0", "--figures", "out"), ["figures", "nothing", "β = 0"]),
    "no bank": (("generate", "--out", "out", "--generator", "bank:/nowhere"), ["bank", "/nowhere"]),
    "nothing to prune by": (("cache", "prune"), ["--max-bytes", "--older-than", "--key"]),
    "no size": (("cache", "prune", "--max-bytes", "lots"), ["max-bytes", "lots", "20GB"]),
    "no limit": (("run", QUICKSTART, "cache-limit=lots"), ["cache-limit", "lots", "20GB"]),
    "no run to show": (("runs", "show", "/nowhere"), ["/nowhere is not a run directory"]),
    "no run to print": (("runs", "csv", "/nowhere"), ["/nowhere is not a run directory"]),
    "no run to remove": (("runs", "rm", "/nowhere", "--yes"), ["/nowhere is not a run directory"]),
    "no runs to prune": (("runs", "prune", "/nowhere"), ["/nowhere", "No such file or directory"]),
    "no runs to list": (("runs", "ls", "/nowhere"), ["/nowhere is not a folder"]),
    "no runs to report": (("report", "/nowhere"), ["/nowhere is not a folder"]),
    "nothing to report": (("report", str(ROOT / "conf")), ["no run directory", str(ROOT / "conf")]),
    "nothing to export": (("export", "/nowhere", "out"), ["/nowhere is not a run directory"]),
    "a record in a file": (("export", "/nowhere", COUNTS), [f"'{COUNTS}': is a file, must be a folder"]),
    "no config file to examine": (("doctor", "nowhere.toml"), ["nowhere.toml"]),
    "no deployment": (("deploy", "register", "/nowhere"), ["/nowhere"]),
    "a run in a file": (
        ("run", QUICKSTART, "policy=none", f"run-dir={COUNTS}/r"),
        [f"run-dir = '{COUNTS}/r' cannot be written: Not a directory"],
    ),
    "no dataset to learn": (("train-generator", "--dataset", "mnist", "--out", "out"), ["dataset", "mnist"]),
    "a generator that is not asked": (
        ("plan", "--generator", "bank:/nowhere"),
        ["--generator: remove the option", "--estimate or --max-seconds"],
    ),
    "measures of no report": (
        ("generate", "--out", "out", "--data-dir", "/nowhere"),
        ["--data-dir: remove the option, since it has no effect without --report"],
    ),
    "weights nowhere": (
        ("generate", "--out", "out", "--report", "--inception", "/nowhere"),
        ["--inception: there is no file /nowhere"],
    ),
    "runs of a list": (
        ("reproduce", "--list", "--no-run"),
        ["--run: remove the option, since --list starts and reads no runs"],
    ),
    "columns of a document": (
        ("reproduce", "--into", "doc.md", "--columns", "c10-k100-a0.1"),
        ["--columns: remove the option, since --into writes"],
    ),
    "total for fedeas": (("plan", "--total", "5"), ["total", "5", "fedeas"]),
    "β of a policy that has none": (
        ("plan", "--policy", "full-balance", "--beta", "3"),
        ["--beta: remove the option, since policy full-balance has nothing to set"],
    ),
    "γ of no policy": (
        ("plan", "--policy", "none", "--gamma", "1"),
        ["--gamma: remove the option, since policy none has"],
    ),
    "a rule that fills nothing": (
        ("plan", "--policy", "full-balance", "--printed-rule"),
        ["--printed-rule: remove the option, since policy full-balance has nothing to set"],
    ),
    "γ of an ablation": (
        ("plan", "--policy", "linear", "--gamma", "0.5"),
        ["--gamma: remove the option, since policy linear has its own"],
    ),
    "β beside a total": (
        ("plan", "--policy", "uniform", "--total", "5", "--beta", "3"),
        ["--beta: remove the option, since --total sets the number of images"],
    ),
    "a rule beside a total": (
        ("plan", "--policy", "waterfill", "--total", "5", "--printed-rule"),
        ["--printed-rule: remove the option, since --total sets the number of images"],
    ),
    "total beside limits": (
        ("plan", "--total", "5", "--min-removed", "0.5", "--max-images", "9"),
        ["total = 5: remove the option, since policy fedeas sets its own"],
    ),
    "nobody's run-dir": (("run", QUICKSTART, f"run-dir={NOBODYS}"), [f"run-dir = {NOBODYS!r}: {UNKNOWN}"]),
    "nobody's data-dir": (("run", QUICKSTART, f"data-dir={NOBODYS}"), [f"data-dir = {NOBODYS!r}: {UNKNOWN}"]),
    "nobody's images": (
        ("run", QUICKSTART, "policy=none", f"dataset=own:{NOBODYS}"),
        [f"dataset = {NOBODYS!r}: {UNKNOWN}"],
    ),
    "nobody's images in a plan": (
        ("plan", "--dataset", f"own:{NOBODYS}", "--protocol", "clean"),
        [f"dataset: {NOBODYS!r}: {UNKNOWN}"],
    ),
    "nobody's weights": (
        ("run", QUICKSTART, "policy=none", "model=resnet18", f"weights={NOBODYS}"),
        [f"weights = {NOBODYS!r}: {UNKNOWN}"],
    ),
    "nobody's generator": (("run", QUICKSTART, f"generator={NOBODYS}"), [f"generator = {NOBODYS!r}: {UNKNOWN}"]),
    "nobody's bank": (("run", QUICKSTART, f"generator=bank:{NOBODYS}"), [f"generator = {NOBODYS!r}: {UNKNOWN}"]),
}
LOADING = ("no generator", "a model that takes other words")
"""These run in a process of their own: a library may print something while it is imported."""


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_are_one_line_and_exit_code_2(tmp_path: Path, name: str) -> None:
    words, parts = MISTAKES[name]
    done = (fedeas if name in LOADING else run_in_process)(*words, cwd=tmp_path)
    assert done.returncode == 2, "invalid input must exit with code 2"
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == [], "files were created"


@pytest.mark.parametrize("words", [[], ["runs"], ["cache"], ["deploy"]])
def test_command_summaries_are_not_truncated(words: list[str]) -> None:
    listed = run_in_process(*words, "--help").stdout.partition("Commands:")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 3 and not [line for line in listed if line.endswith(("...", "."))]


def test_help_names_the_commands_and_keys_lists_the_keys() -> None:
    text = run_in_process("--help").stdout
    commands = ("plan", "run", "resume", "sweep", "runs", "evaluate", "quickstart", "keys", "strategies", "generate")
    assert all(command in text for command in ("cache", "doctor"))
    assert all(command in text for command in commands)
    row = next(line for line in run_in_process("keys").stdout.splitlines() if line.startswith("partition-seed"))
    assert " ".join(row.split()) == "partition-seed 42 0 ≤ n < 4,294,967,296 seed of the partition"
    listed = {row["key"]: row for row in json.loads(run_in_process("keys", "--format", "json").stdout)}
    assert listed["alpha"]["allowed"] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1e6}
    assert listed["device"]["allowed"] == {"type": "string", "enum": ["auto", "cpu", "cuda"]}
    assert "multikrum" in run_in_process("strategies").stdout


def test_version_option_prints_the_projects_version() -> None:
    assert run_in_process("--version").stdout == f"fedeas {read_project().version}\n"


@pytest.mark.parametrize(("words", "meant"), [(["pln"], "plan"), (["cache", "vrify"], "verify")])
def test_misspelt_command_is_suggested_once(words: list[str], meant: str) -> None:
    done = run_in_process(*words)
    assert done.returncode == 2
    assert done.stderr == f"error: No such command '{words[-1]}'. Did you mean '{meant}'?\n"


def test_counted_uses_the_singular_for_one(tmp_path: Path) -> None:
    assert [counted(number, "run") for number in (0, 1, 2, 1234)] == ["0 runs", "1 run", "2 runs", "1,234 runs"]
    assert [counted(number, "class", "classes") for number in (1, 10)] == ["1 class", "10 classes"]
    finish(small(tmp_path / "r", policy="none", rounds=1))
    listed = run_in_process("runs", "ls", str(tmp_path)).stdout.splitlines()[-1]
    assert listed.startswith("1 run, ")
    page = run_in_process("report", str(tmp_path), "--out", str(tmp_path / "out"))
    assert page.returncode == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 run in 1 group (" in text and "4 clients, " in text and "1 round." in text


def test_run_and_evaluate_from_the_shell(tmp_path: Path) -> None:
    words = ("run", QUICKSTART, "policy=none", "rounds=2", "local-epochs=1", "clients=4", "backend=inline")
    done = fedeas(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "digits-k4-a0.1-none-fedavg-s1"
    assert "round   2/2" in done.stdout
    scores = json.loads(run_in_process("evaluate", str(folder)).stdout)
    assert scores["accuracy"] == json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])["accuracy"]
    assert run_in_process(*words, cwd=tmp_path).returncode == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2, "the second run has no folder of its own"


def test_concurrent_runs_of_one_name_get_different_folders(tmp_path: Path) -> None:
    def reserve(_: int) -> Path:
        with reserved_folder(tmp_path / "runs" / "r") as folder:
            return folder

    with ThreadPoolExecutor(8) as threads:
        found = sorted(threads.map(reserve, range(40)))
    assert found == sorted(tmp_path / "runs" / name for name in ["r", *(f"r-{number}" for number in range(2, 41))])


def test_reserved_folder_is_removed_if_still_empty(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "r"
    with pytest.raises(KeyboardInterrupt), reserved_folder(wanted):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), reserved_folder(wanted) as folder:
        (folder / "rounds.jsonl").touch()
        raise KeyboardInterrupt
    assert [path.name for path in wanted.iterdir()] == ["rounds.jsonl"]


def test_paths_with_brackets_are_printed_unchanged(tmp_path: Path) -> None:
    """Rich interprets brackets as styles: it would drop some and raise for others."""
    words = ("policy=none", "rounds=1", "local-epochs=1", "clients=4", "backend=inline", "participation=0.25")
    for name in ("old [b]数", "[", "a[/b]"):
        done = run_in_process("run", QUICKSTART, *words, f"run-dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[0].endswith(f" → {tmp_path / name}")


def test_run_that_fails_after_its_start_exits_1(tmp_path: Path) -> None:
    words = ("policy=none", "rounds=2", "local-epochs=1", "clients=4", "backend=inline", "learning-rate=100")
    done = run_in_process("run", QUICKSTART, *words, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("none · fedavg · digits")
    assert "min-replies" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/root"), 2),
        (FileNotFoundError("weights: there is no file"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp"), 1),
        (ProcessesDiedError("the ServerApp process died without reporting a status"), 1),
        (MemoryError("generation-batch: the GPU has no memory left for 8 images; free some of it"), 1),
    ],
)
def test_exit_code_is_2_for_wrong_paths_and_1_for_full_disks(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_cache_error_names_fedeas_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ("plan", "--clients", "4", "--dataset", "digits")
    for place, named in ((tmp_path / "file", tmp_path / "file" / "partitions"), (Path("/proc/x/y"), Path("/proc/x"))):
        done = run_in_process(*words, FEDEAS_CACHE=str(place))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"error: {named}: ") and done.stderr.endswith(f" (FEDEAS_CACHE = '{place}')\n")
    (home := tmp_path / "home").mkdir()
    (home / ".cache").touch()
    of_itself = run_in_process(*words, FEDEAS_CACHE="", HOME=str(home)).stderr
    assert of_itself.endswith(" (the user's cache; FEDEAS_CACHE names another folder)\n")
    assert "FEDEAS_CACHE" not in run_in_process("plan", "--counts", str(tmp_path)).stderr, (
        "elsewhere it has no part in it"
    )


def test_standard_output_on_a_full_disk_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command("keys"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: standard output or a temporary file: No space left on device\n"


@pytest.mark.parametrize("words", [[], ["runs"], ["cache"], ["deploy"]])
def test_command_group_without_command_prints_its_help(words: list[str]) -> None:
    alone, asked = run_in_process(*words), run_in_process(*words, "--help")
    assert (alone.returncode, alone.stderr) == (0, "") and alone.stdout == asked.stdout
    assert "Commands:" in alone.stdout


def test_runs_ls_without_a_folder_prints_no_runs_yet(tmp_path: Path) -> None:
    none = run_in_process("runs", "ls", cwd=tmp_path)
    assert (none.returncode, none.stderr) == (0, "") and none.stdout == "no runs yet: there is no folder runs here\n"
    assert run_in_process("runs", "ls", "--format", "json", cwd=tmp_path).stdout == "[]\n"
    named = run_in_process("runs", "ls", "runs", cwd=tmp_path)
    assert (named.returncode, named.stderr) == (2, "error: runs is not a folder\n")


def test_cache_hint_with_invalid_cache_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", "~nobody-of-this-name/x")
    assert cache_hint(PermissionError(errno.EACCES, "Permission denied", "/a")) == ""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1.00 GiB free."),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_out_of_memory_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: RunDirectory) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(prepare, "evaluate_run", full)
    done = run_in_process("evaluate", "/a/run")
    line = f"error: {' '.join(str(error).split())}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)

    def wrong(run: RunDirectory) -> dict[str, Any]:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(prepare, "evaluate_run", wrong)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_in_process("evaluate", "/a/run")


def test_generate_writes_a_report_and_a_bank(tmp_path: Path, digits_generator: Path) -> None:
    done = run_in_process("generate", "--per-class", "12", "--out", "out", "--report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "class agreement" in done.stdout
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["grid.png", "images.npz", "report.json"]
    report = json.loads((out / "report.json").read_text())
    assert report["samples"] == 120
    assert report["class_agreement"] > 0.8 and report["classifier_test_accuracy"] > 0.95
    assert report["exact_copies"] == 0
    said = ("generator", "sampler", "sampler-steps", "guidance", "guidance-stop", "seed", "per-class")
    assert [report[key] for key in said] == ["builtin", "dpm++", 20, 1.0, 1.0, 0, 12]
    words = ("generate", "--generator", f"bank:{out}/images.npz", "--out", "again", "--per-class")
    bank, short = run_in_process(*words, "12", "--report", cwd=tmp_path), run_in_process(*words, "13", cwd=tmp_path)
    assert bank.returncode == 0, bank.stderr
    dealt = json.loads((tmp_path / "again" / "report.json").read_text())
    assert dealt["generator"] == "bank:images.npz" and not {*said[1:5]} & set(dealt)
    assert dealt["class_agreement"] == report["class_agreement"]
    few = f"error: generator: bank:{out}/images.npz has 12 images of class '0', but --per-class asks for 13"
    assert (short.returncode, short.stderr) == (2, f"{few} different ones; 10 classes have too few\n")
    guided = run_in_process(*words, "12", "--guidance", "2", cwd=tmp_path)
    assert (
        guided.stderr == "error: --guidance: remove the option, since it applies only to diffusion models in a folder\n"
    )
    again = run_in_process("generate", "--per-class", "2", "--sampler", "dpm++-logsnr", "--out", "out", cwd=tmp_path)
    assert again.returncode == 0 and not (out / "report.json").exists(), "the report of other images is still there"


def test_cache_ls_verify_and_prune_commands(tmp_path: Path) -> None:
    from test_cache import Fake

    from fedeas_flwr.generators.cache import ImageCache

    cache = ImageCache(tmp_path / "images")
    cache.ensure(Fake(), seed=3, client=0, wanted=[2, 0, 3], about={"generator": "toy", "dataset": "none"})
    environment = {"FEDEAS_CACHE": str(tmp_path)}
    listed = run_in_process("cache", "ls", **environment).stdout
    assert "toy" in listed and listed.splitlines()[-1].startswith(f"{tmp_path}/images: 5 images")
    assert run_in_process("cache", "verify", **environment).returncode == 0
    shard = next((tmp_path / "images").rglob("*.npy"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    damaged = run_in_process("cache", "verify", **environment)
    assert damaged.returncode == 1
    assert damaged.stdout == f"damaged: {shard}\n2 shards and 0 datasets checked, 1 damaged\n"
    assert "removed 0" in run_in_process("cache", "prune", "--older-than", "1d", **environment).stdout
    assert "removed 1" in run_in_process("cache", "prune", "--key", cache.key(Fake(), 3)[:6], **environment).stdout
    assert "0 images" in run_in_process("cache", "ls", **environment).stdout


def test_repeated_run_names_its_new_folder(tmp_path: Path) -> None:
    words = ["run", str(ROOT / "conf/quickstart.toml"), "policy=none", "rounds=1", "local-epochs=1", "backend=inline"]
    first, second = (run_in_process(*words, cwd=tmp_path) for _ in range(2))
    (name,) = [path.name for path in (tmp_path / "runs").iterdir() if not path.name.endswith("-2")]
    assert "new run" not in first.stdout
    assert second.stdout.splitlines()[0] == f"{name} exists; new run: {name}-2"
