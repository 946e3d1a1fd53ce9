"""FedEAS in another Flower app: `Augmenter` in its ClientApp, `with_fedeas` in its ServerApp."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg, Strategy
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from users_generators import Stripes

from fedeas_flwr import Augmenter, allocate, fill, open_generator, with_fedeas
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.federation import augmenter, messages
from fedeas_flwr.federation.augmenter import _labels, _MadeBy
from fedeas_flwr.federation.flower_internals import identify_process
from fedeas_flwr.federation.grids import GridView, InlineGrid
from fedeas_flwr.federation.messages import AugmentTask
from fedeas_flwr.policies.interface import Share

identify_process()  # without it, Flower creates no messages

BETA = 6.0
LABELS = np.repeat([0, 1, 3, 2], [60, 30, 4, 1])
COUNTS = np.bincount(LABELS, minlength=4)
PIXELS = np.random.default_rng(0).integers(256, size=(len(LABELS), 6, 5, 1), dtype=np.uint8)
GENERATOR = Stripes("abcd", (6, 5, 1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    augmenter._opened.cache_clear()


def to_tensor(image: Any) -> torch.Tensor:
    """Return an image as quickstart-pytorch's transform does: [C, H, W] from -1 to 1."""
    pixels = torch.tensor(np.array(image)).float() / 127.5 - 1
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


class Pictures(Dataset[Any]):
    """A dataset like those of torchvision."""

    def __init__(self, labels: Sequence[int] = tuple(LABELS), pixels: Any = PIXELS, transform: Any = to_tensor) -> None:
        self.targets, self.pixels, self.transform = [int(n) for n in labels], pixels, transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(self.pixels[index][..., 0])
        return (self.transform(image) if self.transform else image), self.targets[index]


class Changed(Dataset[Any]):
    """A dataset without `targets`, whose items are those of `Pictures` after a change."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.base, self.change, self.transform = Pictures(), change, to_tensor

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.base[index])


def message(policy: str = "fedeas", beta: float = BETA, **more: Any) -> Message:
    out = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    messages.add_augment_task(out, AugmentTask(policy, beta, 0.5, True, **more))
    return out


def context(client: int = 2, **node: Any) -> Context:
    return Context(run_id=1, node_id=9, node_config={"partition-id": client, **node}, state=RecordDict(), run_config={})


def planned(found: Context) -> list[int]:
    plan = found.state.config_records["fedeas"]["plan"]
    assert isinstance(plan, list)
    return [int(number) for number in plan]


def test_plan_is_that_of_allocate_and_images_those_of_fill() -> None:
    real, here = Pictures(), context()
    found = Augmenter(GENERATOR, seed=3).augment(real, message(), here)
    plan = allocate([COUNTS], "fedeas", beta=BETA)[0]
    assert planned(here) == plan.tolist() and plan.sum() > 0
    images, labels = fill(PIXELS, LABELS, plan, GENERATOR, seed=3, client=2)
    assert [label for _, label in found] == labels.tolist()
    assert all(torch.equal(found[i][0], to_tensor(image[..., 0])) for i, image in enumerate(images))


def test_second_call_opens_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a SuperNode, every message starts a new process; only `context.state` and the cache remain."""
    digits = Pictures(LABELS, np.zeros((len(LABELS), 8, 8, 1), np.uint8))
    here, spec = context(), ("users_generators:Stripes", "digits")
    first = Augmenter(*spec).augment(digits, message(), here)
    later = context()
    later.state = copy.deepcopy(here.state)
    augmenter._opened.cache_clear()
    monkeypatch.setattr(augmenter, "open_generator", lambda *_, **__: pytest.fail("opened again"))
    second = Augmenter(*spec).augment(digits, message(beta=99.0), later)
    assert len(first) == len(second) and all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    with pytest.raises(pytest.fail.Exception, match="opened again"):
        Augmenter(*spec, seed=1).augment(digits, message(), context())


def test_changed_labels_replan_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    here = context()
    with caplog.at_level("INFO", "flwr"):
        for labels in (LABELS, LABELS, LABELS[1:]):
            Augmenter(GENERATOR).augment(Pictures(labels), message(), here)
    lines = [record.getMessage() for record in caplog.records if "planned" in record.getMessage()]
    assert len(lines) == 2 and lines[1].startswith("client 2: its labels changed; ")
    assert planned(here) == allocate([np.bincount(LABELS[1:], minlength=4)], "fedeas", beta=BETA)[0].tolist()


def test_changed_labels_keep_the_generator() -> None:
    here, other = context(), Stripes("abcd", (6, 5, 1))
    other.fingerprint = "stripes-2"
    Augmenter(GENERATOR).augment(Pictures(), message(), here)
    with pytest.raises(ValueError, match="not the one that made this client's images"):
        Augmenter(other).augment(Pictures(LABELS[LABELS != 1]), message(), here)


def test_device_auto_is_resolved_before_the_generator_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}

    def open_stripes(spec: str, dataset: str, **settings: Any) -> Stripes:
        opened.update(settings)
        return Stripes("0123456789", (8, 8, 1))

    monkeypatch.setattr(augmenter, "open_generator", open_stripes)
    digits = Pictures(LABELS, np.zeros((len(LABELS), 8, 8, 1), np.uint8))
    Augmenter("builtin", "digits", steps=2).augment(digits, message(), context())
    assert opened == {"device": "cpu", "steps": 2}


def test_image_identity_without_partition_id_is_the_node_id() -> None:
    here = context()
    del here.node_config["partition-id"]
    found = Augmenter(GENERATOR).augment(Pictures(), message(), here)
    images, _ = fill(PIXELS, LABELS, planned(here), GENERATOR, client=9)
    assert torch.equal(found[len(LABELS)][0], to_tensor(images[len(LABELS), ..., 0]))


FORMS: dict[str, tuple[Callable[[], Any], Any]] = {
    "subset": (lambda: Subset(Subset(Pictures(), range(len(LABELS))), range(1, len(LABELS))), None),
    "tensors": (lambda: TensorDataset(torch.zeros(len(LABELS), 1, 6, 5), torch.tensor(LABELS)), to_tensor),
    "no targets": (lambda: Changed(lambda item: item), None),
    "numpy labels": (lambda: Changed(lambda item: (item[0], np.int32(item[1]))), None),
    "dict": (lambda: Changed(lambda item: {"img": item[0], "label": item[1]}), None),
    "images": (lambda: Pictures(transform=None), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_synthetic_items_look_like_real_ones(form: str) -> None:
    make, transform = FORMS[form]
    real = make()
    found, here = Augmenter(GENERATOR, transform=transform), context()
    whole = found.augment(real, message(), here)
    assert len(whole) == len(real) + sum(planned(here)) > len(real)
    if form != "images":  # the default collate function takes no PIL images
        (batch,) = DataLoader(whole, batch_size=len(whole))
        images, labels = batch.values() if isinstance(batch, dict) else batch
        assert images.shape == (len(whole), 1, 6, 5) and images.dtype == torch.float32
        counts = np.bincount(labels.numpy(), minlength=4)
        start = 1 if form == "subset" else 0
        assert (counts == np.bincount(LABELS[start:], minlength=4) + planned(here)).all()


def test_plan_of_a_subset_counts_its_own_labels() -> None:
    here = context()
    Augmenter(GENERATOR).augment(Subset(Pictures(), range(60, len(LABELS))), message(), here)
    assert planned(here) == allocate([[0, 30, 1, 4]], "fedeas", beta=BETA)[0].tolist()


def test_labels_are_those_after_the_target_transform() -> None:
    class Reversed(Pictures):
        def target_transform(self, label: int) -> int:
            return 3 - label

        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, self.target_transform(label)

    here = context()
    Augmenter(GENERATOR).augment(Reversed(), message(), here)
    assert planned(here) == allocate([COUNTS[::-1]], "fedeas", beta=BETA)[0].tolist()


def test_labels_of_a_subset_are_read_from_its_own_items_only() -> None:
    read: list[int] = []

    def change(item: Any) -> Any:
        read.append(item[1])
        return item

    Augmenter(GENERATOR).augment(Subset(Changed(change), range(90, len(LABELS))), message("none"), context())
    assert read == LABELS[90:].tolist()


@pytest.mark.parametrize("transform", [to_tensor, None])
def test_result_can_be_pickled_for_spawned_workers(transform: Any) -> None:
    whole = Augmenter(GENERATOR).augment(Pictures(transform=transform), message(), context())
    (image, label), (expected, expected_label) = pickle.loads(pickle.dumps(whole))[-1], whole[-1]
    assert np.array_equal(image, expected) and label == expected_label


def test_torchvision_image_folder(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    for i, label in enumerate(LABELS):
        (tmp_path / "abcd"[label]).mkdir(exist_ok=True)
        Image.fromarray(PIXELS[i, ..., 0]).convert("RGB").save(tmp_path / "abcd"[label] / f"{i}.png")
    here = context()
    whole = Augmenter(Stripes("abcd", (6, 5, 3))).augment(ImageFolder(tmp_path, to_tensor), message(), here)
    assert len(whole) == len(LABELS) + sum(planned(here))
    assert whole[0][0].shape == whole[-1][0].shape == (3, 6, 5)


def test_hugging_face_split() -> None:
    hf = pytest.importorskip("datasets", reason="an extra: pip install 'fedeas-flwr[datasets]'")
    features = hf.Features({"img": hf.Image(), "label": hf.ClassLabel(names=list("abcd"))})
    images = [Image.fromarray(image[..., 0]) for image in PIXELS]
    plain = hf.Dataset.from_dict({"img": images, "label": LABELS.tolist()}, features=features)

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "img": [to_tensor(image) for image in batch["img"]]}

    for split in (plain.with_transform(change), plain):
        here = context()
        whole = Augmenter(GENERATOR).augment(split, message(), here)
        assert planned(here) == allocate([COUNTS], "fedeas", beta=BETA)[0].tolist()
        assert whole[len(LABELS)].keys() == {"img", "label"} and len(whole) == len(LABELS) + sum(planned(here))
    with pytest.raises(ValueError, match="generator: its images become"):
        Augmenter(GENERATOR).augment(plain.with_format("torch"), message(), context())
    (batch,) = DataLoader(Augmenter(GENERATOR).augment(plain.with_transform(change), message(), context()), 1000)
    assert batch["img"].shape[1:] == (1, 6, 5)
    with pytest.raises(ValueError, match="has 10 classes, but the dataset has 4"):
        Augmenter("builtin", "digits").augment(plain, message(), context())


def test_oversample_repeats_own_items_and_none_adds_nothing() -> None:
    real, here = Pictures(), context()
    whole = Augmenter(GENERATOR).augment(real, message("oversample"), here)
    copies = np.bincount([label for _, label in whole][len(real) :], minlength=4)
    assert copies.tolist() == planned(here) and copies.sum() > 0
    assert Augmenter(GENERATOR).augment(real, message("none"), context()) is real
    empty = Pictures([])
    assert Augmenter(GENERATOR).augment(empty, message(), context()) is empty


def test_folder_that_stores_its_classes_needs_no_dataset(digits_generator: Path) -> None:
    digits, here = Pictures([0, 0, 0, 0, 1], np.zeros((5, 8, 8, 1), np.uint8)), context()
    whole = Augmenter(str(digits_generator), device="cpu", steps=2, batch_size=16).augment(digits, message(), here)
    generator = open_generator(str(digits_generator), "digits", steps=2, batch_size=16)
    images, labels = fill(digits.pixels, digits.targets, planned(here), generator, client=2)
    assert [label for _, label in whole] == labels.tolist() and len(whole) > 5
    assert all(torch.equal(whole[i][0], to_tensor(image[..., 0])) for i, image in enumerate(images))


# ------------------------------------------------------------------------------------------------------- the server


class UsersStrategy(FedAvg):
    """A user's subclass, which changes the config it sends."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = 0.1 / server_round
        return super().configure_train(server_round, arrays, config, grid)


FEDERATION = np.array([[60, 30, 1, 4], [0, 80, 0, 0], [5, 5, 5, 5], [0, 3, 90, 9]])


def users_app(answers: bool = True, mods: list[Any] | None = None) -> ClientApp:
    """Return an app whose clients hold `FEDERATION` and train on nothing."""
    app = ClientApp(mods=mods)
    fedeas = Augmenter(GENERATOR)

    def load(here: Context) -> Pictures:
        labels = np.repeat(range(4), FEDERATION[here.node_config["partition-id"]])
        return Pictures(labels, np.zeros((len(labels), 6, 5, 1), np.uint8))

    @app.train()
    def train(msg: Message, here: Context) -> Message:
        real = load(here)
        config = msg.content.config_records["config"]
        assert config["lr"] == 0.1 / config["server-round"]  # type: ignore[operator]
        augmented = fedeas.augment(real, msg, here)
        metrics = MetricRecord({"num-examples": len(real), "augmented": len(augmented)})
        return Message(RecordDict({"arrays": msg.content["arrays"], "metrics": metrics}), reply_to=msg)

    @app.query("fedeas" if answers else "other")
    def query(msg: Message, here: Context) -> Message:
        return fedeas.answer(load(here), msg, here)

    return app


def start(grid: Grid, rounds: int = 2, **settings: Any) -> None:
    strategy = with_fedeas(UsersStrategy(fraction_evaluate=0.0), **settings)
    assert isinstance(strategy, UsersStrategy)
    strategy.start(grid, ArrayRecord({"w": torch.zeros(1)}), num_rounds=rounds)


@pytest.mark.parametrize("policy", ["fedeas", "full-balance", "uniform", "missing-only", "waterfill"])
def test_clients_plan_as_allocate_does_for_all(policy: str) -> None:
    grid = InlineGrid(users_app(), len(FEDERATION), {})
    start(grid, beta=BETA, policy=policy)
    found = np.array([planned(here) for here in grid._contexts.values()])
    assert found.tolist() == allocate(FEDERATION, policy, beta=BETA).tolist()
    if policy != "full-balance":
        assert found.sum() == allocate(FEDERATION, "fedeas", beta=BETA).sum() > 0


def test_matched_total_may_be_given_and_late_nodes_get_none() -> None:
    grid = InlineGrid(users_app(), len(FEDERATION), {})

    class Late(GridView):
        rounds = 0

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if any(reply.metadata.message_type == MessageType.TRAIN for reply in replies):
                self._nodes = list(grid.get_node_ids())
            return replies

    start(Late(grid, [1, 2, 3]), beta=BETA, policy="uniform", total=50)
    *early, late = (planned(here) for here in grid._contexts.values())
    assert early == allocate(FEDERATION[:3], "uniform", total=50).tolist() and sum(late) == 0


def test_second_start_splits_the_total_again() -> None:
    strategy = with_fedeas(UsersStrategy(fraction_evaluate=0.0), BETA, "uniform")
    for nodes in ([1, 2, 3], [2, 3, 4]):
        grid = InlineGrid(users_app(), len(FEDERATION), {})
        strategy.start(GridView(grid, nodes), ArrayRecord({"w": torch.zeros(1)}), num_rounds=1)
        found = [planned(grid._contexts[node]) for node in nodes]
        assert found == allocate(FEDERATION[[node - 1 for node in nodes]], "uniform", beta=BETA).tolist()


def shares_in(strategy: Strategy, grid: Grid, server_round: int) -> dict[int, Share]:
    """Return the shares in a round's train messages, by node."""
    out = strategy.configure_train(server_round, ArrayRecord({"w": torch.zeros(1)}), ConfigRecord(), grid)
    return {sent.metadata.dst_node_id: messages.read_augment_task(sent).share for sent in out}


def test_second_start_forgets_the_shares_of_the_first() -> None:
    strategy, grid = with_fedeas(UsersStrategy(), BETA, "uniform", total=50), InlineGrid(users_app(), 4, {})
    assert all(share.base for share in shares_in(strategy, GridView(grid, [1, 2]), 1).values())
    shares_in(strategy, GridView(grid, [3, 4]), 1)
    assert {node for node, share in shares_in(strategy, grid, 2).items() if share.base} == {3, 4}


def test_total_is_split_in_whichever_round_comes_first() -> None:
    strategy = with_fedeas(UsersStrategy(), BETA, "uniform", total=50)
    assert all(share.base for share in shares_in(strategy, InlineGrid(users_app(), 4, {}), 3).values())


def test_shares_do_not_depend_on_the_order_of_nodes() -> None:
    grid = InlineGrid(users_app(), 4, {})
    first, other = (
        shares_in(with_fedeas(UsersStrategy(), BETA, "uniform"), GridView(grid, nodes), 1)
        for nodes in ([1, 2, 3, 4], [3, 4, 2, 1])
    )
    assert first == other and len(set(first.values())) > 1


def test_total_is_not_split_without_all_replies() -> None:
    class Lossy(GridView):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return list(super().send_and_receive(messages, timeout=timeout))[1:]

    grid = Lossy(InlineGrid(users_app(), 4, {}), [1, 2, 3, 4])
    with pytest.raises(RunError, match="one did not: no reply within 3600 s"):
        shares_in(with_fedeas(UsersStrategy(), BETA, "uniform"), grid, 1)


def test_clients_with_other_numbers_of_classes_are_rejected() -> None:
    app = ClientApp()

    @app.query("fedeas")
    def query(msg: Message, here: Context) -> Message:
        client = int(here.node_config["partition-id"])
        return messages.build_query_reply(msg, client, classes=4 + client, total=9, absent=1)

    with pytest.raises(RunError, match="clients have 4, 5 classes; all must have the same number"):
        shares_in(with_fedeas(UsersStrategy(), BETA, "uniform"), InlineGrid(app, 2, {}), 1)


@pytest.mark.parametrize("inside", [True, False])
def test_flowers_client_side_privacy_works(inside: bool) -> None:
    """Its mod allows one config record in a message."""

    def private(strategy: Strategy) -> Strategy:
        return DifferentialPrivacyClientSideFixedClipping(strategy, 1.0, 1.0, len(FEDERATION))

    strategy: Strategy = UsersStrategy(fraction_evaluate=0.0)
    strategy = private(with_fedeas(strategy, BETA)) if inside else with_fedeas(private(strategy), BETA)
    grid = InlineGrid(users_app(mods=[fixedclipping_mod]), len(FEDERATION), {})
    strategy.start(grid, ArrayRecord({"w": torch.zeros(1)}), num_rounds=1)
    assert all(sum(planned(here)) for here in grid._contexts.values() if here.node_id != 3)


def test_share_is_read_from_the_message() -> None:
    here = context()
    Augmenter(GENERATOR).augment(Pictures(), message("uniform", share=Share(base=3, extra=1)), here)
    assert planned(here) == [4, 3, 3, 3]


# -------------------------------------------------------------------------------------------------------- bad input


def add(generator: Any = GENERATOR, dataset: Any = None, out: Message | None = None) -> Callable[[], Any]:
    """Return a call of `augment` with one wrong value."""
    return lambda: Augmenter(generator).augment(dataset or Pictures(), out or message(), context())


def named(classes: str) -> Pictures:
    dataset = Pictures()
    dataset.classes = list(classes)  # type: ignore[attr-defined]
    return dataset


def test_other_class_names_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    dataset = named("ABCDEFGHIJ")
    dataset.targets = LABELS
    for _ in range(2):
        _labels(dataset, _MadeBy(10, (8, 8, 1), tuple("0123456789")))
    (warned,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "A, B, C" in warned and "0, 1, 2" in warned


def floats(image: Any) -> torch.Tensor:
    """Return an image as floats from 0 to 255, [C, H, W]."""
    return torch.tensor(np.array(image)).reshape(1, 6, 5).float()


def standardised(image: Any) -> torch.Tensor:
    values = floats(image)
    return (values - values.mean()) / (values.std() + 1e-6)


RANGES: dict[str, Callable[[Any], torch.Tensor]] = {
    "0 to 255": floats,
    "0 to 1": lambda image: floats(image) / 255,
    "0 to 16": lambda image: (floats(image) * 16 / 255).round(),
    "-1 to 1": lambda image: floats(image) / 127.5 - 1,
    "normalised": lambda image: (floats(image) / 255 - 0.4) / 0.25,
    "standardised": standardised,
    "bytes": lambda image: floats(image).byte(),
}


def add_to_tensors(real: str, made: str, pixels: Any = PIXELS, dtype: torch.dtype | None = None) -> Any:
    images = torch.stack([RANGES[real](image).to(dtype) for image in pixels])
    found = Augmenter(GENERATOR, transform=lambda image: RANGES[made](image).to(dtype))
    return found.augment(TensorDataset(images, torch.tensor(LABELS)), message(), context())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("real", "made"),
    [
        ("0 to 1", "0 to 255"),
        ("-1 to 1", "0 to 1"),
        ("normalised", "0 to 1"),
        ("normalised", "0 to 255"),
        ("0 to 255", "0 to 1"),
        ("0 to 16", "0 to 1"),
        ("0 to 255", "normalised"),
    ],
)
def test_images_of_another_range_are_rejected(real: str, made: str, dtype: torch.dtype) -> None:
    line = r"^generator: its images become values from \S+ to \S+, but the dataset has values from \S+ to \S+; give Aug"
    with pytest.raises(ValueError, match=line):
        add_to_tensors(real, made, dtype=dtype)


@pytest.mark.parametrize("pixels", [PIXELS, 0 * PIXELS, PIXELS // 64, PIXELS // 128, 200 + PIXELS // 8])
@pytest.mark.parametrize("form", RANGES)
def test_black_and_bright_images_and_few_values_are_accepted(form: str, pixels: Any) -> None:
    assert len(add_to_tensors(form, form, pixels)) > len(LABELS)


def test_few_negative_values_are_accepted() -> None:
    """Interpolation makes some."""
    images = torch.stack([RANGES["0 to 1"](image) for image in PIXELS])
    images[:, 0, 0, :2] = -0.2
    real = TensorDataset(images, torch.tensor(LABELS))
    whole = Augmenter(GENERATOR, transform=RANGES["0 to 1"]).augment(real, message(), context())
    assert len(whole) > len(LABELS)


def test_transform_that_shrinks_images_is_accepted() -> None:
    """It makes grey of thin black and white lines, so that no value would be negative."""

    def halved(image: Image.Image) -> torch.Tensor:
        return to_tensor(image.resize((5, 3), Image.Resampling.BOX))

    dataset = Pictures(pixels=PIXELS // 4, transform=halved)
    assert len(Augmenter(GENERATOR).augment(dataset, message(), context())) > len(LABELS)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no β": (
        add(out=Message(RecordDict(), 1, MessageType.TRAIN)),
        r"no β in the message: the ServerApp needs strategy = with_fedeas",
    ),
    "β no number": (add(out=message(beta=float("nan"))), "fedeas-beta = nan"),
    "policy": (add(out=message("os:abort")), "fedeas-policy = 'os:abort'"),
    "one class": (add(Stripes("a", (6, 5, 1))), "has 1 class"),
    "label": (add(dataset=Pictures([*LABELS[1:], 4])), "labels: 4 is not allowed; give whole numbers from 0 to 3"),
    "shape": (
        add(Stripes("abcd", (4, 4, 1))),
        r"become \(Tensor torch.float32 \[1, 4, 4\], int\), but the dataset has \(Tensor torch.float32 \[1, 6, 5\]",
    ),
    "no transform": (add(dataset=FORMS["tensors"][0]()), r"a PIL image L 6x5, .*; give Augmenter\(transform="),
    "items": (
        add(dataset=Changed(lambda item: item[0])),
        r"dataset: its items are Tensor torch.float32 \[1, 6, 5\]; must be \(image, label\)",
    ),
    "three values": (add(dataset=Changed(lambda item: (*item, 0))), "dataset: its items are"),
    "loader": (add(dataset=DataLoader(Pictures(LABELS))), "dataset: DataLoader: must have items by number"),
    "dataset's name": (add("builtin"), "dataset: must be the"),
    "folder": (add("/nowhere"), "there is no /nowhere/unet"),
    "number of classes": (
        lambda: Augmenter("builtin", "digits").augment(named("abcd"), message(), context()),
        "generator: it has 10 classes, but the dataset has 4",
    ),
    "order of classes": (
        lambda: Augmenter("builtin", "digits").augment(named("1023456789"), message(), context()),
        "generator: its classes are those of the dataset in another order",
    ),
    "server's policy": (lambda: with_fedeas(FedAvg(), BETA, "greedy"), "policy='greedy': must be one of none, fedeas"),
    "server's β": (lambda: with_fedeas(FedAvg(), -1.0), "beta=-1.0: must be"),
    "server's β as text": (lambda: with_fedeas(FedAvg(), "6"), "beta='6': must be"),  # type: ignore[arg-type]
    "server's strategy": (lambda: with_fedeas(FedAvg, BETA), "strategy=.*FedAvg.*: must be"),  # type: ignore[type-var]
    "generator": (lambda: Augmenter(None), "generator: None without fingerprint"),  # type: ignore[arg-type]
    "seed": (
        lambda: Augmenter(GENERATOR, seed="1").augment(Pictures(), message(), context()),  # type: ignore[arg-type]
        "seed='1': must be an integer",
    ),
    "new object's seed": (lambda: Augmenter(GENERATOR, seed=-1), "seed=-1: must be an integer of at least 0"),
    "new object's dataset": (lambda: Augmenter("builtin", "cifar10"), "generator: 'builtin' is for digits only"),
    "new object's generator": (lambda: Augmenter("buildin", "digits"), "there is no .*did you mean 'builtin'"),
    "server's total": (lambda: with_fedeas(FedAvg(), BETA, total=5), "total=5: policy 'fedeas' sets its own"),
    "no answer line": (
        lambda: start(InlineGrid(users_app(answers=False), 4, {}), beta=BETA, policy="uniform"),
        r'policy = \'uniform\': every ClientApp must answer @app.query\("fedeas"\) .*: ValueError: No query',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str) -> None:
    call, text = BAD[case]
    with pytest.raises((ValueError, RunError, FileNotFoundError), match=text) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_client_answers_only_questions_of_matched_policies() -> None:
    grid = InlineGrid(users_app(), 1, {})
    for policy, question in (("fedeas", "plan"), ("uniform", "waterfill")):
        asked = messages.build_query(1, question, BETA, messages.AUGMENT_QUERY)
        messages.add_augment_task(asked, AugmentTask(policy, BETA, 0.5, True))
        (reply,) = grid.send_and_receive([asked])
        assert f"question = '{question}'" in messages.failure_reason(reply)


def test_client_id_from_a_large_node_id_fits_a_reply() -> None:
    asked = messages.build_query(1, "plan", BETA, messages.AUGMENT_QUERY)
    messages.add_augment_task(asked, AugmentTask("uniform", BETA, 0.5, True))
    here = Context(run_id=1, node_id=2**63 + 9, node_config={}, state=RecordDict(), run_config={})
    assert messages.read_answer(Augmenter(GENERATOR).answer(Pictures(), asked, here), "absent") == (9, 0)
