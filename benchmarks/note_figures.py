"""Draw the figure of each note in results/notes from the table that `fedeas reproduce --into` wrote there.

python benchmarks/note_figures.py --out results/notes
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "results"
BLUE, ORANGE, GREY, BLACK = "#0072b2", "#e69f00", "#9aa5b1", "#22303c"
"""Blue and orange of Okabe and Ito, which colour-blind readers tell apart."""


def table(page: str, item: str) -> list[dict[str, str]]:
    """Return the rows of a generated table, by column."""
    text = (RESULTS / page).read_text()
    (block,) = re.findall(rf"<!-- reproduce {item} -->\n(.*?)<!-- end -->", text, re.S)
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.strip().splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """Return the first number of a cell, NaN without one."""
    found = re.match(r"[−-]?[\d.]+", cell)
    return float(found[0].replace("−", "-")) if found else float("nan")


def short(where: str) -> str:
    """Return where a run belongs, on three lines."""
    return where.replace(", ", "\n")


def bars(axis: Axes, names: list[str], groups: dict[str, tuple[list[float], str]]) -> None:
    """Draw groups of bars with their values above."""
    width = 0.8 / len(groups)
    for position, (label, (values, colour)) in enumerate(groups.items()):
        places = np.arange(len(names)) + (position - (len(groups) - 1) / 2) * width
        axis.bar(places, values, width, label=label, color=colour)
        for place, value in zip(places, values, strict=True):
            if not np.isnan(value):
                axis.text(place, value, f"{value:.0f}", ha="center", va="bottom", fontsize=11)
    axis.set_xticks(range(len(names)), names)
    axis.spines[["top", "right"]].set_visible(False)


def draw_shared_images(axis: Axes) -> None:
    rows = [row for row in table("notes/shared-images.md", "shared") if row["Method"] == "Uniform"]
    own = [row for row in rows if row["Images"] == "of each client's own"]
    one = [row for row in rows if row["Images"] == "one seed for all clients"]
    bars(
        axis,
        [short(row["Where"]) for row in own],
        {
            "ours, each client its own images": ([number(row["Ours, last-20 %"]) for row in own], BLUE),
            "the paper": ([number(row["Paper, last-20 %"]) for row in own], GREY),
            "ours, one seed for all clients": ([number(row["Ours, last-20 %"]) for row in one], ORANGE),
        },
    )
    axis.set(title="The paper's Uniform is where ours is if clients share images", ylabel="last-20 accuracy, %")


def rate(cell: str) -> float:
    return float(re.findall(r"\(([\d.]+) %\)", cell)[0])


def draw_accuracy_drops(axis: Axes) -> None:
    rows = table("notes/accuracy-drops.md", "last-batches")
    names, drops = (list(column) for column in zip(*(row.values() for row in rows), strict=True))
    axis.bar(names, [rate(cell) for cell in drops], color=[GREY, *[BLUE] * (len(rows) - 1)])
    for place, cell in enumerate(drops):
        axis.text(place, rate(cell), cell.partition(" (")[0], ha="center", va="bottom", fontsize=11)
    axis.set(title="Accuracy drops in rounds with clients that end on a batch of two images", ylabel="rounds, %")
    axis.set_xlabel("weight of these clients in the round")
    axis.spines[["top", "right"]].set_visible(False)


def draw_imbalanced_rounds(axis: Axes) -> None:
    rows = table("notes/imbalanced-rounds.md", "imbalanced-rounds")
    names = [row["Normalised entropy of the labels"] for row in rows]
    styles = {
        "Nothing generated, no client of 30 %": (BLUE, "o", "-"),
        "Nothing generated, one client of 30 % or more": (ORANGE, "s", "--"),
    }
    for column, (colour, marker, line) in styles.items():
        values = [rate(row[column]) for row in rows]
        axis.plot(names, values, color=colour, marker=marker, linestyle=line, linewidth=2.5, markersize=9, label=column)
    axis.set(title="Without generated images, imbalanced rounds drop", ylabel="rounds that drop, %")
    axis.set_xlabel("normalised entropy of the labels of a round's clients")
    axis.spines[["top", "right"]].set_visible(False)


def draw_scaffold_and_moon(axis: Axes) -> None:
    rows = [
        row
        for row in table("scaffold-variants/README.md", "records scaffold-variants")
        if "unstored-c" in row["Record"]
    ]
    bars(
        axis,
        [short(row["Where"]) for row in rows],
        {
            "ours, as its authors describe it": ([number(row["Unchanged, %"]) for row in rows], BLUE),
            "the paper": ([number(row["Paper, last-20 %"]) for row in rows], GREY),
            "ours, ten batches, never stored": ([number(row["Changed, %"]) for row in rows], ORANGE),
        },
    )
    axis.set(title="SCAFFOLD: the variant is near the paper in five of eight columns", ylabel="last-20 accuracy, %")


def draw_without_leakage(axis: Axes) -> None:
    rows = [row for row in table("notes/without-leakage.md", "clean") if number(row["Protocol clean, last-20 %"]) > 0]
    bars(
        axis,
        [row["Method"].replace(" ", "\n").replace("-", "-\n", 1) for row in rows],
        {
            "protocol paper": ([number(row["Protocol paper, last-20 %"]) for row in rows], GREY),
            "protocol clean": ([number(row["Protocol clean, last-20 %"]) for row in rows], BLUE),
        },
    )
    axis.set(title="FedEAS's gain remains where the generator has seen no test image", ylabel="last-20 accuracy, %")


FIGURES = {
    "shared-images": draw_shared_images,
    "accuracy-drops": draw_accuracy_drops,
    "imbalanced-rounds": draw_imbalanced_rounds,
    "scaffold-and-moon": draw_scaffold_and_moon,
    "without-leakage": draw_without_leakage,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for NOTE.png")
    options = parser.parse_args()
    plt.rcParams.update({"font.size": 13, "text.color": BLACK, "axes.labelcolor": BLACK})
    for name, draw in FIGURES.items():
        figure, axis = plt.subplots(figsize=(11, 5), layout="constrained")
        draw(axis)
        axis.margins(y=0.1)  # room between the highest number and the title
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
        figure.savefig(options.out / f"{name}.png", dpi=100, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
