"""Accounts, to be compared, of a run's folder, a plan's JSON or a saved step memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jaxmem_callbacks.analysis.run_summary import RunSummary
from jaxmem_callbacks.readers.decoding import plan_from, record_from
from jaxmem_callbacks.readers.runs import stories_of
from jaxmem_callbacks.readers.stores import is_address, readable
from jaxmem_callbacks.records.accounts import ONE_STEP, Account, parts_of
from jaxmem_callbacks.records.errors import RunFileError
from jaxmem_callbacks.records.plans import PlanRecord
from jaxmem_callbacks.records.policies import policy_words
from jaxmem_callbacks.records.secrets import without_secrets
from jaxmem_callbacks.records.terminal import read_json

_EXPECTED = (
    "Expected a monitor's logdir or memory.jsonl, a plan (what jaxmem plan prints with --json, plan.to_json()), or a step's "
    "memory (what jaxmem inspect prints with --json, a baseline of the pytest plugin)."
)
# What a device holds, measured; what the host holds is too noisy to judge.
_MEASURED = {
    "in_use_bytes": "highest bytes in use",
    "peak_bytes_since_start": "allocator's peak since the process began",
    "live_array_bytes": "highest bytes of live arrays",
}
_NOT_JUDGED = {"resident_bytes": "highest resident bytes of the host"}


def read_account(place: str | Path) -> Account:
    """The account of what is at a path, or of a run at an address; of several runs the newest.

    Raises:
        RunFileError: nothing there, or nothing that has an account.
    """
    if isinstance(place, str) and is_address(place):
        with readable(place) as folder:
            return _of_runs(folder, place)
    path = Path(place)
    if path.is_dir() or path.suffix == ".jsonl":
        return _of_runs(path, str(path))
    try:
        data = read_json(path.read_text("utf-8"))
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror or error}. {_EXPECTED}"
        raise RunFileError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{path} is no JSON: {error}. {_EXPECTED}"
        raise RunFileError(msg) from error
    return account_from(data, str(path))


def account_from(data: Any, where: str) -> Account:
    """The account in what `json` read: saved as it is, or of a plan.

    Raises:
        RunFileError: neither; the message names ``where``.
    """
    fields = cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {}
    try:
        if "account" in fields:
            return record_from(Account, fields["account"], "account")
        if "candidates" in fields:
            return _of_plan(plan_from(fields), where)
    except ValueError as error:
        if isinstance(error, RunFileError):
            raise
        msg = f"{where}: {error}. {_EXPECTED}"
        raise RunFileError(msg) from error
    msg = f"{where} is neither a plan nor a step's memory. {_EXPECTED}"
    raise RunFileError(msg)


def _of_runs(path: Path, where: str) -> Account:
    *others, newest = stories_of(path)
    remark = (
        f"{without_secrets(where)} holds {len(others) + 1} runs; this is the newest, {newest.run}." if others else ""
    )
    return _of_story(newest, remark)


def _of_story(story: RunSummary, remark: str) -> Account:
    from jaxmem_callbacks.transforms.arg_roles import batch_of  # loads JAX, and a mistyped name is answered without

    judged = {f"{name}, one step": need for name, need in story.needs.items()}
    judged |= {words: story.highs[name].bytes for name, words in _MEASURED.items() if name in story.highs}
    shown: dict[str, int] = {}
    batch: dict[str, str] = {}
    for name, each in story.programs.items():
        if each.memory is not None:
            shown |= {f"{name}: {part}": size for part, size in parts_of(each.memory, None).items()}
            batch |= {f"{name}: {path}": text for path, text in batch_of(each.signature).items()}
    shown |= {words: story.highs[name].bytes for name, words in _NOT_JUDGED.items() if name in story.highs}
    devices = story.start.devices if story.start is not None else {}
    hardware = f"{devices.get('count', 'unknown')} x {devices.get('kind', 'unknown')}"
    remarks = ([remark] if remark else []) + ([] if story.ended else [f"Run {story.run} was not closed."])
    return Account(
        form="run",
        name=story.run,
        hardware=hardware,
        judged=judged,
        shown=shown,
        batch=batch,
        conditions=dict(story.start.versions) if story.start is not None else {},
        remarks=tuple(remarks),
    )


def _of_plan(record: PlanRecord, where: str) -> Account:
    from jaxmem_callbacks.transforms.arg_roles import batch_of  # as above

    chosen = record.candidates[record.chosen]
    if chosen.step_bytes is None:
        msg = f"{where}: the compiler refused the chosen step without a figure, so there is nothing to compare. {_EXPECTED}"
        raise RunFileError(msg)
    judged = {ONE_STEP: chosen.step_bytes}
    if chosen.need_bytes not in (None, chosen.step_bytes):
        judged["the device must hold"] = chosen.need_bytes or 0
    rows = {} if chosen.batch_rows is None else {"rows": str(chosen.batch_rows)}
    flags = {f"compiler option {name}": value for name, value in record.flags.items()}
    return Account(
        form="plan",
        name=record.step,
        hardware=record.hardware,
        judged=judged,
        shown=parts_of(chosen, chosen.peak),
        batch={**batch_of(record.signature), **rows},
        conditions={"policy": policy_words(chosen.policy), **record.versions, **flags},
    )
