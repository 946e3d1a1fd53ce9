"""The client's half of FedEAS in another Flower app: `Augmenter` adds synthetic images to the app's own dataset.

The server's half is `with_fedeas`; docs/in-your-flower-app.md shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fedeas_flwr.common.devices import pick_device
from fedeas_flwr.common.files import expanded
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.common.progress import log_progress
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.data.datasets import Images, Labels, dataset_info
from fedeas_flwr.data.hf_dataset import LABEL_NAMES
from fedeas_flwr.data.own_images import few_names
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.messages import AugmentTask
from fedeas_flwr.generators.cache import ImageCache, check_owner
from fedeas_flwr.generators.diffusion.model_folder import CLASSES, check_unet, read_json
from fedeas_flwr.generators.fill import checked_labels, repeated
from fedeas_flwr.generators.interface import Generator, LazyGenerator, check_attributes
from fedeas_flwr.generators.opening import open_generator
from fedeas_flwr.policies.interface import ClientView
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import POLICIES, answer_question, checked_plan

logger = logging.getLogger("flwr")

_STATE = "fedeas"
"""Name of the record in ``context.state``."""


class Augmenter:
    """Adds synthetic images to a client's dataset, in numbers planned with the β that `with_fedeas` sends.

    A new object checks its arguments, but opens nothing. The generator is opened when an image is missing in the cache,
    once per process.

    Parameters
    ----------
    generator
        As for `open_generator`; or an object, see `Generator`.
    dataset
        Name of a dataset of this package that has the generator's classes and image shape, or the names of the classes
        in the order of the labels. Not needed with an object, or a folder that ``fedeas train-generator`` wrote.
    transform
        Turns a PIL image into the image of an item. By default that of the client's dataset: the attribute
        ``transform``, or the function given to ``with_transform``.
    seed
        Part of each image's identity, together with the client's number: its ``partition-id``, or else its node id.
    device
        ``auto``, ``cpu`` or ``cuda``.
    settings
        More arguments of `open_generator`, such as ``steps``.
    """

    def __init__(
        self,
        generator: str | Generator,
        dataset: str | Sequence[str] = "",
        *,
        transform: Callable[[Image.Image], Any] | None = None,
        seed: int = 0,
        device: str = "auto",
        **settings: Any,
    ) -> None:
        if not isinstance(generator, str):
            check_attributes(generator, repr(generator))
        check_owner(seed, client=0)
        self._generator, self._transform, self._seed = generator, transform, seed
        self._dataset = dataset if isinstance(dataset, str) else tuple(dataset)
        kind = GeneratorSpec.parse(generator).kind if isinstance(generator, str) else ""
        if kind == "builtin" and self._dataset not in ("", "digits"):
            raise ValueError(f"generator: 'builtin' is for digits only: dataset must be 'digits', not {dataset!r}")
        if kind == "folder":
            read_json(expanded(str(generator), "generator") / "unet" / "config.json")
        self._settings = (("device", device), *settings.items())

    def augment(self, dataset: Any, message: Message, context: Context) -> Any:
        """Return the dataset followed by the client's synthetic images, whose items look like the real ones.

        The client plans when it first takes part, and again if its label counts change; the plan is in
        ``context.state``. Weight the reply by the number of real items, ``len(dataset)``, as the paper does.

        Parameters
        ----------
        dataset
            A torch dataset whose items are (image, label) or a dict of both, or a split of a Hugging Face dataset.
        message
            The train message, from a strategy after `with_fedeas`.
        context
            The client's context.

        Raises
        ------
        ValueError
            In one line, if the message has no β or the generator does not fit the dataset.
        """
        made_by = self._describe()
        task, client = messages.read_augment_task(message), _client(context)
        labels = _labels(dataset, made_by)
        state = self._planned(task, client, np.bincount(labels, minlength=made_by.num_classes), context)
        policy, plan = POLICIES[str(state["policy"])], cast(list[int], state["plan"])
        if not sum(plan):
            return dataset
        if policy.repeats:
            chosen = repeated(labels, plan, stream(self._seed, "oversample", client))
            return ConcatDataset([dataset, Subset(dataset, chosen.tolist())])
        make = _item_maker(dataset, self._transform)
        striped = np.zeros(made_by.image_shape, np.uint8)  # black and white, also where it is cropped or shrunk
        striped[np.arange(len(striped)) * 4 // len(striped) % 2 == 1] = 255
        _check_items(dataset[0], make(_to_pil(striped), 0))
        known = str(state["generator"])
        source = LazyGenerator(known, *made_by[:2], self._open) if known else self._open()
        about = {"generator": self._generator if isinstance(self._generator, str) else type(self._generator).__name__}
        report = log_progress(logger, f"client {client}: images generated")
        images, more, _ = ImageCache().ensure(
            source, seed=self._seed, client=client, wanted=plan, about=about, report=report
        )
        state["generator"] = source.fingerprint
        return ConcatDataset([dataset, _Synthetic(images, more, make)])

    def answer(self, dataset: Any, message: Message, context: Context) -> Message:
        """Return the reply to a matched policy's question, for ``@app.query("fedeas")``: a few integers, no counts."""
        task, (question, at) = messages.read_augment_task(message), messages.read_question(message)
        policy, made_by = POLICIES[task.policy], self._describe()
        if not isinstance(policy, MatchedPolicy) or question not in policy.questions:
            raise ValueError(f"question = {question!r}: must be a question of the policy {task.policy!r}")
        counts = np.bincount(_labels(dataset, made_by), minlength=made_by.num_classes)
        numbers = answer_question(policy, ClientView(counts[None], task.settings), question, at)
        return messages.build_query_reply(message, _client(context), classes=made_by.num_classes, **numbers)

    def _planned(self, task: AugmentTask, client: int, counts: Labels, context: Context) -> ConfigRecord:
        """Return the client's state; plan if it has none, or if its label counts changed."""
        state = context.state.config_records.get(_STATE)
        if state is None or state["counts"] != counts.tolist():
            view = ClientView(counts[None], task.settings, [task.share])
            plan = checked_plan(POLICIES[task.policy], view)[0].tolist()
            again = "its labels changed; " if state else ""
            logger.info("client %d: %s%d images planned by policy %s", client, again, sum(plan), task.policy)
            generator = state["generator"] if state else ""
            state = ConfigRecord(
                {"policy": task.policy, "counts": counts.tolist(), "plan": plan, "generator": generator}
            )
            context.state[_STATE] = state
        return state

    def _describe(self) -> _MadeBy:
        """Return what the generator makes, without opening it."""
        if not isinstance(self._generator, str):
            found = _MadeBy(self._generator.num_classes, self._generator.image_shape)
        elif isinstance(self._dataset, str) and self._dataset:
            info = dataset_info(self._dataset)
            found = _MadeBy(len(info.classes), info.image_shape, info.classes)
        elif GeneratorSpec.parse(self._generator).kind != "folder":
            raise ValueError(f"dataset: must be the name of a dataset with generator = {self._generator!r}")
        else:
            folder = expanded(self._generator, "generator")
            config = read_json(folder / "unet" / "config.json")
            classes = self._dataset or config.get(CLASSES) or ()
            if not classes:
                raise ValueError(f"dataset: must be given, since {folder} does not store the names of its classes")
            found = _MadeBy(len(classes), check_unet(config, folder), tuple(classes))
        if found.num_classes < 2:
            raise ValueError(f"generator: it has {found.num_classes} class; must have at least 2 to balance")
        return found

    def _open(self) -> Generator:
        if not isinstance(self._generator, str):
            return self._generator
        return _opened(self._generator, self._dataset or self._describe().classes, self._settings)


class _MadeBy(NamedTuple):
    """Classes and image shape of a generator."""

    num_classes: int
    image_shape: tuple[int, int, int]
    classes: tuple[str, ...] = ()
    """Their names; empty if they are not known."""


@lru_cache(maxsize=1)
def _opened(spec: str, dataset: str | tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> Generator:
    """Open the generator of this process, by a dataset's name or by the names of the classes."""
    arguments = dict(settings)
    arguments["device"] = pick_device(arguments["device"])
    if isinstance(dataset, str):
        return open_generator(spec, dataset, **arguments)
    from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator  # loads diffusers

    return DiffusionGenerator(expanded(spec, "generator"), num_classes=len(dataset), classes=dataset, **arguments)


def _client(context: Context) -> int:
    return int(context.node_config.get("partition-id", context.node_id % 2**53))


# --------------------------------------------------------------------------------------- labels and items of datasets


class _Synthetic(Dataset[Any]):
    """Synthetic images as items of the client's dataset."""

    def __init__(self, images: Images, labels: Labels, make: Callable[[Image.Image, int], Any]) -> None:
        self._images, self._labels, self._make = images, labels, make

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return self._make(_to_pil(self._images[index]), int(self._labels[index]))


def _to_pil(image: Images) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def _to_numpy(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _whole_dataset(dataset: Any) -> Any:
    return _whole_dataset(dataset.dataset) if isinstance(dataset, Subset) else dataset


def _is_hf(dataset: Any) -> bool:
    return hasattr(dataset, "features") and hasattr(dataset, "with_format")


def _hf_columns(dataset: Any) -> tuple[str, str]:
    """Return the names of the columns with images and labels of a Hugging Face dataset."""
    kinds = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = labels or [name for name in kinds if name in LABEL_NAMES]
    if len(images) != 1 or len(labels) != 1:
        wanted = "must be one with images and one with labels; choose them with select_columns([...])"
        raise ValueError(f"dataset: columns {', '.join(kinds)}: {wanted}")
    return images[0], labels[0]


def _item_keys(item: Any) -> tuple[Any, Any]:
    """Return the keys of an item's image and label."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return 0, 1
    if isinstance(item, dict) and len(item) == 2 and len(label := [key for key in item if key in LABEL_NAMES]) == 1:
        return next(key for key in item if key != label[0]), label[0]
    raise ValueError(f"dataset: its items are {_look(item)}; must be (image, label), or a dict of an image and a label")


def _labels(dataset: Any, made_by: _MadeBy) -> Labels:
    """Return the dataset's labels after checking them against the generator's classes."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(f"dataset: {type(dataset).__name__}: must have items by number; of a DataLoader give .dataset")
    whole = _whole_dataset(dataset)
    names = getattr(whole.features[_hf_columns(whole)[1]], "names", None) if _is_hf(whole) else None
    names = names or getattr(whole, "classes", None) or made_by.classes
    if len(names) not in (0, made_by.num_classes):
        raise ValueError(f"generator: it has {made_by.num_classes} classes, but the dataset has {len(names)}")
    if made_by.classes and list(names) != list(made_by.classes) and sorted(names) == sorted(made_by.classes):
        raise ValueError("generator: its classes are those of the dataset in another order; labels must be equal")
    if made_by.classes and not set(names) & set(made_by.classes):
        _warn_of_names(tuple(names), made_by.classes)
    found = _stored_labels(dataset) if len(dataset) else np.zeros(0, np.int64)
    if found is None:
        items = (dataset[index] for index in range(len(dataset)))
        found = np.array([_to_numpy(item[_item_keys(item)[1]]) for item in items])
    return checked_labels(found, len(dataset), made_by.num_classes)


@cache
def _warn_of_names(names: tuple[str, ...], made: tuple[str, ...]) -> None:
    """Log once that dataset and generator have no class name in common."""
    text = "the dataset's classes (%s) have other names than the generator's (%s): they are matched by number"
    logger.warning(text, few_names(names), few_names(made))


def _stored_labels(dataset: Any) -> Any:
    """Return the labels that a dataset stores apart from its items, or None."""
    if isinstance(dataset, Subset):
        stored = _stored_labels(dataset.dataset)
        return None if stored is None else stored[np.asarray(dataset.indices)]
    if _is_hf(dataset):
        column = _hf_columns(dataset)[1]
        return np.asarray(dataset.select_columns(column).with_format(None)[:][column])
    if isinstance(dataset, TensorDataset):
        return _to_numpy(dataset.tensors[-1])
    attribute = next((name for name in ("targets", "labels") if hasattr(dataset, name)), None)
    if attribute and getattr(dataset, "target_transform", None) is None:
        return _to_numpy(getattr(dataset, attribute))
    return None


def _item_maker(dataset: Any, transform: Callable[[Image.Image], Any] | None) -> Callable[[Image.Image, int], Any]:
    """Return a function that makes an item like those of the dataset from an image and a label; it can be pickled."""
    whole = _whole_dataset(dataset)
    if _is_hf(whole) and whole.format["type"] == "custom" and transform is None:
        image_key, label_key = _hf_columns(whole)
        return partial(_transform_row, whole.format["format_kwargs"]["transform"], image_key, label_key)
    item = dataset[0]
    image_key, label_key = _hf_columns(whole) if _is_hf(whole) else _item_keys(item)
    change = transform or getattr(whole, "transform", None)
    return partial(_make_item, change, (image_key, label_key) if isinstance(item, dict) else None, item[label_key])


def _transform_row(transform: Any, image_key: str, label_key: str, image: Image.Image, label: int) -> dict[str, Any]:
    return {key: values[0] for key, values in transform({image_key: [image], label_key: [label]}).items()}


def _make_item(change: Any, keys: tuple[Any, Any] | None, like: Any, image: Image.Image, label: int) -> Any:
    """Return an item with a label ``like`` that of a real one: a dict if it has keys, else a pair."""
    own = like.new_tensor(label) if isinstance(like, torch.Tensor) else type(like)(label)
    item = (change(image) if change else image), own
    return dict(zip(keys, item, strict=True)) if keys else item


def _check_items(real: Any, synthetic: Any) -> None:
    """Raise ValueError unless a real item and a synthetic one of black and white look the same, also in their range."""
    wanted, found = _look(real), _look(synthetic)
    pixels = _floats(real), _floats(synthetic)
    if wanted == found and _differ_in_range(*pixels):
        wanted, found = (f"values from {values.min():.3g} to {values.max():.3g}" for values in pixels)
    if wanted != found:
        raise ValueError(
            f"generator: its images become {found}, but the dataset has {wanted}; give "
            "Augmenter(transform=...), a function that turns a PIL image into the image of an item"
        )


def _floats(item: Any) -> torch.Tensor:
    """Return the image of an item if its values are floats, else an empty tensor."""
    for value in item.values() if isinstance(item, dict) else item:
        if "float" in str(getattr(value, "dtype", "")) and len(value.shape) > 1:
            return torch.as_tensor(value).detach().double().cpu()
    return torch.empty(0)


def _differ_in_range(real: torch.Tensor, made: torch.Tensor) -> bool:
    """Return whether the ranges differ beyond doubt, given one real image, which may be black or have few values."""
    if not real.numel():
        return False
    largest, white = real.abs().max(), made.abs().max()
    to_one = largest <= 1 and (real % 1).any()  # a dark image of 0 to 255 has whole numbers
    whole = largest > 1 and not (real % 1).any()  # such as scikit-learn's digits, of 0 to 16
    negative = (real < -0.05 * largest).double().mean() > 0.25  # more than interpolation or erased parts explain
    other_scale = (to_one and white > 50) or (whole and white == 1) or largest > 50 * white > 0
    return bool(other_scale or (negative and made.min() >= 0))


def _look(value: Any) -> str:
    """Return the type, dtype and shape of an item."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_look(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_look, value))})"
    if isinstance(value, Image.Image):
        return f"a PIL image {value.mode} {value.height}x{value.width}"
    shape = f" {value.dtype} {list(value.shape)}" if hasattr(value, "shape") and hasattr(value, "dtype") else ""
    return type(value).__name__ + shape
