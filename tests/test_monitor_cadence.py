"""How often each probe is read: as its own setting says, however often the monitor looks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.probes.device_memory import DriverProbe
from jaxmem_callbacks.probes.host import HostProbe
from jaxmem_callbacks.probes.live_arrays import HeapProbe, LiveArraysProbe
from jaxmem_callbacks.records.presets import MonitorSettings

SETTINGS = {HostProbe: "host_s", DriverProbe: "driver_s", LiveArraysProbe: "scan_s", HeapProbe: "heap_map_s"}
SECONDS, MANY = 1.5, 12
OFTEN, SELDOM = 0.02, 0.5


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """How often each probe was read, by type; each is read as ever."""
    counted: Counter[type] = Counter()

    def counting(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_count(self: Any, step: int) -> Any:
            counted[type(self)] += 1
            return read(self, step)

        return read_and_count

    for probe in SETTINGS:
        monkeypatch.setattr(probe, "read", counting(probe.read))
    return counted


@pytest.mark.parametrize("probe", SETTINGS, ids=SETTINGS.values())
def test_a_probe_is_read_as_often_as_its_setting_says(probe: type, reads: Counter[type]):
    often = dict.fromkeys(SETTINGS.values(), OFTEN)
    other = (
        DriverProbe if probe is HostProbe else HostProbe
    )  # which is never slowed down, however many arrays there are
    settings = MonitorSettings(**{**often, SETTINGS[probe]: SELDOM}, on_error="raise")
    with jm.MemoryMonitor(settings, writer=jm.CollectingWriter()) as monitor:
        began = time.monotonic()
        step = 0
        while (
            time.monotonic() < began + SECONDS or reads[other] < MANY
        ):  # a busy machine may look at the devices seldom
            monitor(step)
            step += 1
            time.sleep(0.005)
    # Once at the start, the end or both, besides those that fell due; scan_s is behind all others' readings but the map's.
    assert 2 <= reads[probe] <= (time.monotonic() - began) / SELDOM + 2
