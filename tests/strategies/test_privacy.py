"""Differential privacy: clipping, noise, the recorded ε, and resuming."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp
from rich.console import Console
from runners import finish, pass_models_by_reference, quick, weights, with_fixed_noise_key

from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch.prepare import check_runs, prepare
from fedeas_flwr.policies.interface import Share
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export
from fedeas_flwr.strategies.privacy import WRAPPERS, clips_update, describe_noise, gaussian_epsilon
from fedeas_flwr.strategies.records import to_record
from fedeas_flwr.strategies.registry import build_strategy

TINY = {"clients": 3, "participation": 1.0, "batch_size": 128, "policy": "none", "dp_noise_multiplier": 0.2}
LINEAR = {**TINY, "model": "users_models:with_dropout"}
UPDATES = (1.0, 2.0, 3.0)
EXAMPLES = (10, 20, 1000)
DIGITS = messages.classes_digest(dataset_info("digits").classes)
SIZE = 10_000
START = Checkpoint(0, {"w": np.ones(SIZE, np.float32)}, {"n": np.array(0, np.int64)})


@pytest.fixture(autouse=True)
def import_helper_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")


def toy_app() -> ClientApp:
    """Return clients that each add a constant update to 10,000 weights."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Any) -> Message:
        node = context.node_config
        client = node["partition-id"]
        numbers = {"partitions": node["num-partitions"], "examples": EXAMPLES[client], "classes": DIGITS}
        return messages.build_query_reply(message, client, **numbers)

    @app.train()
    @clips_update
    def train(message: Message, context: Any) -> Message:
        client = context.node_config["partition-id"]
        arrays, buffers = messages.read_model(message)
        report = messages.TrainReport(client, EXAMPLES[client], 0.5, 1, 0, 0, 0.0, 0.0)
        trained = {"w": arrays["w"] + np.float32(UPDATES[client])}
        return messages.train_reply(message, report, trained, {"n": buffers["n"] + 5}, {})

    return app


def one_round(folder: Path, **keys: Any) -> tuple[Federation, Checkpoint]:
    values = {"clients": 3, "participation": 1.0, "policy": "none", "run-dir": str(folder), **keys}
    config = parse_config({key.replace("_", "-"): value for key, value in values.items()})
    grid = InlineGrid(toy_app(), 3, config.to_user_dict())
    made = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    made.clients.discover()
    made.clients.plan()
    return made, made.training.train_round(START)[0]


@pytest.mark.parametrize(("keys", "noise"), [({}, 3 / 20), ({"dp_count_noise": 0.7}, 0.7)])
def test_noise_on_the_count_is_the_configured_one(keys: dict[str, Any], noise: float) -> None:
    config = quick(Path("/nowhere"), dp="server-adaptive", **{**TINY, "dp_noise_multiplier": 0.02}, **keys)
    assert build_strategy(config).inner.clipped_count_stddev == noise  # type: ignore[attr-defined]


@pytest.mark.parametrize("dp", WRAPPERS)
def test_dp_without_noise_is_unweighted_mean_of_clipped_updates(tmp_path: Path, dp: str) -> None:
    # Updates of norm 100, 200, 300 clipped to 150: steps 1, 1.5, 1.5 and their mean, not weighted by samples.
    made, state = one_round(tmp_path, dp=dp, dp_noise_multiplier=0.0, dp_clipping_norm=150.0)
    assert state.trainable["w"] == pytest.approx(np.full(SIZE, 1 + (1 + 1.5 + 1.5) / 3), rel=1e-5)
    assert state.trainable["w"].dtype == np.float32
    assert state.buffers["n"] == 5
    assert made.strategy.privacy_spent(state) == {"epsilon": None, "why": "dp-noise-multiplier = 0 adds no noise"}


@pytest.mark.parametrize("dp", ["server-adaptive", "client-adaptive"])
def test_adaptive_clipping_norm_moves_towards_the_quantile(tmp_path: Path, dp: str) -> None:
    keys = {"dp": dp, "dp_noise_multiplier": 0.0, "dp_clip_rate": 0.3}
    for norm, quantile, clipped in ((150.0, 0.5, 2 / 3), (1.0, 0.5, 1.0), (999.0, 0.5, 0.0), (150.0, 0.9, 2 / 3)):
        made, _ = one_round(tmp_path / f"{norm}-{quantile}", dp_clipping_norm=norm, dp_clip_quantile=quantile, **keys)
        # If too many updates are clipped, the norm grows; if too few, it shrinks.
        expected = norm * math.exp(0.3 * (clipped - quantile))
        assert made.strategy.state().numbers["clipping_norm"] == pytest.approx(expected)


@pytest.mark.parametrize("dp", ["server-fixed", "client-fixed"])
def test_noise_has_the_expected_deviation_and_differs_by_run(tmp_path: Path, dp: str) -> None:
    keys = {"dp": dp, "dp_noise_multiplier": 3.0, "dp_clipping_norm": 2.0}
    _, state = one_round(tmp_path / "a", **keys)
    noise = state.trainable["w"] - (1 + 2 / math.sqrt(SIZE))
    assert noise.std() == pytest.approx(3.0 * 2.0 / 3, rel=0.03)
    assert abs(noise.mean()) < 4 * noise.std() / math.sqrt(SIZE)
    _, other = one_round(tmp_path / "b", **keys)
    difference = state.trainable["w"] - other.trainable["w"]
    assert difference.std() == pytest.approx(math.sqrt(2) * 3.0 * 2.0 / 3, rel=0.03), (
        "two runs with one seed must have independent noise"
    )


def test_noise_key_is_only_in_the_servers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Message] = []
    deliver = InlineGrid.send_and_receive

    def listen(grid: InlineGrid, messages: Any, **more: Any) -> Any:
        out = list(messages)
        sent.extend(out)
        return deliver(grid, out, **more)

    monkeypatch.setattr(InlineGrid, "send_and_receive", listen)
    run = finish(quick(tmp_path / "r", dp="server-fixed", rounds=2, **LINEAR))
    assert (run.path / "noise-key").stat().st_mode & 0o777 == 0o600
    key = (run.path / "noise-key").read_text().split()[0]
    assert len(bytes.fromhex(key)) == 32
    export(run, tmp_path / "record")
    shown = [path.read_text() for path in (tmp_path / "record").iterdir()]
    log = (run.path / "flower.log").read_text()
    shown += [(run.path / "config.json").read_text(), log, *map(repr, sent)]
    assert "times the largest norm of a mean of 3 updates" in log
    assert len(sent) > 6 and not any(key in text for text in shown)
    assert not (tmp_path / "record" / "noise-key").exists()


def test_repeated_round_reuses_noise_only_for_equal_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"dp": "server-fixed", "dp_noise_multiplier": 3.0, "dp_clipping_norm": 999.0}
    made, state = one_round(tmp_path, **keys)

    def spent() -> float:
        return made.strategy.privacy_spent(Checkpoint(1, START.trainable, {}))["epsilon"]

    np.random.rand(5)
    again, _ = made.training.train_round(START)
    assert again.trainable["w"].tobytes() == state.trainable["w"].tobytes(), "the repeated round released another model"
    assert spent() == gaussian_epsilon(3.0, 1, 1e-5)
    monkeypatch.setattr("test_privacy.UPDATES", (1.0, 2.0, 3.0 + 1e-4))  # as on a GPU, or after a data change
    other, _ = made.training.train_round(START)
    difference = other.trainable["w"] - state.trainable["w"]
    assert difference.std() == pytest.approx(math.sqrt(2) * 3.0 * 999.0 / 3, rel=0.03), (
        "the noise must be drawn anew for other updates"
    )
    assert spent() == gaussian_epsilon(3.0, 2, 1e-5)


def test_releases_before_a_crash_count_after_resume(tmp_path: Path) -> None:
    noise = RunDirectory(tmp_path).noise()
    first, second = noise.draws(1, [b"a"]).bytes(9), noise.draws(2, [b"b"]).bytes(9)
    with (tmp_path / "noise-key").open("a") as file:
        file.write("\n3\n")  # truncated by crashes: one model that may have been released, and none
    resumed = RunDirectory(tmp_path).noise()
    assert resumed.draws(2, [b"b"]).bytes(9) == second != first == resumed.draws(1, [b"a"]).bytes(9)
    resumed.draws(2, [b"c"]), resumed.draws(1, [b"b"])
    assert [RunDirectory(tmp_path).noise().releases(rounds) for rounds in (0, 1, 2, 3)] == [0, 2, 4, 5]
    assert RunDirectory(tmp_path / "another").noise().draws(1, [b"a"]).bytes(9) != first


def test_noise_key_with_another_digit_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "noise-key"
    RunDirectory(tmp_path).noise()
    text = path.read_text()
    path.write_text(("1" if text[0] == "0" else "0") + text[1:])
    with pytest.raises(RunError, match=r"noise-key is not the key of a run's noise"):
        RunDirectory(tmp_path).noise()


@pytest.mark.parametrize("text", [b"", b"0f" * 31, b"no key", b"\xff" * 32, b"0f" * 32 + b"\nround 1"])
def test_damaged_noise_key_is_one_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "noise-key").write_bytes(text)
    with pytest.raises(RunError, match=r"noise-key is not the key of a run's noise") as refused:
        RunDirectory(tmp_path).noise()
    assert "\n" not in str(refused.value)


def test_epsilon_by_hand_and_at_least_the_exact_value() -> None:
    # σ = 1, one release: ρ = ½, ε = ½ + 2 √(½ ln 10⁵).
    assert gaussian_epsilon(1.0, 1, 1e-5) == pytest.approx(0.5 + 2 * math.sqrt(0.5 * 11.512925464970229))
    for sigma, releases, delta in [(1.0, 1, 1e-5), (4.0, 20, 1e-5), (0.7, 3, 1e-3), (20.0, 200, 1e-6)]:
        epsilon = gaussian_epsilon(sigma, releases, delta)
        assert exact_delta(sigma / math.sqrt(releases), epsilon) <= delta
        assert exact_delta(sigma / math.sqrt(releases), epsilon / 2) > delta, "the bound is too loose"
    assert gaussian_epsilon(2.0, 4, 1e-5) == pytest.approx(gaussian_epsilon(1.0, 1, 1e-5))


def exact_delta(sigma: float, epsilon: float) -> float:
    """Return the exact δ of one Gaussian mechanism at ε (Balle and Wang 2018, Theorem 8)."""

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    half = 1 / (2 * sigma)
    return below(half - epsilon * sigma) - math.exp(epsilon) * below(-half - epsilon * sigma)


@pytest.mark.parametrize(
    ("keys", "buffers", "words"),
    [
        ({"dp": "server-adaptive", "dp_noise_multiplier": 0.2}, {}, "next round's clipping norm"),
        ({"dp": "server-fixed", "strategy": "fedadam"}, {}, "'fedadam' does not take the mean"),
        ({"dp": "client-fixed", "strategy": "fedmedian"}, {}, "'fedmedian' does not take the mean"),
        ({"dp": "client-fixed"}, {"bn.running_mean": np.zeros(1)}, r"bn\.running_mean, are averaged without noise"),
        ({"dp": "client-fixed"}, {"scalar": None}, "does not clip scalars such as temperature"),
    ],
)
def test_epsilon_is_none_where_no_bound_is_valid(keys: dict[str, Any], buffers: dict[str, Any], words: str) -> None:
    values = {key.replace("_", "-"): value for key, value in keys.items()}
    strategy = build_strategy(parse_config({"clients": 3, "participation": 1.0, **values}))
    trainable = {"w": np.zeros(3)}
    if "scalar" in buffers:
        trainable, buffers = {**trainable, "temperature": np.zeros(())}, {}
    spent = strategy.privacy_spent(Checkpoint(5, trainable, buffers))
    assert spent["epsilon"] is None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(spent["why"])


@pytest.mark.parametrize("dp", WRAPPERS)
def test_dp_run_resumes_bitwise_and_records_epsilon(tmp_path: Path, dp: str) -> None:
    whole = finish(quick(with_fixed_noise_key(tmp_path / "whole"), dp=dp, rounds=4, **LINEAR))
    finish(quick(with_fixed_noise_key(tmp_path / "parts"), dp=dp, rounds=2, **LINEAR))
    np.random.rand(7)
    resumed = finish(quick(tmp_path / "parts", dp=dp, rounds=4, resume=True, **LINEAR))
    assert weights(whole) == weights(resumed)
    spent = whole.summary()["privacy"]
    assert resumed.summary()["privacy"] == spent
    if dp.endswith("fixed"):
        assert spent["epsilon"] == gaussian_epsilon(0.2, 4, 1e-5)
        assert ("clients that clip" in spent["assumes"]) == (dp == "client-fixed")
        assert [r["epsilon"] for r in whole.rounds()] == [gaussian_epsilon(0.2, n, 1e-5) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_client_and_server_clipping_give_equal_weights(tmp_path: Path, kind: str) -> None:
    keys = {
        **TINY,
        "dp_noise_multiplier": 0.0,
        "rounds": 2,
    }  # noise depends on the replies, which differ before clipping
    server = finish(quick(tmp_path / "server", dp=f"server-{kind}", **keys))
    client = finish(quick(tmp_path / "client", dp=f"client-{kind}", **keys))
    assert weights(server) == weights(client) != weights(finish(quick(tmp_path / "none", **keys)))


@pytest.mark.parametrize(("dp", "strategy"), [("server-adaptive", "fedavgm"), ("client-adaptive", "fedadam")])
def test_resume_restores_dp_wrapper_and_inner_strategy(tmp_path: Path, dp: str, strategy: str) -> None:
    keys = {**LINEAR, "dp": dp, "strategy": strategy}
    whole = finish(quick(with_fixed_noise_key(tmp_path / "whole"), rounds=3, **keys))
    finish(quick(with_fixed_noise_key(tmp_path / "parts"), rounds=1, **keys))
    resumed = finish(quick(tmp_path / "parts", rounds=3, resume=True, **keys))
    assert weights(whole) == weights(resumed)
    state = whole.load_checkpoint()
    assert state is not None
    assert state.strategy.numbers["clipping_norm"] != 0.1
    assert len(state.strategy.arrays) == 2 * len(state.trainable)


@pytest.mark.parametrize("dp", WRAPPERS)
def test_models_passed_as_tensors_give_same_weights(tmp_path: Path, dp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**TINY, "dp": dp, "rounds": 2, "model": "users_models:with_batchnorm"}
    sent = finish(quick(with_fixed_noise_key(tmp_path / "bytes"), **keys))
    pass_models_by_reference(monkeypatch)
    by_reference = finish(quick(with_fixed_noise_key(tmp_path / "live"), **keys))
    assert weights(sent) == weights(by_reference)
    if dp.endswith("fixed"):
        assert "1.running_mean, are averaged without noise" in sent.summary()["privacy"]["why"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dp": "server-fixed", "min-replies": 0.5}, ["min-replies = 0.5", "must be 1", "server-fixed"]),
        ({"dp": "client-adaptive"}, ["dp-noise-multiplier = 1", "below 0.4", "4 clients"]),
        ({"dp": "client-adaptive", "dp-count-noise": 0.4}, ["dp-noise-multiplier = 1", "below 0.8"]),
        ({"dp": "local"}, ["dp = 'local'", "server-adaptive"]),
        ({"dp-clipping-norm": 0}, ["dp-clipping-norm = 0"]),
        ({"dp-delta": 1.0}, ["dp-delta = 1.0"]),
    ],
)
def test_invalid_dp_settings_are_rejected_at_start(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(
            parse_config({"clients": 4, "participation": 1.0, "policy": "none", **keys}), Console(file=io.StringIO())
        )
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), refused.value


def test_noise_is_compared_with_the_updates_by_hand() -> None:
    """10,000 parameters and σ = 3: a norm of 300 C in the sum, 75 C in the mean of 4, 750 C after 100 rounds."""
    config = parse_config({"clients": 8, "participation": 0.5, "dp": "server-fixed", "dp-noise-multiplier": 3})
    line = describe_noise(config.with_changes(rounds=100), START.trainable)
    assert "75 times the largest norm of a mean of 4 updates" in line and "d = 10,000" in line
    assert "over 100 rounds 7.5 times that of all updates together" in line
    assert describe_noise(config.with_changes(dp="none"), START.trainable) == ""
    assert describe_noise(config.with_changes(dp_noise_multiplier=0.0), START.trainable) == ""


def test_noise_that_exceeds_all_updates_of_a_generator_is_rejected() -> None:
    keys = {"clients": 10, "rounds": 60, "task": "generator", "policy": "none", "dp": "server-fixed"}
    config = parse_config({**keys, "generator-training.average-moments": "neither", "participation": 0.5})
    with pytest.raises(ConfigError) as refused:
        prepare(config, Console(file=io.StringIO()))
    assert str(refused.value).startswith("dp-noise-multiplier = 1: must be at most 0.0486 with task = 'generator'")
    assert "\n" not in str(refused.value) and "159 times the largest norm" in str(refused.value)
    with pytest.raises(ConfigError, match=r"must be at most 0\.0486"):
        check_runs([config], Console(file=io.StringIO()))
    printed = io.StringIO()
    prepare(config.with_changes(dp_noise_multiplier=0.0486), Console(file=printed))
    assert "over 60 rounds 1 times that of all updates together" in printed.getvalue()


def test_client_without_a_clipping_norm_fails(tmp_path: Path) -> None:
    """If the run-config has client-fixed but the server sends no norm, no unclipped update leaves the client."""
    config = parse_config({"clients": 3, "participation": 1.0, "dp": "client-fixed"})
    grid = InlineGrid(toy_app(), 3, config.to_user_dict())
    plain = build_strategy(config.with_changes(dp="none"))
    (message, *_) = plain.configure_train(1, to_record(START.trainable), ConfigRecord(), grid)
    task = messages.TrainTask(1, 0.0, 0, 0, 0, str(tmp_path), Share())
    messages.add_task(message, task, to_record(START.buffers), to_record({}))
    (reply,) = grid.send_and_receive([message])
    assert "clipping_norm" in messages.failure_reason(reply)


def test_resume_without_the_noise_key_is_rejected(tmp_path: Path) -> None:
    """Otherwise ε would count too few releases, and repeated rounds would have noise of another key."""
    run = finish(quick(tmp_path / "r", dp="server-fixed", rounds=1, **LINEAR))
    (run.path / "noise-key").unlink()
    with pytest.raises(RunError, match=r"noise-key is missing.* start a new run"):
        finish(quick(tmp_path / "r", dp="server-fixed", rounds=2, resume=True, **LINEAR))
    assert not (run.path / "noise-key").exists() and len(run.rounds()) == 1
