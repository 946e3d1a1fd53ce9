"""Figures: text does not cover data, nothing is cut off, and colours differ."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from fake_runs import write_run
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.planning.beta_selection import Limits, choose
from fedeas_flwr.planning.budget_path import BudgetPath
from fedeas_flwr.report.document import make_document
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.page import Document, as_html
from fedeas_flwr.report.plan_figures import plan_figures
from fedeas_flwr.report.style import COLOURS, MORE_COLOURS, legend_above
from fedeas_flwr.report.writing import comparison_figure
from fedeas_flwr.reproduce.cells import all_cells
from fedeas_flwr.reproduce.figures import (
    Setting,
    _draw_bars,
    _draw_budgets,
    draw_closed_form,
    draw_convergence,
    draw_motivation,
    draw_overview,
    draw_sensitivity,
    draw_surrogate,
    setting_of,
)
from fedeas_flwr.reproduce.results import Value, find_results
from fedeas_flwr.runs.directory import RunDirectory

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def committed() -> Setting:
    """Return what the paper's figures show of the committed runs."""
    return setting_of(find_results(all_cells(), "full", [RESULTS], {}))


def faults(figure: Figure) -> list[str]:
    """Return the layout faults of a figure: text over data, and text cut off at the edge."""
    figure.draw_without_rendering()
    found = []
    for axes in figure.axes:
        legend, curves = axes.get_legend(), _lines(axes)
        words = [(text.get_text(), text.get_window_extent()) for text in axes.texts if text.get_text()]
        legend_box = legend.get_window_extent() if legend else Bbox.null()
        if legend and any(_covers(legend_box, points) for points in [*curves, *_areas(axes)]):
            found.append(f"legend on the data: {[text.get_text() for text in legend.get_texts()]}")
        for text, box in words:
            if any(_covers(box, points) for points in curves):
                found.append(f"on a curve: {text}")
            if legend and box.overlaps(legend_box):
                found.append(f"on the legend: {text}")
            if any(_covers(box, points) for points in _straight_lines(axes)):
                found.append(f"on a straight line: {text}")
        for (one, one_box), (other, other_box) in combinations(words, 2):
            if one_box.overlaps(other_box):
                found.append(f"on each other: {one}, {other}")
    inside = figure.bbox.padded(1)
    for part in (*figure.axes, *figure.legends):
        box = part.get_tightbbox()
        if box is not None and not (inside.contains(*box.min) and inside.contains(*box.max)):
            found.append(f"cut off: {part}")
    return found


def _covers(box: Bbox, points: NDArray[np.float64]) -> bool:
    return bool(((points > box.min) & (points < box.max)).all(axis=1).any())


def _lines(axes: Axes) -> list[NDArray[np.float64]]:
    """Return dense points along every curve, except straight lines across the axes."""
    found = []
    for line in axes.lines:
        points = line.get_transform().transform(np.asarray(line.get_xydata()))
        if len(points) and line.get_transform() == axes.transData:
            places = np.linspace(0, len(points) - 1, 40 * len(points))
            found.append(np.stack([np.interp(places, np.arange(len(points)), column) for column in points.T], axis=1))
    return found


def _straight_lines(axes: Axes) -> list[NDArray[np.float64]]:
    """Return dense points along the straight lines across the axes, which mark limits."""
    across = [line for line in axes.lines if line.get_transform() != axes.transData and len(line.get_xydata()) == 2]
    ends = [line.get_transform().transform(np.asarray(line.get_xydata())) for line in across]
    return [np.linspace(start, end, 2000) for start, end in ends]


def _areas(axes: Axes) -> list[NDArray[np.float64]]:
    """Return a grid of points over every bar."""
    boxes = [patch.get_window_extent() for patch in axes.patches]
    return [np.stack(np.meshgrid(*np.linspace(box.min, box.max, 30).T), axis=-1).reshape(-1, 2) for box in boxes]


@pytest.mark.parametrize("name", ["quickstart", pytest.param("cifar10-k100-a0.1", marks=pytest.mark.slow)])
def test_report_figures_have_no_overlap(name: str) -> None:
    groups, _ = group_runs([RunDirectory(path.parent) for path in sorted((RESULTS / name).glob("*/config.json"))])
    pictures = [picture for section in make_document(groups).sections for picture in section.pictures]
    assert len(pictures) >= 6
    assert {picture.name: found for picture in pictures if (found := faults(picture.figure))} == {}
    if name == "quickstart":
        assert faults(comparison_figure(groups)) == []


@pytest.mark.parametrize(("dataset", "clients"), [("digits", 10), pytest.param("cifar10", 20, marks=pytest.mark.slow)])
def test_plan_figures_have_no_overlap(dataset: str, clients: int) -> None:
    partition = make_partition(dataset, "paper", clients, 0.1, 42)
    path = BudgetPath(partition.counts(plan_labels(dataset, "paper"), 10))
    choice = choose(path, Limits(min_removed=0.5, max_synthetic=0.4), [4.0, 8.0, 12.0, 16.0, 20.0])
    for chosen in (None, choice):
        assert {name: bad for name, f in plan_figures(path, 12.0, chosen).items() if (bad := faults(f))} == {}


def test_ticks_are_correct_for_few_images_and_seconds(tmp_path: Path) -> None:
    """With a small dataset, a tick between two integers must not be labelled as an integer."""
    drawn = plan_figures(BudgetPath([[41, 11, 3], [1, 4, 21], [14, 33, 16]]), 4.0)
    assert {name: bad for name, figure in drawn.items() if (bad := faults(figure))} == {}
    seconds = {"seconds": {"clients": 1.2, "aggregate": 0.1, "generating": 0.9, "training": 0.3}}
    groups, _ = group_runs([write_run(tmp_path / "run", [0.5], extra=[seconds])])
    pictures = {p.name: p.figure for section in make_document(groups).sections for p in section.pictures}
    for figure in (drawn["reduction.png"], pictures["seconds"]):
        FigureCanvasAgg(figure).draw()
        (axes,) = figure.axes
        labels = [float(label.get_text()) for label in axes.get_xticklabels()]
        assert labels == pytest.approx(list(axes.get_xticks()))


def test_axes_stay_within_possible_values(tmp_path: Path) -> None:
    """No axis shows an accuracy over 100 % or below 0, or Γ̂ below 0, and no marker is cut in half."""
    runs = []
    for seed, (low, high) in enumerate([(0.0, 1.0), (0.9, 0.98)]):
        more = {"per_class_accuracy": [1.0] * 9 + [low], "worst_tenth_accuracy": low, "gamma_hat": low / 2}
        for policy in ("none", "fedeas"):
            run = {"extra": [more] * 2, "images": 400 * (policy == "fedeas"), "policy": policy, "seed": seed}
            runs.append(write_run(tmp_path / f"{policy}-{seed}", [low, high], **run))
    pictures = {p.name: p.figure for s in make_document(group_runs(runs)[0]).sections for p in s.pictures}
    for name, most in (("accuracy", 100), ("cost", 100), ("classes", 100), ("worst-tenth", 100), ("gamma-hat", 1)):
        (axes,) = pictures[name].axes
        low, high = axes.get_ylim()
        assert 0 <= low < high <= most, name
        marks = [line for line in axes.lines if line.get_marker() not in ("None", "", "_", "|")]
        assert not any(line.get_clip_on() for line in marks), name
    setting = setting_of(find_results(all_cells(), "smoke", [tmp_path], {}))
    assert [axes.get_ylim() for axes in draw_convergence(setting).axes] == [(0, 100)] * 2
    axes = Figure(layout="constrained").subplots()
    _draw_bars(axes, [Value("c/fedavg", "", (97.0, 99.0), (1, 2), 55.0), Value("c/fedeas", "", (99.9,), (1,), 71.0)])
    assert axes.get_ylim() == (0, 100) and faults(axes.figure) == []  # type: ignore[arg-type]


def test_paper_figures_have_no_overlap(committed: Setting) -> None:
    drawn = [draw(committed) for draw in (draw_motivation, draw_surrogate, draw_overview, draw_convergence)]
    assert [faults(figure) for figure in (*drawn, draw_sensitivity(committed), draw_closed_form())] == [[]] * 6


def test_figures_claim_only_what_their_runs_show(committed: Setting) -> None:
    left, right = draw_motivation(committed).axes
    titles = ["(a) Images to generate per client", "(b) Accuracy with 13,437 images in all"]
    assert [axes.get_title(loc="left") for axes in (left, right)] == titles
    assert [(axes.get_yscale(), axes.get_ylim()[0]) for axes in (left, right)] == [("linear", 0)] * 2
    assert _names_in_legend(right) == ["the paper's", "ours, 1 seed"]
    bars = Figure().subplots()
    _draw_bars(bars, [Value("c/fedavg", "", (5.0, 9.0), (1, 2), 55.0), Value("c/fedeas", "", (9.0,), (1,), 71.0)])
    assert _names_in_legend(bars)[1] == "ours, 1 to 2 seeds"
    groups, _ = group_runs([RunDirectory(RESULTS / "quickstart" / policy) for policy in ("none", "fedeas")])
    figure = comparison_figure(groups)
    assert figure.axes[2].get_title() == "Test accuracy (dashed: mean of all rounds)"
    assert figure.get_suptitle() == "893 generated images: mean accuracy 92.7 % instead of 74.5 %"
    assert [draw(committed).get_suptitle() for draw in (draw_motivation, draw_convergence, draw_sensitivity)] == [
        "FedEAS generates 6 % of the images of full balance: +15.5 points over FedAvg",
        "FedEAS reaches 70 % in round 78 (20 clients) and 60 (100); Missing-only in 78 and 147",
        "FedEAS is above Uniform at 4 of 5 matched budgets; β = 12 meets both conditions",
    ]


def _names_in_legend(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_coinciding_rounds_are_both_visible_and_titles_aligned(committed: Setting) -> None:
    """With 20 clients FedEAS and Missing-only reach 70 % in the same round, so their lines coincide."""
    figure = draw_convergence(committed)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    axes = figure.axes[0]
    (left, low), (right, high) = axes.transData.transform([(77, 5), (79, 35)]).round().astype(int)
    under_the_curves = pixels[low:high, left:right].reshape(-1, 3)
    for method in ("missing-only", "fedeas"):
        colour = 255 * np.array(to_rgb(COLOURS[method]))
        assert (np.abs(under_the_curves - colour).max(axis=1) < 40).sum() > 50, method
    heights = [axes._left_title.get_window_extent().y0 for axes in figure.axes]  # type: ignore[attr-defined]
    assert heights[0] == pytest.approx(heights[1], abs=0.5)


def test_beta_without_runs_is_a_gap_and_one_seed_has_no_sd() -> None:
    axes = Figure(figsize=(6.2, 4.4), layout="constrained").subplots()
    runs: list[tuple[float, ...]] = [(61.0,), (), (62.0, 64.0)]
    values = [Value("", "", ours, tuple(range(len(ours))), 60.0, 2, comparable=True) for ours in runs]
    for name in ("FedEAS", "Uniform"):
        _draw_budgets(axes, values, [1, 2, 3], name, "black", "o")
    legend_above(axes)
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert [line.get_label() for line in lines] == [
        f"{name}, {whose}" for name in ("FedEAS", "Uniform") for whose in ("ours", "the paper's")
    ]
    assert np.array_equal(np.asarray(lines[0].get_ydata(), dtype=float), [61.0, np.nan, 63.0], equal_nan=True)
    bars = [np.asarray(path.vertices)[:, 1] for part in axes.collections for path in part.get_paths()]
    assert [list(np.round(bar, 2)) for bar in bars if np.isfinite(bar).all()] == [[61.59, 64.41]] * 2
    legend = axes.get_legend()
    assert legend is not None and legend._ncols == 2  # both entries of a policy are in one column


def test_paper_figures_without_any_run(tmp_path: Path) -> None:
    """Missing measurements are stated in the axes; axes without curves have no legend."""
    setting = setting_of(find_results(all_cells(), "smoke", [tmp_path], {}))
    draws = (draw_motivation, draw_surrogate, draw_overview, draw_convergence, draw_sensitivity)
    drawn = [draw(setting) for draw in draws]
    assert [faults(figure) for figure in drawn] == [[]] * 5
    for figure, panels in ((drawn[3], (0, 1)), (drawn[4], (0,))):
        assert [[text.get_text() for text in figure.axes[panel].texts] for panel in panels] == [["not run yet"]] * len(
            panels
        )


def test_thirty_groups_have_distinct_styles(tmp_path: Path) -> None:
    """Curves differ by colour and dashes, markers by colour and shape; the table uses the curves' style."""
    rates = [0.001 * number for number in range(1, 31)]
    runs = [
        write_run(tmp_path / f"{rate}", [0.5, 0.6], extra=[{"per_class_accuracy": [0.5] * 10}] * 2, learning_rate=rate)
        for rate in rates
    ]
    groups, _ = group_runs(runs)
    assert len({(group.style.colour, group.style.line) for group in groups}) == 30
    assert len({(group.style.colour, group.style.marker) for group in groups}) == 30
    assert [group.style.line for group in groups[:9]] == ["-"] * 9, "dashes are used although there are enough colours"
    sections = {section.title: section for section in make_document(groups).sections}
    (axes,) = sections["Accuracy"].pictures[0].figure.axes
    assert len({(line.get_color(), str(line._dash_pattern)) for line in axes.lines}) == 30  # type: ignore[attr-defined]
    (axes,) = sections["Classes before and after filling"].pictures[0].figure.axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 30
    assert sections["Results"].tables[0].swatches == [group.style for group in groups]
    swatches = re.findall(r'<svg class="swatch".*?</svg>', as_html(Document("", [], [sections["Results"]])))
    assert len(set(swatches)) == 30


def lab(colour: str) -> NDArray[np.float64]:
    """Return a colour in CIE L*a*b*, where distances are perceptual."""
    rgb = np.array(to_rgb(colour))
    rgb = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(to_xyz @ rgb / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_are_distinguishable() -> None:
    pairs = combinations(sorted({*COLOURS.values(), *MORE_COLOURS}), 2)
    near = {pair: float(np.linalg.norm(lab(pair[0]) - lab(pair[1]))) for pair in pairs}
    assert {pair: distance for pair, distance in near.items() if distance < 25} == {}
