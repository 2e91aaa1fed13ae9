"""How long a program waits for its collectives, by the order in which its compiler has the instructions run."""

from __future__ import annotations

from jaxmem_callbacks.planning.step_time import Speed
from jaxmem_callbacks.programs.reading.hlo import (
    COLLECTIVES,
    Instruction,
    Module,
    calls_of,
    moved_bytes,
    padded_bytes,
    product_flops,
)

_START, _DONE = "-start", "-done"
# These run nothing.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


def waiting_seconds(module: Module, device_count: int, speed: Speed) -> float:
    """Modelled seconds of a program's collectives that no other work hides.

    The links carry one collective at a time, in the order of their starts. What is asynchronous is carried while the work between
    its start and its end goes on; all else is waited for. Loops count as often as they run, and of branches the longest.

    Args:
        module: The program, its instructions in the order in which they run.
        device_count: Devices that it is for.
        speed: Peaks of one device.
    """
    return _Schedule(module, device_count, speed).total(module.entry)[1]


class _Schedule:
    """Work and waiting of each computation of a program."""

    def __init__(self, module: Module, device_count: int, speed: Speed) -> None:
        self._module, self._device_count, self._speed = module, device_count, speed
        self._instructions: dict[str, list[Instruction]] = {}
        for each in module.instructions.values():
            self._instructions.setdefault(each.computation, []).append(each)
        self._known: dict[str, tuple[float, float]] = {}

    def total(self, computation: str) -> tuple[float, float]:
        """Seconds of one run of a computation's work, and those that it waits."""
        if computation not in self._known:
            work = waits = 0.0
            carried: dict[str, float] = {}  # what is on its way -> seconds that the links still need for it
            for each in self._instructions.get(computation, ()):
                if each.opcode.removesuffix(_START) in COLLECTIVES:
                    seconds = moved_bytes(each, self._device_count) / self._speed.link
                    if each.opcode.endswith(_START):
                        carried[each.name] = seconds
                    else:
                        waits += seconds
                elif each.opcode.endswith(_DONE) and each.operands and each.operands[0] in carried:
                    waits += carried.pop(each.operands[0])
                elif each.opcode not in _FREE:
                    own_work, own_waits = self._of(each)
                    work, waits = work + own_work, waits + own_waits
                    _carry(carried, own_work)
            self._known[computation] = work, waits
        return self._known[computation]

    def _of(self, each: Instruction) -> tuple[float, float]:
        """The same of one instruction: of what it runs, or of at least its products and of writing its results."""
        work = waits = 0.0
        for either, times in [] if each.calls else calls_of(each):
            inner_work, inner_waits = max(map(self.total, either), key=sum)
            work, waits = work + times * inner_work, waits + times * inner_waits
        if work or waits:
            return work, waits
        inside = self._instructions.get(each.calls or "", ())
        flops = sum(product_flops(one, self._module) for one in (each, *inside))
        return max(flops / self._speed.flops, padded_bytes(each.shape) / self._speed.bandwidth), 0.0


def _carry(carried: dict[str, float], seconds: float) -> None:
    """Let the links carry for so long, what started first first."""
    for name, left in carried.items():
        done = min(left, seconds)
        carried[name] = left - done
        seconds -= done
