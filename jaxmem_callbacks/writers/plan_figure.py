"""A plan enters, a picture of its frontier leaves: bytes against extra operations, with the budget as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxmem_callbacks.records.plans import Candidate, PlanRecord
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes
from jaxmem_callbacks.writers.plan_table import candidate_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A budget this many times the largest point would squeeze all points into one corner.
_NEAR = 2


def plan_figure(record: PlanRecord, frontier: Sequence[Candidate]) -> Figure:
    """Extra operations in percent over bytes on one device. Points that the compiler itself recomputes at are hollow.

    Returns:
        A figure of its own, not registered with ``pyplot``.
    """
    from matplotlib.figure import Figure

    shown = [each for each in record.candidates if each.step_bytes is not None]
    unit, name = (GIB, "GiB") if max((each.step_bytes or 0 for each in shown), default=0) > 2 * GIB else (MIB, "MiB")
    plain = min((each.flops for each in shown if each.policy.remat == "none"), default=1)

    def percent(each: Candidate) -> float:
        """Above the plain step on as many rows, so that batches of several sizes can be compared."""
        return 100 * (each.extra_flops / plain if each.extra_share is None else each.extra_share)

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    line = sorted((each.step_bytes or 0, percent(each)) for each in frontier)
    axes.plot([size / unit for size, _ in line], [extra for _, extra in line], color="0.7", zorder=1)
    for index, each in enumerate(record.candidates):
        if each.step_bytes is None:
            continue
        place = each.step_bytes / unit, percent(each)
        colour = "tab:green" if index == record.chosen else "tab:red" if each.fits is False else "tab:blue"
        axes.scatter(*place, color=colour, facecolors="none" if each.compiler_remat else colour, zorder=2)
        axes.annotate(candidate_words(each), place, xytext=(6, 6), textcoords="offset points", fontsize=8)
    most = max((each.step_bytes or 0 for each in shown), default=0)
    if record.budget_bytes is not None and record.budget_bytes < _NEAR * most:
        axes.axvline(record.budget_bytes / unit, color="tab:red", linestyle="--", linewidth=1)
        axes.annotate(
            " budget", (record.budget_bytes / unit, 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=8
        )
    elif record.budget_bytes is not None:
        words = f"budget: {format_bytes(record.budget_bytes)}, far to the right"
        axes.annotate(words, (0.99, 0.98), xycoords="axes fraction", va="top", ha="right", fontsize=8)
    axes.set_xlabel(f"{name} on one device, by the compiler for {record.target}")
    axes.set_ylabel("extra FLOPs, % of the plain step")
    axes.set_title(f"{record.step}: what it may keep, what it must compute again", fontsize=10)
    axes.margins(x=0.12, y=0.15)
    return figure
