"""Kauldron: `MemoryProfiler` for `trainer.profiler`, the one place that it calls at every step.

Kauldron is imported here, so only when this file is.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from kauldron.inspect.profile_utils import Profiler  # pyright: ignore[reportMissingImports] - not installed where types are checked
from kauldron.utils.config_util import ROOT_CFG_REF, UpdateFromRootCfg  # pyright: ignore[reportMissingImports]

from jaxmem_callbacks.callbacks.monitor import MemoryMonitor
from jaxmem_callbacks.readers.stores import is_address, opener, packages_for
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.terminal import print_line

_LOCAL = "logdir='runs/a'"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MemoryProfiler(UpdateFromRootCfg):  # pyright: ignore[reportUntypedBaseClass]
    """Report every step to a `MemoryMonitor`, and call the profiler that the place was made for.

    Kauldron calls it on its lead host only, so of several processes the first alone is watched. The monitor is made at the first
    step and writes beside Kauldron's own curves, into the folder ``memory`` of the run; it ends with the process, or by
    ``trainer.profiler.watching.close()``.

    Attributes:
        preset: What the monitor obeys, by name, since a konfig holds no live objects.
        monitor: A live one in its place, where the trainer is made in Python.
        profiler: Called as well; None for none.
        workdir: The run's folder, set by the trainer.
    """

    preset: str | None = None
    monitor: MemoryMonitor | None = None
    profiler: Any = dataclasses.field(default_factory=Profiler)
    workdir: Any = ROOT_CFG_REF.workdir

    __root_cfg_fields_to_recurse__ = ("profiler",)

    @functools.cached_property
    def watching(self) -> MemoryMonitor:
        """The monitor that is called."""
        if self.monitor is not None:
            return self.monitor
        workdir = os.fspath(self.workdir)
        if is_address(workdir) and opener(workdir) is not None:
            return MemoryMonitor(self.preset, logdir=f"{workdir.rstrip('/')}/memory")
        if is_address(workdir):
            print_line(
                f"no memory curves are written, since workdir={workdir!r} is no local folder, and {packages_for(workdir)}; "
                f"events are printed here. Give a local one: MemoryProfiler(monitor={advise('monitor.call', arguments=_LOCAL)})."
            )
            return MemoryMonitor(self.preset)
        return MemoryMonitor(self.preset, logdir=Path(workdir) / "memory")

    def __call__(self, step: int) -> None:
        """A step was dispatched."""
        if self.profiler is not None:
            self.profiler(step)
        self.watching(step)
