"""Whole runs in one process: identities, matched budgets, resume."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from rich.console import Console
from runners import (
    CHEAP,
    black_bank,
    client_state,
    finish,
    pass_models_by_reference,
    quick,
    run_in_process,
    small,
    start_interruptible,
    weights,
)
from safetensors.torch import save_file
from torchvision.models import resnet18
from waiting import LONG, PausedRun, wait_until

from fedeas_flwr.allocation import fedeas
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.import_path import source_hash
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.generators import client_images, opening, service
from fedeas_flwr.generators.interface import Generator, SampleId
from fedeas_flwr.generators.opening import hash_input_files
from fedeas_flwr.launch import prepare
from fedeas_flwr.launch.prepare import evaluate_run
from fedeas_flwr.launch.run import launch
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.policies.interface import PolicySettings
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import POLICIES, allocate
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export

ROOT = Path(__file__).parents[2]


def test_weights_depend_only_on_the_seed(tmp_path: Path) -> None:
    first = finish(quick(tmp_path / "a", policy="none"))
    again = finish(quick(tmp_path / "b", policy="none"))
    other = finish(quick(tmp_path / "c", policy="none", seed=2))
    assert weights(first) == weights(again) != weights(other)


def test_beta_zero_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    fedavg = finish(quick(tmp_path / "none", policy="none"))
    fedeas = finish(quick(tmp_path / "zero", policy="fedeas", beta=0.0))
    assert weights(fedavg) == weights(fedeas)
    assert fedeas.summary()["total_generated"] == 0


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.generates(PolicySettings(2.0))])
def test_every_policy_generates_what_its_plan_says(tmp_path: Path, digits_generator: Path, policy: str) -> None:
    beta = {"linear": 0.3}.get(policy, 2.0)
    keys = {**CHEAP, "policy": policy, "policy_args": "rounds=", "participation": 1.0, "rounds": 1}
    # Full balance needs thousands of images unless the clients are nearly balanced.
    config = quick(tmp_path / policy, **keys, **({"alpha": 5.0} if policy == "full-balance" else {"beta": beta}))
    run = finish(config)
    counts = planned_counts(config)
    expected = allocate(counts, config.find_policy(), beta=beta)
    assert run.summary()["total_generated"] == expected.sum() > 0
    for client in range(4):
        assert client_state(run, client, 1).generate == tuple(expected[client].tolist())
    if isinstance(POLICIES[policy], MatchedPolicy):
        assert expected.sum() == allocate(counts, "fedeas", beta=beta).sum()


@pytest.mark.parametrize("printed_rule", [False, True])
def test_clients_apply_the_configured_rule(tmp_path: Path, printed_rule: bool) -> None:
    """The two rules differ at β = 40, not at β = 12 and below."""
    bank = black_bank(tmp_path / "bank.npz", [200] * 10)
    keys = {"clients": 2, "participation": 1.0, "rounds": 1, "local_epochs": 1, "generator": bank, "beta": 40.0}
    config = quick(tmp_path / "r", printed_rule=printed_rule, **keys)
    counts = planned_counts(config)
    expected, other = (fedeas(counts, 40.0, strict_mean=strict) for strict in (not printed_rule, printed_rule))
    assert expected.sum() != other.sum()
    assert planned_allocation(config, counts).tolist() == expected.tolist()
    assert finish(config).summary()["total_generated"] == expected.sum()


@pytest.mark.parametrize("policy", ["fedeas", "uniform", "oversample"])
def test_clients_use_the_servers_beta(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    keys = {**CHEAP, "policy": policy, "participation": 1.0, "rounds": 1}
    alike = finish(quick(tmp_path / "alike", **keys))

    def grid(app: ClientApp, clients: int, run_config: Mapping[str, Any], *args: Any, **more: Any) -> InlineGrid:
        return InlineGrid(app, clients, {**run_config, "beta": 1.0}, *args, **more)

    monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", grid)
    assert weights(finish(quick(tmp_path / "other", **keys))) == weights(alike)


def test_matched_total_can_be_set(tmp_path: Path, digits_generator: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="uniform", total=83, participation=1.0, rounds=1))
    assert run.summary()["total_generated"] == 83


def test_generation_happens_once(tmp_path: Path, digits_generator: Path) -> None:
    seed = int.from_bytes(os.urandom(3), "big")  # a cache kept between sessions has no images of it
    keys = {**CHEAP, "participation": 1.0, "seed": seed}
    run = finish(quick(tmp_path / "r", rounds=3, **keys))
    made = [record["made"] for record in run.rounds()]
    assert made[0] == run.summary()["total_generated"] > 0
    assert made[1:] == [0, 0]
    # Another run with the same seed finds the images; a larger budget makes only the difference.
    again = finish(quick(tmp_path / "again", rounds=1, **keys))
    assert again.rounds()[0]["made"] == 0
    larger = finish(quick(tmp_path / "larger", rounds=1, beta=5.0, **keys))
    assert larger.rounds()[0]["made"] == larger.summary()["total_generated"] - made[0] > 0


def test_shared_images_are_made_once_for_all_clients(tmp_path: Path, digits_generator: Path) -> None:
    """Each client has its usual number of images, but image i of a class is client 0's on every client."""
    seed = int.from_bytes(os.urandom(3), "big")
    config = quick(tmp_path / "own", participation=1.0, rounds=1, seed=seed, **CHEAP)
    own = finish(config)
    plan = allocate(planned_counts(config), "fedeas", beta=config.beta)
    shared = finish(config.with_changes(run_dir=str(tmp_path / "shared"), shared_images="by-class"))
    assert shared.summary()["total_generated"] == own.summary()["total_generated"] == plan.sum()
    beyond = np.maximum(plan.max(axis=0) - plan[0], 0).sum()  # client 0's images were there already
    assert 0 < shared.rounds()[0]["made"] == beyond < plan[1:].sum()
    assert weights(shared) != weights(own)
    alike = finish(config.with_changes(run_dir=str(tmp_path / "alike"), shared_images="one-seed"))
    assert alike.summary()["total_generated"] == plan.sum()
    assert len({weights(run) for run in (own, shared, alike)}) == 3


def test_one_seed_identifies_images_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are numbered through all classes: clients with identical lists up to an image share that image."""
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    asked: list[SampleId] = []

    class Named:
        fingerprint, image_shape, num_classes = "named", (8, 8, 1), 10

        def sample(self, samples: Sequence[SampleId]) -> Any:
            asked.extend(samples)
            return np.array([np.full((8, 8, 1), one.index) for one in samples], np.uint8)

    config = small(tmp_path / "r", shared_images="one-seed")
    for client, wanted in ((1, (2, 0, 3, 1)), (2, (2, 0, 3, 0)), (3, (0, 4, 1, 0))):
        row = (*wanted, *[0] * 6)
        images, labels, _, _ = client_images._synthetic(config, client, row, "cpu", Named())
        assert labels.tolist() == np.repeat(np.arange(10), row).tolist()
        assert images[:, 0, 0, 0].tolist() == list(range(sum(wanted)))
    assert {one.client for one in asked} == {0} and len(asked) == len(set(asked))


def test_images_below_min_class_agreement_are_replaced(tmp_path: Path, digits_generator: Path) -> None:
    plain = finish(quick(tmp_path / "plain", participation=1.0, rounds=1))
    strict = finish(quick(tmp_path / "strict", participation=1.0, rounds=2, min_class_agreement=0.9))
    assert strict.summary()["total_generated"] == plain.summary()["total_generated"]
    assert [record["rejected"] for record in plain.rounds()] == [0]
    rejected = [record["rejected"] for record in strict.rounds()]
    assert rejected[0] == rejected[1] > 0, "rejected images must count in each round"
    assert strict.rounds()[1]["made"] == 0


def test_generated_images_add_steps(tmp_path: Path, digits_generator: Path) -> None:
    plain = finish(quick(tmp_path / "none", policy="none", participation=1.0, rounds=1))
    filled = finish(quick(tmp_path / "fedeas", policy="fedeas", participation=1.0, rounds=1))
    assert filled.rounds()[0]["steps"] > plain.rounds()[0]["steps"]
    assert weights(plain) != weights(filled)


def test_federated_evaluation_matches_central_under_paper(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", protocol="paper", evaluation="federated", participation=1.0))
    last = run.rounds()[-1]
    central = evaluate_run(run)
    # Under `paper` the global test set is the union of the clients' own: both ways must agree exactly.
    same = ("accuracy", "mean_client_accuracy", "worst_tenth_accuracy", "worst_client")
    assert [last[key] for key in same] == [central[key] for key in same]
    assert last["worst_tenth_accuracy"] < last["mean_client_accuracy"]


def test_evaluate_gives_the_recorded_accuracy(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none"))
    scores = evaluate_run(run)
    last = run.rounds()[-1]
    assert scores["accuracy"] == last["accuracy"]
    assert scores["per_class_accuracy"] == last["per_class_accuracy"]
    assert last["balanced_accuracy"] == pytest.approx(np.mean(last["per_class_accuracy"]))


def test_evaluate_with_another_model_names_the_difference(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=1))
    whole = run.load_model()
    file = rf"{run.path}/model\.safetensors does not hold model 'users_models:tiny'"
    for wrong, why in (
        ({**whole, "fc.bias": np.zeros(3, np.float32)}, r"fc.bias is float32 \[3\]; the model needs float32 \[10\]"),
        ({**whole, "more": np.zeros(3)}, r"the names differ from the model's: \['more'\]"),
    ):
        run.save_model(wrong)
        with pytest.raises(RunError, match=rf"^{file}: {why}$"):
            evaluate_run(run)


def test_batchnorm_counters_survive_as_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    run = finish(quick(tmp_path / "r", policy="none", model="users_models:with_batchnorm", participation=1.0))
    model = run.load_model()
    assert model["1.num_batches_tracked"].dtype == np.int64
    assert model["1.num_batches_tracked"] > 3
    assert model["1.running_mean"].dtype == np.float32


def test_client_that_raises_fails_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    with pytest.raises(RunError, match="ArithmeticError: out of luck") as stopped:
        finish(quick(tmp_path / "r", policy="none", model="users_models:that_raises"))
    assert "\n" not in str(stopped.value)
    assert RunDirectory(tmp_path / "r").status()[0] == "failed"
    assert "Traceback" in (tmp_path / "r" / "flower.log").read_text()


def test_resume_after_any_round_ends_with_the_same_weights(tmp_path: Path, digits_generator: Path) -> None:
    whole = finish(quick(tmp_path / "whole", rounds=5))
    finish(quick(tmp_path / "parts", rounds=2))
    resumed = finish(quick(tmp_path / "parts", rounds=5, resume=True))
    assert weights(whole) == weights(resumed)
    same = [("round", "accuracy", "clients", "generated", "steps")] * 2
    first, second = (
        [[r[k] for k in keys] for r in run.rounds()] for keys, run in zip(same, (whole, resumed), strict=True)
    )
    assert first == second


def test_model_with_dropout_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    keys = {"policy": "none", "model": "users_models:with_dropout"}
    whole = finish(quick(tmp_path / "whole", rounds=4, **keys))
    finish(quick(tmp_path / "parts", rounds=2, **keys))
    torch.rand(100)  # the global random state must have no effect
    assert weights(whole) == weights(finish(quick(tmp_path / "parts", rounds=4, resume=True, **keys)))


def test_resume_continues_failed_and_extended_runs(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    run.set_status("failed", "an old reason")
    again = finish(quick(tmp_path / "r", policy="none", rounds=3, resume=True))
    assert again.summary()["rounds"] == 3
    startup = [record["seconds"].get("startup", 0.0) for record in again.rounds()]
    assert [seconds > 0 for seconds in startup] == [True, False, True], "once for each start"
    assert again.summary()["seconds"]["startup"] == pytest.approx(sum(startup), abs=1e-3)
    with pytest.raises(RunError, match="already holds a run"):
        finish(quick(tmp_path / "r", policy="none", rounds=3))


def test_ray_run_ignores_an_old_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher reads status.json from the start, half a minute before the ServerApp writes it."""
    run = finish(quick(tmp_path / "r", policy="none", rounds=1))
    with pytest.raises(RunError, match="already holds a run"):
        finish(quick(tmp_path / "r", policy="none", rounds=1, backend="ray"))
    with pytest.raises(RunError, match=r"alpha = 0\.5, but"):
        finish(quick(tmp_path / "r", policy="none", rounds=2, backend="ray", resume=True, alpha=0.5))
    run.set_status("failed", "an old reason")
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr("fedeas_flwr.launch.run._run_ray", lambda config, run, *_, **__: seen.append(run.status()))
    with pytest.raises(RunError, match="ended as 'running'"):
        finish(quick(tmp_path / "r", policy="none", rounds=2, backend="ray", resume=True))
    assert seen == [("running", "")]


def test_inline_run_opens_its_generator_once(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a generator reads and hashes all its weights, gigabytes for SD-Turbo."""
    opened: list[str] = []
    service._opened_generator.cache_clear()

    def counted(config: RunConfig, device: str) -> Generator:
        opened.append(device)
        return opening.open_for_run(config, device)

    for module in (service, prepare):
        monkeypatch.setattr(module, "open_for_run", counted)
    console = Console(file=io.StringIO())
    run = launch(prepare.prepare(quick(tmp_path / "r", rounds=1), console), console)
    assert run.summary()["total_generated"] > 0 and opened == ["cpu"]


@pytest.mark.parametrize("by_reference", [False, True])
def test_ctrl_c_checkpoints_the_last_finished_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_reference: bool
) -> None:
    """Ctrl-C arrives when the fourth round's clients and the strategy are ahead of the recorded rounds."""
    keys = {"policy": "none", "strategy": "scaffold", "participation": 0.5, "checkpoint_every": 50}
    if by_reference:
        pass_models_by_reference(monkeypatch)
    whole = finish(quick(tmp_path / "whole", rounds=6, **keys))
    train_round = TrainingRounds.train_round

    def interrupted(self: TrainingRounds, state: Checkpoint) -> object:
        outcome = train_round(self, state)
        if state.round == 3:
            raise KeyboardInterrupt
        return outcome

    with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
        meanwhile.setattr(TrainingRounds, "train_round", interrupted)
        finish(quick(tmp_path / "stopped", rounds=6, **keys))
    stopped = RunDirectory(tmp_path / "stopped")
    checkpoint = stopped.load_checkpoint()
    assert checkpoint is not None and checkpoint.round == len(stopped.rounds()) == 3
    assert stopped.state() == "interrupted"
    assert weights(finish(quick(tmp_path / "stopped", rounds=6, resume=True, **keys))) == weights(whole)


def test_ctrl_c_after_the_last_round_keeps_status_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: InlineGrid) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
        meanwhile.setattr(InlineGrid, "close", interrupted)
        finish(quick(tmp_path / "r", rounds=1, policy="none"))
    assert RunDirectory(tmp_path / "r").status() == ("finished", "")


@pytest.fixture(scope="module")
def eight_rounds(tmp_path_factory: pytest.TempPathFactory, digits_generator: Path) -> str:
    """Return the weights of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "r"
    return weights(finish(small(folder, rounds=8, checkpoint_every=2)))


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_run_stopped_by_a_signal_resumes_to_same_weights(
    tmp_path: Path, eight_rounds: str, number: signal.Signals
) -> None:
    conf = tmp_path / "conf.toml"
    conf.write_text('clients = 4\nalpha = 0.1\nbeta = 4.0\nrounds = 8\nlocal-epochs = 1\nbackend = "inline"\n')
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "fedeas_flwr", "run", str(conf), f"run-dir={folder}", "checkpoint-every=2"]
    child = start_interruptible(command, env=PausedRun(tmp_path, 6).environment)
    wait_until(lambda: len(RunDirectory(folder).rounds()) >= 3, "three rounds are recorded")
    child.send_signal(number)
    _, errors = child.communicate(timeout=LONG)
    done = len(RunDirectory(folder).rounds())
    assert 3 <= done < 8, "the run ended before the signal"
    if number != signal.SIGKILL:
        assert child.returncode == 130
        assert "fedeas resume" in errors
        assert "Traceback" not in errors
        assert RunDirectory(folder).status()[0] == "interrupted"
    again = run_in_process("resume", str(folder))
    assert again.returncode == 0, again.stderr
    assert weights(RunDirectory(folder)) == eight_rounds
    assert [r["round"] for r in RunDirectory(folder).rounds()] == list(range(1, 9))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("launch.prepare.prepare", "stopped before the run started; to start it, repeat the same command\n"),
        ("launch.run.launch", "stopped; resume with: fedeas resume '{run}'\n"),
    ],
)
def test_ctrl_c_prints_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, said: str) -> None:
    """Also during preparation, when there is no run yet, and with a folder name that needs shell quoting."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fedeas_flwr.{where}", stop)
    run = tmp_path / "my [b] runs" / "a"
    done = run_in_process("run", "conf/quickstart.toml", "policy=none", "backend=inline", f"run-dir={run}", cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, said.format(run=run))


def test_empty_plan_is_one_warning(tmp_path: Path, digits_generator: Path) -> None:
    def said(**keys: Any) -> str:
        out = io.StringIO()
        prepare.prepare(quick(tmp_path / "r", **keys), Console(file=out))
        return out.getvalue()

    warning = "warning: the plan has no images: policy '{}' with β = 0.01 gives these clients none; see `fedeas plan`\n"
    for policy in ("fedeas", "waterfill"):
        assert said(policy=policy, beta=0.01) == warning.format(policy)
    assert said(policy="fedeas", beta=4.0) == said(policy="none") == said(policy="uniform", total=1) == ""


def test_run_without_a_training_step_is_one_warning(tmp_path: Path) -> None:
    out = io.StringIO()
    launch(quick(tmp_path / "r", policy="none", rounds=2, batch_size=4096, min_batch=4096), Console(file=out))
    warnings = [line for line in out.getvalue().splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "round 1" in warnings[0] and "min-batch = 4096" in warnings[0]
    out = io.StringIO()
    launch(quick(tmp_path / "s", policy="none", rounds=2), Console(file=out))
    assert "warning:" not in out.getvalue()


def test_run_records_hashes_of_its_input_files(tmp_path: Path, digits_generator: Path) -> None:
    """Files are named by the hash of their content, because paths differ between machines."""
    bank, start = black_bank(tmp_path / "bank.npz", [40] * 10), tmp_path / "start.safetensors"
    torch.manual_seed(1)
    save_file(resnet18(num_classes=1000).state_dict(), start)

    def named(file: Path) -> str:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    made = finish(quick(tmp_path / "made", rounds=1))
    (weights,) = digits_generator.rglob("*.safetensors")
    code = {"model": source_hash("users_models:tiny", "model")}
    assert made.files() == {"generator": named(weights), **code}
    RunDirectory.start(made.config().with_changes(resume=True), {})
    made.record_inputs("digits", made.classes(), {"weights": "0" * 16})
    assert made.files() == {"generator": named(weights), "weights": "0" * 16, **code}, "input files are not recorded"
    dealt = finish(quick(tmp_path / "dealt", rounds=1, generator=bank))
    assert dealt.files() == {"generator": named(tmp_path / "bank.npz"), **code}
    export(dealt, tmp_path / "record")
    assert RunDirectory(tmp_path / "record").files() == dealt.files()
    plain = finish(quick(tmp_path / "plain", rounds=1, policy="none", generator=bank))
    assert plain.files() == code
    started = small(tmp_path / "started", rounds=1, policy="none", model="resnet18", weights=str(start))
    assert hash_input_files(started) == {"weights": named(start)}
    start.unlink()
    assert hash_input_files(started) == {}, "unreadable files must be reported where they are read"
