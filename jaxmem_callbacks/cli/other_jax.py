"""A step inspected by another interpreter with its own JAX. Nothing is installed into it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from jaxmem_callbacks.readers.accounts import account_from
from jaxmem_callbacks.readers.decoding import record_from
from jaxmem_callbacks.records.accounts import Account
from jaxmem_callbacks.records.errors import ComparisonError
from jaxmem_callbacks.records.peaks import Buffer

_PACKAGE = pathlib.Path(__file__).parents[1]
_EVERY = 10**9  # buffers: more than any program has
_TAIL_LINES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedStep:
    """What one interpreter's JAX makes of a step.

    Attributes:
        account: Its bytes, with versions.
        buffers: All buffers of its peak.
    """

    account: Account
    buffers: tuple[Buffer, ...]


def inspect_by(python: str, script: str, target: str | None) -> InspectedStep:
    """Run ``jaxmem inspect`` by an interpreter, with this library and that interpreter's packages.

    Args:
        python: The interpreter.
        script: As ``jaxmem inspect`` takes it.
        target: Hardware that is not there, or None.

    Raises:
        ComparisonError: it cannot be run, lacks a package, or fails; the message has the end of what it wrote.
    """
    command = [python, "-m", "jaxmem_callbacks", "inspect", script, "--json", "--top", str(_EVERY)]
    command += [] if target is None else ["--target", target]
    try:
        # The folder that holds this library may hold a JAX beside it, which must not stand before the interpreter's own.
        with tempfile.TemporaryDirectory() as alone:
            (pathlib.Path(alone) / _PACKAGE.name).symlink_to(_PACKAGE, target_is_directory=True)
            path = os.pathsep.join(filter(None, [alone, os.environ.get("PYTHONPATH")]))
            done = subprocess.run(  # noqa: S603 - the interpreter that was asked for
                command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
            )
    except OSError as error:
        msg = f"{python} cannot be run: {error.strerror or error}. Expected a Python interpreter whose JAX is to be compared."
        raise ComparisonError(msg) from error
    if done.returncode == 0:
        try:
            found: dict[str, Any] = json.loads(done.stdout)
            buffers = tuple(record_from(Buffer, each, "top_buffers") for each in found["top_buffers"])
            return InspectedStep(account=account_from(found, python), buffers=buffers)
        except (ValueError, KeyError, TypeError) as error:
            msg = f"What {python} printed is no step's memory: {error}. Expected the JSON of jaxmem inspect."
            raise ComparisonError(msg) from error
    tail = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()][-_TAIL_LINES:]
    msg = (
        f"{python} could not inspect {script}. Expected an interpreter with JAX and what this library needs of packages; nothing "
        "is installed into it. The end of what it wrote:\n  " + "\n  ".join(tail)
    )
    raise ComparisonError(msg)


def version_words(account: Account) -> str:
    """Its JAX, such as ``jax 0.12.0.1``."""
    return f"jax {account.conditions['jax']}"
