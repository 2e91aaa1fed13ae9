"""The pytest plugin: a test fails where a step's compiled bytes grew beyond a committed baseline.

Installed with the package. It brings the fixture `assert_step_memory` and the option ``--jaxmem-update``, which writes baselines,
and imports neither JAX nor the rest of the package before a test uses the fixture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import pytest

if TYPE_CHECKING:
    from jaxmem_callbacks.programs.memory import StepMemory
    from jaxmem_callbacks.records.accounts import Account

FOLDER = "memory_baselines"
_OPTION = "--jaxmem-update"
_PROPERTY = "jaxmem"  # what a test did reaches the summary in its report, from other processes too


@final
class StepGate:
    """What the fixture gives to one test.

    Args:
        node: The test.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._node = node
        self._update = bool(node.config.getoption(_OPTION))
        self._used: set[Path] = set()

    def __call__(
        self,
        step: Callable[..., Any],
        *args: Any,
        target: str | None = None,
        max_regress: str = "2%",
        baseline: str | Path | None = None,
        **kwargs: Any,
    ) -> StepMemory:
        """Fail where one step needs more than its baseline and ``max_regress`` allow. The step is compiled, never run.

        Args:
            step: As for `jm.step_memory`.
            *args: Its arguments, real or abstract.
            target: Hardware that need not be there, such as ``h100_sxm``; None for the attached devices.
            max_regress: By how much it may grow, with its percent sign.
            baseline: The file, beside the test file unless absolute; by default ``memory_baselines/<file>/<test>.json`` there.
            **kwargs: The step's keyword arguments.

        Returns:
            What `jm.step_memory` returned.

        Raises:
            JaxmemError: as `jm.step_memory`, such as a target whose compiler is not installed; a baseline that cannot be read.
        """
        from jaxmem_callbacks.analysis.comparing import parse_share
        from jaxmem_callbacks.programs.memory import as_step, step_memory

        most = parse_share(max_regress)
        path = self._place(baseline)
        made = as_step(step)
        memory = step_memory(made, *args, target=target, **kwargs)
        if self._update:
            self._write(path, _account(memory, made.policy, with_peak=True))
        else:
            self._hold(path, memory, made.policy, most)
        return memory

    def _place(self, baseline: str | Path | None) -> Path:
        node = self._node
        path = node.path.parent / (Path(FOLDER) / node.path.stem / _file_name(node) if baseline is None else baseline)
        if path in self._used:
            pytest.fail(
                f"assert_step_memory was called twice with the baseline {path.name}. Expected one file a step: pass "
                "baseline='memory_baselines/another.json'.",
                pytrace=False,
            )
        self._used.add(path)
        return path

    def _write(self, path: Path, account: Account) -> None:
        from jaxmem_callbacks.records.files import write_file
        from jaxmem_callbacks.records.secrets import scrubbed

        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"account": dataclasses.asdict(scrubbed(account))}, indent=1, default=dict)
        write_file(path, f"{text}\n")
        self._node.user_properties.append((_PROPERTY, f"wrote {self._near(path)}"))

    def _hold(self, path: Path, memory: StepMemory, policy: Any, most: Any) -> None:
        from jaxmem_callbacks.analysis.comparing import growth, growth_document
        from jaxmem_callbacks.readers.accounts import read_account
        from jaxmem_callbacks.records.documents import as_text
        from jaxmem_callbacks.records.errors import ComparisonError

        remedy = f"If that is meant, write the baseline again and commit it: pytest {_OPTION} '{self._node.nodeid}'"
        if not path.exists():
            msg = f"There is no baseline {self._near(path)}. Write it and commit it: pytest {_OPTION} '{self._node.nodeid}'"
            pytest.fail(msg, pytrace=False)
        before = read_account(path)
        refusal = ""
        try:
            too_much = growth(before, _account(memory, policy, with_peak=False), most).too_much
        except ComparisonError as error:
            too_much, refusal = (), str(error)
        if refusal:
            pytest.fail(f"{refusal}\n{remedy}", pytrace=False)
        if too_much:
            after = _account(memory, policy, with_peak=True)
            report = as_text(growth_document(growth(before, after, most), after))
            pytest.fail(f"{report}\nThe baseline is {self._near(path)}. {remedy}", pytrace=False)

    def _near(self, path: Path) -> Path:
        root = self._node.config.rootpath
        return path.relative_to(root) if path.is_relative_to(root) else path


@pytest.fixture
def assert_step_memory(request: pytest.FixtureRequest) -> StepGate:
    """Holds what one step needs against a committed baseline: ``assert_step_memory(step, state, batch, target="h100_sxm")``."""
    return StepGate(request.node)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes baselines."""
    words = "write the memory baselines of assert_step_memory instead of holding steps against them"
    parser.getgroup("jaxmem").addoption(_OPTION, action="store_true", default=False, help=words)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name every baseline that was written."""
    reports = [report for each in terminalreporter.stats.values() for report in each]
    for report in reports:
        for name, text in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
            if name == _PROPERTY:
                terminalreporter.write_line(f"jaxmem: {text}")


def _account(memory: StepMemory, policy: Any, *, with_peak: bool) -> Account:
    """The step's account; what makes its peak costs one more compile, so only a baseline and a failure ask for it."""
    from jaxmem_callbacks.programs.memory import account_of_step
    from jaxmem_callbacks.records.errors import CompileError

    try:
        return account_of_step(memory, policy, memory.peak() if with_peak else None)
    except CompileError as error:  # the figures hold without it
        account = account_of_step(memory, policy, None)
        return dataclasses.replace(account, remarks=(f"What makes its peak is unknown: {error}",))


def _file_name(node: pytest.Item) -> str:
    """A file name for a test, its class and parameters; a hash keeps apart what a file system cannot."""
    name = node.nodeid.partition("::")[2].replace("::", ".")
    safe = re.sub(r"[^\w.=-]+", "_", name).strip("_")
    return f"{safe}.json" if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"
