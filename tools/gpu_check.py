"""`make gpu-check`: what only an NVIDIA GPU can answer, with this machine's own Python and JAX, in under eight minutes.

Writes results/gpu_check.json and prints a table at the end. Standard library only: every question is asked in a process of its
own (gpu_questions.py) with a time limit, so one that crashes or hangs is an answer too. Without a GPU it prints that and exits
0. `--preflight` asks the same questions, smaller, on the CPU, in under a minute.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_predictions import of_plan, prediction_line, predictions

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = Path(__file__).resolve().parent / "gpu_questions.py"
LIMIT_S, QUESTION_LIMIT_S = 450, 100
# Wheels beside JAX that the questions about the library's own parts need: module -> what to install.
WHEELS = {"numpy": "numpy", "psutil": "psutil", "pydantic": "pydantic", "rich": "rich"}
WHEELS |= {
    "tensorboardX": "tensorboardX",
    "yaml": "PyYAML",
    "google.protobuf": "protobuf",
    "flatbuffers": "flatbuffers",
}
ALLOCATORS = {
    "default": {},
    "bfc": {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"},
    "bfc, no preallocation": {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "cuda_async": {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
    "cuda_async, no preallocation": {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    },
    "platform": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    "vmm": {"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"},
}
PLANS = ("plan_none", "plan_full", "plan_keep")
LEVERS = ("plan_chunks", "plan_option", "plan_state")  # a head in chunks, a compiler option, the state on the host
PRESETS = ("gpu_growth", "gpu_preallocate", "gpu_shared", "gpu_async", "gpu_platform_debug")
CASES = ("losses_in_a_list", "train_and_evaluate")
SMALL_POOLS = {
    "small pool": {"XLA_CLIENT_MEM_FRACTION": "0.1"},
    "small pool that grows": {"XLA_CLIENT_MEM_FRACTION": "0.1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
}


def plan(*, preflight: bool) -> list[tuple[str, str]]:
    """Question and allocator, the most wanted answers first. The CPU ignores allocators and knows no peak: fewer are asked."""
    kinds = ["default"] if preflight else list(ALLOCATORS)
    ooms = ["default"] if preflight else ["default", "bfc, no preallocation", "cuda_async", "platform", "vmm"]
    return [
        ("out_of_memory", ooms[0]),
        *(("statistics", kind) for kind in kinds),
        ("prediction_plain", "default"),
        *((name, "default") for name in (PLANS[::2] if preflight else PLANS)),
        *((name, "default") for name in LEVERS),
        ("hook", "default"),
        ("recorded_runs", "default"),
        ("fragmentation", "small pool"),
        *((name, pool) for pool in (list(SMALL_POOLS)[: 1 if preflight else 2]) for name in CASES),
        ("moved_together", "small pool"),
        *(("out_of_memory", kind) for kind in ooms[1:]),
        ("defragment", "default"),
        *((name, "default") for name in (PRESETS[:1] if preflight else PRESETS)),
    ]


def environment(allocator: str, *, preflight: bool) -> dict[str, str]:
    """The child's variables: the user's, less every allocator setting, plus those of the kind that is asked about."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("XLA_PYTHON_CLIENT_", "XLA_CLIENT_MEM_"))
    }
    kept |= (ALLOCATORS | SMALL_POOLS)[allocator]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    if preflight:
        kept["JAX_PLATFORMS"] = "cpu"
    return kept


def ask(question: str, allocator: str, limit_s: float, *, preflight: bool) -> dict[str, Any]:
    """One question in a process of its own.

    Returns:
        ``state`` (answered, crashed or timed out), ``seconds``, ``exit_code`` (minus a signal's number), ``answer``, and for
        everything but an answer the end of what it printed.
    """
    command = [sys.executable, str(QUESTIONS), question, *(["--small"] if preflight else [])]
    variables = environment(allocator, preflight=preflight)
    asked = {name: variables[name] for name in variables if name.startswith(("XLA_PYTHON_CLIENT_", "XLA_CLIENT_MEM_"))}
    result: dict[str, Any] = {"question": question, "allocator": allocator, "environment": asked}
    start = time.monotonic()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, cwd=ROOT
    )
    try:
        out, err = child.communicate(timeout=limit_s)
        state = "answered" if child.returncode == 0 else "crashed"
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        state = "timed out"
    answers = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    result |= {"state": state, "exit_code": child.returncode, "seconds": round(time.monotonic() - start, 1)}
    result["answer"] = json.loads(answers[-1].removeprefix("ANSWER ")) if answers else None
    if state != "answered" or question in ("out_of_memory", "fragmentation"):
        result["stderr_end"] = err[-6000:]
    return result


def nvidia_smi() -> str | None:
    """Name, driver and memory of the GPUs, one a line; None where the driver's tool finds none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be seen at all, JAX or no JAX."""
    return nvidia_smi() is not None or Path("/dev/nvidia0").exists()


def missing_wheels() -> list[str]:
    """What the questions about the library's own parts need and this Python lacks."""

    def absent(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ModuleNotFoundError:
            return True

    return sorted(wheel for module, wheel in WHEELS.items() if absent(module))


def ask_all(*, preflight: bool) -> list[dict[str, Any]]:
    """Every question in turn, until the time is up."""
    begin, results = time.monotonic(), []
    lacking = missing_wheels()
    for question, allocator in plan(preflight=preflight):
        left = LIMIT_S - (time.monotonic() - begin)
        reason = ""
        if question in ("hook", "recorded_runs", *CASES, *PLANS, *LEVERS, *PRESETS) and lacking:
            reason = f"this Python lacks {', '.join(lacking)}; bring these wheels"
        elif left < 10:  # noqa: PLR2004 - seconds that starting JAX takes
            reason = f"the {LIMIT_S} seconds are used up"
        if reason:
            results.append({"question": question, "allocator": allocator, "state": "not asked", "reason": reason})
        else:
            results.append(ask(question, allocator, min(left, QUESTION_LIMIT_S), preflight=preflight))
        print(f"  {question} ({allocator}): {results[-1]['state']} {results[-1].get('seconds', '')}", flush=True)
    return results


def headline(result: dict[str, Any]) -> str:
    """The answer in a few words, for the table."""
    answer = result.get("answer")
    if answer is None:
        return str(result.get("reason") or f"exit code {result.get('exit_code')}")
    return HEADLINES[result["question"]](answer)


def of_statistics(answer: dict[str, Any]) -> str:
    """How much the allocator reports."""
    statistics = answer["after_a_program"]
    if not isinstance(statistics, dict):
        return f"memory_stats() is {statistics}"
    filled = "filled" if answer["largest_free_block_is_filled"] else "not filled"
    return f"{len(statistics)} keys, largest free block {filled}, {answer['call_us']} us a call"


def of_out_of_memory(answer: dict[str, Any]) -> str:
    """Whether donated inputs survived."""
    return "; ".join(f"{kind}: donated inputs {deleted_of(answer[kind])}" for kind in ("temporaries", "outputs"))


def of_prediction(answer: dict[str, Any]) -> str:
    """Compiled need against measured peak."""
    measured = f"peak {shown(answer['peak_after_bytes'])}"
    ratio = answer["peak_over_need"]
    return f"need {answer['need_bytes']:,} B, {measured}" + ("" if ratio is None else f", peak / need {ratio}")


def of_hook(answer: dict[str, Any]) -> str:
    """What the hook costs, and whether long steps still overlap with the host."""
    watched, slow = answer["watched_5_ms"], answer["watched_slow"]
    cost = f"median {watched['hook_median_us']} us, p99 {watched['hook_p99_us']} us a step"
    return f"{cost}; host at most {slow['host_max_ms']} ms in steps of {answer['slow_step_ms']} ms"


def of_fragmentation(answer: dict[str, Any]) -> str:
    """The share that XLA would call fragmented, in three states of the pool."""
    shares = ((name, answer[name]["share"]) for name in ("full", "holes", "empty"))
    return ", ".join(f"{name}: {'unknown, not reported' if share is None else share}" for name, share in shares)


def of_simulation(answer: dict[str, Any]) -> str:
    """How far the simulated allocator went with the real one."""
    compared = answer["compared"]
    if compared is None:
        return f"{answer['requests_run']} requests ran; not compared, because {answer['unknown']}"
    words = f"{compared['alike']} of {compared['requests']} requests alike"
    if compared["first_unlike"]:
        words += f", then {', '.join(compared['first_unlike']['unlike'])}"
    return f"{words}; refused at {compared['refused_at']}, on the device at {compared['device_refused_at']}"


def of_recorded_runs(answer: dict[str, Any]) -> str:
    """Whether healthy runs raised nothing, and faulty ones their own event once."""
    runs, expected = answer["runs"], answer["expected"]
    wrong = [
        f"{name}: {', '.join(run['events']) or 'nothing' if 'events' in run else run['error']}"
        for name, run in runs.items()
        if run.get("events") != ([expected[name]] if name in expected else [])
    ]
    return f"{len(runs) - len(wrong)} of {len(runs)} runs as expected" + ("; " + "; ".join(wrong) if wrong else "")


def of_defragment(answer: dict[str, Any]) -> str:
    """Whether the client's own defragmentation can be called at all."""
    return answer["error"]["text"][:110] if answer["error"] else f"done, array intact: {answer['array_intact']}"


def of_moved(answer: dict[str, Any]) -> str:
    """What `jm.defragment` made of two pools, or why it did nothing."""
    parts = []
    for name in ("small_between_large_holes", "as_large_as_the_holes"):
        pool = answer[name]
        if not pool["done"]:
            return pool["reason"][:110]
        (before,), (after,) = pool["before"].values(), pool["after"].values()
        shares = [f"{share:.0%}" if share else "none" for share in (pool["device_share"], pool["host_share"])]
        parts.append(
            f"largest free {shown(before['largest_free_bytes'])} -> {shown(after['largest_free_bytes'])}"
            f" ({pool['moved']} moved, device {shares[0]}, host {shares[1]} of one large copy)"
        )
    return "; ".join(parts)


def of_environment(answer: dict[str, Any]) -> str:
    """What held of a preset's settings, and what an allocation costs under it."""
    outcomes = [check["outcome"] for check in answer["checks"]]
    counted = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("held", "broken", "unknown") if kind in outcomes)
    cost = f"filling 1 MiB takes {answer['fill_1_mib_us']} us"
    return f"{answer['refused'].splitlines()[-1].strip()[:110] if answer['refused'] else counted}; {cost}"


HEADLINES = {
    "statistics": of_statistics,
    "out_of_memory": of_out_of_memory,
    "prediction_plain": of_prediction,
    **dict.fromkeys((*PLANS, *LEVERS), of_plan),
    "hook": of_hook,
    "fragmentation": of_fragmentation,
    **dict.fromkeys(CASES, of_simulation),
    "recorded_runs": of_recorded_runs,
    "defragment": of_defragment,
    "moved_together": of_moved,
    **dict.fromkeys(PRESETS, of_environment),
}


def deleted_of(outcome: dict[str, Any]) -> str:
    """What an OOM did to the donated inputs, or why that is unknown."""
    if "compile_error" in outcome:
        return "unknown, because the compile failed"
    if outcome["run_error"] is None:
        return "unknown, because it did not run out of memory"
    gone = [name for name, deleted in outcome["donated_inputs_deleted"].items() if deleted]
    return "survived" if not gone else f"deleted ({len(gone)} of {len(outcome['donated_inputs_deleted'])})"


def shown(count: int | None) -> str:
    """Bytes for the table; what is not reported has a word for it."""
    return "unknown, because the allocator reports none" if count is None else f"{count:,} B"


def table(results: list[dict[str, Any]]) -> str:
    """One line a question."""
    rows = [(entry["question"], entry["allocator"], entry["state"], headline(entry)) for entry in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows
    )


def main(arguments: list[str]) -> int:
    """The command line; 0 without a GPU, 1 when JAX cannot be used or, with one, when nothing was answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preflight", action="store_true", help="the same questions, smaller, on the CPU")
    parser.add_argument("--out", type=Path, help="result file (default: results/gpu_check.json; preflight writes none)")
    options = parser.parse_args(arguments)
    if not options.preflight and not has_gpu():
        print("No NVIDIA GPU was found here (no nvidia-smi that answers, no /dev/nvidia0): nothing to check.")
        print("The same questions on the CPU: python3 tools/gpu_check.py --preflight")
        return 0
    present = ask("presence", "default", QUESTION_LIMIT_S, preflight=options.preflight)
    platform = (present["answer"] or {}).get("platform")
    if platform not in (("cpu",) if options.preflight else ("gpu", "cuda")):
        print(
            f"JAX in {sys.executable} sees {platform or 'nothing'}, not the GPU. Its output:\n{present.get('stderr_end', '')}"
        )
        print("Install it for this driver, for example: python3 -m pip install 'jax[cuda12]'")
        return 1
    print(f"asking with jax {present['answer']['jax']} on {present['answer']['device_kind']}", flush=True)
    results = ask_all(preflight=options.preflight)
    report = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python3 tools/gpu_check.py", *arguments]),
        "presence": present["answer"],
        "nvidia_smi": nvidia_smi(),
        "missing_wheels": missing_wheels(),
        "predictions": predictions(results),
        "results": results,
    }
    out = options.out or (None if options.preflight else ROOT / "results" / "gpu_check.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {out}")
    print(table(results))
    print("\n".join(["", "Foretold against seen:", *map(prediction_line, report["predictions"])]))
    return 0 if any(entry["state"] == "answered" for entry in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
