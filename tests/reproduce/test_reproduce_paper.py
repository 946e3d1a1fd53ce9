"""The paper's numbers are consistent with each other and with the cells; every cell gives a valid run config."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_files import absolute_paths, parse_overrides, read_config
from fedeas_flwr.planning.run_plan import count_distinct_images, planned_counts, planned_images
from fedeas_flwr.policies.registry import allocate
from fedeas_flwr.reproduce import paper
from fedeas_flwr.reproduce.cells import (
    BETA_SWEEP_COLUMN,
    DEFAULT_COLUMN,
    RULES,
    SCALES,
    SHARED,
    all_cells,
    cell,
    column,
    matching,
    run_command_args,
    variants,
)
from fedeas_flwr.reproduce.items import ITEMS, can_run, choose
from fedeas_flwr.reproduce.results import experiment_key

ROOT = Path(__file__).parents[2]
SLOW_PARTITION = "c10-k100-a0.05"
"""Computing it takes up to two minutes on a slow core; tests/test_partition.py checks its total."""


# ---------------------------------------------------------------------------------------------- the paper's numbers


@pytest.mark.parametrize("rows", [paper.LAST_20, paper.PEAK])
def test_paper_rows_are_complete_and_peaks_exceed_means(rows: dict[str, paper.Row]) -> None:
    assert list(rows) == list(paper.LAST_20)
    assert {len(row) for row in rows.values()} == {len(paper.COLUMNS)}
    for method, place in itertools.product(rows, paper.COLUMNS):
        mean, peak = paper.at(paper.LAST_20, method, place), paper.at(paper.PEAK, method, place)
        assert (mean is None) == (peak is None) == (method == "full-balance" and not place.endswith("a0.1"))
        assert mean is None or peak is None or mean <= peak


def test_numbers_in_the_papers_text_follow_from_its_table() -> None:
    def lead(place: str, over: str) -> float:
        ours, theirs = (paper.at(paper.LAST_20, method, place) for method in ("fedeas", over))
        assert ours is not None and theirs is not None
        return round(ours - theirs, 2)

    over_uniform = {place: lead(place, "uniform") for place in paper.COLUMNS}
    assert max(over_uniform.values()) == over_uniform["c10-k100-a0.05"] == 18.82
    assert [over_uniform[p] for p in ("c10-k20-a0.05", BETA_SWEEP_COLUMN, "c10-k20-a0.3")] == [13.28, 7.22, 1.81]
    assert [over_uniform[p] for p in ("c100-k20-a0.1", "c100-k100-a0.1")] == [5.16, 8.32]
    assert lead("c10-k20-a0.05", "fedavg") == 29.09
    assert round(100 * (1 - 13_437 / 226_783), 1) == 94.1
    peaks = [paper.at(paper.PEAK, method, BETA_SWEEP_COLUMN) for method in ("fedeas", "uniform")]
    assert peaks[0] and peaks[1] and round(peaks[0] - peaks[1], 2) == paper.PEAK_LEAD["ddpm"]
    assert round(paper.RUN_SECONDS["full-balance"] / paper.RUN_SECONDS["fedeas"], 1) == 3.7


def test_paper_best_and_second_best_of_every_column() -> None:
    """The paper's Table 1 prints them bold and underlined; it excludes Full-Balance."""
    printed = {
        "c10-k20-a0.05": ("fedeas", "missing-only"),
        "c10-k20-a0.1": ("fedeas", "missing-only"),
        "c10-k20-a0.3": ("scaffold", "missing-only"),
        "c100-k20-a0.1": ("missing-only", "fedeas"),
        "c10-k100-a0.05": ("fedeas", "missing-only"),
        "c10-k100-a0.1": ("fedeas", "missing-only"),
        "c10-k100-a0.3": ("fedeas", "missing-only"),
        "c100-k100-a0.1": ("fedeas", "missing-only"),
    }
    for place in paper.COLUMNS:
        scores = {m: paper.at(paper.LAST_20, m, place) or 0.0 for m in paper.LAST_20 if m != "full-balance"}
        assert tuple(sorted(scores, key=lambda method: -scores[method])[:2]) == printed[place]


def test_paper_small_tables_agree_with_table_1() -> None:
    for method, (last, images, gain, eta) in paper.BETA_SWEEP.items():
        if method in paper.LAST_20:
            assert last == paper.at(paper.LAST_20, method, BETA_SWEEP_COLUMN)
        if gain is None or eta is None:
            continue
        assert round(last - 55.52, 2) == gain
        assert abs(gain * 1e3 / images - eta) < 6e-4
    for method, (images, last) in paper.ABLATION.items():
        if method in paper.BETA_SWEEP:
            assert (last, images) == paper.BETA_SWEEP[method][:2]
    base = paper.GAMMA_HAT["fedavg"][0]
    for gamma_hat, less in paper.GAMMA_HAT.values():
        assert less is None or abs(100 * (1 - gamma_hat / base) - less) < 0.06


# -------------------------------------------------------------------------------------------------- cells as runs

GENERATING = [
    one.name
    for one in all_cells()
    if paper.images(one.method.name, one.column.name) and one.column.name != SLOW_PARTITION
]


@pytest.mark.parametrize("name", GENERATING)
def test_cell_plans_exactly_the_papers_number_of_images(name: str) -> None:
    one = cell(name)
    config = one.config("full", 1)
    counts = planned_counts(config)
    plan = allocate(counts, config.policy, beta=config.beta, gamma=config.gamma)
    assert plan.sum() == paper.images(one.method.name, one.column.name)


def test_other_policies_spend_at_most_the_total_of_fedeas() -> None:
    totals = {}
    for method in RULES:
        config = cell(f"{DEFAULT_COLUMN}/{method}").config("full", 1)
        plan = allocate(planned_counts(config), config.policy, beta=config.beta, gamma=config.gamma)
        totals[method] = int(plan.sum())
    assert totals["fedeas"] == totals["waterfill"] == 33_650
    assert all(33_640 <= total <= 33_650 for total in totals.values())
    gammas = [cell(f"{DEFAULT_COLUMN}/{method}").config("full", 1).gamma for method in RULES[:4]]
    assert gammas == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.slow
def test_number_of_distinct_shared_images() -> None:
    """The planned total stays the paper's; for Uniform, a hundredth of it is generated."""
    different = {}
    for place, method, end in variants(SHARED):
        config = cell(f"{place}/{method}{end}").config("full", 1)
        counts = planned_counts(config)
        total = paper.images(method, place)
        assert allocate(counts, config.policy, beta=config.beta).sum() == total
        different[place, method, end] = count_distinct_images(config, counts)
        assert different[place, method, end] <= planned_images(config, counts).sum() <= total
    assert different == {
        (DEFAULT_COLUMN, "uniform", ""): 33_650,
        (DEFAULT_COLUMN, "uniform", "-shared"): 10 * 34,
        (
            DEFAULT_COLUMN,
            "uniform",
            "-one-seed",
        ): 385,  # the remainder shifts some clients' image indices
        (DEFAULT_COLUMN, "missing-only", ""): 33_650,
        (DEFAULT_COLUMN, "missing-only", "-shared"): 10 * 65,
        (DEFAULT_COLUMN, "missing-only", "-one-seed"): 3_122,
        (DEFAULT_COLUMN, "fedeas", ""): 33_650,
        (DEFAULT_COLUMN, "fedeas", "-shared"): 984,
        (DEFAULT_COLUMN, "fedeas", "-one-seed"): 4_152,
        (BETA_SWEEP_COLUMN, "uniform", ""): 13_437,
        (BETA_SWEEP_COLUMN, "uniform", "-one-seed"): 725,
        ("c10-k100-a0.05", "uniform", ""): 36_697,
        ("c10-k100-a0.05", "uniform", "-one-seed"): 415,
        ("c10-k100-a0.3", "uniform", ""): 15_666,
        ("c10-k100-a0.3", "uniform", "-one-seed"): 205,
        ("c100-k100-a0.1", "uniform", ""): 74_005,
        ("c100-k100-a0.1", "uniform", "-one-seed"): 1_922,
    }


def test_shared_images_change_the_key_only_of_runs_with_images() -> None:
    for method, is_another in (("uniform", True), ("fedavg", False)):
        config = cell(f"{DEFAULT_COLUMN}/{method}").config("full", 1)
        assert (experiment_key(config) != experiment_key(config.with_changes(shared_images="by-class"))) == is_another


@pytest.mark.parametrize("clients", [20, 100])
def test_conf_files_equal_their_cells(clients: int) -> None:
    file = read_config(ROOT / "conf" / f"cifar10-k{clients}.toml")
    mine = cell(f"c10-k{clients}-a0.1/fedeas").config("full", 1)
    told = {key: value for key, value in mine.to_user_dict().items() if key not in ("gamma-hat", "generator")}
    assert told == {key: value for key, value in file.to_user_dict().items() if key not in ("gamma-hat", "generator")}


def test_generators_of_one_experiment_are_any_diffusion_models() -> None:
    builtin, folder, bank = (parse_config({"generator": g}) for g in ("builtin", "/my/model", "bank:/my/images.npz"))
    assert experiment_key(builtin)["generator"] == experiment_key(folder)["generator"] == "diffusion"
    assert experiment_key(bank)["generator"] == "bank"


@pytest.mark.parametrize("scale", SCALES)
def test_cells_have_distinct_experiment_keys(scale: str) -> None:
    cells = [one for one in all_cells() if can_run(one, scale)]
    meanings = {one.name: str(sorted(experiment_key(one.config(scale, 1)).items())) for one in cells}
    assert len(set(meanings.values())) == len(cells) > 100


@pytest.mark.parametrize("scale", SCALES)
def test_run_command_of_a_cell_gives_its_config(scale: str) -> None:
    for one in all_cells():
        if can_run(one, scale):
            fedeas, run, conf, *words = run_command_args(one, scale, 2, {"precision": "bf16"})
            assert (fedeas, run) == ("fedeas", "run")
            assert parse_overrides(words)["seed"] == 2
            found, wanted = read_config(ROOT / conf, words), one.config(scale, 2, {"precision": "bf16"})
            places = [absolute_paths(config.to_user_dict(), ROOT) for config in (found, wanted)]
            assert places[0] == places[1], one.name


def test_cells_are_ordered_by_priority() -> None:
    names = [one.name for one in all_cells()]
    assert names[:5] == [
        f"{DEFAULT_COLUMN}/{m}" for m in ("fedavg", "fedeas", "missing-only", "uniform", "full-balance")
    ]
    wanted = [
        f"{DEFAULT_COLUMN}/moon",
        f"{BETA_SWEEP_COLUMN}/fedavg",
        f"{DEFAULT_COLUMN}/uniform-one-seed",
        f"{BETA_SWEEP_COLUMN}/linear",
        "c10-k100-a0.05/fedavg",
        "c10-k20-a0.05/fedavg",
        "c100-k100-a0.1/fedeas",
        "c100-k100-a0.1/uniform-one-seed",
        f"{DEFAULT_COLUMN}/fedgen",
        "c10-k20-a0.3/fedeas+scaffold",
        f"{DEFAULT_COLUMN}/oversample",
        f"{DEFAULT_COLUMN}/fedeas+logit-adjusted",
        f"{DEFAULT_COLUMN}/fedeas-clean",
        f"{DEFAULT_COLUMN}/waterfill",
    ]
    assert [names.index(name) for name in wanted] == sorted(names.index(name) for name in wanted)
    assert cell(f"{DEFAULT_COLUMN}/fedeas").seeds("full") == (1, 2, 3)
    assert cell(f"{DEFAULT_COLUMN}/scaffold").seeds("full") == (1,)


def test_user_settings_do_not_override_those_of_a_method() -> None:
    one = cell(f"{BETA_SWEEP_COLUMN}/uniform-sd-turbo")
    config = one.config("full", 1, {"generator": "/models/ddpm", "policy": "none", "precision": "bf16"})
    assert (config.generator, config.policy, config.precision) == ("sd-turbo", "uniform", "bf16")


def test_fedmix_lambda_is_the_papers_in_every_column() -> None:
    # The supplement, Section D: "following the original CIFAR-10 setup", for all of its columns; FedMix's own is 0.05.
    for place in paper.COLUMNS:
        assert cell(f"{place}/fedmix").config("full", 1, {"fedmix-lambda": 0.1}).fedmix_lambda == 0.05


# ----------------------------------------------------------------------------------------------------- choosing


def test_choose_selects_items_columns_and_cells_by_name() -> None:
    everything = choose(["all"], [], "full")
    assert everything.items == tuple(ITEMS) and everything.columns == paper.COLUMNS
    assert {one.name for one in everything.needed()} == {one.name for one in all_cells()}
    main = choose(["table1", DEFAULT_COLUMN], ["c10-k20-a0.3"], "full")
    assert main.columns == ("c10-k20-a0.3", DEFAULT_COLUMN)
    assert len(main.needed()) == 10 + 9
    assert [one.name for one in choose([f"{DEFAULT_COLUMN}/fed*-clean"], [], "full").cells] == [
        f"{DEFAULT_COLUMN}/fedavg-clean",
        f"{DEFAULT_COLUMN}/fedeas-clean",
        f"{DEFAULT_COLUMN}/fedeas+logit-adjusted-clean",
    ]
    of_100 = choose(["c100-*"], [], "full").cells
    assert of_100 == tuple(one for one in all_cells() if one.column.dataset == "cifar100")
    assert [one.column.name for one in choose(["*/fedavg"], [DEFAULT_COLUMN], "full").cells] == [DEFAULT_COLUMN]
    assert not [one for one in replace(everything, scale="smoke").needed() if "sd-turbo" in one.name]
    assert not [one for one in choose(["*/fedeas*"], [], "smoke").cells if "sd-turbo" in one.name]
    assert (
        "beta" not in choose(["all"], [DEFAULT_COLUMN], "full").items
        and "rule" in choose(["all"], [DEFAULT_COLUMN], "full").items
    )
    by_name = {"claims", "clean", "shared", "drawn", "batches", "last-batches", "imbalanced-rounds", "rule"}
    assert set(ITEMS) - set(choose(["all"], [], "smoke").items) == by_name


def test_unknown_item_column_or_cell_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"column 'c10-k30-a0\.1': must be one of c10-k20-a0\.05"):
        column("c10-k30-a0.1")
    with pytest.raises(ConfigError, match="'table9': must be all, claims, fig1"):
        choose(["table9"], [], "full")
    with pytest.raises(ConfigError, match=r"cell 'c10-k20-a0\.1/nothing': there is none"):
        matching("c10-k20-a0.1/nothing")
    with pytest.raises(ConfigError, match="column 'nowhere'"):
        choose(["table1"], ["nowhere"], "full")
