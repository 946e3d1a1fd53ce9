"""Client × class heat maps of real and generated images, recomputed from a run's partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config_keys import PARTITION_KEYS
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.generators.opening import hash_own_inputs
from fedeas_flwr.planning.run_plan import count_distinct_images, planned_allocation, planned_counts
from fedeas_flwr.report.groups import Group
from fedeas_flwr.report.run_figures import draw_heat_map


@dataclass(frozen=True)
class HeatMaps:
    """One partition, and the images that each group generates on it."""

    classes: Sequence[str]
    counts: IntArray
    generated: list[tuple[str, IntArray]]

    @property
    def caption(self) -> str:
        """Return the caption of the figure."""
        return (
            f"{counted(len(self.counts), 'client')} by {self.counts.shape[1]} classes: the real samples, and the "
            "images that each group's clients generate; all red maps share one colour scale."
        )


def maps_of(groups: Sequence[Group]) -> tuple[list[HeatMaps], list[str]]:
    """Return the heat maps of groups that generate, one set per partition, and notes on groups without one."""
    found: dict[tuple[object, ...], HeatMaps] = {}
    notes = []
    for group in groups:
        config = group.config
        if any("bought" in record for member in group.members for record in member.rounds):
            continue  # no plan: clients chose the classes during the run (purchases.py)
        try:
            hashes = hash_own_inputs(config, ("policy", "partition"))
            for member in group.members:
                member.run.check_own_inputs(hashes)
            counts = planned_counts(config)
            generated = planned_allocation(config, counts) if config.generates else None
        except (OSError, ValueError, RunError) as error:
            notes.append(f"No heat map of {group.name}: {error}.")
            continue
        values = config.to_user_dict()
        of_partition = tuple(values[key] for key in PARTITION_KEYS)
        maps = found.setdefault(of_partition, HeatMaps(dataset_info(config.dataset).classes, counts, []))
        if generated is None:
            continue
        if _matches_run(group, generated):
            maps.generated.append((group.name, generated))
            notes += _map_caveats(group, counts, int(generated.sum()))
        else:
            images = counted(int(generated.sum()), "image")
            notes.append(
                f"No heat map of {group.name}: its partition would give {images}, but the run has "
                f"{group.images_shown}; clients with custom data do not disclose what they generate."
            )
    return list(found.values()), notes


def _map_caveats(group: Group, counts: IntArray, planned: int) -> list[str]:
    """Return notes on why fewer images were generated than the map shows: absent or limited clients, shared images."""
    notes = []
    made = [member.summary["total_generated"] for member in group.members]
    if set(made) != {planned}:
        runs = f"the {'run has' if len(made) == 1 else 'runs have'} {', '.join(f'{images:,}' for images in made)}"
        limited = any(member.not_made for member in group.members)
        absent = any(member.summary["total_generated"] + member.not_made != planned for member in group.members)
        reasons = ["clients that never took part generate none"] if absent else []
        reasons += ["nodes' limits exclude the rest"] if limited else []
        why = " and ".join(reasons)
        notes.append(f"{group.name}: the map is the plan, {counted(planned, 'image')}; {runs}, because {why}.")
    if group.config.shared_images != "no":
        different = count_distinct_images(group.config, counts)
        notes.append(f"{group.name}: {different:,} of the plan's {counted(planned, 'image')} are distinct.")
    return notes


def _matches_run(group: Group, generated: IntArray) -> bool:
    """Return whether the plan matches the run: clients that trained generated the planned images within limits."""
    by_client = generated.sum(axis=1)
    for member in group.members:
        trained = {client for record in member.rounds for client in record["clients"]}
        if not trained <= set(range(len(by_client))):
            return False
        planned = sum(int(by_client[client]) for client in trained)
        if planned != member.summary["total_generated"] + member.not_made:
            return False
    return True


def draw(maps: HeatMaps) -> Figure:
    """Draw the real samples first, then the groups' images; groups with the same plan share one map."""
    plans: dict[bytes, tuple[list[str], IntArray]] = {}
    for name, values in maps.generated:
        plans.setdefault(values.tobytes(), ([], values))[0].append(name)
    panels = 1 + len(plans)
    columns = min(panels, 2)
    rows = math.ceil(panels / columns)
    height = min(6.0, max(2.8, 0.32 * len(maps.counts)))
    figure = Figure(figsize=(4.6 * columns, height * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    draw_heat_map(axes[0], maps.counts, maps.classes, f"real samples ({maps.counts.sum():,})", "Greys")
    top = max((int(values.max()) for _, values in maps.generated), default=1)
    for place, (names, values) in zip(axes[1:], plans.values(), strict=False):
        draw_heat_map(place, values, maps.classes, f"{'; '.join(names)} ({values.sum():,})", "Reds", top)
    for place in axes[panels:]:
        place.set_visible(False)
    return figure
