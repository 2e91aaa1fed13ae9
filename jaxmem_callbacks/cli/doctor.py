"""``jaxmem doctor``: this machine's settings, what is wrong with them, and which figures exist here or why not.

Starts no backend unless asked. With ``--start`` another process does, without taking a GPU's pool: it allocates nothing.
"""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem_callbacks._compat.backends import settings_were_read
from jaxmem_callbacks.cli.backend_probe import devices_started
from jaxmem_callbacks.cli.exit_codes import FINDINGS, OK
from jaxmem_callbacks.environment.apply import start_findings
from jaxmem_callbacks.environment.findings import effective, findings
from jaxmem_callbacks.environment.process import (
    ALLOCATOR,
    DEFAULT_FRACTION,
    OLD_FRACTION,
    OPTIONS,
    PREALLOCATE,
    as_preallocate,
    fraction_given,
    process_facts,
    version_numbers,
)
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.programs.targets.compilers import compiler_versions
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Block, Code, Document, Section, Table, put_document
from jaxmem_callbacks.records.environment import DeviceFacts, Figure, Finding, Platform, ProcessFacts
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


def run(args: argparse.Namespace) -> int:
    """Look, judge, print.

    Returns:
        0, or 1 where there are findings.
    """
    seen = process_facts(started=settings_were_read())
    devices, failed = _started(seen) if args.start else (None, ())
    report = _Report(seen=seen, findings=(*findings(seen), *failed), devices=devices)
    if args.json:
        put(json.dumps(report.as_json(), indent=2) + "\n", as_json=True)
    else:
        put_document(report.document(), width=_WIDTH)
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

    def document(self) -> Document:
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
        return Document(blocks)

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


_HAS_LARGEST = (0, 11, 0)  # before, BFC's largest_free_block_bytes is always 0
_SILENT = ("platform", "address", "vmm")
_UNDECIDED = f"JAX was not started; {advise('command.typed', typed='doctor --start')} asks it"


def platform_to_come(seen: ProcessFacts) -> Platform | None:
    """What JAX will run on, where the settings and the installed plugins decide it without a start; else None."""
    wanted = [platform for platform in seen.platforms if platform != "cpu"]
    return None if wanted or (seen.plugins and not seen.platforms) else "cpu"


def in_effect(seen: ProcessFacts) -> tuple[tuple[str, str, str], ...]:
    """The settings that a GPU's client gets: name, value, source. A text that JAX cannot read stands as it is."""
    defaults = {"allocator": "default (BFC)", "memory_fraction": f"{DEFAULT_FRACTION:.0%} of the GPU"}
    defaults |= {"preallocate": "yes, at the first allocation", "collective_memory_size": "none of its own"}
    words = {"memory_fraction": "fraction", "collective_memory_size": "pool for collectives"}
    rows: list[tuple[str, str, str]] = []
    for key, variable in OPTIONS.items():
        name, text = (fraction_given(seen.variables) if key == "memory_fraction" else None) or (
            variable,
            seen.variables.get(variable, ""),
        )
        if key in seen.options:
            value, source = str(seen.options[key]), f"jax_pjrt_client_create_options[{key!r}]"
        elif text:
            value, source = _meaning(key, text), f"{name}={text}"
        else:
            value, source = defaults[key], "JAX's default"
        if key != "allocator" and effective(seen).allocator == "platform":
            value = "none: the platform allocator has no pool"
        rows.append((words.get(key, key), value, source))
    return tuple(rows)


def _meaning(key: str, text: str) -> str:
    if key == "preallocate":
        return "yes, at the first allocation" if as_preallocate(text) else "no, grows with need"
    return f"{text} MiB" if key == "collective_memory_size" else text


def figures_here(
    seen: ProcessFacts,
    devices: Sequence[DeviceFacts] | None,
    *,
    compilers: Mapping[str, Mapping[str, str]],
    resident_bytes: int | None,
    has_driver: bool,
) -> tuple[Figure, ...]:
    """Each figure that the library can show, and whether it exists here.

    Args:
        seen: The process and the machine.
        devices: The local devices, or None before the start.
        compilers: Platform -> package -> version, of the compilers of absent hardware.
        resident_bytes: What this process takes of the host's memory, or None where the system refuses.
        has_driver: Whether NVIDIA's management library (NVML) is installed.
    """
    platform = devices[0].platform if devices else platform_to_come(seen)
    absent = [
        f"{name} ({', '.join(f'{p} {v}' for p, v in found.items())})" for name, found in compilers.items() if found
    ]
    lacking = [name for name, found in compilers.items() if not found]
    compiled = f"of the attached device, and of absent ones: {', '.join(absent) or 'none'}" + (
        f"; no compiler for absent {' or '.join(lacking)} (jaxmem targets)" if lacking else ""
    )
    host = f"resident {format_bytes(resident_bytes)}" if resident_bytes is not None else "the operating system refuses"
    return (
        _statistics(seen, devices, platform),
        _largest_block(seen, devices, platform),
        Figure(name="live arrays", exists=True, text="jax.live_arrays(), on every platform"),
        _addresses(platform),
        Figure(name="compile-time analysis", exists=True, text=compiled),
        _driver(platform, has_driver=has_driver),
        Figure(name="host memory", exists=resident_bytes is not None, text=host),
    )


def _statistics(seen: ProcessFacts, devices: Sequence[DeviceFacts] | None, platform: Platform | None) -> Figure:
    name = "allocator statistics"
    if platform == "cpu":
        return Figure(name=name, exists=False, text="JAX's CPU client keeps none")
    if not devices:
        return Figure(name=name, exists=None, text=_UNDECIDED)
    silent = [device.label for device in devices if device.statistics is None]
    if silent:
        allocator = seen.variables.get(ALLOCATOR, "").lower()
        why = f"the allocator {allocator} reports none" if allocator in _SILENT else "the runtime reports none"
        return Figure(name=name, exists=False, text=f"{', '.join(silent)}: {why}; {ALLOCATOR}=default (BFC) does")
    keys = sorted({key for device in devices for key in device.statistics or ()})
    return Figure(name=name, exists=True, text=f"of {len(devices)} local: {', '.join(keys)}")


def _largest_block(seen: ProcessFacts, devices: Sequence[DeviceFacts] | None, platform: Platform | None) -> Figure:
    name = "largest free block"
    if platform == "cpu":
        return Figure(name=name, exists=False, text="no allocator statistics, so no fragmentation either")
    if platform != "tpu" and seen.jaxlib is not None and version_numbers(seen.jaxlib) < _HAS_LARGEST:
        text = "jaxlib before 0.11 reports 0 on GPUs, which means unknown; fragmentation is unknown too"
        return Figure(name=name, exists=False, text=text)
    if not devices:
        return Figure(name=name, exists=None, text=_UNDECIDED)
    reported = [device.statistics for device in devices if device.statistics is not None]
    if any(each.get("largest_free_block_bytes", 0) > 0 for each in reported):
        return Figure(name=name, exists=True, text="largest_free_block_bytes, and fragmentation of the pool by it")
    if reported and all(each.get("pool_bytes") == 0 for each in reported):
        return Figure(name=name, exists=None, text="nothing was allocated yet, so the pool is empty")
    return Figure(name=name, exists=False, text="this allocator reports none: BFC and TPUs do")


def _addresses(platform: Platform | None) -> Figure:
    name = "array addresses"
    if platform == "tpu":
        return Figure(name=name, exists=False, text="a TPU's runtime reports none, so there is no heap map")
    if platform is None:
        return Figure(name=name, exists=None, text=_UNDECIDED)
    return Figure(name=name, exists=True, text="of arrays that are ready: the monitor's heap map")


def _driver(platform: Platform | None, *, has_driver: bool) -> Figure:
    name = "memory by the driver"
    if has_driver:
        text = (
            "NVIDIA's management library is installed: it counts what CUDA, NCCL and other processes took; the monitor asks "
            "it through the package nvidia-ml-py"
        )
        return Figure(name=name, exists=True, text=text)
    if platform == "cpu":
        return Figure(name=name, exists=False, text="JAX runs on the CPU, where host memory is all")
    return Figure(name=name, exists=False, text="NVIDIA's management library (libnvidia-ml) is not installed")
