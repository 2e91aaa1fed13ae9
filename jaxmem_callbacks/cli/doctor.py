"""``jaxmem doctor``: this machine's settings, what is wrong with them, and which figures exist here.

Starts no backend unless asked. With ``--start`` another process does, without taking a GPU's pool: it allocates nothing.
"""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import json
from typing import Any

from jaxmem_callbacks._compat.backends import settings_were_read
from jaxmem_callbacks.cli.backend_probe import devices_started
from jaxmem_callbacks.cli.exit_codes import FINDINGS, OK
from jaxmem_callbacks.environment.apply import start_findings
from jaxmem_callbacks.environment.figures import figures_here, in_effect, platform_to_come
from jaxmem_callbacks.environment.findings import findings
from jaxmem_callbacks.environment.process import OLD_FRACTION, OPTIONS, PREALLOCATE, process_facts
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.programs.targets.compilers import compiler_versions
from jaxmem_callbacks.records.documents import Block, Code, Document, Section, Table, as_text
from jaxmem_callbacks.records.environment import DeviceFacts, Figure, Finding, ProcessFacts
from jaxmem_callbacks.records.runs import Reading
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.records.units import format_bytes

_WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--start",
        action="store_true",
        help=f"start JAX's backend and ask its devices, in a process of its own with {PREALLOCATE}=false",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.epilog = "Exit code: 0 where nothing is wrong, 1 where something is, 2 for wrong arguments."


def run(args: argparse.Namespace) -> int:
    """Look, judge, print.

    Returns:
        0, or 1 where there are findings.
    """
    seen = process_facts(started=settings_were_read())
    devices, failed = _started(seen) if args.start else (None, ())
    report = _Report(seen=seen, findings=(*findings(seen), *failed), devices=devices)
    put((json.dumps(report.as_json(), indent=2) if args.json else report.as_text()) + "\n", as_json=args.json)
    return FINDINGS if report.findings else OK


def _started(seen: ProcessFacts) -> tuple[tuple[DeviceFacts, ...] | None, tuple[Finding, ...]]:
    """The devices, and what went wrong with the start."""
    answer = devices_started()
    return (None, (answer,)) if isinstance(answer, Finding) else (answer, start_findings(answer, seen))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Report:
    """What is printed."""

    seen: ProcessFacts
    findings: tuple[Finding, ...]
    devices: tuple[DeviceFacts, ...] | None

    @property
    def figures(self) -> tuple[Figure, ...]:
        host = HostProbe().read(0)[0]
        return figures_here(
            self.seen,
            self.devices,
            compilers={platform: compiler_versions(platform) for platform in ("cuda", "tpu")},
            resident_bytes=host.resident_bytes if isinstance(host, Reading) else None,
            has_driver=ctypes.util.find_library("nvidia-ml") is not None,
        )

    def as_text(self) -> str:
        effect = [(setting, value, f"({source})") for setting, value, source in in_effect(self.seen)]
        others = self._others()
        wrong = [block for finding in self.findings for block in _finding(finding)]
        blocks = [
            Section("JAX here", [Table((), self._machine())]),
            Section("A GPU's settings at the start", [Table((), effect)]),
            *([Section("Also set", [Table((), others)])] if others else []),
            Section(f"Wrong: {len(self.findings)}", wrong) if wrong else "Nothing is wrong with these settings.",
            Section("Figures that exist here", [Table((), [_row(figure) for figure in self.figures], folded=True)]),
        ]
        return as_text(Document(blocks), width=_WIDTH)

    def _machine(self) -> list[tuple[str, str]]:
        seen = self.seen
        coming = platform_to_come(seen)
        runs = f"the {coming.upper()}, by the settings and plugins" if coming else "unknown before a start (--start)"
        if self.devices:
            runs = ", ".join(f"{device.label} ({device.kind})" for device in self.devices)
        return [
            ("jax, jaxlib", f"{seen.jax or 'not installed'}, {seen.jaxlib or 'not installed'}"),
            ("plugins", ", ".join(seen.plugins.values()) or "none"),
            ("hardware seen", ", ".join(seen.hardware) or "no accelerator"),
            ("JAX runs on", runs),
            *((device.label, _memory(device)) for device in self.devices or ()),
        ]

    def _others(self) -> list[tuple[str, str]]:
        seen = self.seen
        rows = [
            (name, value) for name, value in seen.variables.items() if name not in (*OPTIONS.values(), OLD_FRACTION)
        ]
        rows += [("flag", flag) for flag in seen.memory_flags]
        return rows + [(name, "read by nothing") for name in seen.unread]

    def as_json(self) -> dict[str, Any]:
        """The same as data; its keys do not change where fields of records do."""
        return {
            "surroundings": dataclasses.asdict(self.seen),
            "devices": None if self.devices is None else [dataclasses.asdict(device) for device in self.devices],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "figures": [{"name": each.name, "exists": each.exists, "told": each.text} for each in self.figures],
        }


def _memory(device: DeviceFacts) -> str:
    statistics = device.statistics
    if statistics is None:
        return "reports no allocator statistics"
    in_use, limit = statistics.get("bytes_in_use"), statistics.get("bytes_limit") or None
    return f"{format_bytes(in_use)} in use, limit {format_bytes(limit)}"


def _row(figure: Figure) -> tuple[str, str]:
    words = {True: f"yes: {figure.text}", False: f"no: {figure.text}", None: f"unknown, because {figure.text}"}
    return figure.name, words[figure.exists]


def _finding(finding: Finding) -> tuple[Block, Block]:
    return f"{finding.given} {finding.why}", Code([finding.type_next])
