"""MaxText's own remat policies and one plan of the same decoder. Writes results/remat_policies.json.

    python -m benchmarks.gallery.remat_policies [POLICY ...]

Each value of MaxText's `remat_policy` is compiled for an H100, with its pre-training's own main and an unedited step. The plan is
made of the default one, `full`, whose checkpoints policies may replace. It is not given a budget: the frontier that it compiles
is held against all of them. The policies that keep residuals in the host's memory are held against a plan that may do so too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from benchmarks.gallery.__main__ import Trial, printed_json
from benchmarks.gallery.environment import folder_of, made, versions
from benchmarks.gallery.programs import PROGRAMS
from benchmarks.gallery.small_maxtext import SMALL
from benchmarks.sources import RESULTS, check_hash

RESULT, NAME, TARGET = RESULTS / "remat_policies.json", "maxtext_pretrain", "h100_sxm"
MODULE, CONFIG = "maxtext.trainers.pre_train.train", "configs/base.yml"
# As in the comment above `remat_policy` in configs/base.yml, but for `custom`, which chooses tensors one by one. With `none`
# MaxText 0.2.5 wraps its layers all the same, and compiles the program of `full`.
POLICIES = (
    *("minimal_with_context", "minimal", "save_dot_with_context_except_mlp", "save_dot_except_mlpwi"),
    *("save_dot_except_mlp", "save_qkv_proj", "save_out_proj", "full", "qkv_proj_offloaded", "minimal_offloaded"),
)
# So many tokens that saved activations are most of what a step needs.
SETTINGS = SMALL | {"steps": 1, "per_device_batch_size": 16, "max_target_length": 512, "run_name": "policies"}
OFFLOADED = "_offloaded"
SAME = 1.02  # of bytes or FLOPs, as in results/plan_bench


def planned(trial: Trial, policy: str, *options: str) -> list[dict[str, Any]]:
    """The candidates of a plan of the decoder under one of MaxText's policies.

    Raises:
        FailedError: it failed.
    """
    (package,) = (folder_of(trial.program.line) / "lib").glob("python*/site-packages/maxtext")
    settings = SETTINGS | {"base_output_directory": tempfile.mkdtemp(), "remat_policy": policy}
    given = [f"{name}={value}" for name, value in settings.items()]
    typed = ("jaxmem", "plan", "-m", MODULE, "--target", TARGET, "--json", "--quiet", *options)
    trial.run(trial.plain, *typed, "--args", str(package / CONFIG), *given)
    found = printed_json((trial.plain / "stdout.txt").read_text())["candidates"]
    return [{key: each[key] for key in ("step_bytes", "flops", "policy")} for each in found if each["step_bytes"]]


def held_against(policies: dict[str, Any], plans: dict[bool, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """For each policy the ratios (bytes, FLOPs) of the candidate whose larger one is least; plans by whether they may offload."""
    return {
        name: min(
            ([each[key] / one[key] for key in ("step_bytes", "flops")] for each in plans[name.endswith(OFFLOADED)]),
            key=max,
        )
        for name, one in policies.items()
    }


def table(result: dict[str, Any]) -> list[str]:
    """The lines of the page's table in Markdown."""
    lines = ["| `remat_policy` | needs | FLOPs | plan: bytes | plan: FLOPs |", "| --- | --- | --- | --- | --- |"]
    least = min(each["flops"] for each in result["policies"].values())
    for name, each in result["policies"].items():
        ours = " | ".join(f"{ratio:.3f}" for ratio in result["nearest"][name])
        lines.append(f"| `{name}` | {each['step_bytes'] / 2**20:,.1f} MiB | {each['flops'] / least:.3f} | {ours} |")
    return lines


def main(names: list[str]) -> int:
    """Compile the policies, make the plan, write both; 1 where a policy is better than the whole frontier."""
    program = PROGRAMS[NAME]
    made(program.line)
    trial = Trial(NAME, program, "policies")
    policies = {name: planned(trial, name, "--search", "remat=no")[0] for name in names or POLICIES}
    by_hand_s, trial.row = trial.row["processor_s"], {}
    candidates, plan_s = planned(trial, "full", "--search", "own_checkpoints"), trial.row["processor_s"]
    offloading = planned(trial, "full", "--search", "own_checkpoints", "--search", "offload")
    ratios = held_against(policies, {False: candidates, True: offloading})
    result = {
        "command": "make bench-policies",
        "sources": check_hash("remat_policies"),
        "versions": versions(program.line),
        "target": TARGET,
        "policies": {name: {key: each[key] for key in ("step_bytes", "flops")} for name, each in policies.items()},
        "policies_processor_s": by_hand_s,
        "candidates": candidates,
        "candidates_processor_s": plan_s,
        "candidates_with_offload": offloading,
        "candidates_with_offload_processor_s": round(trial.row["processor_s"] - plan_s, 1),
        "nearest": ratios,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for name, (in_bytes, in_flops) in ratios.items():
        print(f"{name}: {policies[name]['step_bytes'] / 2**20:.1f} MiB; ours {in_bytes:.3f}, FLOPs {in_flops:.3f}")
    return int(any(max(each) > SAME for each in ratios.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
