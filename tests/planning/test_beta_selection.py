"""β from limits: the paper's window, edges exact to the float, contradictions, and the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedeas_flwr.allocation import IntArray, fedeas, full_balance, removed
from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.planning import curves
from fedeas_flwr.planning.beta_selection import BetaChoice, GeneratorSpeed, Limits, broken, choose, format_choice
from fedeas_flwr.planning.budget_path import BudgetPath, bisect_last_true, where_removed
from fedeas_flwr.report.plan_figures import draw_plan

PAPER = Limits(min_removed=0.5, max_synthetic=0.25)
GRID = (4.0, 8.0, 12.0, 16.0, 20.0)


@pytest.fixture(scope="module")
def cifar() -> BudgetPath:
    return BudgetPath(make_partition("cifar10", "paper", 20, 0.1, 42).counts(plan_labels("cifar10", "paper"), 10))


def just(beta: float, towards: float) -> float:
    return math.nextafter(beta, towards)


# ------------------------------------------------------------------------------------------------ the paper's choice


def test_paper_limits_give_the_papers_window_and_beta(cifar: BudgetPath) -> None:
    choice = choose(cifar, PAPER, GRID)
    ((low, high),) = choice.windows
    assert (round(low, 1), round(high, 1)) == (11.4, 13.3)
    assert math.floor(100 * high) == 1328  # the paper's text has 13.4
    assert choice.recommended == 12
    assert [point.images for point, _ in choice.grid] == [4_113, 8_673, 13_437, 18_435, 23_514]
    assert [breaks for _, breaks in choice.grid] == [["min_removed"]] * 2 + [[]] + [["max_synthetic"]] * 2
    assert "the only one on the grid" in choice.why
    assert "51.8% removed, 13,437 images, 23.0% synthetic" in choice.why


def test_window_edges_are_exact(cifar: BudgetPath) -> None:
    ((low, high),) = choose(cifar, PAPER).windows
    assert broken(cifar.at(low), PAPER) == broken(cifar.at(high), PAPER) == []
    assert broken(cifar.at(just(low, 0)), PAPER) == ["min_removed"]
    assert broken(cifar.at(just(high, math.inf)), PAPER) == ["max_synthetic"]


def test_concentration_figures_of_the_main_setting(cifar: BudgetPath) -> None:
    generated = fedeas(cifar.counts, 12)
    held, received = curves.concentration(cifar.counts, generated)
    assert (round(100 * held[5], 1), round(100 * received[5], 1)) == (53.6, 45.1)
    assert (held[-1], received[-1], len(held)) == (1, 1, 21)
    needed, given = curves.demand(cifar.counts, generated)
    assert (needed.sum(), given.sum(), np.median(given)) == (226_783, 13_437, 595)
    found = curves.reduction(cifar, [12.0])
    assert [images for images, _ in found.marks["fedeas"]] == [13_437]
    assert round(100 * (found.marks["fedeas"][0][1] - found.marks["uniform"][0][1]), 1) == 14.6
    last = {name: round(100 * curve[-1][1], 1) for name, curve in found.curves.items()}
    assert last["fedeas"] == 51.8 and last["greedy"] == 53.3 and last["waterfill"] >= 53.3
    assert round(13_437 / 226_783, 3) == 0.059
    assert np.median(cifar.counts.sum(axis=1)) == 1_984.5  # the paper's supplement has 1,624
    assert (cifar.counts == 0).sum() == 95
    assert curves.marked_betas(12) == list(GRID)


def test_budget_path_matches_the_allocation(cifar: BudgetPath) -> None:
    for beta in (0.0, 3.7, 12.0, 300.0):
        point, generated = cifar.at(beta), fedeas(cifar.counts, beta)
        assert (point.images, point.removed) == (generated.sum(), removed(cifar.counts, generated))


# --------------------------------------------------------------------------------------------- which β is recommended


def test_choose_spends_upper_limits_and_minimises_otherwise(cifar: BudgetPath) -> None:
    assert choose(cifar, PAPER).recommended == 13  # 12 and 13 are the values of two digits in the window
    assert choose(cifar, Limits(min_removed=0.5)).recommended == 12
    assert choose(cifar, Limits(min_removed=0.3), GRID).recommended == 8
    assert choose(cifar, Limits(max_images=20_000), GRID).recommended == 16


def test_choose_does_not_recommend_more_than_balance() -> None:
    path = BudgetPath([[64, 0]])  # balanced at 64, which β = 64 / √32 = 11.3 fills to
    choice = choose(path, Limits(max_images=400), (8.0, 11.32, 20.0, 30.0))
    assert [breaks for _, breaks in choice.grid] == [[]] * 4
    assert choice.recommended == 11.32


def test_window_without_an_upper_end_is_shown_as_such(cifar: BudgetPath) -> None:
    choice = choose(cifar, Limits(min_removed=0.5))
    assert choice.as_json()["windows"] == [{"low": choice.windows[0][0], "high": None}]
    assert "β from 11.374 and above" in format_choice(choice)


def test_window_ends_where_the_removed_share_drops(cifar: BudgetPath) -> None:
    ((low, high),) = choose(cifar, Limits(min_removed=0.95)).windows
    assert low < 100 < high < 1000
    assert cifar.at(high).removed >= 0.95 > cifar.at(just(high, math.inf)).removed
    assert cifar.at(low).removed >= 0.95 > cifar.at(just(low, 0)).removed


def test_max_seconds_counts_whole_batches(cifar: BudgetPath) -> None:
    speed, limits = GeneratorSpeed(batch=100, seconds_a_batch=2.0), Limits(max_seconds=201.9)
    ((_, high),) = choose(cifar, limits, speed=speed).windows
    assert cifar.at(high).images <= 10_000 < cifar.at(just(high, math.inf)).images  # 100 batches, 200 s
    assert choose(cifar, limits, GRID, speed).as_json()["grid"][1]["seconds"] == 174  # 8,673 images
    with pytest.raises(ValueError, match=r"--max-seconds 201\.9: needs the generator's speed"):
        choose(cifar, limits)


def test_window_depends_on_strict_mean_and_gamma() -> None:
    # All filled to 64, b = ⌊√16 · 1 · β⌋ = 64 at β = 16; by Eq. 9 as printed more β goes on balanced, to no harm.
    for strict_mean, high in ((True, 16.25), (False, math.inf)):
        path = BudgetPath([[64, 0, 0, 0]], strict_mean=strict_mean)
        ((low, top),) = where_removed(path, 1.0, path.end)
        assert low == pytest.approx(16, abs=1e-9)
        assert top == (path.end if high == math.inf else pytest.approx(high, abs=1e-9))
    ((low, _),) = where_removed(BudgetPath([[64, 0, 0, 0]], gamma=1.0), 1.0, 100.0)
    assert low == pytest.approx(4, abs=1e-9)


# ------------------------------------------------------------------------------------------ steps that are not monotone


counts_of = st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=1, max_size=4)


@settings(max_examples=60)
@given(counts=counts_of, least=st.floats(0, 1), strict_mean=st.booleans(), end=st.floats(0.5, 60))
def test_where_removed_finds_exactly_the_valid_intervals(
    counts: Any, least: float, strict_mean: bool, end: float
) -> None:
    path = BudgetPath(counts, strict_mean=strict_mean)
    pieces = where_removed(path, least, end)
    for beta in np.linspace(0, end, 301).tolist():
        inside = any(low <= beta <= high for low, high in pieces)
        assert inside == (path.at(beta).removed >= least), beta
    for low, high in pieces:
        assert path.at(low).removed >= least and path.at(high).removed >= least
        assert low == 0 or path.at(just(low, 0)).removed < least
        assert high == end or path.at(just(high, math.inf)).removed < least


def test_where_removed_splits_at_a_drop() -> None:
    # The first client passes its optimum before the second, with little skew, gets its first image.
    path = BudgetPath([[30, 0, 0], [260, 100, 100]])
    first, second = where_removed(path, 0.3, 400.0)
    assert [round(edge, 1) for edge in (*first, *second)] == [3.5, 54.1, 79.6, 400]
    assert path.at(first[1]).removed >= 0.3 > path.at(just(first[1], math.inf)).removed
    assert path.at(60.0).removed < 0.3
    for end in (80.0, 90.0, 104.0):  # both ends of the second half of [0, end] satisfy it, its inside does not
        assert where_removed(path, 0.3, end) == [first, (second[0], end)]
    text = format_choice(choose(path, Limits(min_removed=0.3, max_images=700)))
    assert "β from 3.479 to 54.074, 79.562 to " in text and ", in 2 pieces (" in text


@settings(max_examples=60)
@given(counts=counts_of, most=st.integers(0, 60))
def test_bisect_last_true_finds_the_greatest_beta(counts: Any, most: int) -> None:
    path = BudgetPath(counts)
    top = bisect_last_true(lambda beta: path.at(beta).images <= most, path.end)
    assert path.at(top).images <= most
    assert top == path.end or path.at(just(top, math.inf)).images > most


# ------------------------------------------------------------------------------------------------------ contradictions


def contradiction(choice: BetaChoice) -> list[str]:
    assert choice.recommended is None
    lines = format_choice(choice).splitlines()
    return [line.removeprefix("Contradiction: ") for line in lines if line.startswith("Contradiction: ")]


def test_only_contradicting_limits_are_named(cifar: BudgetPath) -> None:
    limits = Limits(min_removed=0.5, max_synthetic=0.25, max_images=5_000, max_seconds=100.0)
    choice = choose(cifar, limits, GRID, GeneratorSpeed(100, 1.0))
    (images,) = [line for line in contradiction(choice) if "--max-images" in line]
    assert images == (
        "--min-removed 0.5 needs β ≥ 11.374 (50.0% removed, 12,654 images, 21.9% synthetic), "
        "but --max-images 5000 allows β ≤ 4.827 (26.5% removed, 5,000 images, 10.0% synthetic)"
    )
    assert [line.split(" but ")[1].split()[0] for line in contradiction(choice)] == ["--max-images", "--max-seconds"]
    assert choice.windows == []


def test_unreachable_limit_is_reported(cifar: BudgetPath) -> None:
    (line,) = contradiction(choose(cifar, Limits(min_removed=0.99, max_images=10)))
    assert line.startswith("--min-removed 0.99 cannot be reached at any β: about 98.7% is the most")
    (line,) = contradiction(choose(BudgetPath([[5, 5]]), Limits(min_removed=0.1)))
    assert line == "--min-removed 0.1 cannot be reached at any β: there is no imbalance to remove"


def test_grid_outside_the_window_is_reported(cifar: BudgetPath) -> None:
    choice = choose(cifar, PAPER, (4.0, 8.0, 16.0))
    assert contradiction(choice) == ["grid 4, 8, 16: no β of it lies in β from 11.374 to 13.286"]
    assert len(choice.windows) == 1


def test_balanced_clients_accept_any_beta() -> None:
    choice = choose(BudgetPath([[5, 5], [0, 0]]), Limits(max_images=10))
    assert choice.as_json()["windows"] == [{"low": 0, "high": None}]
    assert choice.recommended is not None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_removed": 1.5}, "--min-removed 1.5: must be a share from 0 to 1"),
        ({"max_synthetic": -0.1}, "--max-synthetic -0.1: must be a share from 0 to 1"),
        ({"min_removed": math.nan}, "--min-removed nan: must be a share"),
        ({"max_images": -1}, "--max-images -1: must be a finite number of at least 0"),
        ({"max_seconds": math.inf}, "--max-seconds inf: must be a finite number"),
    ],
)
def test_invalid_limits_are_named(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**limits)


def test_invalid_requests_are_named(cifar: BudgetPath) -> None:
    with pytest.raises(ValueError, match="no limit: give --min-removed, --max-synthetic"):
        choose(cifar, Limits())
    with pytest.raises(ValueError, match="grid: beta=-4"):
        choose(cifar, PAPER, (-4.0,))
    with pytest.raises(ValueError, match=r"policy='uniform'.*fedeas, without-entropy, linear"):
        BudgetPath(cifar.counts, "uniform")


def test_choice_is_plain_json(cifar: BudgetPath) -> None:
    choice = choose(cifar, PAPER, GRID).as_json()
    assert json.loads(json.dumps(choice)) == choice
    assert list(choice) == ["limits", "windows", "grid", "recommended", "why", "contradictions"]
    assert choice["limits"] == {"min_removed": 0.5, "max_synthetic": 0.25}
    assert list(choice["grid"][0]) == ["beta", "total", "synthetic_fraction", "removed", "breaks"]


# --------------------------------------------------------------------------------------------------------- the pictures


@pytest.mark.parametrize("counts", [None, [[5, 0]], [[9, 0, 3], [0, 0, 0], [1, 1, 1]]])
def test_draw_plan_writes_four_figures(tmp_path: Path, cifar: BudgetPath, counts: list[list[int]] | None) -> None:
    path = BudgetPath(counts) if counts else cifar
    choice = choose(
        path, Limits(max_synthetic=0.6, max_images=14_000, max_seconds=9.0), GRID[:3], GeneratorSpeed(64, 0.04)
    )
    assert choice.recommended is not None
    drawn = draw_plan(path, choice.recommended, tmp_path / "new" / "folder", choice)
    names = ["demand.png", "concentration.png", "reduction.png", "beta-selection.png"]
    assert [file.name for file in drawn] == names
    for file in drawn:
        picture = np.asarray(Image.open(file).convert("RGB"), dtype=int)
        red = np.abs(picture - [0xD1, 0x49, 0x5B]).max(axis=2) < 12  # FedEAS's colour
        assert picture.shape[:2] == (672, 1024) and red.sum() > 300, file.name


def test_window_is_shaded_only_with_limits(tmp_path: Path, cifar: BudgetPath) -> None:
    def shaded(choice: BetaChoice | None, folder: str) -> int:
        draw_plan(cifar, 12.0, tmp_path / folder, choice)
        picture = np.asarray(Image.open(tmp_path / folder / "beta-selection.png").convert("RGB"), dtype=int)
        return int((np.abs(picture - [0xDF, 0xED, 0xE4]).max(axis=2) < 3).sum())

    assert shaded(choose(cifar, PAPER, GRID), "limits") > 50_000
    assert shaded(None, "none") < 500


@pytest.mark.timeout(20)
def test_gamma_that_leaves_no_budget_is_rejected() -> None:
    with pytest.raises(ValueError, match="gamma"):
        BudgetPath([[640, 3, 0, 0]], gamma=400.0)


def test_draw_plan_without_images_is_rejected(tmp_path: Path, cifar: BudgetPath) -> None:
    with pytest.raises(ValueError, match="nothing would be generated at β = 0"):
        draw_plan(cifar, 0.0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reduction_of_many_images_omits_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    path = BudgetPath([[64, 0, 0, 0]])
    assert "greedy" in curves.reduction(path, [4.0]).curves
    monkeypatch.setattr(curves, "MAX_DRAWN_GREEDY_STEPS", 10)
    assert list(curves.reduction(path, [4.0]).curves) == ["waterfill", "uniform", "fedeas"]


def test_demand_by_hand() -> None:
    counts: IntArray = np.array([[4, 0], [1, 1]])
    needed, given = curves.demand(counts, np.array([[0, 3], [0, 0]]))
    assert (needed.tolist(), given.tolist()) == ([4, 0], [3, 0])
    assert needed.sum() == full_balance(counts).sum()
