"""What a generator's model card says of the data: the split that it was trained on, and the licence."""

from __future__ import annotations

_DATA = {
    "digits": (
        "the project's fixed stratified 80/20 one",
        "cc-by-4.0",
        "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), UCI Machine Learning Repository, "
        "CC BY 4.0.",
    ),
    "cifar10": (
        "the official one",
        "other",
        "CIFAR-10 (Krizhevsky, 2009), published without a licence, in use for research.",
    ),
    "cifar100": (
        "the official one",
        "other",
        "CIFAR-100 (Krizhevsky, 2009), published without a licence, in use for research.",
    ),
    "fashion-mnist": (
        "that of the files: the official one in torchvision's",
        "mit",
        "Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), MIT.",
    ),
}
_OWN_DATA = (
    "as given, or with a fifth of every class of three images or more held out",
    "other",
    "Custom data: its licence is yours.",
)


def describe_data(dataset: str) -> tuple[str, str, str]:
    """Return a dataset's split, the identifier of its licence, and a sentence on the licence."""
    return _DATA.get(dataset, _OWN_DATA)
