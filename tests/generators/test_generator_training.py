"""The generator trainer: resume, interruption and presets, on a tiny network."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import run_in_process, start_interruptible
from safetensors.torch import save
from timelines import Clock
from waiting import LONG

from fedeas_flwr.common.checked import write_checked
from fedeas_flwr.data.datasets import Dataset, open_dataset
from fedeas_flwr.generators.diffusion.model_folder import CLASSES, WEIGHTS_NAME
from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.learn import run, verdict
from fedeas_flwr.generators.learn import trainer as trainer_module
from fedeas_flwr.generators.learn.denoiser import loss_weights, rate_factor
from fedeas_flwr.generators.learn.presets import CIFAR_SMALL, DIGITS, PAPER, PRESETS, Preset, find_preset
from fedeas_flwr.generators.learn.run import CHECKPOINT, train_generator, write_checkpoint
from fedeas_flwr.generators.learn.trainer import Trainer, TrainingProgress
from fedeas_flwr.generators.learn.verdict import Verdict

TINY = dataclasses.replace(
    DIGITS,
    name="tiny",
    unet={**DIGITS.unet, "block_out_channels": (8, 8), "norm_num_groups": 4, "dropout": 0.1},
    batch=8,
    min_snr=5.0,
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give verdicts without a classifier, which takes seconds to train; test_verdict.py tests them."""
    monkeypatch.setattr(verdict, "_MIN_HELD_OUT", 1_000_000)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return open_dataset("digits")


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [*trainer.unet.parameters(), *trainer.average.shadow_params]


def same(one: Trainer, other: Trainer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def test_resumed_training_equals_uninterrupted_bitwise(tmp_path: Path, digits: Dataset) -> None:
    whole = Trainer(TINY, digits)
    assert whole.run(steps=6)
    seen: list[int] = []

    def stop_at_three(now: TrainingProgress) -> None:
        seen.append(now.step)
        if now.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    out, before = tmp_path / "g", signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    assert not train_generator("digits", out, TINY, steps=6, report=stop_at_three)
    assert sorted(path.name for path in out.iterdir()) == [CHECKPOINT]
    assert signal.getsignal(signal.SIGINT) is before
    torch.manual_seed(123)  # a resumed process has another random state
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    assert train_generator("digits", out, TINY, steps=6, resume=True, report=lambda now: seen.append(now.step))
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads
    assert seen == [1, 2, 3, 4, 5, 6]
    resumed = dict(DiffusionGenerator(out, num_classes=10)._denoiser.unet.named_parameters())
    for name, value in whole.averaged().named_parameters():
        assert torch.equal(value, resumed[name])


@pytest.fixture
def deterministic_mode() -> Iterator[Callable[[], int]]:
    """Yield a function that returns torch's deterministic mode: 0 off, 1 warn, 2 error."""
    yield torch.get_deterministic_debug_mode
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_trainer_error_restores_deterministic_mode(
    digits: Dataset, deterministic_mode: Callable[[], int], given: int
) -> None:
    plain, other = Trainer(TINY, digits), Trainer(TINY, digits)
    plain.run(steps=2)
    within: list[int] = []

    def fail_at_two(now: TrainingProgress) -> None:
        within.append(deterministic_mode())
        if now.step == 2:
            raise ZeroDivisionError

    torch.use_deterministic_algorithms(given > 0, warn_only=given == 1)
    with pytest.raises(ZeroDivisionError):
        other.run(steps=2, report=fail_at_two)
    assert deterministic_mode() == given and within == [2, 2] and same(plain, other)


def test_seed_and_step_change_the_draws(digits: Dataset) -> None:
    trainers = [Trainer(TINY, digits, seed=seed) for seed in (0, 0, 1)]
    for trainer in trainers:
        trainer.run(steps=2)
    assert same(trainers[0], trainers[1]) and not same(trainers[0], trainers[2])
    losses = [loss for _, loss in trainers[0].state.curve]
    assert len(set(losses)) == 2


def test_minutes_limit_counts_total_wall_clock_time(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, clock = Trainer(TINY, digits), Clock()
    monkeypatch.setattr(trainer_module, "time", clock)

    def half_second_step() -> bool:
        clock.sleep(0.5)
        return False

    assert trainer.run(minutes=1.75 / 60, between=half_second_step)
    assert (trainer.state.step, trainer.state.seconds) == (4, 2.0)
    clock.sleep(3600)  # a pause between two calls
    assert trainer.run(minutes=1.75 / 60) and trainer.state.step == 4
    assert trainer.run(minutes=2.25 / 60, between=half_second_step)
    assert (trainer.state.step, trainer.state.seconds) == (5, 2.5)


def test_loss_curve_has_first_and_last_step(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, clock = Trainer(dataclasses.replace(TINY, log_every=20), digits), Clock()
    monkeypatch.setattr(trainer_module, "time", clock)
    assert trainer.run(minutes=1 / 60, between=lambda: bool(clock.sleep(0.25)))
    assert [step for step, _ in trainer.state.curve] == [1, 4]


def test_training_on_few_images_stores_them(tmp_path: Path) -> None:
    words = ("train-generator", "--dataset", "digits", "--device", "cpu", "--out", str(tmp_path / "few"), "--steps")
    done = run_in_process(*words, "1", "--only", "20")
    assert done.returncode == 0, done.stderr
    digits = open_dataset("digits")
    with np.load(tmp_path / "few" / "only.npz") as found:
        assert found["y"].tolist() == [label for label in range(10) for _ in range(2)]
        assert np.array_equal(found["x"][:2], digits.x_train[np.flatnonzero(digits.y_train == 0)[:2]])
    card = " ".join((tmp_path / "few" / "README.md").read_text().split())
    assert (
        "the 20 train images of digits (the project's fixed stratified 80/20 one; only the first of each class)" in card
    )
    assert "--only 20 --resume" in done.stdout
    done = run_in_process(*words, "2", "--resume")
    assert (done.returncode, "only: 0 is not allowed; the checkpoint in" in done.stderr) == (2, True)
    shutil.rmtree(tmp_path / "few")
    done = run_in_process(*words, "1", "--only", "15")
    message = "error: only: 15 is not allowed; give a multiple of 10, the number of classes\n"
    assert (done.returncode, done.stderr, (tmp_path / "few").exists()) == (2, message, False)


def test_training_on_more_images_than_a_class_has_is_rejected(tmp_path: Path) -> None:
    smallest = int(np.bincount(open_dataset("digits").y_train).argmin())
    message = rf"only: 2000 is not allowed; it needs 200 images of each class, and class '{smallest}' has 139"
    with pytest.raises(ValueError, match=message):
        train_generator("digits", tmp_path / "few", TINY, only=2000)


def test_folder_holds_model_card_and_figures(tmp_path: Path) -> None:
    out = tmp_path / "g"
    assert train_generator("digits", out, TINY, steps=2, half=True)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert names >= {"unet/config.json", f"unet/{WEIGHTS_NAME}", "scheduler/scheduler_config.json", "README.md"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("samples.png", "loss.png"))
    card = (out / "README.md").read_text()
    for fact in ("1,438 train images", "No test set was seen", "2 steps of 8 images", "CC BY 4.0", "`tiny`", "float16"):
        assert fact in card
    assert not list(out.rglob(".*"))
    with np.errstate(all="ignore"):
        images = DiffusionGenerator(out, num_classes=10, steps=2).sample([SampleId(0, 0, 3, 0)])
    assert images.shape == (1, 8, 8, 1)
    assert json.loads((out / "unet" / "config.json").read_text())[CLASSES] == list("0123456789")
    with pytest.raises(ValueError, match="was trained on 10 classes; the dataset has 11"):
        DiffusionGenerator(out, num_classes=11)


def test_invalid_training_settings_are_rejected_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "g"
    train_generator("digits", out, TINY, steps=1)
    cases = [
        ({}, "is not empty; give --resume"),
        ({"resume": True, "seed": 7}, "seed: 7 is not allowed; the checkpoint in .* has 0"),
        ({"steps": 0}, "steps: 0 is not allowed"),
        ({"steps": 1, "minutes": 1}, "exclude each other"),
        ({"minutes": 0}, "minutes: 0 is not allowed; give more than 0 and less than 1,000,000"),
        ({"minutes": float("inf")}, "minutes: inf is not allowed; give more than 0 and less than 1,000,000"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            train_generator("digits", out, TINY, **settings)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"preset: 'digits' is not allowed; the checkpoint in .* has 'tiny'"):
        train_generator("digits", out, DIGITS, resume=True)
    whole = (out / CHECKPOINT).read_bytes()
    for damaged, reason in (
        (whole[:1000], "cannot be read"),
        (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], "does not match its digest"),
        (whole.replace(b'\\"step\\": 1', b'\\"step\\": 0'), "does not match its digest"),
        (save({"w": torch.zeros(1)}, metadata={"state": "{}"}), "has no digest"),
    ):
        (out / CHECKPOINT).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"^resume: .*{reason}.*; start again in another folder$"):
            train_generator("digits", out, TINY, resume=True)
    with pytest.raises(ValueError, match=r"resume: there is no .*checkpoint.safetensors; omit --resume"):
        train_generator("digits", tmp_path / "new", TINY, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty; it has no training to continue"):
        train_generator("digits", tmp_path / "other", TINY, steps=1)
    with pytest.raises(ValueError, match=r"there is no .*checkpoint.safetensors; give another folder"):
        train_generator("digits", tmp_path / "other", TINY, resume=True)
    with pytest.raises(ValueError, match="preset: 'large' is not known; use one of digits, cifar-small, paper"):
        find_preset("large", "cifar10", "cpu")


def test_checkpoint_of_weights_that_are_not_finite_is_not_written(tmp_path: Path, digits: Dataset) -> None:
    """The loss is looked at only now and then, so it may not have shown this yet."""
    trainer, path = Trainer(TINY, digits), tmp_path / CHECKPOINT
    trainer.run(steps=1)
    write_checkpoint(path, trainer, {})
    before = path.read_bytes()
    with torch.no_grad():
        next(trainer.unet.parameters()).view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match="weights: not finite at step 1; --resume continues from the last checkpoint"):
        write_checkpoint(path, trainer, {})
    assert path.read_bytes() == before


def test_resumed_training_keeps_its_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It started on a GPU, with cifar-small as default, and is resumed without one."""
    out, asked = tmp_path / "g", list[str]()
    out.mkdir()
    identity = {"dataset": "cifar10", "seed": 0, "preset": dataclasses.asdict(CIFAR_SMALL)}
    diary = {"step": 1, "seconds": 1.0, "curve": [], "start": ""}
    write_checked(out / CHECKPOINT, {"identity": identity, "diary": diary}, {}, run._OWNER)
    args = ("train-generator", "--dataset", "cifar10", "--out", str(out), "--device", "cpu", "--resume")
    other = run_in_process(*args, "--preset", "paper")
    line = f"error: preset: 'paper' is not allowed; the checkpoint in {out} has 'cifar-small'\n"
    assert (other.returncode, other.stdout, other.stderr) == (2, "", line)

    def train(dataset: str, out: Path, preset: Preset, **more: Any) -> Verdict:
        asked.append(preset.name)
        return Verdict(10_000, 0.1, 1.0, None, None, "no fault found", False)

    monkeypatch.setattr(run, "train_generator", train)
    done = run_in_process(*args)
    lines = [f"generator: {out}", "verdict: no fault found", f"look at: {out / 'samples.png'}"]
    lines.append(f"next: fedeas run conf/quickstart.toml dataset=cifar10 generator={out}")
    assert (done.returncode, done.stdout.splitlines(), asked) == (0, lines, ["cifar-small"])
    monkeypatch.undo()
    full = run_in_process(*args[:-1])
    assert (full.returncode, full.stdout) == (2, "") and "is not empty; give --resume" in full.stderr
    nowhere = run_in_process(*args[:4], str(tmp_path / "new"), *args[5:])
    assert (nowhere.returncode, nowhere.stdout) == (2, "") and "resume: there is no" in nowhere.stderr


def test_resume_on_changed_data_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom data keep their path when a class is added."""
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    out, own = tmp_path / "g", tmp_path / "own.npz"
    x = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 1), dtype=np.uint8)

    def write(*classes: str, channels: int = 1) -> None:
        np.savez(own, x=x.repeat(channels, axis=3), y=np.arange(24) % len(classes), classes=np.array(classes))

    def train(**settings: Any) -> Verdict | None:
        return train_generator(f"own:{own}", out, TINY, **settings)

    write("ant", "bee")
    assert train(steps=1)
    for other, message in (
        (("ant", "bee", "cat"), "class 2: 'cat' is not allowed; the checkpoint in .*g has None"),
        (("ant", "cow"), "class 1: 'cow' is not allowed; the checkpoint in .*g has 'bee'"),
    ):
        write(*other)
        with pytest.raises(ValueError, match=f"^{message}$"):
            train(steps=2, resume=True)
    write("ant", "bee", channels=3)
    with pytest.raises(ValueError, match=r"^images: \[8, 8, 3\] is not allowed; the checkpoint in .* has \[8, 8, 1\]"):
        train(steps=2, resume=True)
    write("ant", "bee")
    assert train(steps=2, resume=True)


def test_learning_rate_schedule_by_hand() -> None:
    tail = dataclasses.replace(CIFAR_SMALL, warm_up=4)
    assert [rate_factor(tail, step, 0.0) for step in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert rate_factor(tail, 9, 0.8) == 1.0
    assert rate_factor(tail, 9, 0.9) == pytest.approx(0.5)
    assert rate_factor(tail, 9, 1.0) == pytest.approx(0.0)
    assert rate_factor(DIGITS, 99, 0.5) == pytest.approx(0.5)
    assert rate_factor(PAPER, 0, 0.99) == 1.0


def test_min_snr_loss_weights_by_hand() -> None:
    ratio = torch.tensor([0.5, 5.0, 20.0])
    epsilon = dataclasses.replace(PAPER, min_snr=5.0)
    assert loss_weights(epsilon, ratio).tolist() == [1.0, 1.0, 0.25]
    torch.testing.assert_close(loss_weights(CIFAR_SMALL, ratio), torch.tensor([0.5 / 1.5, 5 / 6, 5 / 21]))
    assert loss_weights(PAPER, ratio).tolist() == [1.0, 1.0, 1.0]


def fake_cifar() -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(6) % 10
    return Dataset("cifar10", tuple("abcdefghij"), (0.5,) * 3, (0.2,) * 3, images, labels, images[:1], labels[:1])


@pytest.mark.parametrize(("preset", "millions"), [(CIFAR_SMALL, (24, 27)), (PAPER, (30, 80))])
def test_presets_build_networks_of_the_stated_size(preset: Preset, millions: tuple[int, int]) -> None:
    trainer = Trainer(preset, fake_cifar())
    size = sum(value.numel() for value in trainer.unet.parameters()) / 1e6
    assert millions[0] < size < millions[1]
    assert trainer.unet.config.num_class_embeds == 11 and trainer.unet.config.sample_size == 32
    assert (preset.flips, trainer.loss._flips) == (True, True)
    assert trainer.scheduler.config.beta_schedule == preset.beta_schedule
    json.dumps(dataclasses.asdict(preset))


def test_images_whose_mirror_images_differ_are_not_flipped(digits: Dataset) -> None:
    shoe = np.zeros((2, 28, 28, 1), dtype=np.uint8)
    fashion = Dataset(
        "fashion-mnist", ("shoe",), (0.5,), (0.2,), shoe, np.zeros(2, np.int64), shoe, np.zeros(2, np.int64)
    )
    for dataset in (digits, fashion):
        assert not Trainer(dataclasses.replace(TINY, flips=True), dataset).loss._flips
    assert set(PRESETS) == {"digits", "cifar-small", "paper"}


def test_default_preset_depends_on_dataset_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_preset("", "digits", "cpu") is find_preset("", "digits", "cuda") is DIGITS
    assert find_preset("", "cifar100", "cuda") is find_preset("", "own:x", "cuda") is CIFAR_SMALL
    assert find_preset("", "cifar100", "cpu") is find_preset("", "own:x", "cpu") is DIGITS
    assert find_preset("cifar-small", "own:x", "cpu") is CIFAR_SMALL
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8), y=np.arange(20) % 2)
    args = ("train-generator", "--dataset", "own:own.npz", "--device", "cpu", "--steps", "1")
    done = run_in_process(*args, "--out", "chosen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = "preset digits, the default on cpu; choose another with --preset"
    assert done.stdout.splitlines()[0] == first
    named = run_in_process(*args, "--out", "named", "--preset", "digits", cwd=tmp_path)
    assert "the default on" not in named.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_training_starts_from_given_weights_and_records_it(tmp_path: Path, device: str) -> None:
    """With three classes after ten, all four embeddings start as "no label", all other weights as given."""
    first, out = tmp_path / "first", tmp_path / "second"
    assert train_generator("digits", first, TINY, steps=2, device=device)
    given = DiffusionGenerator(first, num_classes=10)._denoiser.unet.state_dict()
    x = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), dtype=np.uint8)
    three = Dataset("digits", ("a", "b", "c"), (0.5,), (0.2,), x, np.arange(9) % 3, x[:1], np.zeros(1, np.int64))
    trainer = Trainer(TINY, three, device=device, start=first)
    for name, value in trainer.unet.state_dict().items():
        wanted = given[name][-1:].expand(4, -1) if name == "class_embedding.weight" else given[name]
        assert torch.equal(value.cpu(), wanted), name
    assert all(torch.equal(a, b) for a, b in zip(trainer.unet.parameters(), trainer.average.shadow_params, strict=True))
    assert trainer.run(steps=1)
    same = Trainer(TINY, open_dataset("digits"), start=first).unet.state_dict()
    assert all(torch.equal(same[name], value) for name, value in given.items())

    def stop(now: TrainingProgress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    assert not train_generator("digits", out, TINY, steps=2, start=first, report=stop, device=device)
    shutil.rmtree(first)  # a resumed training does not read it again
    assert train_generator("digits", out, TINY, steps=2, start=first, resume=True, device=device)
    assert "**Initial weights**: `first` (sha256 " in (out / "README.md").read_text()


def test_incompatible_start_weights_are_rejected_in_one_line(tmp_path: Path) -> None:
    first, wider = tmp_path / "first", {**TINY.unet, "block_out_channels": (8, 16)}
    with pytest.raises(FileNotFoundError, match=r"start: there is no .*config\.json; a generator is a folder with"):
        train_generator("digits", tmp_path / "new", TINY, steps=1, start=first)
    assert train_generator("digits", first, TINY, steps=1)
    assert "**Initial weights**" not in (first / "README.md").read_text()
    cases = [
        ({"unet": wider}, r"start: \S+ of .*first is '.*'; it must be .*, as the preset's"),
        (
            {"prediction": "epsilon"},
            "start: prediction_type of .* is 'v_prediction'; it must be epsilon, as",
        ),
        ({"beta_schedule": "linear"}, "start: beta_schedule of .* is 'squaredcos_cap_v2'; it must be linear, as"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            train_generator("digits", tmp_path / "new", dataclasses.replace(TINY, **changes), steps=1, start=first)
        assert "\n" not in str(caught.value) and not (tmp_path / "new").exists()
    args = ("train-generator", "--dataset", "digits", "--preset", "digits", "--steps", "1", "--out", "new")
    refused = run_in_process(*args, "--start", "nowhere", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("error: start: there is no nowhere/unet/config.json")


def test_training_with_epsilon_and_flips_is_finite() -> None:
    preset = dataclasses.replace(TINY, prediction="epsilon", beta_schedule="linear", flips=True)
    trainer = Trainer(preset, fake_cifar())
    assert trainer.run(steps=2)
    assert all(np.isfinite(loss) for _, loss in trainer.state.curve)


def test_interrupted_train_generator_command_resumes(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "fedeas_flwr", "train-generator", "--dataset", "digits", "--out", "g"]
    running = start_interruptible([*args, "--minutes", "5"], cwd=tmp_path)
    assert running.stdout is not None
    assert "loss" in running.stdout.readline()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=LONG)
    assert running.returncode not in (0, None)
    assert "--resume" in errors and "Traceback" not in errors
    assert (tmp_path / "g" / CHECKPOINT).is_file()
    log = logging.getLogger("fedeas_flwr")
    before = log.handlers[:], log.getEffectiveLevel(), log.propagate
    done = run_in_process(*args[3:], "--steps", "1", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (log.handlers, log.getEffectiveLevel(), log.propagate) == before, "the logger was not restored"
    assert "generator: " in done.stdout and (tmp_path / "g" / "unet" / WEIGHTS_NAME).is_file()
    again = run_in_process(*args[3:], cwd=tmp_path)
    assert again.returncode == 2 and "is not empty" in again.stderr and len(again.stderr.splitlines()) == 1


def write_images(path: Path, height: int, width: int) -> str:
    np.savez(path, x=np.zeros((60, height, width, 1), np.uint8), y=np.arange(60) % 3)
    return f"own:{path}"


@pytest.mark.parametrize(
    ("height", "width", "preset", "why"),
    [
        (28, 28, "paper", "sides of multiples of 8; these are 28×28: use preset digits or cifar-small"),
        (30, 44, "cifar-small", "sides of multiples of 4; these are 30×44: use preset digits"),
        (30, 45, "digits", "sides of multiples of 2; these are 30×45: resize them"),
        (7, 5, "digits", "sides of multiples of 2; these are 7×5: resize them"),
    ],
)
def test_preset_indivisible_image_size_raises_before_training(
    tmp_path: Path, height: int, width: int, preset: str, why: str
) -> None:
    given = ["--dataset", write_images(tmp_path / "own.npz", height, width), "--preset", preset]
    done = run_in_process("train-generator", *given, "--out", str(tmp_path / "g"), FEDEAS_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "g").exists()
    assert done.stderr.startswith(f"error: preset: {preset} needs images with {why}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("height", "width"), [(2, 6), (10, 4)])
def test_check_size_rejects_only_sizes_the_network_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, height: int, width: int
) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    dataset = open_dataset(write_images(tmp_path / "own.npz", height, width))
    TINY.check_size(height, width)
    assert Trainer(TINY, dataset).run(steps=1)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        odd = dataclasses.replace(dataset, x_train=dataset.x_train[:, :, : width - 1])
        Trainer(TINY, odd).run(steps=1)
