"""The frontier of `jm.plan` against remat written by hand: model x target x {none, each policy by hand, ours}.

    python -m benchmarks.plan_bench [--models vit ...] [--targets h100_sxm v5e] [--policies none full ...]

Each row is one whole AdamW step: its bytes by the target's own compiler, its operations by count, what the compiler
recomputes by itself, and the seconds it took. "ours" is what a plan compiles unasked; "ours as dots" is our step that keeps as
much as it may without more operations than the policy `dots` by hand has. Of both, the least bytes at equal FLOPs are printed.
"ours in dots" is what a plan chooses whose budget is the bytes of `dots` by hand.
results/plan_bench_jax_<version>.json is written row by row; a run goes on where the last one stopped, and measures again only
what was made with other versions or another source. A row for which nothing had to be compiled again, since all its programs are
those of the row before, keeps the seconds that they took.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jaxlib

import jaxmem_callbacks as jm
from benchmarks.plan_models import FAMILIES, PlanCase
from benchmarks.sources import RESULTS, is_cut_otherwise, planned_segments, row_hashes
from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import budget_for
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.programs.targets.compilers import compiler_versions
from jaxmem_callbacks.programs.targets.target import resolve_target
from jaxmem_callbacks.records.errors import CompileError, LossRefusedError, PlanError, PolicyError, TargetError
from jaxmem_callbacks.records.plans import Candidate
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.transforms.costs import jaxpr_flops

TARGETS = ("h100_sxm", "v5e", "cpu")  # one device each: for several, a plan also divides the state
NONE, OURS = "none", "ours"
MATCHED, BUDGETED = f"{OURS} as ", f"{OURS} in "
AT_ONCE = 2
EQUAL = 1.001  # operations are called equal up to here
_COMPILED = "compiled"  # whether anything was, for `kept_seconds` alone
_MADE_WITH = ("model", "target", "policy", "versions", "source", "library")
_SECONDS = ("seconds", "compile_seconds")

Row = dict[str, Any]


class Table:
    """The result file: its rows, one for each model, target and policy, written as they come."""

    def __init__(self, path: pathlib.Path) -> None:
        """Read the rows already there."""
        self.path = path
        self._lock = threading.Lock()
        self.rows: list[Row] = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []

    def has(self, key: Row) -> bool:
        """Whether a row was measured for exactly this model, target, policy, versions and source."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def at(self, model: str, target: str) -> dict[str, Row]:
        """The rows of a model and target by their policies, whatever they were measured with."""
        place = {"model": model, "target": target}
        return {row["policy"]: row for row in self.rows if place.items() <= row.items()}

    def of(self, model: str, target: str, policy: str) -> Row:
        """The row of a model, target and policy; empty where there is none."""
        return self.at(model, target).get(policy, {})

    def add(self, row: Row) -> None:
        """Put a row in the place of an older one and write the file, whole or not at all."""
        place = ("model", "target", "policy")
        with self._lock:
            others = [old for old in self.rows if any(old[name] != row[name] for name in place)]
            self.rows = sorted([*others, row], key=_order)
            result = {"command": "python -m benchmarks.plan_bench", "rows": self.rows}
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            draft.replace(self.path)


def _order(row: Row) -> tuple[Any, ...]:
    models = list(FAMILIES)
    place = models.index(row["model"]) if row["model"] in models else len(models)
    return place, row["target"], row["policy"].startswith(OURS), row["policy"] != NONE, row["policy"]


def row_key(model: str, target: str, policy: str) -> Row:
    """What a row stands for, and what it was made with."""
    platform = resolve_target(target).platform
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    if platform != "cpu":
        versions |= compiler_versions(platform)
    key: Row = {
        "model": model,
        "target": target,
        "policy": policy,
        "versions": versions,
    }
    return key | row_hashes(model, policy)


def stale(row: Row) -> bool:
    """Whether a row was made with other versions or another source than are here."""
    key = row_key(row["model"], row["target"], row["policy"])
    return any(row[name] != value for name, value in key.items())


def step_row(case: PlanCase, policy: str, target: str, timeout_s: float) -> Row:
    """One step, plain or with remat by hand, compiled for the target."""
    step, arguments = case.plain if policy == NONE else case.hand[policy], case.arguments
    flops = jaxpr_flops(jax.make_jaxpr(step)(*arguments))
    compiled = compile_for_target(
        step, arguments, target=target, donate_argnames=case.donate_argnames, keep_hlo=False, timeout_s=timeout_s
    )
    row: Row = {
        "step_bytes": compiled.needed_bytes,
        "fits": compiled.fits,
        "flops": flops,
        _COMPILED: not compiled.cached,
    }
    if compiled.memory is None:
        return row | {"refusal": (compiled.refusal or "").partition("\n")[0]}
    return row | {
        "argument_bytes": compiled.memory.argument_bytes,
        "temp_bytes": compiled.memory.temp_bytes,
        "compiler_remat": compiled.memory.compiler_remat,
        "compile_seconds": round(compiled.compile_seconds or 0, 1),
    }


def plan_row(case: PlanCase, target: str) -> Row:
    """The frontier of `jm.plan` for the plain step: every candidate that it compiled."""
    plan = jm.plan(case.plain, *case.arguments, target=target, progress=False)
    candidates = [_candidate_row(candidate) for candidate in plan.candidates]
    return {"compiles": plan.compiles, "candidates": candidates, _COMPILED: plan.record.compiled}


def budgeted_row(case: PlanCase, target: str, budget: int | None) -> Row:
    """What `jm.plan` chooses for the plain step in so many bytes; None where the policy by hand was refused."""
    if budget is None:
        return {"error": "The policy by hand has no bytes to plan in."}
    plan = jm.plan(case.plain, *case.arguments, target=target, budget=f"{budget}B", progress=False)
    row = {"budget": budget, "compiles": plan.compiles, "fits": plan.chosen.fits, _COMPILED: plan.record.compiled}
    return row | _candidate_row(plan.chosen)


def _candidate_row(candidate: Candidate) -> Row:
    return {
        "remat": candidate.policy.remat,
        "segments": candidate.policy.segments,
        "keep": candidate.policy.keep,
        "step_bytes": candidate.step_bytes,
        "temp_bytes": candidate.temp_bytes,
        "flops": candidate.flops,
        "extra_flops": candidate.extra_flops,
        "compiler_remat": candidate.compiler_remat,
        "compile_seconds": candidate.seconds,
    }


def matched_row(
    case: PlanCase, hand: str, target: str, timeout_s: float, segments: int | Literal["blocks"] | None = None
) -> Row:
    """Our cut at no more operations than a policy by hand has: what is left of them goes into what is kept.

    Args:
        case: The model.
        hand: The policy by hand.
        target: What it is compiled for.
        timeout_s: Most seconds of the compile.
        segments: Those into which the plan cuts this step; None for those that the library chooses first.
    """
    hardware = resolve_target(target)
    problem = Problem(
        train_step=case.plain, args=case.arguments, kwargs={}, target=hardware, budget=budget_for(None, hardware)
    )
    compiler = Compiler(problem)
    full = StepPolicy(remat="full", segments=segments)
    flops = jaxpr_flops(jax.make_jaxpr(case.hand[hand])(*case.arguments))
    (shares,) = (shares for shares in compiler.facts(full, survey=True).shares if len(shares) > 1)
    # A survey foretells operations within 1 %; the trace of what is compiled has the word.
    totals = [compiler.plain.flops + each.flops for each in shares]
    near = (each for each, total in zip(shares, totals, strict=True) if total <= 1.01 * flops)
    traced: dict[StepPolicy, int] = {}
    for each in near:
        policy = dataclasses.replace(full, keep=each.share)
        traced[policy] = compiler.facts(policy).flops
        if traced[policy] <= flops:
            break
    else:
        least = min(traced.values(), default=min(totals))
        return {
            "error": f"No cut has as few operations as {hand} ({flops}): the one that computes least again has {least}."
        }
    step = jm.apply_policy(case.plain, policy)
    row = step_row(dataclasses.replace(case, plain=step), NONE, target, timeout_s)
    return row | {"segments": segments, "keep": policy.keep}


def measured(case: PlanCase, policy: str, target: str, timeout_s: float, here: Mapping[str, Row]) -> Row:
    """One row's figures, or the error in its place; ``here`` are the rows of the same model and target, as far as there are."""
    begun = time.perf_counter()
    try:
        if policy.startswith(BUDGETED):
            row = budgeted_row(case, target, here.get(policy.removeprefix(BUDGETED), {}).get("step_bytes"))
        elif policy.startswith(MATCHED):
            segments = planned_segments(here.get(OURS, {}))
            row = {"segments": segments} | matched_row(case, policy.removeprefix(MATCHED), target, timeout_s, segments)
        else:
            row = plan_row(case, target) if policy == OURS else step_row(case, policy, target, timeout_s)
    except (CompileError, LossRefusedError, PlanError, PolicyError) as error:
        row = {"error": str(error)[:500]}
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def kept_seconds(row: Row, before: Row) -> Row:
    """A row as it is written: with its own seconds, or those of the row before where it has the same figures uncompiled."""
    has_compiled = row.pop(_COMPILED, True)
    return row if has_compiled or _figures(row) != _figures(before) else row | before


def _figures(row: Row) -> Row:
    """All that does not depend on how busy the machine was, nor on what a row was made with."""
    candidates = [{k: v for k, v in each.items() if k not in _SECONDS} for each in row.get("candidates", [])]
    return {k: v for k, v in row.items() if k not in {*_SECONDS, *_MADE_WITH}} | {"candidates": candidates}


def closest(candidates: Sequence[Row], hand: Row) -> tuple[float, float]:
    """Bytes and FLOPs over those of a policy by hand, at the candidate whose larger ratio is least."""
    ratios = [
        (candidate["step_bytes"] / hand["step_bytes"], candidate["flops"] / hand["flops"])
        for candidate in candidates
        if candidate["step_bytes"] is not None
    ]
    return min(ratios, key=max)


def printed_rows(rows: Sequence[Row]) -> list[str]:
    """The table as text: a line for each row, ours beside each policy by hand."""
    lines: list[str] = []
    for (model, target), several in itertools.groupby(rows, key=lambda row: (row["model"], row["target"])):
        here = {row["policy"]: row for row in several}
        candidates = here.get(OURS, {}).get("candidates", [])
        for policy, row in here.items():
            if policy.startswith(OURS):
                continue
            if "error" in row or row["step_bytes"] is None:
                lines.append(f"{model:20s} {target:10s} {policy:14s} {row.get('error', 'refused')}"[:120])
                continue
            against = ""
            if policy != NONE and candidates:
                against = "  ours x{:.3f} x{:.3f}".format(*closest(candidates, row))
            if (equal := at_equal_flops(here, policy)) is not None:
                against += f"  at equal FLOPs x{equal:.3f}"
            lines.append(
                f"{model:20s} {target:10s} {policy:14s} {row['step_bytes'] / 2**20:8.0f} MiB {row['flops'] / 1e9:8.0f} GFLOP"
                f" {row.get('compiler_remat') or 0:4d} recomputed {row['seconds']:6.1f} s{against}"
            )
    return lines


def at_equal_flops(here: Mapping[str, Row], hand: str, *, unasked: bool = False) -> float | None:
    """Our least bytes over those of a policy by hand, with no more operations than it has, to a part in a thousand.

    Of the frontier and of what was matched to this policy; None before it was. ``unasked`` takes the frontier alone.
    """
    theirs = here[hand].get("step_bytes")
    if MATCHED + hand not in here or theirs is None:
        return None
    ours = [*here.get(OURS, {}).get("candidates", []), *([] if unasked else [here[MATCHED + hand]])]
    fitting = [
        row["step_bytes"] for row in ours if row.get("step_bytes") and row["flops"] <= EQUAL * here[hand]["flops"]
    ]
    return min(fitting) / theirs if fitting else None


def in_its_bytes(here: Mapping[str, Row], hand: str) -> float | None:
    """FLOPs of what a plan chose in the bytes of a policy by hand, over those of the hand.

    Infinite where nothing fits, and None before it was asked for.
    """
    row = here.get(BUDGETED + hand, {"error": ""})
    if "error" in row:
        return None
    return row["flops"] / here[hand]["flops"] if row["fits"] else math.inf


def summed_up(rows: Sequence[Row]) -> Iterator[str]:
    """Over all policies by hand on each target: how near the frontier comes, and how far below at equal FLOPs."""
    for target in dict.fromkeys(row["target"] for row in rows):
        near: list[float] = []
        equal: list[float] = []
        alone: list[float] = []
        asked: list[float] = []
        for model in dict.fromkeys(row["model"] for row in rows):
            here = {row["policy"]: row for row in rows if (row["model"], row["target"]) == (model, target)}
            hands = [policy for policy in here if policy != NONE and not policy.startswith(OURS)]
            compared = [policy for policy in hands if here[policy].get("step_bytes") is not None]
            candidates = here.get(OURS, {}).get("candidates", [])
            near += [max(closest(candidates, here[policy])) for policy in compared if candidates]
            equal += [ratio for policy in compared if (ratio := at_equal_flops(here, policy)) is not None]
            alone += [ratio for policy in compared if (ratio := at_equal_flops(here, policy, unasked=True)) is not None]
            asked += [ratio for policy in compared if (ratio := in_its_bytes(here, policy)) is not None]
        if near:
            yield f"{target}: {len(near)} policies by hand; the frontier's nearest point is within {max(near):.3f} of each"
        if equal:
            below = sum(ratio < 1 for ratio in equal)
            mean = statistics.geometric_mean(equal)
            yield f"{target}: at equal FLOPs {mean:.3f} of their bytes (geometric mean of {len(equal)}), {below} below 1"
            if alone:
                yield f"{target}: the frontier alone {statistics.geometric_mean(alone):.3f} (of {len(alone)})"
        if asked:
            fitting = [ratio for ratio in asked if math.isfinite(ratio)]
            fit = f"{len(fitting)} of {len(asked)} plans fit"
            yield f"{target}: in their bytes {fit}, with at most {max(fitting, default=0):.3f} of their FLOPs"


def wanted(options: argparse.Namespace, table: Table, *, compared: bool) -> list[tuple[str, str, str]]:
    """Model, target and policy of the rows still to be measured.

    Args:
        options: What was asked for. A target without its compiler is left out.
        table: What was measured.
        compared: Those that rest on the rows of a policy by hand and of the plan; else these.
    """
    jobs: list[tuple[str, str, str]] = []
    for target in options.targets:
        for model in options.models:
            hand = FAMILIES[model]().hand
            rows = (
                [kind + policy for kind in (MATCHED, BUDGETED) for policy in hand] if compared else [NONE, *hand, OURS]
            )
            chosen = [policy for policy in rows if not options.policies or policy in options.policies]
            jobs += [(model, target, policy) for policy in chosen if not is_measured(table, model, target, policy)]
    return jobs


def is_measured(table: Table, model: str, target: str, policy: str) -> bool:
    """Whether a row is there as it would be made now: with as many segments as the plan, in as many bytes as by hand."""
    row, hand = table.of(model, target, policy), table.of(model, target, policy.removeprefix(BUDGETED))
    in_budget = row.get("budget", hand.get("step_bytes")) == hand.get("step_bytes")
    return table.has(row_key(model, target, policy)) and in_budget and not is_cut_otherwise(row, table.rows)


def installed(targets: Sequence[str]) -> list[str]:
    """The targets without those whose compiler is not there, which is printed."""
    found: list[str] = []
    for target in targets:
        try:
            resolve_target(target)
            found.append(target)
        except TargetError as error:
            print(f"{target} is left out: {error}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not yet in the file, two at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--policies", nargs="+", help="none, ours, or names of policies by hand; default: all")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no compile after this time")
    parser.add_argument("--timeout-seconds", type=float, default=1800, help="of one compile")
    options = parser.parse_args(arguments)
    options.targets = installed(options.targets)
    table = Table(RESULTS / f"plan_bench_jax_{jax.__version__}.json")
    end = time.monotonic() + options.limit_seconds

    def work(job: tuple[str, str, str]) -> bool:
        model, target, policy = job
        if time.monotonic() > end:
            return False
        here = table.at(model, target)
        row = measured(FAMILIES[model](), policy, target, options.timeout_seconds, here)
        row = kept_seconds(row, here.get(policy, {})) | row_key(*job)
        table.add(row)
        print(f"{model} {target} {policy}: {row['seconds']} s", flush=True)
        return True

    done: list[bool] = []
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for compared in (False, True):
            done += pool.map(work, wanted(options, table, compared=compared))
    here = [row for row in table.rows if row["target"] in options.targets]
    fresh = [row for row in here if not stale(row) and not is_cut_otherwise(row, here)]
    print(*printed_rows(fresh), *summed_up(fresh), sep="\n")
    print(f"{sum(done)} of {len(done)} rows measured; {table.path.name}")


if __name__ == "__main__":
    main()
