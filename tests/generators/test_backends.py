"""Generators other than diffusion: image bank, text to image, and the documentation's example."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from runners import black_bank, run_in_process, small
from safetensors.torch import save_file

from fedeas_flwr import client_app
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.generators.bank import BankGenerator
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.classifier import ensure_filtered
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.opening import hash_input_files, open_generator
from fedeas_flwr.launch.prepare import prepare

ROOT = Path(__file__).parents[2]
SHAPE = (8, 8, 1)


def few(classes: int = 3, count: int = 4, seed: int = 0, client: int = 0) -> list[SampleId]:
    return [SampleId(seed, client, label, index) for label in range(classes) for index in range(count)]


# ------------------------------------------------------------------------------------------------- bank


def save_bank(folder: Path, count: int = 5, size: int = 8) -> Path:
    for label, name in enumerate(("cat", "1", "ship")):  # by name or by number
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.full((size, size, 3), 80 * label + i, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def open_bank(where: Path, shape: tuple[int, int, int] = SHAPE) -> BankGenerator:
    return BankGenerator(where, classes=("cat", "dog", "ship"), image_shape=shape)


def test_bank_gives_a_client_each_image_once(tmp_path: Path) -> None:
    bank = open_bank(save_bank(tmp_path))
    images = bank.sample(few(count=5))
    assert images.shape == (15, *SHAPE) and images.dtype == np.uint8
    values = images[:, 0, 0, 0].reshape(3, 5)
    assert [sorted(row) for row in values.tolist()] == [[80 * c + i for i in range(5)] for c in range(3)]
    backwards = bank.sample(few(count=5)[::-1])
    assert np.array_equal(backwards[::-1], images)
    orders = {tuple(bank.sample(few(1, 5, seed, client))[:, 0, 0, 0]) for seed in range(3) for client in range(3)}
    assert len(orders) > 3, "clients have too few different orders"


def test_bank_with_too_few_images_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The class and the counts are in the client's own log, and not in the error that is sent to the server."""
    bank = open_bank(save_bank(tmp_path))
    with pytest.raises(
        ValueError, match=r"bank .* has too few images of a class for client 7, whose own log"
    ) as caught:
        bank.sample([SampleId(0, 7, 1, 5)])
    assert "has 5 images of class 'dog'; client 7 needs at least 6" in caplog.text
    assert not re.search("dog|5 images|least 6", sent(caught.value))


def test_bank_error_in_the_log_is_one_short_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, classes = save_bank(tmp_path / "a\nINFO all is well"), ("cat", "x" * 5000, "ship")
    with pytest.raises(ValueError, match="too few images of a class"):
        BankGenerator(folder, classes=classes, image_shape=SHAPE).sample([SampleId(0, 7, 1, 5)])
    (line,) = caplog.messages
    assert len(line.splitlines()) == 1 and len(line) == 600 and line.endswith("; client 7 needs at least 6")


def sent(error: Exception) -> str:
    """What the server is told of a client's error, without the numbers of lines."""
    InlineGrid(client_app.app, 1, {})
    reply = messages.error_reply(messages.build_query(1, "identity"), error)
    return re.sub(r"line \d+", "", reply.error.reason or "")


def test_bank_fingerprint_depends_on_content(tmp_path: Path) -> None:
    first = open_bank(save_bank(tmp_path / "a")).fingerprint
    assert first == open_bank(save_bank(tmp_path / "b")).fingerprint
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "b" / "ship" / "4.png")
    assert first != open_bank(tmp_path / "b").fingerprint


def test_bank_large_images_are_downscaled_with_antialiasing(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255  # any subsampling would be all black or all white
    Image.fromarray(stripes).save(tmp_path / "0" / "a.png")
    image = open_bank(tmp_path, (8, 8, 3)).sample([SampleId(0, 0, 0, 0)])
    assert abs(int(image.mean()) - 127) < 3 and image.std() < 10


def test_bank_from_npz_arrays(tmp_path: Path) -> None:
    x, y = np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8, 1), np.array([0, 0, 1, 1, 2, 2])
    np.savez(tmp_path / "b.npz", x=x, y=y)
    images = open_bank(tmp_path / "b.npz").sample(few(count=2))
    assert sorted(map(bytes, images)) == sorted(map(bytes, x))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros((2, 9, 9, 1), np.uint8), "y": np.zeros(2, int)}, r"x uint8 \[2, 9, 9, 1\].*\[N, 8, 8, 1\]"),
        ({"x": np.zeros((2, 8, 8, 1), np.uint8), "y": np.zeros(3, int)}, r"y int64 \[3\]"),
        ({"x": np.zeros((2, 8, 8, 1), np.uint8)}, "must be an .npz file with x and y"),
    ],
)
def test_bank_with_invalid_arrays_is_rejected_in_one_line(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "b.npz", **content)
    with pytest.raises(ValueError, match=message) as caught:
        open_bank(tmp_path / "b.npz")
    assert "\n" not in str(caught.value)


def test_invalid_bank_is_rejected_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no bank '/nowhere'; must be bank:DIR"):
        open_generator("bank:/nowhere", "digits")
    with pytest.raises(FileNotFoundError, match="there is no bank ''"):
        open_generator("bank:", "digits")
    with pytest.raises(ValueError, match=r"has no images; must have one subfolder per class named 'cat'"):
        open_bank(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"cat/a.png is not an image"):
        open_bank(tmp_path)


def test_folder_of_fedeas_generate_is_a_bank(tmp_path: Path) -> None:
    digits = black_bank(tmp_path / "a.npz", [3] * 10)
    look = tmp_path / "look"
    done = run_in_process("generate", "--generator", digits, "--per-class", "2", "--out", str(look))
    assert done.returncode == 0, done.stderr
    bank = open_generator(f"bank:{look}", "digits")
    assert isinstance(bank, BankGenerator) and bank.images_of_class == [2] * 10
    file = open_generator(f"bank:{look / 'images.npz'}", "digits")
    assert bank.fingerprint == file.fingerprint
    hashes = [hash_input_files(small(tmp_path, generator=f"bank:{path}")) for path in (look, look / "images.npz")]
    assert hashes[0]["generator"] == hashes[1]["generator"]


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_too_small_bank_is_rejected_at_start(tmp_path: Path, backend: str) -> None:
    def prepared(*counts: int, **keys: Any) -> None:
        bank = black_bank(tmp_path / f"{sum(counts)}.npz", counts)
        prepare(small(tmp_path / "run", generator=bank, backend=backend, **keys), Console(file=io.StringIO()))

    with pytest.raises(ValueError, match=r"has 3 images of class '7', but a client needs 25 different ones$"):
        prepared(*[25] * 7, 3, 25, 25, policy="uniform", total=1000)
    prepared(*[25] * 10, policy="uniform", total=1000)
    prepared(*[25] * 10, policy="uniform", total=1000, shared_images="by-class")
    with pytest.raises(ValueError, match="10 classes have too few"):
        prepared(*[24] * 10, policy="uniform", total=1000, shared_images="by-class")


def test_mistyped_builtin_generator_is_suggested() -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*did you mean 'builtin'\?$"):
        open_generator("buildin", "digits")


def test_generator_specs_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["builtin", "sd-turbo", "bank:b", "sd-turbo:/m", "folder"]
    assert [GeneratorSpec.parse(s).absolute(Path()) for s in given] == [
        "builtin", "sd-turbo", f"bank:{tmp_path}/b", "sd-turbo:/m", f"{tmp_path}/folder"
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------- sd-turbo


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random text-to-image pipeline, saved like SD-Turbo."""
    transformers = pytest.importorskip("transformers", reason="sd-turbo is an extra: pip install 'fedeas-flwr[sd]'")
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel

    folder = tmp_path_factory.mktemp("pipeline")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=32,
        ),
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.CLIPTokenizer(*files, model_max_length=77),
        unet=UNet2DConditionModel(
            sample_size=16, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        scheduler=EulerDiscreteScheduler(timestep_spacing="trailing", steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "model")  # fmt: skip
    return folder / "model"


def open_turbo(folder: str | Path, **settings: Any) -> Any:
    from fedeas_flwr.generators.sd_turbo import TurboGenerator

    given: dict[str, Any] = {"classes": ("cat", "dog", "ship"), "image_shape": (8, 8, 3), "batch_size": 4}
    return TurboGenerator(folder, **(given | settings))


def test_turbo_images_do_not_depend_on_their_batch(pipeline: Path) -> None:
    turbo = open_turbo(pipeline)
    images = turbo.sample(few(count=2))
    assert images.shape == (6, 8, 8, 3) and images.dtype == np.uint8
    assert len({bytes(image) for image in images}) == 6, "images share their noise"
    assert np.array_equal(turbo.sample(few(count=2)[::-1])[::-1], images)
    assert np.array_equal(turbo.sample(few(count=2)[3:4]), images[3:4])
    assert turbo.fingerprint == open_turbo(pipeline).fingerprint
    assert turbo.fingerprint != open_turbo(pipeline, classes=("cat", "dog", "car")).fingerprint
    assert open_generator(f"sd-turbo:{pipeline}", "digits").sample(few(1, 1)).shape == (1, 8, 8, 1)


def test_turbo_without_pipeline_is_one_line(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*model_index.json"):
        open_turbo(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "Nothing"}')
    with pytest.raises(ValueError, match="is not a text-to-image pipeline or is damaged"):
        open_turbo(tmp_path)
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"stabilityai/sd-turbo cannot be loaded \(FEDEAS_OFFLINE is set"):
        open_turbo("")


def test_turbo_without_transformers_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"sd-turbo needs the package transformers; pip install 'fedeas-flwr\[sd\]'"):
        open_generator("sd-turbo", "digits")


class FakePipeline:
    """Draws the same pictures whatever it is asked for."""

    def __init__(self, value: float) -> None:
        self.value = value

    def to(self, device: Any) -> FakePipeline:
        return self

    def __call__(self, prompt: list[str], **settings: Any) -> Any:
        return SimpleNamespace(images=torch.full((len(prompt), 3, 16, 16), self.value))


def test_turbo_with_nan_or_equal_images_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedeas_flwr.generators.sd_turbo.check_transformers", lambda: None)
    monkeypatch.setattr("fedeas_flwr.generators.sd_turbo._load", lambda folder, dtype: pictures)
    (tmp_path / "model_index.json").write_text("{}")
    for value, why in ((np.nan, "hold NaN or infinity"), (0.5, "are all the same; is the model trained?")):
        pictures = FakePipeline(value)
        with pytest.raises(ValueError, match=re.escape(f"generator: {tmp_path}: the generated images {why}")):
            open_turbo(tmp_path).sample(few())
    save_file({"w": torch.tensor([1.0, np.inf])}, tmp_path / "unet.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/unet.safetensors holds NaN or infinity in w")):
        open_turbo(tmp_path)


def test_downscale_does_not_alias() -> None:
    from fedeas_flwr.generators.sd_turbo import downscale

    stripes = torch.zeros(1, 3, 512, 512)
    stripes[..., ::2] = 1
    for channels in (1, 3):
        image = downscale(stripes, (32, 32, channels))
        assert image.shape == (1, 32, 32, channels)
        assert abs(float(image.mean()) - 127.5) < 2 and image.std() < 8


# ----------------------------------------------------------------------------------------------- custom


def test_documented_custom_generator_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "generators.md").read_text()
    (code,) = re.findall(r"```python\n# a fourth backend\n(.*?)```", text, re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    images, labels, made = ImageCache(tmp_path).ensure(space["StripesGenerator"](), seed=1, client=2, wanted=[3] * 10)
    assert images.shape == (30, 8, 8, 1) and made == 30 and len(np.unique(images)) > 2
    again = space["StripesGenerator"]().sample([SampleId(1, 2, 4, 1)])
    assert np.array_equal(again[0], images[labels == 4][1])


# --------------------------------------------------------------------------------------------- class-agreement filter


class OddImagesClassifier:
    """Accepts an image if its first pixel is odd."""

    def predict(self, images: Any) -> tuple[Any, Any]:
        believed = np.where(images[:, 0, 0, 0] % 2 == 1, 0.9, 0.2)
        return np.repeat(believed[:, None], 3, axis=1), np.zeros((len(images), 1))


class Counting:
    """A generator whose first pixel is the index, or 0 if ``hopeless``, which no classifier accepts."""

    fingerprint, image_shape, num_classes = "counting", (1, 1, 1), 3

    def __init__(self, hopeless: bool = False) -> None:
        self.hopeless = hopeless

    def sample(self, samples: Any) -> Any:
        return np.array([0 if self.hopeless else s.index % 256 for s in samples], np.uint8).reshape(-1, 1, 1, 1)


def test_filter_rejected_images_are_replaced_by_later_ones(tmp_path: Path) -> None:
    cache, classifier = ImageCache(tmp_path), OddImagesClassifier()
    ensure = partial(cache.ensure, Counting(), seed=0, client=0)
    images, labels, made, rejected = ensure_filtered(ensure, [3, 0, 2], classifier, 0.5)  # type: ignore[arg-type]
    assert images.ravel().tolist() == [1, 3, 5, 1, 3] and labels.tolist() == [0, 0, 0, 2, 2]
    assert (made, rejected) == (10, 5)
    more = ensure_filtered(ensure, [4, 0, 2], classifier, 0.5)  # type: ignore[arg-type]
    assert more[0].ravel().tolist() == [1, 3, 5, 7, 1, 3] and more[2:] == (2, 6)
    assert ensure(wanted=[8, 0, 4])[2] == 0, "rejected images are not in the cache"


def test_generator_without_accepted_images_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ensure = partial(ImageCache(tmp_path).ensure, Counting(hopeless=True), seed=0, client=0)
    with pytest.raises(ValueError, match=r"min-class-agreement = 0.5: the classifier accepts too few") as caught:
        ensure_filtered(ensure, [0, 2, 0], OddImagesClassifier(), 0.5)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert re.search(r"\d+ images of class 1 gave only 0 accepted ones", caplog.text)
    assert "class 1" not in sent(caught.value)
