"""`fedeas doctor` reports real problems with a fix, and a failing check does not stop it."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from runners import black_bank, fedeas, run_in_process
from test_cli import QUICKSTART

from fedeas_flwr.commands.doctor import show
from fedeas_flwr.common import import_path
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.doctor import findings as findings_module
from fedeas_flwr.doctor import inputs, packages
from fedeas_flwr.doctor.findings import Finding
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.partition import dirichlet_partition

pytestmark = pytest.mark.flower


def config(**changes: Any) -> RunConfig:
    return parse_config({"clients": 10, **{key.replace("_", "-"): value for key, value in changes.items()}})


def only(check: Callable[[RunConfig], Iterable[Finding]], given: RunConfig | None = None) -> Finding:
    (finding,) = check(given or config())
    return finding


@pytest.fixture
def fake_versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that fakes the versions of libraries; None removes one."""

    def pretend(**versions: str | None) -> None:
        real = metadata.version

        def lookup(name: str) -> str:
            found = versions.get(name, "") if name in versions else real(name)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(packages.metadata, "version", lookup)

    return pretend


# ---------------------------------------------------------------------------------------------- packages


def test_requirements_come_from_the_project_and_ray_from_flower() -> None:
    ranges = packages.requirements()
    assert str(ranges["torch"]) == "<2.12,>=2.10"
    assert ranges["ray"].contains(metadata.version("ray")) and "==" in str(ranges["ray"])
    assert {finding.state for finding in packages.check_packages(config())} == {"ok"}


def test_check_packages_reports_old_or_missing_library_with_fix(fake_versions: Callable[..., None]) -> None:
    fake_versions(torch="2.4.1+cpu", ray=None, flwr="1.43.0")
    found = {finding.name: finding for finding in packages.check_packages(config())}
    assert {name: finding.state for name, finding in found.items()} == {
        "torch": "problem", "torchvision": "ok", "flwr": "problem", "ray": "problem", "diffusers": "ok"
    }  # fmt: skip
    assert found["torch"].text == "2.4.1+cpu is not <2.12,>=2.10"
    assert "pip install 'torch<2.12,>=2.10'" in found["torch"].fix
    assert "not installed" in found["ray"].text and "pip install 'flwr[simulation]==" in found["ray"].fix


def test_check_packages_ignores_local_version_labels(fake_versions: Callable[..., None]) -> None:
    fake_versions(torch="2.10.0+cu128", torchvision="0.25.0+cu128")
    assert {finding.state for finding in packages.check_packages(config())} == {"ok"}


def test_check_python_with_unsupported_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(packages.check_python).state == "ok"
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.10.4")
    found = only(packages.check_python)
    assert found.state == "problem" and "3.10.4" in found.text and ">=3.11" in found.fix


def test_check_torch_pair_without_operators_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(packages.check_torch_pair).state == "ok"

    def missing(*_: object) -> None:
        raise RuntimeError("operator torchvision::nms\ndoes not exist")

    monkeypatch.setattr("torchvision.ops.nms", missing)
    found = only(packages.check_torch_pair)
    assert (found.state, found.text) == ("problem", "operator torchvision::nms does not exist")
    assert "constraints.txt" in found.fix


def test_check_callbacks_only_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_path, "find_spec", lambda name: None)
    assert list(packages.check_callbacks(config())) == []
    asked = config(callbacks="tensorboard")
    missing = next(found for found in findings_module.examine(asked) if found.name == "callbacks")
    assert missing.state == "problem" and "pip install 'fedeas-flwr[tensorboard]'" in missing.text
    monkeypatch.setattr(import_path, "find_spec", lambda name: object())
    found = only(packages.check_callbacks, config(callbacks="tensorboard, early-stop(patience=5)"))
    assert (found.state, found.text) == ("ok", "tensorboard, early-stop: can be called")


# ------------------------------------------------------------------------------------------------ inputs


def cifar(folder: Path, **changes: Any) -> RunConfig:
    return config(dataset="cifar10", data_dir=str(folder), policy="none", **changes)


def test_check_dataset_missing_downloadable_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(inputs.check_dataset).state == "ok"
    monkeypatch.delenv("FEDEAS_OFFLINE", raising=False)
    advice = "give data-dir=DIR with cifar10.npz or torchvision's folder in it"
    to_come, nowhere = (only(inputs.check_dataset, cifar(tmp_path / name)) for name in ("", "nope"))
    assert (to_come.state, to_come.fix) == ("note", advice)
    assert (nowhere.state, nowhere.fix) == ("problem", advice) and "no such folder" in nowhere.text
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    missing = only(inputs.check_dataset, cifar(tmp_path))
    assert missing.state == "problem" and f"put cifar10.npz in {tmp_path}" in missing.text
    assert missing.fix == f"{advice}, or unset FEDEAS_OFFLINE to download it"

    info = dataset_info("cifar10")
    arrays = {
        "x_train": np.zeros((info.num_train, 32, 32, 3), np.uint8), "y_train": np.zeros(info.num_train, np.int64),
        "x_test": np.zeros((info.num_test, 32, 32, 3), np.uint8), "y_test": np.zeros(info.num_test, np.int64),
    }  # fmt: skip
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    assert only(inputs.check_dataset, cifar(tmp_path)).text == f"cifar10, {tmp_path}/cifar10.npz"
    arrays["y_test"] = arrays["y_test"][:-1]
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    wrong = only(inputs.check_dataset, cifar(tmp_path))
    assert wrong.state == "problem" and "y_test" in wrong.text and "[10000]" in wrong.text
    (tmp_path / "cifar10.npz").write_bytes(b"PK not really")
    assert "cannot be used" in only(inputs.check_dataset, cifar(tmp_path)).text


def test_check_model_with_missing_weights_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(inputs.check_model).state == "ok"
    gone = only(inputs.check_model, cifar(tmp_path, model="resnet18", weights=f"{tmp_path}/gone.safetensors"))
    assert gone.state == "problem" and "gone.safetensors" in gone.text and "weights" in gone.fix
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    official = cifar(tmp_path, model="resnet18", weights="imagenet")
    monkeypatch.delenv("FEDEAS_OFFLINE", raising=False)
    assert only(inputs.check_model, official).state == "note"
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    offline = only(inputs.check_model, official)
    assert offline.state == "problem" and str(tmp_path) in offline.text and "safetensors" in offline.fix
    assert only(inputs.check_model, config(model="nowhere:net")).state == "problem"
    assert only(inputs.check_model, config(model="nowhere:net", task="generator", policy="none")).state == "ok"
    generator = config(task="generator", policy="none", **{"generator-training.preset": "paper"})
    assert "paper" in only(inputs.check_model, generator).text


def test_check_generator_checks_each_part_of_the_folder(tmp_path: Path, digits_generator: Path) -> None:
    assert only(inputs.check_generator, config(policy="none")).state == "note"
    assert only(inputs.check_generator) == Finding("generator", "ok", f"builtin, {digits_generator}")
    folder = tmp_path / "model"
    given = config(generator=str(folder))
    missing = only(inputs.check_generator, given)
    assert missing.state == "problem" and str(folder) in missing.text and "train-generator" in missing.fix
    shutil.copytree(digits_generator, folder)
    found = only(inputs.check_generator, given)
    assert (found.state, found.text) == ("ok", f"{folder}, 10 classes, images [8, 8, 1]")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert "safetensors" in only(inputs.check_generator, given).text
    settings = json.loads((folder / "unet" / "config.json").read_text())
    (folder / "unet" / "config.json").write_text(json.dumps({**settings, "num_class_embeds": 4}))
    few = only(inputs.check_generator, given)
    assert few.state == "problem" and "num_class_embeds" in few.text and "is 4" in few.text


def test_check_generator_notes_untrained_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    found = only(inputs.check_generator)
    assert found.state == "note" and "the first run trains it" in found.text
    assert list(tmp_path.iterdir()) == []


def test_check_generator_needs_bank_images_of_every_class(tmp_path: Path) -> None:
    path = tmp_path / "bank.npz"
    given = config(generator=f"bank:{path}")
    assert "there is no bank" in only(inputs.check_generator, given).text
    np.savez(path, x=np.zeros((30, 8, 8, 1), np.uint8), y=np.repeat(np.arange(10), 3))
    assert only(inputs.check_generator, given).text.endswith("at least 3 images per class")
    np.savez(path, x=np.zeros((30, 8, 8, 1), np.uint8), y=np.repeat([0, 1, 2, 4, 5, 6, 7, 8, 9, 9], 3))
    short = only(inputs.check_generator, given)
    assert short.state == "problem" and "no images of 1 class: 3" in short.text


def test_bank_that_is_the_dataset_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black_bank(tmp_path / "a.npz", [20] * 10)
    black_bank(tmp_path / "b.npz", [20] * 10)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = only(inputs.check_generator, config(dataset="own:a.npz", generator="bank:link/a.npz"))
    assert found.state == "note" and "a.npz" in found.text and "test images" in found.text
    for keys in ({"generator": "bank:b.npz"}, {"generator": "bank:a.npz", "dataset": "digits"}):
        assert only(inputs.check_generator, config(**{"dataset": "own:a.npz"} | keys)).state == "ok"


def test_check_plan_needs_enough_bank_images(tmp_path: Path) -> None:
    bank = black_bank(tmp_path / "bank.npz", [18] * 10)
    enough = only(inputs.check_plan, config(generator=bank))
    assert (enough.state, enough.text) == ("ok", "893 images, at most 18 per client and class")
    bank = black_bank(tmp_path / "bank.npz", [17, 9, *[18] * 8])
    short = only(inputs.check_plan, config(generator=bank))
    assert short.state == "problem" and short.text == (
        f"generator: {bank} has 9 images of class '1', but a client needs 18 different ones; 2 classes have too few"
    )
    for keys in ({"beta": 1.0}, {"policy": "none"}, {"generator": "builtin"}):
        assert only(inputs.check_plan, config(**{"generator": bank, **keys})).state == "ok"
    none = only(inputs.check_plan, config(generator=bank, beta=0.01))
    assert (none.state, none.text[:9]) == ("note", "no images") and "β = 0.01" in none.text
    assert only(inputs.check_plan, config(generator=bank, clients=2000)).state == "note"
    assert inputs.check_plan(config(generator="bank:/nowhere")) == [], "check_generator already reports it"


def test_check_generator_rejects_invalid_sampler_steps(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"sampler": "ddim", "sampler_steps": 300}
    for more in ({}, {"generator": str(digits_generator)}):
        found = only(inputs.check_generator, config(**given, **more))
        assert found.state == "problem" and "sampler-steps: 300 is not allowed with ddim" in found.text
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    assert "sampler-steps: 300" in only(inputs.check_generator, config(**given)).text
    assert only(inputs.check_generator, config(guidance=2.0)).state == "note"


@pytest.mark.parametrize(
    ("keys", "name", "why"),
    [
        (
            {"clients": 1000},
            "clients",
            "clients=1000: each client needs 10 samples, and there are 1438; there can be 143",
        ),
        ({"clients": 2000}, "clients", "there can be 143 clients at most"),
        ({"clients": 100, "alpha": 1e-3}, "clients", "none of 20 tries gave every client 10 samples"),
        (
            {"clients": 2, "strategy": "krum"},
            "strategy",
            "strategy = 'krum' with num_malicious_nodes = 0 needs 3 replies",
        ),
        ({"strategy": "scaffold", "momentum": 0.9}, "strategy", "momentum = 0.9: must be 0 with strategy = 'scaffold'"),
    ],
)
def test_checks_report_what_prepare_rejects(
    keys: dict[str, Any], name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dirichlet_partition.__kwdefaults__, "max_tries", 20)
    given = config(**{"policy": "none", "model": "resnet18", **keys})
    checks = (inputs.check_strategy, inputs.check_clients, inputs.check_last_batches)
    (found,) = [finding for check in checks for finding in check(given) if finding.state == "problem"]
    assert found.name == name and why in found.text and found.fix
    with pytest.raises(ValueError, match=re.escape(found.text)):
        prepare(given, Console(file=io.StringIO()))


def test_check_plan_reads_own_data_again_after_a_change(tmp_path: Path) -> None:
    given = config(dataset=f"own:{tmp_path / 'own.npz'}", generator=f"{tmp_path}/model", clients=2, alpha=100.0)
    images, found = np.zeros((60, 8, 8, 1), np.uint8), []
    for rare in (10, 28):
        np.savez(tmp_path / "own.npz", x=images, y=np.repeat([0, 1], [60 - rare, rare]))
        found.append(only(inputs.check_plan, given).text)
    assert found[0] != found[1]


def test_unknown_number_of_clients_is_one_note() -> None:
    given = config(clients=0, strategy="krum", model="resnet18")
    found = only(inputs.check_clients, given)
    assert found.state == "note" and "strategy, last batches and plan are not checked" in found.text
    assert "clients = 0" in found.text and "clients=10" in found.fix
    for check in (inputs.check_strategy, inputs.check_last_batches, inputs.check_plan):
        assert list(check(given)) == []


@pytest.mark.parametrize("generator", ["/nowhere/model", "bank:/nowhere/bank"])
@pytest.mark.parametrize("damaged", [False, True])
def test_unreadable_own_data_is_one_problem(tmp_path: Path, generator: str, damaged: bool) -> None:
    if damaged:
        (tmp_path / "own.npz").write_bytes(b"no archive")
    given = config(dataset=f"own:{tmp_path / 'own.npz'}", generator=generator, clients=4, model="resnet18")
    (found,) = [finding for finding in findings_module.examine(given) if finding.state == "problem"]
    assert found.name == "dataset" and str(tmp_path / "own.npz") in found.text


def test_check_last_batches_names_the_smallest_batch(tmp_path: Path) -> None:
    """Among the paper's 20 clients, client 2 (130 images) and 12 (2,499) end with batches of two and three of 64."""
    paper = {"dataset": "cifar10", "protocol": "paper", "clients": 20, "model": "resnet18", "policy": "none"}
    paper |= {"batch_size": 64}
    found = only(inputs.check_last_batches, config(**paper))
    assert found.state == "note" and "min-batch=8" in found.fix
    assert "2 of 20 clients" in found.text and "client 2 with 2 of its 130" in found.text
    filled = only(
        inputs.check_last_batches, config(**paper | {"policy": "fedeas", "beta": 12.0, "generator": "bank:b"})
    )
    assert "3 of 20 clients" in filled.text and "client 8 with 2 of its 1,026" in filled.text
    copies = {"dataset": "digits", "clients": 10, "model": "resnet18", "policy": "oversample", "batch_size": 32}
    repeated = only(inputs.check_last_batches, config(**copies, partition_seed=42, alpha=0.1, beta=12.0))
    assert repeated != only(inputs.check_last_batches, config(**{**copies, "policy": "none"}, alpha=0.1))
    assert only(inputs.check_last_batches, config(**paper, min_batch=8)).state == "ok"
    without = config(**paper | {"model": "users_models:tiny"})
    for other in (without, config(**paper | {"model": "nowhere:net"})):
        assert list(inputs.check_last_batches(other)) == []
    assert list(inputs.check_last_batches(config(**paper | {"dataset": f"own:{tmp_path}"}))) == []
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- the command


def test_check_that_raises_is_reported_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(given: RunConfig) -> list[Finding]:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(packages, "check_torch_pair", fails)
    monkeypatch.setattr(
        findings_module, "CHECKS", {"first": "packages.check_torch_pair", "python": "packages.check_python"}
    )
    first, second = findings_module.examine(config())
    assert (first.name, first.state) == ("first", "problem") and "ZeroDivisionError: two lines" in first.text
    assert first.fix and second.state == "ok"


def test_doctor_without_torch_prints_every_line(tmp_path: Path) -> None:
    code = (
        "import json, sys; sys.modules['torch'] = None; from fedeas_flwr.config import parse_config;"
        "from fedeas_flwr.doctor.findings import examine;"
        "print(json.dumps([[f.name, f.state, f.text, f.fix] for f in examine(parse_config({'clients': 10}))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert len([text for _, _, text, _ in lines if "import of torch halted" in text]) == 2, "one cause, one line"
    found = {name: (state, text, fix) for names, state, text, fix in lines for name in names.split(", ")}
    assert found["python"][0] == "ok"
    assert found["torch with torchvision"][0] == "problem" and "torch" in found["torch with torchvision"][1]
    assert found["GPU"] == (
        "problem",
        "could not be checked: import of torch halted; None in sys.modules",
        "install what is missing, then run the check again",
    )
    assert set(findings_module.CHECKS) - {"packages", "callbacks", "other SuperLink", "other Ray"} <= set(found)


def test_narrow_terminal_cuts_no_word() -> None:
    out = io.StringIO()
    findings = [
        Finding("cache folder", "problem", "/a/very/long/path/" + "x" * 60 + " [red] cannot be written", "set a key"),
        Finding("GPU", "note", "none found"),
    ]
    show(findings, Console(file=out, width=40, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[-1] == "1 problem, 1 note"
    column = "".join(line[lines[0].index("what") :].strip() for line in lines[1:-1])
    assert "x" * 60 in column and "[red]" in column and "set a key" in column
    assert [line.split()[0] for line in lines if line.startswith(("problem", "note"))] == ["problem", "note"]


def test_doctor_exit_code_is_1_with_a_problem(tmp_path: Path, digits_generator: Path) -> None:
    fine = fedeas("doctor", QUICKSTART, "actors=1", "--format", "json", cwd=tmp_path)
    assert fine.returncode == 0, fine.stdout + fine.stderr
    found = json.loads(fine.stdout)
    assert all(list(line) == ["name", "state", "text", "fix"] for line in found)
    assert {"python", "torch", "dataset", "generator", "run folder"} <= {line["name"] for line in found}
    assert list(tmp_path.iterdir()) == []
    bad = run_in_process("doctor", "dataset=cifar10", "policy=none", f"data-dir={tmp_path}", cwd=tmp_path)
    assert bad.returncode == 1 and bad.stderr == ""
    assert "problem  dataset" in bad.stdout and bad.stdout.splitlines()[-1].startswith("1 problem, ")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("nowhere.toml",), ["nowhere.toml"]),
        (("betta=1",), ["betta", "beta"]),
        (("--format", "xml"), ["format", "xml", "json"]),
    ],
)
def test_invalid_doctor_arguments_are_one_line(words: tuple[str, ...], parts: list[str]) -> None:
    done = run_in_process("doctor", *words)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and all(part in line for part in parts)
