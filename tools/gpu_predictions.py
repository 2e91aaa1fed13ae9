"""Predictions of plans against what was measured: rows of differences, one for each policy that answered a `plan_...` question.

Standard library only. A figure that one side does not have gives no difference, and the reason stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GOAL = 0.02  # predicted and measured peak are to be no further apart
TELLING_S = 0.01  # of shorter steps, such as the preflight's, times show nothing of recomputation


def predictions(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a policy that answered: bytes, and how much longer than the plain step it takes, predicted and measured."""
    answers = {
        entry["question"]: entry["answer"]
        for entry in results
        if entry["question"].startswith("plan_") and entry.get("answer")
    }
    plain = answers.get("plan_none")
    return [
        {"question": name, **_bytes_of(answer), **_times_of(answer, plain if _is_alike(answer, plain) else None)}
        for name, answer in answers.items()
    ]


def _is_alike(answer: Mapping[str, Any], plain: Mapping[str, Any] | None) -> bool:
    """Whether an answer is about the step of the plain one: times of another step are not compared with it."""
    return plain is not None and answer.get("shapes") == plain.get("shapes")


def _bytes_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    seen, predicted = answer["seen"], answer["predicted"]
    peak, earlier = seen["peak_bytes"], seen["peak_before_bytes"]
    reason = None
    if peak is None:
        reason = "the allocator reports no peak"
    elif earlier is not None and peak <= earlier:
        reason = "the peak is before the step"
    row: dict[str, Any] = {
        "policy": answer["policy"],
        "nearest_target": answer["nearest_target"],
        "measured_peak_bytes": None if reason else peak,
        "measured_peak_unknown": reason,
    }
    for where in ("attached", "without_the_device"):
        found = predicted.get(where, {"error": "no target is like this device"})
        row[f"{where}_bytes"] = found.get("step_bytes")
        row[f"{where}_unknown"] = found.get("error")
        known = row["measured_peak_bytes"] is not None and found.get("step_bytes")
        row[f"{where}_difference"] = round(found["step_bytes"] / peak - 1, 5) if known else None
    return row


def _times_of(answer: Mapping[str, Any], plain: Mapping[str, Any] | None) -> dict[str, Any]:
    """Seconds of a step, and recomputation as a share of the plain step: measured, and modelled from a data sheet."""
    where, modelled, base = _modelled(answer, plain)
    measured = answer["seen"]["step_s"]
    first = None if plain is None or plain["seen"]["step_s"] < TELLING_S else plain["seen"]["step_s"]
    return {
        "measured_step_s": measured,
        "modelled_step_s": modelled,
        "modelled_for": where,
        "measured_recompute_share": None if first is None else round(measured / first - 1, 4),
        "modelled_recompute_share": None if modelled is None or base is None else round(modelled / base - 1, 4),
    }


def _modelled(
    answer: Mapping[str, Any], plain: Mapping[str, Any] | None
) -> tuple[str | None, float | None, float | None]:
    """Modelled seconds of a step and of the plain one, and of what: the nearest target, or failing that the device."""
    predictions = [{} if each is None else each["predicted"] for each in (answer, plain)]
    places = ("without_the_device", "attached")
    times = {where: [each.get(where, {}).get("modelled_s") for each in predictions] for where in places}
    both = [where for where in places if None not in times[where]]
    where = next(iter(both or [where for where in places if times[where][0] is not None]), None)
    return (None, None, None) if where is None else (where, *times[where])


def of_plan(answer: Mapping[str, Any]) -> str:
    """The answer of one question in a few words, for the table."""
    row = _bytes_of(answer)
    bytes_words = f"predicted {_shown(row, 'attached')}, without the device {_shown(row, 'without_the_device')}"
    return f"{bytes_words}; {_peak(row)}"


def prediction_line(row: Mapping[str, Any]) -> str:
    """One row for the end of the output; a difference beyond the goal is marked."""
    parts = [f"  {row['question']}: {_peak(row)}"]
    for where, words in (
        ("attached", "the plan here"),
        ("without_the_device", f"without it ({row['nearest_target']})"),
    ):
        off = row[f"{where}_difference"]
        mark = "" if off is None or abs(off) <= GOAL else f", beyond the goal of {GOAL:.0%}"
        parts.append(f"{words} {_shown(row, where)}" + ("" if off is None else f" ({off:+.1%}{mark})"))
    shares = [row[f"{kind}_recompute_share"] for kind in ("measured", "modelled")]
    times = " and ".join("unknown" if share is None else f"{share:+.1%}" for share in shares)
    return "; ".join([*parts, f"time against the plain step, measured and modelled: {times}"])


def _shown(row: Mapping[str, Any], where: str) -> str:
    count = row[f"{where}_bytes"]
    reason = str(row[f"{where}_unknown"] or "the compiler gave none").splitlines()[0]
    return f"{count:,} B" if count is not None else f"unknown, because {reason[:110]}"


def _peak(row: Mapping[str, Any]) -> str:
    count = row["measured_peak_bytes"]
    return f"peak {count:,} B" if count is not None else f"peak unknown, because {row['measured_peak_unknown']}"
