"""JAX's device memory profile with this library's names: what each allocation holds, at which step, and what made it.

`jax.profiler` sums allocations by the call that made them and by their size. A step makes parameters, optimizer state and metrics
in one call, so its profile has one sum for all of them. Here each of its sums is divided among the live arrays of that call and
size: by the arguments of a step's call where these are given, else by the shapes that registered steps take.

Backends: all. Waits for no device. Cost: a few microseconds a live array, on the thread that asks.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import jax

import jaxmem_callbacks
from jaxmem_callbacks._compat.arrays import creation_call, live_arrays
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.leaves import Leaf
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.files import write_file
from jaxmem_callbacks.records.pprof import Frame, MemoryProfile, Sample, profile_bytes, profile_from
from jaxmem_callbacks.records.runs import MemoryEvent
from jaxmem_callbacks.records.terminal import log_line
from jaxmem_callbacks.transforms.arg_roles import kind_of_path

OTHER_ARRAYS, NO_ARRAY = "other arrays", "no live array"
_TYPE = re.compile(r"\w+\[[\d,]*\]")
_NUMBER = re.compile(r"\d+")


class Name(NamedTuple):
    """What an array is: ``parameters``; its path, or an empty text; its dtype and shape."""

    holds: str
    path: str
    type_text: str


_Where = tuple[
    tuple[tuple[str, int], ...], int, int
]  # files and lines of the calls, bytes on one device, the device's number


def memory_profile(step: int | None = None, leaves: Sequence[Leaf] = ()) -> MemoryProfile:
    """What is alive on this process's devices now.

    Args:
        step: The step that had just been dispatched, or None.
        leaves: The arrays of a step's call, whose names are then exact.
    """
    profile = profile_from(jax.profiler.device_memory_profile())
    held = _held({id(leaf.value): leaf for leaf in leaves})
    named = [part for sample in profile.samples for part in _divided(sample, held)]
    labels: Mapping[str, str | int] = {} if step is None else {"step": step}
    when = "" if step is None else f"after step {step}, "
    by = f"{when}by jaxmem_callbacks {jaxmem_callbacks.__version__} and jax {jax.__version__}"
    return MemoryProfile(
        samples=[
            Sample(frames=each.frames, count=each.count, bytes=each.bytes, labels={**each.labels, **labels})
            for each in named
        ],
        comments=[f"Device memory {by}. `holds` is what an allocation is to the step."],
    )


def _divided(sample: Sample, held: Mapping[_Where, Counter[Name]]) -> Iterator[Sample]:
    """A sum of JAX's, by what its allocations hold."""
    if sample.labels.get("kind") != "buffer" or not sample.count:
        yield sample
        return
    stack = tuple((frame.file, frame.line) for frame in sample.frames)
    number = _NUMBER.search(str(sample.labels.get("device", "")))
    names = held.get((stack, sample.bytes // sample.count, int(number[0]) if number else -1), Counter())
    if names.total() > sample.count:  # arrays that share memory: which of them is counted is not known
        kinds, types = ({name[at]: None for name in names} for at in (0, 2))
        names = Counter({Name(" or ".join(kinds), "", " or ".join(types)): sample.count})
    if rest := sample.count - names.total():
        names = names + Counter({Name(NO_ARRAY, "", ""): rest})
    for name, count in names.items():
        what = " ".join(filter(None, (name.path, name.type_text)))
        yield Sample(
            frames=(*([Frame(what)] if what else []), Frame(name.holds), *sample.frames),
            count=count,
            bytes=sample.bytes * count // sample.count,
            labels={
                **sample.labels,
                "holds": name.holds,
                **({"path": name.path} if name.path else {}),
                **({"shape": name.type_text} if name.type_text else {}),
            },
        )


def _held(own: Mapping[int, Leaf]) -> dict[_Where, Counter[Name]]:
    """The live arrays by where they were made, with their names."""
    places: list[tuple[Any, str, list[_Where]]] = []
    stacks: dict[Any, tuple[tuple[str, int], ...]] = {}
    for array in live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted or donated meanwhile
            if array.is_deleted():
                continue
            call = creation_call(array)
            if call not in stacks:
                frames = getattr(call, "frames", ())
                stacks[call] = tuple((each.file_name, each.line_num) for each in frames)
            size = array.on_device_size_in_bytes() // len(array.sharding.device_set)
            type_text = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            devices = array.sharding.addressable_devices
            places.append((id(array), type_text, [(stacks[call], size, device.id) for device in devices]))
    by_type: dict[str, list[tuple[int, list[_Where]]]] = {}
    for number, type_text, where in places:
        by_type.setdefault(type_text, []).append((number, where))
    expected = {} if own else _expected()
    found: dict[_Where, Counter[Name]] = {}
    for type_text, arrays in by_type.items():
        one_call = len({stack for _, where in arrays for stack, _, _ in where}) == 1
        names = iter(_by_shape(type_text, expected.get(type_text, {}), len(arrays), one_call=one_call))
        for number, where in arrays:
            leaf, name = own.get(number), next(names)
            for each in where:
                known = name if leaf is None else Name(leaf.kind, leaf.path, type_text)
                found.setdefault(each, Counter())[known] += 1
    return found


def _expected() -> dict[str, dict[str, list[str]]]:
    """Dtype and shape -> kind -> paths, of what registered steps take; of several steps those of the one with most of a kind."""
    found: dict[str, dict[str, list[str]]] = {}
    for _, compilation in registry.steps():
        own: dict[str, dict[str, list[str]]] = {}
        for path, text in compilation.signature:
            if (type_text := _TYPE.match(text)) is not None and not type_text[0].endswith("[]"):
                own.setdefault(type_text[0], {}).setdefault(kind_of_path(path), []).append(path)
        for type_text, kinds in own.items():
            for kind, paths in kinds.items():
                known = found.setdefault(type_text, {})
                known[kind] = max(known.get(kind, []), paths, key=len)
    return found


def _by_shape(type_text: str, kinds: Mapping[str, Sequence[str]], count: int, *, one_call: bool) -> list[Name]:
    """A name for each of so many arrays of one shape: exact in number where the steps take just as many of one call's."""
    wanted = sum(map(len, kinds.values()))
    if not kinds:
        return [Name(OTHER_ARRAYS, "", type_text)] * count
    if count == wanted and (one_call or len(kinds) == 1):
        return [Name(kind, _path(paths), type_text) for kind, paths in kinds.items() for _ in paths]
    holds = " or ".join(kinds) + (f" or {OTHER_ARRAYS}" if count > wanted else "")
    return [Name(holds, "", type_text)] * count


def _path(paths: Sequence[str]) -> str:
    return paths[0] + (f" or {len(paths) - 1} more of its shape" if len(paths) > 1 else "")


@final
class NearOomProfiles:
    """Keeps a profile at each near-OOM event, while there still is memory, on the monitor's own thread.

    Args:
        most: How many are written.
        folder: Where to.
        shown: Where the user finds that folder.
    """

    def __init__(self, most: int, folder: Path, shown: Path | str) -> None:
        self._left, self._folder, self._shown = most, folder, str(shown).rstrip("/")

    def keep(self, events: Iterable[MemoryEvent]) -> None:
        """Write one where one of the events is near OOM, and log where it is."""
        step = next((each.step for each in events if each.kind == "near_oom"), None)
        if step is None or not self._left:
            return
        self._left -= 1
        process = f".process-{jax.process_index()}" if jax.process_index() else ""
        name = f"near_oom{process}.step-{step}.pb.gz"
        self._folder.mkdir(parents=True, exist_ok=True)
        write_file(self._folder / name, profile_bytes(memory_profile(step)), private=True)
        command = advise("command.typed", typed=f"profile {self._shown}/{name}")
        log_line(logging.INFO, f"near OOM at step {step}: a device memory profile is written; `{command}` shows it.")
