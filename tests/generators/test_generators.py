"""Generators: sample identity, checks of folders, and training of the built-in one."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from rich.console import Console
from runners import run_in_process
from safetensors.torch import load_file, save_file
from waiting import LONG

from fedeas_flwr.config import SAMPLER_STEPS, RunConfig, parse_config
from fedeas_flwr.doctor.inputs import check_generator
from fedeas_flwr.generators import opening
from fedeas_flwr.generators.diffusion.denoising import PRECISIONS, make_solver
from fedeas_flwr.generators.diffusion.model_folder import CLASSES, WEIGHTS_NAME, check_classes
from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator, initial_noise
from fedeas_flwr.generators.interface import SampleId, check_variety
from fedeas_flwr.generators.opening import open_generator
from fedeas_flwr.launch.prepare import prepare

SHAPE = (8, 8, 1)


def save_tiny(folder: Path, *, embeddings: int = 4, prediction: str = "v_prediction", half: bool = False) -> Path:
    """Save a tiny random model of 3 classes, 8×8, and return its folder."""
    from diffusers import DDIMScheduler, UNet2DModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 8),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            add_attention=False,
            norm_num_groups=4,
            num_class_embeds=embeddings,
        )
    (unet.half() if half else unet).save_pretrained(folder / "unet")
    scheduler = DDIMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type=prediction)
    scheduler.save_pretrained(folder / "scheduler")
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def open_tiny(folder: Path, **settings: Any) -> DiffusionGenerator:
    return DiffusionGenerator(folder, **({"num_classes": 3, "steps": 4, "batch_size": 4} | settings))


def ids(count: int, seed: int = 0, client: int = 0) -> list[SampleId]:
    return [SampleId(seed, client, i % 3, i // 3) for i in range(count)]


def test_noise_depends_on_each_field_of_the_sample_id() -> None:
    base = SampleId(1, 2, 3, 4)
    others = [SampleId(2, 1, 3, 4), base._replace(seed=9), base._replace(client=9), base._replace(label=9)]
    noises = [initial_noise(sample, (5, 5)) for sample in [base, *others, base._replace(index=9)]]
    assert np.array_equal(noises[0], initial_noise(base, (5, 5))) and noises[0].dtype == np.float32
    assert len({noise.tobytes() for noise in noises}) == len(noises)
    many = np.stack([initial_noise(base._replace(index=i), (16,)) for i in range(1000)])
    assert abs(many.mean()) < 0.03 and abs(many.std() - 1) < 0.03
    assert np.abs(np.corrcoef(many.T) - np.eye(16)).max() < 0.15


def test_images_do_not_depend_on_order_batch_or_padding(tiny: Path) -> None:
    generator, wanted = open_tiny(tiny), ids(11)
    images = generator.sample(wanted)
    assert images.shape == (11, *SHAPE) and images.dtype == np.uint8
    assert len({image.tobytes() for image in images}) == 11  # otherwise the comparisons below prove nothing
    order = np.random.default_rng(0).permutation(11)
    assert np.array_equal(generator.sample([wanted[i] for i in order]), images[order])
    assert np.array_equal(generator.sample(wanted[:5]), images[:5])
    for i in (0, 3, 10):
        assert np.array_equal(generator.sample([wanted[i]])[0], images[i])
    assert generator.sample([]).shape == (0, *SHAPE)


def test_sample_ignores_and_keeps_threads_and_rng_state(tiny: Path) -> None:
    before = torch.get_num_threads()
    state = torch.random.get_rng_state()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(open_tiny(tiny).sample(ids(5)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(*made)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_forward_has_one_batch_size_and_one_thread(tiny: Path) -> None:
    # Rounding to uint8 hides most differences in the last bits, so check batch size and threads directly.
    generator, seen = open_tiny(tiny), set()
    generator._denoiser.unet.register_forward_pre_hook(
        lambda _, inputs: seen.add((len(inputs[0]), torch.get_num_threads()))
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generator.sample(ids(6))
        generator.sample(ids(1))
    finally:
        torch.set_num_threads(before)
    assert seen == {(4, 1)}


def test_label_and_guidance_reach_the_model(tiny: Path) -> None:
    plain, guided = open_tiny(tiny), open_tiny(tiny, guidance=3.0)
    assert not np.array_equal(plain.sample(ids(4)), guided.sample(ids(4)))
    # The guided prediction is free + scale · (conditional − free), by hand.
    x, labels, time = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]), torch.tensor(500)
    with torch.no_grad():
        conditional = plain._denoiser.unet(x, time, class_labels=labels).sample
        free = plain._denoiser.unet(x, time, class_labels=torch.full((4,), 3)).sample
        assert not torch.equal(conditional, free)
        torch.testing.assert_close(guided._denoiser.predict(x, time, labels), 3 * conditional - 2 * free)
        assert torch.equal(plain._denoiser.predict(x, time, labels), conditional)


def test_rescaled_guidance_has_the_unguided_deviation(tiny: Path) -> None:
    """This holds per image; partial rescaling lies in between, and none is plain guidance."""
    plain, guided = open_tiny(tiny), open_tiny(tiny, guidance=6.0)
    whole, most = (open_tiny(tiny, guidance=6.0, guidance_rescale=part) for part in (1.0, 0.7))
    x, labels, time = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]), torch.tensor(500)
    with torch.no_grad():
        conditional, far, near, between = (
            generator._denoiser.predict(x, time, labels) for generator in (plain, guided, whole, most)
        )
    torch.testing.assert_close(near.std((1, 2, 3)), conditional.std((1, 2, 3)))
    torch.testing.assert_close(between, 0.7 * near + 0.3 * far)
    directions = [torch.nn.functional.normalize(each.flatten(1)) for each in (near, far)]
    torch.testing.assert_close(*directions)
    assert not torch.allclose(near, far)
    assert whole.fingerprint != guided.fingerprint == open_tiny(tiny, guidance=6.0, guidance_rescale=0).fingerprint
    assert plain.fingerprint == open_tiny(tiny, guidance_rescale=0.7).fingerprint, (
        "rescaling changed the fingerprint without guidance"
    )


def test_only_guided_steps_need_two_forward_passes(tiny: Path) -> None:
    middle = {"guidance_start": 0.25, "guidance_stop": 0.75}
    settings: list[tuple[dict[str, Any], int]] = [({}, 4), ({"guidance": 2.0}, 8), ({"guidance": 2.0, **middle}, 6)]
    for setting, passes in settings:
        generator, seen = open_tiny(tiny, **setting), []
        generator._denoiser.unet.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        generator.sample(ids(3))
        assert len(seen) == passes


def test_fingerprint_depends_on_all_that_changes_pixels(tiny: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny).fingerprint
    assert open_tiny(tiny).fingerprint == base
    settings: list[tuple[str, Any]] = [("steps", 5), ("guidance", 2), ("batch_size", 5), ("sampler", "ddim")]
    guided = [open_tiny(tiny, guidance=2, **{key: 0.5}) for key in ("guidance_start", "guidance_stop")]
    changed = [open_tiny(tiny, **{key: value}) for key, value in [*settings, ("precision", "bf16")]] + guided
    changed.append(open_tiny(save_tiny(tmp_path / "epsilon", prediction="epsilon")))
    changed.append(open_tiny(save_tiny(tmp_path / "half", half=True)))
    assert len({base, *(generator.fingerprint for generator in changed)}) == 10
    moved = save_tiny(tmp_path / "moved")
    config = json.loads((moved / "unet" / "config.json").read_text())
    (moved / "unet" / "config.json").write_text(json.dumps(config | {"_diffusers_version": "0.0"}))
    assert open_tiny(moved).fingerprint == base


def test_sampler_default_steps_and_ddim_formula(tiny: Path) -> None:
    assert DiffusionGenerator(tiny, num_classes=3).steps == 20
    assert DiffusionGenerator(tiny, num_classes=3, sampler="ddim").steps == 250
    # Song et al. (2021), Eq. 12 with σ = 0, for a v-model: times 999, 749, 499, 249 by trailing spacing.
    generator = open_tiny(tiny, sampler="ddim")
    solver = make_solver("ddim", generator._schedule, 4)
    assert solver.timesteps.tolist() == [999, 749, 499, 249]
    kept = [*solver.alphas_cumprod[[999, 749, 499, 249]].tolist(), 1.0]
    x = torch.from_numpy(np.stack([initial_noise(sample, (1, 8, 8)) for sample in ids(4)]))
    labels = torch.tensor([sample.label for sample in ids(4)])
    for number, time in enumerate((999, 749, 499, 249)):
        now, after = kept[number], kept[number + 1]
        velocity = generator._denoiser.predict(x, torch.tensor([time]), labels)
        image = (now**0.5 * x - (1 - now) ** 0.5 * velocity).clamp(-1, 1)
        noise = now**0.5 * velocity + (1 - now) ** 0.5 * x
        x = after**0.5 * image + (1 - after) ** 0.5 * noise
    expected = ((x / 2 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1).numpy()
    assert np.abs(generator.sample(ids(4)) - expected).max() <= 1


def test_batch_size_changes_images_by_rounding_only(digits_generator: Path) -> None:
    wanted = [SampleId(0, 0, label, 0) for label in range(10)]
    one, other = (
        DiffusionGenerator(digits_generator, num_classes=10, batch_size=size).sample(wanted).astype(int)
        for size in (16, 64)
    )
    assert np.abs(one - other).max() <= 1 and (one != other).mean() <= 0.01


def test_low_precision_is_close_and_independent_of_order(tiny: Path) -> None:
    exact, rough = open_tiny(tiny), open_tiny(tiny, precision="bf16")
    assert rough._denoiser.unet.dtype == torch.bfloat16
    images = rough.sample(ids(5))
    assert np.abs(images.astype(int) - exact.sample(ids(5))).mean() < 4
    assert np.array_equal(rough.sample(ids(5)[::-1]), images[::-1])


def test_out_of_memory_halves_the_batch_size(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = open_tiny(tiny, batch_size=16)
    whole = generator.sample(ids(40))
    start = generator._denoiser.start
    sizes: list[int] = []

    def short_of_memory(noise: Any, labels: Any) -> Any:
        sizes.append(len(noise))
        if len(sizes) == 2 or (len(noise) > 8 and len(sizes) > 2):
            raise torch.cuda.OutOfMemoryError
        return start(noise, labels)

    monkeypatch.setattr(generator._denoiser, "start", short_of_memory)
    assert np.abs(generator.sample(ids(40)).astype(int) - whole).max() <= 1
    assert sizes == [16, 16, 8, 8, 8] and generator.batch_size == 8
    assert [r.getMessage() for r in caplog.records] == ["out of memory at a batch of 16; continuing with 8"]
    monkeypatch.setattr(generator._denoiser, "start", lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError))
    with pytest.raises(MemoryError, match="generation-batch: the GPU has no memory for 8 images"):
        generator.sample(ids(1))


def test_open_for_run_passes_settings_or_defaults(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(opening, "open_generator", lambda *_, **settings: seen.update(settings))
    opening.open_for_run(parse_config({}), "cpu")
    assert (seen["sampler"], seen["steps"], seen["batch_size"], seen["precision"]) == ("dpm++", None, None, None)
    given = {"sampler": "ddim", "sampler-steps": 50, "generation-batch": 7, "generation-precision": "fp16"}
    opening.open_for_run(parse_config(given), "cpu")
    assert (seen["sampler"], seen["steps"], seen["batch_size"], seen["precision"]) == ("ddim", 50, 7, "fp16")
    for key, known in (("sampler", SAMPLER_STEPS), ("generation_precision", {"auto", *PRECISIONS})):
        assert set(get_args(RunConfig.model_fields[key].annotation)) == set(known)


def test_half_precision_weights_are_computed_in_float32(tmp_path: Path) -> None:
    generator = open_tiny(save_tiny(tmp_path, half=True))
    assert {value.dtype for value in generator._denoiser.unet.parameters()} == {torch.float32}
    assert len(np.unique(generator.sample(ids(2)))) > 2


def test_model_without_no_label_class_rejects_guidance(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, embeddings=3)
    assert open_tiny(folder).sample(ids(1)).shape == (1, *SHAPE)
    with pytest.raises(ValueError, match=r"guidance: 2.0 needs a model with a 'no label' class"):
        open_tiny(folder, guidance=2.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_classes": 7}, "num_class_embeds of .* is 4; it must be 7, or 8"),
        ({"image_shape": (32, 32, 3)}, r"makes images \[8, 8, 1\]; the dataset's are \[32, 32, 3\]"),
        ({"steps": 0}, "steps: 0 is not allowed; give 1 to 1000"),
        ({"steps": "20"}, "steps: '20' is not allowed; give 1 to 1000"),
        ({"batch_size": "8"}, "batch_size: '8' is not allowed; give at least 1"),
        ({"guidance": 0.5}, "guidance: 0.5 is not allowed"),
        ({"guidance": float("nan")}, "guidance: nan is not allowed"),
        ({"guidance_start": 0.5, "guidance_stop": 0.5}, "guidance_start: 0.5 is not allowed; give 0 or more, below"),
        ({"guidance_stop": 1.5}, r"below guidance-stop = 1.5 \(at most 1\)"),
        ({"guidance_rescale": 1.5}, "guidance_rescale: 1.5 is not allowed; give 0 \\(none\\) to 1"),
        ({"batch_size": 0}, "batch_size: 0 is not allowed"),
        ({"sampler": "euler"}, r"sampler: 'euler' is not allowed; give one of dpm\+\+, dpm\+\+-logsnr, ddim"),
        ({"sampler": "ddim", "steps": 300}, "steps: 300 is not allowed with ddim; give a divisor of 1000"),
        ({"precision": "tf32"}, "precision: 'tf32' is not allowed on cpu; give fp32, bf16, fp16"),
        ({"device": "tpu"}, "device: 'tpu' is not allowed; use cpu, cuda"),
    ],
)
def test_invalid_generator_settings_are_rejected_in_one_line(
    tiny: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        DiffusionGenerator(tiny, **({"num_classes": 3} | settings))
    assert "\n" not in str(caught.value)


def test_open_generator_names_arguments_of_a_wrong_type() -> None:
    with pytest.raises(ValueError, match=r"^spec=PosixPath\('here'\): must be a string"):
        open_generator(Path("here"), "digits")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dataset_name=None: must be"):
        open_generator("builtin", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generation-precision": "tf32"}, "generation-precision: 'tf32' is not allowed on cpu; give fp32, bf16, fp16"),
        ({"sampler": "ddim", "sampler-steps": 300}, "sampler-steps: 300 is not allowed with ddim; give a divisor of"),
        ({"generator": "bank:/nowhere"}, "generator: there is no bank '/nowhere'"),
    ],
)
def test_open_for_run_errors_name_run_config_keys(digits_generator: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{message}"):
        opening.open_for_run(parse_config({"generator": str(digits_generator), **given}), "cpu")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    path = folder / "unet" / WEIGHTS_NAME
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder


def one_nan(weights: dict[str, torch.Tensor]) -> None:
    weights["mid_block.resnets.0.conv1.weight"].view(-1)[7] = torch.nan


def test_weights_with_nan_are_rejected_by_run_generate_and_doctor(tmp_path: Path, digits_generator: Path) -> None:
    folder = change_weights(Path(shutil.copytree(digits_generator, tmp_path / "model")), one_nan)
    why = f"generator: {folder}/unet/{WEIGHTS_NAME} holds NaN or infinity in mid_block.resnets.0.conv1.weight"
    config = parse_config({"clients": 2, "generator": str(folder), "run-dir": str(tmp_path / "run")})
    with pytest.raises(ValueError, match=re.escape(why)):
        prepare(config, Console(file=io.StringIO()))
    (found,) = check_generator(config)
    assert (found.state, found.text) == ("problem", why)
    done = run_in_process("generate", "--generator", str(folder), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (2, f"error: {why}\n")


def too_large(weights: dict[str, torch.Tensor]) -> None:
    weights["conv_out.weight"] *= 1e38


def no_output(weights: dict[str, torch.Tensor]) -> None:
    weights["conv_out.weight"].zero_()


def test_check_variety_compares_different_samples_only() -> None:
    same = np.broadcast_to(np.arange(64, dtype=np.uint8).reshape(8, 8, 1), (3, 8, 8, 1))
    check_variety(same, ids(1) * 3, "model")
    with pytest.raises(ValueError, match="generator: model: the generated images are all the same"):
        check_variety(same, ids(3), "model")


def test_images_that_are_not_finite_or_all_the_same_are_rejected(tmp_path: Path) -> None:
    """One image is rejected only if all of its pixels are equal: a user may want a single image."""
    sound = open_tiny(save_tiny(tmp_path / "sound", prediction="sample"))
    assert len(sound.sample(ids(1))) == 1 and np.ptp(sound.sample(ids(1) * 3), axis=0).max() == 0
    folder = change_weights(save_tiny(tmp_path / "large", prediction="sample"), too_large)
    with pytest.raises(ValueError, match=f"^generator: {folder}: the generated images hold NaN or infinity$"):
        open_tiny(folder).sample(ids(1))
    folder = change_weights(save_tiny(tmp_path / "constant", prediction="sample"), no_output)
    for samples in (ids(1), ids(5)):
        with pytest.raises(ValueError, match=f"^generator: {folder}: the generated images are all the same; "):
            open_tiny(folder).sample(samples)
    assert len(open_tiny(folder).sample([])) == 0


def test_invalid_generator_folder_is_rejected_in_one_line(tmp_path: Path) -> None:
    def refuse(message: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            open_tiny(tmp_path)
        assert "\n" not in str(caught.value)

    refuse("there is no .*config.json; a generator is a folder with unet/ and scheduler/")
    save_tiny(tmp_path, prediction="v_prediction")
    weights, config = tmp_path / "unet" / WEIGHTS_NAME, tmp_path / "unet" / "config.json"
    whole, settings = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[:-100])
    refuse("does not fit its config.json or is damaged")
    weights.unlink()
    refuse("must be one safetensors file")
    weights.write_bytes(whole)
    config.write_text(json.dumps(settings | {"layers_per_block": 2}))  # missing weights must not be random
    refuse("does not fit its config.json")
    config.write_text(json.dumps(settings | {"_class_name": "UNet2DConditionModel"}))
    refuse("must be UNet2DModel")
    config.write_text("{")
    refuse("is not JSON")
    config.write_text(json.dumps(settings))
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"prediction_type": "flow_prediction"}')
    refuse("'flow_prediction'; allowed are epsilon, sample, v_prediction")


def test_model_with_class_names_rejects_other_classes(tmp_path: Path) -> None:
    """Four embeddings are three classes and "no label"; with four classes, the last would be "no label"."""
    plain = open_tiny(save_tiny(tmp_path))
    assert open_tiny(tmp_path, num_classes=4).num_classes == 4, "a model without class names may have four"
    config = tmp_path / "unet" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {CLASSES: ["ant", "bee", "cat"]}))
    assert open_tiny(tmp_path, classes=("ant", "bee", "cat")).fingerprint == plain.fingerprint
    assert open_tiny(tmp_path, classes=("0", "1", "2")).fingerprint == plain.fingerprint, (
        "numbers do not count as class names"
    )
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"num_classes": 4}, r"unet of .* was trained on 3 classes; the dataset has 4"),
        ({}, {"classes": ("ant", "cat", "bee")}, r"class 1 of .* is 'bee'; the dataset's is 'cat'"),
        ({"num_class_embeds": 3}, {}, r"num_class_embeds of .* is 3; it must be 4, its classes and 'no label'"),
        ({CLASSES: "abc"}, {}, rf"{CLASSES} of .* is 'abc'; it must be a list of names"),
        ({CLASSES: [1, 2, 3]}, {}, rf"{CLASSES} of .* is '\[1, 2, 3\]'; it must be a list of names"),
    ]
    for changes, given, message in cases:
        config.write_text(json.dumps(settings | {CLASSES: ["ant", "bee", "cat"]} | changes))
        with pytest.raises(ValueError, match=f"^generator: {message}$"):
            open_tiny(tmp_path, **given)


def test_model_numbered_classes_in_other_order_raise(tmp_path: Path) -> None:
    numbers = [str(label) for label in range(12)]
    check_classes(
        {"num_class_embeds": 13, CLASSES: numbers}, tmp_path, 12, list("abcdefghijkl")
    )  # numbers do not count as names
    with pytest.raises(ValueError, match=r"class 2 of .* is '10'; the dataset's is '2'"):
        check_classes({"num_class_embeds": 13, CLASSES: sorted(numbers)}, tmp_path, 12, numbers)
    with pytest.raises(ValueError, match=r"class 2 of .* is '2'; the dataset's is '10'"):
        check_classes({"num_class_embeds": 13, CLASSES: numbers}, tmp_path, 12, sorted(numbers))


def test_sample_ids_out_of_range_are_rejected(tiny: Path) -> None:
    for sample in (SampleId(0, 0, 3, 0), SampleId(0, 0, -1, 0), SampleId(0, -1, 0, 0)):
        with pytest.raises(ValueError, match="none negative, label below 3"):
            open_tiny(tiny).sample([sample])


def test_builtin_is_for_digits_only() -> None:
    with pytest.raises(ValueError, match="for cifar10 give a folder"):
        open_generator("builtin", "cifar10")


def test_diffusers_is_imported_only_when_needed() -> None:
    code = (
        "import sys, fedeas_flwr.generators; assert 'torch' not in sys.modules\n"
        "import fedeas_flwr.generators.learn.builtin, fedeas_flwr.generators.diffusion.sampler\n"
        "assert 'diffusers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_builtin_trained_once_and_retrained_if_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedeas_flwr")
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    from fedeas_flwr.generators.learn import builtin

    monkeypatch.setattr(builtin, "DIGITS", dataclasses.replace(builtin.DIGITS, steps=3))
    ensure_builtin = builtin.ensure_builtin
    code = (
        "import dataclasses\n"
        "from fedeas_flwr.generators.learn import builtin\n"
        "builtin.DIGITS, seen = dataclasses.replace(builtin.DIGITS, steps=3), []\n"
        "builtin.ensure_builtin(lambda *a: (seen.append(a[:2]), a[0] == 1 and input('trains\\n'))); print(seen)"
    )
    words, seen = [sys.executable, "-c", code], []
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "trains\n"
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ensure_builtin, lambda *a: seen.append(a[:2]))
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        assert other.communicate("\n", timeout=LONG)[0] == "[(1, 3), (2, 3), (3, 3)]\n"
        waits.result(LONG)
    assert seen == []

    def again(folder: Path) -> bool:
        seen: list[int] = []
        threads = torch.get_num_threads()
        assert ensure_builtin(lambda step, total, loss: seen.append(step)) == folder
        assert torch.get_num_threads() == threads and not torch.are_deterministic_algorithms_enabled()
        return bool(seen)

    folder = ensure_builtin()
    assert not caplog.messages, "logged although nothing was trained"
    weights = folder / "unet" / WEIGHTS_NAME
    whole = weights.read_bytes()
    assert not again(folder)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert again(folder) and weights.read_bytes() == whole  # training is reproducible, also in another process
    (folder / "scheduler" / "scheduler_config.json").unlink()
    assert again(folder) and not again(folder)
    weights.unlink()
    ensure_builtin()  # without a callback it logs, since this is how a node trains it
    assert [message for message in caplog.messages if "built-in" in message] == [
        "training steps of the built-in generator: 0 of 3",
        "training steps of the built-in generator: 3 of 3",
    ]
    assert "No test set was seen" in (folder / "README.md").read_text()


def test_builtin_generates_the_requested_digits(digits_generator: Path) -> None:
    from sklearn.svm import SVC

    from fedeas_flwr.data.datasets import open_dataset

    digits = open_dataset("digits")
    svm = SVC().fit(digits.x_train.reshape(len(digits.x_train), -1), digits.y_train)
    assert svm.score(digits.x_test.reshape(len(digits.x_test), -1), digits.y_test) > 0.97
    generator = open_generator("builtin", "digits")
    wanted = [SampleId(0, 0, label, index) for label in range(10) for index in range(19)]
    images = generator.sample(wanted)
    agreed = svm.predict(images.reshape(len(images), -1)) == [sample.label for sample in wanted]
    assert agreed.mean() >= 0.85
    assert agreed.reshape(10, -1).mean(axis=1).min() >= 0.5  # every class is recognised
    assert len({image.tobytes() for image in images}) == len(images)


@pytest.mark.slow
def test_generation_benchmark_writes_its_tables(tmp_path: Path) -> None:
    root, folder = Path(__file__).parents[2], save_tiny(tmp_path / "model", embeddings=11)
    args = ["--generator", str(folder), "--dataset", "digits", "--images", "70", "--steps", "2", "--ddim-steps", "2"]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "generation.py"), *args, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "generation.json").read_text())
    assert len(result["rows"]) == 8 and result["order"]["differing"] == 0
    assert all(row["images_per_second"] > 0 and row["max_off"] <= 1 for row in result["rows"])
    assert "0 of" in done.stdout and "ddim, 2 steps" in (tmp_path / "out" / "generation.txt").read_text()
