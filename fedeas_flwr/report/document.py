"""The content of a report, independent of its format: sections of sentences, tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedeas_flwr.common.text import counted
from fedeas_flwr.data.datasets import readable_info, short_name
from fedeas_flwr.partition import DIRICHLET, LEAKAGE, LEAKAGE_ELSEWHERE
from fedeas_flwr.report import allocations, purchases, samples
from fedeas_flwr.report.groups import (
    PHASES,
    Group,
    baseline_of,
    differences,
    gain_and_efficiency,
    group_key,
    score_of,
    show_efficiency,
    weak_gain,
)
from fedeas_flwr.report.notes import WEAK, notes_on
from fedeas_flwr.report.page import Document, Picture, Section, Table
from fedeas_flwr.report.paired import PairedRuns
from fedeas_flwr.report.run_figures import draw_accuracy, draw_classes, draw_cost, draw_measure, draw_seconds
from fedeas_flwr.report.style import GAMMA_HAT, legend_above

NOTHING = "–"
_KEY_FORMATS: dict[str, Callable[[Any], str]] = {
    "dataset": "Dataset {}".format,
    "clients": partial(counted, noun="client"),
    "partition": lambda value: "" if value == DIRICHLET else f"partition {value}",
    "partition-args": lambda value: value and f"partition-args {value}",
    "alpha": "α = {}".format,
    "protocol": "protocol {}".format,
    "model": "model {}".format,
    "strategy": "strategy {}".format,
    "rounds": partial(counted, noun="round"),
}


def make_document(groups: Sequence[Group], left_out: Sequence[str] = (), paired: PairedRuns | None = None) -> Document:
    """Return the report on the groups' records."""
    sections = [
        _results(groups),
        Section("Paired differences", tables=[paired.table()], below=paired.text) if paired else None,
        _accuracy(groups),
        _cost(groups),
        *_classes(groups),
        _worst_tenth(groups),
        allocation_section(groups),
        purchase_section(groups),
        sample_section(groups),
        _gamma_hat(groups),
        _time(groups),
        _configuration(groups, left_out),
        _environments(groups),
    ]
    datasets = ", ".join(dict.fromkeys(short_name(group.config.dataset) for group in groups))
    return Document(f"FedEAS report: {datasets}", _opening(groups), [section for section in sections if section])


def _opening(groups: Sequence[Group]) -> list[str]:
    shared = group_key(groups[0].config)
    same = {key: value for key, value in shared.items() if key not in differences([group.config for group in groups])}
    words = filter(None, (show(same[key]) for key, show in _KEY_FORMATS.items() if key in same))
    runs = sum(len(group.all_members) for group in groups)
    found = f"{counted(runs, 'run')} in {counted(len(groups), 'group')}"
    text = [f"{found} (the runs of a group differ only in their seed). {', '.join(words)}."]
    mixed = [group.config.dataset.startswith("cifar") for group in groups if group.config.protocol == "paper"]
    if mixed:
        text.append(LEAKAGE if any(mixed) else LEAKAGE_ELSEWHERE)
    return text


def result_tables(groups: Sequence[Group]) -> list[Table]:
    """Return the results, one row per group, with a table for each number of rounds: others cannot be compared."""
    thresholds = {group.config.threshold for group in groups}
    reached = f"rounds to {100 * thresholds.pop():g} %" if len(thresholds) == 1 else "rounds to threshold"
    lengths = sorted({tuple(group.lengths) for group in groups})
    tables = []
    for found in lengths:
        name = f"{' and '.join(map(str, found))} round{'' if found == (1,) else 's'}" if len(lengths) > 1 else ""
        shown = [group for group in groups if group.lengths == [*found]]
        accuracies = (f"{score_of(shown)} %", "final %", "peak %")
        head = (name, "seeds", *accuracies, "images", "gain", "η", reached, "Γ̂", "seconds")
        tables.append(Table(head, [_result_row(group, groups) for group in shown], [group.style for group in shown]))
    return tables


def _results(groups: Sequence[Group]) -> Section:
    text = (
        f"{score_of(groups).capitalize()} is the mean test accuracy of {_last_rounds(groups)}, final that of the last "
        "round; ± is the sample standard deviation over seeds. Gain is the difference of this mean in percentage "
        "points from the group that generates nothing and is otherwise the same; η is the gain per 1,000 images. Γ̂ "
        "measures how much the clients' updates differ in direction (median over rounds; smaller is closer). Seconds "
        "are the wall-clock time of a run under the backend named, from its launch to its last round. – means none, or "
        "never. Group names show the keys in which groups differ; Configuration lists all of them."
    )
    return Section("Results", [text, *(f"{note}." for note in notes_on(groups))], result_tables(groups))


def _last_rounds(groups: Sequence[Group]) -> str:
    """Return the rounds of the `last_20` of these groups as text."""
    lengths = [length for group in groups for length in group.lengths]
    if max(lengths) <= 20:
        return "all rounds"
    return "the last 20 rounds" + (" (of all rounds if a run has fewer)" if min(lengths) <= 20 else "")


def _result_row(group: Group, groups: Sequence[Group]) -> list[str]:
    accuracies, spread = [group.spread(key) for key in ("last_20", "final", "peak")], group.spread("gamma_hat")
    gain = gain_and_efficiency(group, groups)
    reached = [member.summary["rounds_to_threshold"] for member in group.members]
    return [
        group.name,
        ", ".join(map(str, group.seeds)),
        *(found.show(100) for found in accuracies if found),  # every round has an accuracy
        group.images_shown,
        f"{gain[0]:+.1f}{WEAK if weak_gain(group, groups) else ''}" if gain else NOTHING,
        show_efficiency(group, groups) or NOTHING,
        ", ".join(NOTHING if number is None else str(number) for number in reached),
        spread.show(digits=3) if spread else NOTHING,
        f"{group.wall_clock:,.0f} {', '.join(sorted({member.config.backend for member in group.members}))}",
    ]


# --------------------------------------------------------------------------------------------------------- pictures


def _picture(
    name: str, caption: str, draw: Callable[[Axes], None], size: tuple[float, float] = (8.6, 4.4)
) -> tuple[Picture]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    figure.set_figheight(size[1] + legend_above(axes))
    return (Picture(name, figure, caption),)


def _accuracy(groups: Sequence[Group]) -> Section:
    caption = (
        "Test accuracy after every round: the mean over seeds, with ± one standard deviation if there are several. "
        f"Dashed and in the legend: the mean of {_last_rounds(groups)}, with its standard deviation over seeds."
    )
    return Section("Accuracy", pictures=_picture("accuracy", caption, lambda axes: draw_accuracy(axes, groups)))


def _cost(groups: Sequence[Group]) -> Section | None:
    if not any(group.images for group in groups):
        return None
    caption = "Accuracy against the number of images generated by all clients. Higher and further left is better."
    if len({length for group in groups for length in group.lengths}) > 1:
        caption += " Runs of different length cannot be compared."
    return Section("Accuracy per image", pictures=_picture("cost", caption, lambda axes: draw_cost(axes, groups)))


def _classes(groups: Sequence[Group]) -> list[Section]:
    """Return one section per dataset: classes of different datasets cannot be compared."""
    known: dict[str, list[Group]] = {}
    for group in groups:
        if group.worst_class and group.per_class is not None:
            name = f"{short_name(group.config.dataset)}, {counted(len(group.per_class), 'class', 'classes')}"
            known.setdefault(name, []).append(group)
    title = "Classes before and after filling"
    if len(known) == 1:
        return [_classes_of_one(title, "classes", *known.values())]
    named = enumerate(known.items(), 1)
    return [_classes_of_one(f"{title}: {name}", f"classes-{number}", found) for number, (name, found) in named]


def _classes_of_one(title: str, picture: str, known: Sequence[Group]) -> Section:
    baseline = next((found for group in known if (found := baseline_of(group, known))), None)
    names = class_names(known[0])
    caption = f"Accuracy of each class, mean over {_last_rounds(known)} and over seeds."
    if baseline:
        caption += f" Before filling: {baseline.name}; the other marks are after filling."
    rows = []
    for group in known:
        worst, values = group.worst_class, group.per_class
        assert worst is not None and values is not None
        own = baseline_of(group, known)
        before = own.per_class[worst[0]] if own and own.per_class is not None else None
        cells = [f"{100 * worst[1]:.1f}", NOTHING if before is None else f"{100 * before:.1f}"]
        rows.append([group.name, names[worst[0]], *cells, f"{100 * float(np.nanmean(values)):.1f}"])
    head = ("", "worst class", "its accuracy %", "that class before filling %", "mean of the classes %")
    table = Table(head, rows, [group.style for group in known])
    pictures = _picture(picture, caption, lambda axes: draw_classes(axes, known, names, baseline))
    return Section(title, (), (table,), pictures)


def class_names(group: Group) -> Sequence[str]:
    """Return the class names of the dataset, or numbers if the dataset cannot be read."""
    assert group.per_class is not None
    info, classes = readable_info(group.config.dataset), len(group.per_class)
    return info.classes if info and len(info.classes) == classes else [str(label) for label in range(classes)]


def _worst_tenth(groups: Sequence[Group]) -> Section | None:
    known = [group for group in groups if group.worst_tenth]
    if not known:
        return None
    caption = "Accuracy of the tenth of clients with the lowest accuracy in a round, on their own test images."
    rows = [[group.name, group.worst_tenth.show(100)] for group in known if group.worst_tenth]
    table = Table(("", f"{score_of(known)} %"), rows, [group.style for group in known])
    measure, label = "worst_tenth_accuracy", "accuracy of the worst tenth (%)"
    pictures = _picture("worst-tenth", caption, lambda axes: draw_measure(axes, known, measure, label, 100))
    return Section("The worst tenth of clients", (), [table], pictures)


def allocation_section(groups: Sequence[Group]) -> Section | None:
    """Return heat maps of real and generated images, if the runs' partition can be recomputed."""
    maps, notes = allocations.maps_of(groups)
    if not maps and not notes:
        return None
    pictures = [
        Picture(f"allocation-{number}", allocations.draw(found), found.caption) for number, found in enumerate(maps, 1)
    ]
    return Section("Where the images go", notes, pictures=pictures)


def purchase_section(groups: Sequence[Group]) -> Section | None:
    """Return what clients bought during the runs of adaptive policies; None if none did."""
    found = purchases.purchases_of(groups)
    if not found:
        return None
    text = "Clients bought these images during the run, at one price for all: level / (1 − level). "
    text += "A client buys images of the classes with the highest scores for the images it has."
    hidden = [bought.group.name for bought in found if bought.by_class is None]
    notes = [f"No picture of {', '.join(hidden)}: the scores of the clients' classes are not here."] if hidden else []
    caption = "Images by class over the rounds: the first part of the plan, then what all clients bought together."
    pictures = [
        Picture(f"bought-{number}", bought.draw(), caption)
        for number, bought in enumerate(found, 1)
        if bought.by_class is not None
    ]
    table = Table(
        ("", "before round", "images", "clients", "level"), [row for bought in found for row in bought.rows()]
    )
    return Section("What was bought when", [text, *notes], [table], pictures)


def sample_section(groups: Sequence[Group]) -> Section | None:
    """Return images that the runs trained on, if this machine's cache has them."""
    pictures = [
        Picture(f"samples-{number}", samples.draw_rows(found.rows, samples.IMAGES_PER_CLASS), found.caption)
        for number, found in enumerate(samples.grids_of(groups), 1)
    ]
    return Section("Generated images", pictures=pictures) if pictures else None


def _gamma_hat(groups: Sequence[Group]) -> Section | None:
    known = [group for group in groups if not np.isnan(group.curve("gamma_hat")).all()]
    if not known:
        return None
    caption = "Γ̂ of every round: the dissimilarity of the clients' update directions. 0: all identical."
    pictures = _picture("gamma-hat", caption, lambda axes: draw_measure(axes, known, "gamma_hat", GAMMA_HAT))
    return Section("Dissimilarity of client updates", pictures=pictures)


def _time(groups: Sequence[Group]) -> Section:
    caption = (
        "Upper bar: wall-clock time on the server by phase. Lower bar: the summed work of the clients; it is longer "
        "than the upper bar if clients work in parallel. Γ̂ and tests run in the background of the next round: the wait "
        "is the time that they block the server. Start-up is the time from the launch to the first round; – means that "
        "an older version has not recorded it."
    )
    height = 1.0 + 0.7 * len(groups)
    server = ("waiting for clients", "averaging and checks", "waiting for Γ̂ and tests", "Γ̂", "testing")
    names = ("start-up", *server, "clients: generating", "clients: training")
    spent = [[group.startup, *map(group.seconds, PHASES)] for group in groups]
    rows = [
        [group.name, *(NOTHING if seconds is None else f"{seconds:,.1f}" for seconds in row)]
        for group, row in zip(groups, spent, strict=True)
    ]
    pictures = _picture("seconds", caption, lambda axes: draw_seconds(axes, groups), (8.6, height))
    return Section("Time by phase", (), [Table(("seconds", *names), rows, [group.style for group in groups])], pictures)


def _configuration(groups: Sequence[Group], left_out: Sequence[str]) -> Section:
    configs = [group.config for group in groups]
    differing = differences(configs)
    rows = [[key, *(str(group_key(config).get(key, NOTHING)) for config in configs)] for key in differing]
    diff = Table(("key", *(group.name for group in groups)), rows)
    runs = [(group.name, member) for group in groups for member in group.all_members]
    folders = [[name, member.run.path.name, str(member.config.seed)] for name, member in runs]
    differ = "Keys in which the groups differ; keys of generation do not apply to groups that generate nothing."
    alone = "There is only one group, so nothing differs."
    text = [differ if differing else alone, *(f"Left out: {reason}." for reason in left_out)]
    used = {key: str(value) for config in configs for key, value in group_key(config).items()}
    same = [[key, value] for key, value in used.items() if key not in differing]
    tables = [*([diff] if differing else []), Table(("group", "run", "seed"), folders), Table(("key", "value"), same)]
    return Section("Configuration", text, tables, folded=True)


def _environments(groups: Sequence[Group]) -> Section:
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for group in groups:
        for member in group.all_members:
            given = member.run.environment()
            flat = {k: str(v) for k, v in given.items() if k != "packages"} | dict(given.get("packages", {}))
            found.setdefault(repr(sorted(flat.items())), (flat, []))[1].append(member.run.path.name)
    tables = [Table((", ".join(runs), ""), [[k, str(v)] for k, v in flat.items()]) for flat, runs in found.values()]
    return Section("Environment", tables=tables, folded=True)
