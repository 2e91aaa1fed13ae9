"""MaxText's own memory estimator and a plan, asked the same of one decoder. Writes results/estimator.json.

    python -m benchmarks.gallery.estimator

With which remat policy does this batch fit a TPU v5e? The estimator compiles one of MaxText's policies after the other until one
is not refused. The plan has what the chip lends to programs as its budget. What the estimator's policy needs and computes is
asked of the same compiler, as a plan of that policy alone.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gallery.__main__ import FailedError, Trial, printed_json
from benchmarks.gallery.environment import folder_of, made, versions
from benchmarks.gallery.programs import PROGRAMS, Program
from benchmarks.gallery.remat_policies import CONFIG, MODULE, NAME
from benchmarks.gallery.small_maxtext import SMALL
from benchmarks.sources import RESULTS, ROOT, check_hash

RESULT, TARGET, TOPOLOGY = RESULTS / "estimator.json", "v5e", "v5e-1"
BUDGET = "15.75GiB"  # of the chip's 16, by libtpu's refusals
# So many tokens that a policy which keeps everything does not fit.
SETTINGS = SMALL | {"steps": 1, "per_device_batch_size": 1024, "max_target_length": 512, "run_name": "estimator"}
OF_A_RUN = ("hardware", "skip_jax_distributed_system")  # settings for the CPU, on which the estimator runs nothing


def given(trial: Trial, settings: dict[str, Any]) -> list[str]:
    """What MaxText's programs are called with."""
    (package,) = (folder_of(trial.program.line) / "lib").glob("python*/site-packages/maxtext")
    every = settings | {"base_output_directory": tempfile.mkdtemp()}
    return [str(package / CONFIG), *(f"{name}={value}" for name, value in every.items())]


def estimated(trial: Trial) -> dict[str, Any]:
    """The estimator's policy by tensor, and how many it compiled.

    Raises:
        FailedError: it failed, or found none.
    """
    settings = {name: value for name, value in SETTINGS.items() if name not in OF_A_RUN}
    topology = {"compile_topology": TOPOLOGY, "compile_topology_num_slices": 1}
    folder = trial.variables()["JAXMEM_TARGET_PATH"]  # libtpu is in it, and needs no TPU to compile
    typed = ("python", "-u", "-m", "maxtext.utils.estimator", *given(trial, settings | topology))
    trial.run(trial.plain, *typed, PYTHONPATH=f"{folder}:{ROOT}", TPU_SKIP_MDS_QUERY="1")
    printed = (trial.plain / "stdout.txt").read_text()
    found = re.search(r"^  - Found valid combo: .*policy=(\{.*\})$", printed, re.MULTILINE)
    if found is None:
        msg = "the estimator found no policy"
        raise FailedError(msg)
    return {"compiles": len(re.findall(r"^Is OOM: ", printed, re.MULTILINE)), "policy": ast.literal_eval(found[1])}


def planned(trial: Trial, settings: dict[str, Any], *options: str) -> dict[str, Any]:
    """The chosen candidate of a plan of the decoder, and how many were compiled.

    Raises:
        FailedError: it failed.
    """
    typed = ("jaxmem", "plan", "-m", MODULE, "--target", TARGET, "--budget", BUDGET, "--json", "--quiet", *options)
    trial.run(trial.plain, *typed, "--args", *given(trial, SETTINGS | settings))
    plan = printed_json((trial.plain / "stdout.txt").read_text())
    chosen = plan["candidates"][plan["chosen"]]
    known = {key: chosen[key] for key in ("step_bytes", "flops", "fits", "compiler_remat", "policy")}
    return {"compiles": plan["compiles"], "budget_bytes": plan["budget_bytes"], **known}


def by_the_estimator(program: Program) -> dict[str, Any]:
    """The estimator's policy, what it needs and computes, and how many policies were compiled to find it."""
    found = estimated(Trial(NAME, program, "estimator"))
    custom = {"remat_policy": "custom", "decoder_layer_input": "device", **found["policy"]}
    return planned(Trial(NAME, program, "estimated"), custom, "--search", "remat=no") | found


def by_a_plan(program: Program) -> dict[str, Any]:
    """The plan's policy, in the place of MaxText's own checkpoints."""
    return planned(Trial(NAME, program, "planned"), {"remat_policy": "full"}, "--search", "own_checkpoints")


def main() -> int:
    """Ask both at once, write the answers; 1 where the estimator's computes less."""
    program = PROGRAMS[NAME]
    made(program.line)
    with ThreadPoolExecutor() as pool:
        estimator, plan = (pool.submit(ask, program) for ask in (by_the_estimator, by_a_plan))
        answers = {"estimator": estimator.result(), "plan": plan.result()}
    about = {"command": "make bench-estimator", "sources": check_hash("estimator"), "versions": versions(program.line)}
    RESULT.write_text(json.dumps(about | {"target": TARGET} | answers, indent=1) + "\n")
    print(json.dumps(answers, indent=1))
    return int(answers["plan"]["flops"] > answers["estimator"]["flops"])


if __name__ == "__main__":
    sys.exit(main())
