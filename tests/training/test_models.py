"""Networks: seeded weights, pretrained weights, custom models, and reading and writing of states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from safetensors.torch import save_file
from torch import nn
from users_models import WithFunctions, with_batchnorm, with_dropout

from fedeas_flwr.config import parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.engine import copy_state
from fedeas_flwr.training.models import build_model, split_state, uses_rng

DIGITS = (8, 8, 1)
CIFAR = (32, 32, 3)


class Own(nn.Module):
    """A custom model with frozen, trained and integer state."""

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.fc = nn.Linear(int(np.prod(image_shape)), num_classes)
        self.register_buffer("steps", torch.tensor(7, dtype=torch.int64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(images.flatten(1))
        return logits


def not_a_model(num_classes: int, image_shape: tuple[int, int, int]) -> str:
    return "model"


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", ["small-cnn", f"{__name__}:Own"])
def test_initial_weights_depend_only_on_the_seed(name: str) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(name, 10, DIGITS, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(first, build_model(name, 10, DIGITS, seed=3))
    assert not same(first, build_model(name, 10, DIGITS, seed=4))


def test_small_cnn_accepts_digits_and_has_no_buffers() -> None:
    model = build_model("small-cnn", 10, DIGITS, seed=0)
    assert model(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert split_state(model)[1] == {}


def test_images_too_small_for_small_cnn_are_rejected() -> None:
    for height, width in ((1, 1), (1, 8), (8, 1)):
        why = f"model: small-cnn needs images of 2×2 or more, these are {height}×{width}; use resnet18"
        with pytest.raises(ValueError, match=f"^{why}"):
            build_model("small-cnn", 3, (height, width, 1), seed=0)
    assert build_model("small-cnn", 3, (2, 3, 1), seed=0)(torch.zeros(2, 1, 2, 3)).shape == (2, 3)
    for stem in ("7x7", "3x3"):
        assert build_model("resnet18", 3, (1, 1, 1), stem=stem, seed=0)(torch.zeros(2, 1, 1, 1)).shape == (2, 3)


def test_resnet18_stems() -> None:
    wide = build_model("resnet18", 10, CIFAR, seed=0)
    fine = build_model("resnet18", 10, CIFAR, stem="3x3", seed=0)
    assert wide.conv1.weight.shape == (64, 3, 7, 7) and isinstance(wide.maxpool, nn.MaxPool2d)
    assert fine.conv1.weight.shape == (64, 3, 3, 3) and isinstance(fine.maxpool, nn.Identity)
    assert fine.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_pretrained_stem_sees_grey_images_as_equal_channels(tmp_path: Path) -> None:
    file, grey = tmp_path / "weights.safetensors", torch.rand(2, 1, 28, 28)
    save_file(build_model("resnet18", 1000, CIFAR, seed=9).state_dict(), file)
    colour, one = (build_model("resnet18", 7, (28, 28, c), weights=str(file), seed=0).eval() for c in (3, 1))
    assert one.conv1.weight.shape == (64, 1, 7, 7)
    torch.testing.assert_close(one(grey), colour(grey.expand(-1, 3, -1, -1)))


def test_pretrained_weights_load_except_head_and_new_stem(tmp_path: Path) -> None:
    source = build_model("resnet18", 1000, CIFAR, seed=9)
    source.bn1.running_mean.fill_(0.25)
    state = source.state_dict()
    # Like older files: half precision, without the counters.
    half = {key: value.half() for key, value in state.items() if not key.endswith("num_batches_tracked")}
    file = tmp_path / "weights.safetensors"
    save_file(half, file)
    wide = build_model("resnet18", 7, CIFAR, weights=str(file), seed=0)
    fine = build_model("resnet18", 7, CIFAR, weights=str(file), stem="3x3", seed=0)
    for model, new in ((wide, {"fc"}), (fine, {"fc", "conv1"})):
        for key, value in model.state_dict().items():
            if key.split(".")[0] not in new and key in half:
                assert value.dtype == torch.float32 and torch.equal(value, half[key].float())
        assert model.fc.weight.shape == (7, 512)
    assert torch.equal(fine.conv1.weight, build_model("resnet18", 7, CIFAR, stem="3x3", seed=0).conv1.weight)

    with pytest.raises(ValueError, match="needs images of 1 or 3 channels; these have 4"):
        build_model("resnet18", 10, (32, 32, 4), weights=str(file), seed=0)
    save_file({key: value for key, value in half.items() if key != "bn1.bias"}, file)
    with pytest.raises(ValueError, match=r"lacks bn1\.bias"):
        build_model("resnet18", 10, CIFAR, weights=str(file), seed=0)
    save_file(half | {"bn1.bias": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"bn1\.bias of .* has shape \[3\]; resnet18 needs \[64\]"):
        build_model("resnet18", 10, CIFAR, weights=str(file), seed=0)
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        build_model("resnet18", 10, CIFAR, weights=str(file), seed=0)


def takes_other_arguments(classes: int) -> nn.Module:
    return nn.Linear(1, classes)


def breaks(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    raise TypeError("a fault\nof its own")


def has_three_outputs_more(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes + 3))


def for_digits(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


class TwoOutputs(nn.Linear):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return images, images


def returns_two(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return TwoOutputs(1, 1)


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("vgg", "none", "model: 'vgg' is not known; use small-cnn, resnet18 or package.module:callable"),
        ("no.such.module:Net", "none", "cannot be imported"),
        ("math:no_such", "none", "cannot be imported"),
        ("math:pi", "none", "is float; it must be callable"),
        (f"{__name__}:not_a_model", "none", "returned str; it must return a torch.nn.Module"),
        (
            f"{__name__}:takes_other_arguments",
            "none",
            "called with num_classes and image_shape by keyword, raised TypeError",
        ),
        (f"{__name__}:breaks", "none", "by keyword, raised TypeError: a fault of its own"),
        (
            f"{__name__}:has_three_outputs_more",
            "none",
            r"must return \[2, 10\] for images \[2, 3, 32, 32\]; it returns \[2, 13\]",
        ),
        (
            f"{__name__}:for_digits",
            "none",
            r"must return \[2, 10\] for images \[2, 3, 32, 32\] \(RuntimeError: mat1 and",
        ),
        (f"{__name__}:returns_two", "none", r"must return \[2, 10\] for images \[2, 3, 32, 32\]; it returns tuple"),
        ("small-cnn", "imagenet", "weights: 'imagenet' cannot be loaded into model 'small-cnn'"),
        ("resnet18", "imagnet", "weights: 'imagnet' is not known; use none, imagenet or the path"),
        ("resnet18", "/no/such.safetensors", "there is no file"),
    ],
)
def test_invalid_model_or_weights_are_rejected_in_one_line(name: str, weights: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        build_model(name, 10, CIFAR, weights=weights, seed=0)
    assert "\n" not in str(caught.value)


def test_module_with_syntax_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'half_written:build' cannot be imported \(SyntaxError: .*line 1\)\)$"):
        build_model("half_written:build", 10, CIFAR, seed=0)


def test_trial_of_a_custom_model_does_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    tried = build_model("users_models:with_batchnorm", 10, CIFAR, seed=3)
    torch.manual_seed(3)
    plain = with_batchnorm(10, CIFAR)
    assert tried.training and tried.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, tried.state_dict()[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("device", DEVICES)
def test_uses_rng_detects_random_networks_without_side_effects(device: str) -> None:
    images = torch.zeros(2, 1, 8, 8, device=device)
    for build, draws in ((Own, False), (with_batchnorm, False), (with_dropout, True), (WithFunctions, True)):
        model = build(10, DIGITS).to(device).eval()
        generators = [torch.default_generator, *(torch.cuda.default_generators if device == "cuda" else ())]
        state = {key: value.clone() for key, value in model.state_dict().items()}
        before = [generator.get_state() for generator in generators]
        assert uses_rng(model, images) == draws, build
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert all(map(torch.equal, before, (generator.get_state() for generator in generators)))


def test_imagenet_weights_are_not_downloaded_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FEDEAS_OFFLINE is set"):
        build_model("resnet18", 10, CIFAR, weights="imagenet", seed=0)


def test_split_state_separates_trainable_and_keeps_dtypes() -> None:
    model = Own(10, DIGITS)
    trainable, buffers = split_state(model)
    assert set(trainable) == {"fc.weight", "fc.bias"} and set(buffers) == {"frozen", "steps"}
    assert buffers["steps"].dtype == np.int64 and buffers["steps"].shape == ()
    trainable["fc.bias"][:] = 5  # a copy: the model must not change
    assert not torch.any(model.fc.bias == 5)


def test_state_round_trip_in_place() -> None:
    source = build_model("resnet18", 10, CIFAR, seed=1)
    source.bn1.num_batches_tracked.fill_(2**40 + 1)  # a float32 could not hold it
    target = build_model("resnet18", 10, CIFAR, seed=2)
    address = target.conv1.weight.data_ptr()
    trainable, buffers = split_state(source)
    for array in trainable.values():
        array.setflags(write=False)
    copy_state(target, trainable, buffers)
    assert same(source, target) and target.conv1.weight.data_ptr() == address


def test_state_that_does_not_fit_is_rejected_unchanged() -> None:
    model = Own(10, DIGITS)
    trainable, buffers = split_state(model)
    new = {key: value + 1 for key, value in trainable.items()}
    wrong = [
        (new, {"frozen": buffers["frozen"]}, r"names differ .*\['steps'\]"),
        (new | {"extra": np.zeros(1)}, buffers, r"names differ .*\['extra'\]"),
        (new, buffers | {"steps": np.float64(7) * np.ones(())}, r"steps is float64 \[\]; the model needs int64 \[\]"),
        (new, buffers | {"steps": np.array([7])}, r"steps is int64 \[1\]; the model needs int64 \[\]"),
        (new | {"fc.bias": np.zeros(10)}, buffers, r"fc\.bias is float64"),
    ]
    for parameters, rest, message in wrong:
        with pytest.raises(ValueError, match=message):
            copy_state(model, parameters, rest)
    assert all(np.array_equal(value, trainable[key]) for key, value in split_state(model)[0].items())


def test_networks_of_a_run_are_equal_and_share_no_tensors() -> None:
    """They are copies of one network that is built once; changing one must not change the others."""
    config = parse_config({"policy": "none", "seed": 5})
    info = dataset_info(config.dataset)
    built = build_model(config.model, len(info.classes), info.image_shape, seed=5).state_dict()
    first, second = build_network(config), build_network(config)
    with torch.no_grad():
        for value in first.parameters():
            value.zero_()
    for state in (second.state_dict(), build_network(config).state_dict()):
        assert list(state) == list(built) and all(torch.equal(state[key], built[key]) for key in built)
    other = build_network(config.with_changes(seed=6)).state_dict()
    assert not torch.equal(other["fc.weight"], built["fc.weight"])
