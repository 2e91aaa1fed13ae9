"""A traced program in a portable form, without what only reports to Python."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmem_callbacks.records.errors import CompileError
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs

_EFFECTS = {"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"}
# A kernel's own prints are compiled into it.
_KERNELS = {"pallas_call"}
# Primitives of JAX -> as people write them.
_WORDS = {
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "inspect_sharding": "jax.debug.inspect_array_sharding",
}


def without_reports(closed: Any) -> tuple[Any, tuple[str, ...]]:
    """A closed jaxpr without its reports, those inside loops, branches and nested functions included.

    Returns:
        The jaxpr, the same object where there are none; and what was left out, as ``jax.debug.print (train.py:12 (loss))``.
    """
    if not _reports(open_jaxpr(closed).effects):
        return closed, ()
    stripping = _Stripping()
    return stripping.of(closed), tuple(stripping.found)


def _reports(effects: Any) -> set[Any]:
    return {effect for effect in effects if type(effect).__name__ in _EFFECTS}


class _Stripping:
    """Takes reports out of jaxprs; a jaxpr that is used twice stays one, so that JAX lowers it once."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}  # what was taken out, in the order of the program
        self._done: dict[int, tuple[Any, Any]] = {}  # with the original, whose number then stays its own

    def of(self, jaxpr: Any) -> Any:
        """The same jaxpr, closed or open, without reports."""
        opened = open_jaxpr(jaxpr)
        if not _reports(opened.effects):
            return jaxpr
        if id(opened) not in self._done:
            self._done[id(opened)] = opened, self._stripped(opened)
        kept = self._done[id(opened)][1]
        return kept if opened is jaxpr else jaxpr.replace(jaxpr=kept)

    def _stripped(self, opened: Any) -> Any:
        eqns = [self._inside(eqn) for eqn in opened.eqns if not self._only_reports(eqn)]
        return opened.replace(eqns=eqns, effects=_left(opened.effects, [eqn.effects for eqn in eqns]))

    def _only_reports(self, eqn: Any) -> bool:
        """Whether an equation does nothing but report; it is noted then."""
        is_report = bool(_reports(eqn.effects)) and not eqn.outvars and not subjaxprs(eqn)
        if is_report:
            word = _WORDS.get(eqn.primitive.name) or str(eqn.primitive.name)
            place = source_info_util.summarize(eqn.source_info)
            self.found[f"{word} ({place})" if place else word] = None
        return is_report

    def _inside(self, eqn: Any) -> Any:
        if not _reports(eqn.effects) or not subjaxprs(eqn) or eqn.primitive.name in _KERNELS:
            return eqn
        params = {name: self._parameter(value) for name, value in eqn.params.items()}
        inner = eqn.replace(params=params)
        return inner.replace(effects=_left(eqn.effects, [body.effects for body in subjaxprs(inner)]))

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._parameter, value)) if any(map(_is_jaxpr, value)) else value
        return self.of(value) if _is_jaxpr(value) else value


def _left(effects: Any, inner: list[Any]) -> frozenset[Any]:
    """Effects without the reports that nothing inside makes any more."""
    made = set[Any]().union(*inner)
    return frozenset(effect for effect in effects if effect in made or not _reports([effect]))


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


# A sharding as JSON: mesh axes with sizes (none: one device), the partition spec, and the memory kind where
# it is not the device's own.
ShardingText = dict[str, Any]
#: What is wrong with a step that asks for cuDNN where there is none, and what to write instead.
_SIZES = "does not match the device assignment size"  # JAX's words where meshes of two sizes meet
NO_CUDNN = (
    "it asks for a cuDNN kernel, and cuDNN is not there to choose one",
    "Use implementation='xla' of jax.nn.dot_product_attention for the estimate.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PortableProgram:
    """A traced program, ready to be compiled elsewhere.

    Attributes:
        name: The function's name, which the compiled module keeps.
        blob: The serialised program.
        shardings: Of each array argument in order, or None where it has none.
        out_shardings: Of each result in order, or None where nothing was given.
        donated: Positions of the donated arguments among all array arguments.
        device_count: Devices that its shardings span.
        left_out: What only reports to Python and is not in the program, with its source line.
    """

    name: str
    blob: bytes
    shardings: tuple[ShardingText | None, ...]
    out_shardings: tuple[ShardingText | None, ...] | None
    donated: tuple[int, ...]
    device_count: int
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatProgram:
    """A function of array leaves only, with the abstract leaves to call it on; everything else is closed over."""

    name: str
    function: Callable[..., list[Any]]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]
    donated: tuple[int, ...]
    out_shardings: Any


def flatten_program(  # noqa: PLR0913 - jax.jit's own options
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    donate_argnums: Sequence[int] = (),
    donate_argnames: Sequence[str] = (),
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    out_shardings: Any = None,
) -> FlatProgram:
    """Split the arguments into array leaves (traced) and the rest (closed over), and mark what is donated."""
    donated_keys = _keys(function, args, kwargs, donate_argnums, donate_argnames)
    static_keys = _keys(function, args, kwargs, static_argnums, static_argnames)
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    traced = {key: value for key, value in arguments.items() if key not in static_keys}
    flat = {key: jax.tree.flatten(value) for key, value in traced.items()}
    places = [(key, i) for key, (leaves, _) in flat.items() for i, leaf in enumerate(leaves) if _is_array(leaf)]
    abstract = tuple(_abstract(flat[key][0][i]) for key, i in places)
    name = getattr(function, "__name__", None) or "step"

    def program(*leaves: Any) -> list[Any]:
        filled = {key: list(old) for key, (old, _) in flat.items()}
        for (key, i), leaf in zip(places, leaves, strict=True):
            filled[key][i] = leaf
        values = arguments | {key: jax.tree.unflatten(flat[key][1], new) for key, new in filled.items()}
        result = function(*(values[i] for i in range(len(args))), **{name: values[name] for name in kwargs})
        spread = (
            None if out_shardings is None else jax.tree.broadcast(out_shardings, result, is_leaf=lambda x: x is None)
        )
        shardings.extend(jax.tree.leaves(spread, is_leaf=lambda x: x is None))
        return jax.tree.leaves(result)

    shardings: list[Any] = []
    program.__name__ = name
    if out_shardings is not None:
        jax.eval_shape(program, *abstract)
    return FlatProgram(
        name=name,
        function=program,
        leaves=abstract,
        paths=_paths(function, traced),
        donated=tuple(position for position, (key, _) in enumerate(places) if key in donated_keys),
        out_shardings=tuple(map(_on_the_set_mesh, shardings)) if out_shardings is not None else None,
    )


@contextlib.contextmanager
def refusing_cudnn(name: str, platform: str) -> Generator[None]:
    """Where a function is traced for an absent device: JAX asks for cuDNN then, and fails where there is none.

    Raises:
        CompileError: a kernel of cuDNN is asked for; the message has what to write instead.
    """
    try:
        yield
    except RuntimeError as error:
        if asks_for_cudnn(error):
            raise _refusal(name, platform, error, "") from error
        raise


def asks_for_cudnn(error: Exception) -> bool:
    """Whether a trace or a script failed because a kernel of cuDNN was asked for where there is none."""
    return isinstance(error, RuntimeError) and "cudnn" in str(error).lower()


def export_program(flat: FlatProgram, platform: str) -> PortableProgram:
    """Trace and serialise for ``tpu`` or ``cuda``, without what only reports to Python.

    Raises:
        CompileError: the program has something that cannot leave this process; the message has what to do.
        Exception: whatever the user's own function raises while it is traced, unchanged.
    """
    options: dict[str, Any] = {} if flat.out_shardings is None else {"out_shardings": list(flat.out_shardings)}
    jitted = jax.jit(flat.function, **options)
    with refusing_cudnn(flat.name, platform):
        traced = jitted.trace(*flat.leaves)
    kept, left_out = without_reports(traced.jaxpr)
    if left_out:
        jitted = jax.jit(_named(jaxpr_as_fun(kept), flat.name), **options)
    try:
        blob, device_count = _serialised(jitted, flat.leaves, platform)
    except Exception as error:
        names = {eqn.primitive.name for eqn in _equations(kept)}
        callbacks = sorted(name for name in names if "callback" in name)
        raise _refusal(flat.name, platform, error, ", ".join(callbacks)) from error
    return PortableProgram(
        name=flat.name,
        blob=blob,
        shardings=tuple(sharding_text(leaf.sharding) for leaf in flat.leaves),
        out_shardings=None if flat.out_shardings is None else tuple(map(sharding_text, flat.out_shardings)),
        donated=flat.donated,
        device_count=device_count,
        left_out=left_out,
    )


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def program(*leaves: Any) -> Any:
        return function(*leaves)

    program.__name__ = name
    return program


def sharding_text(sharding: Any) -> ShardingText | None:
    """A sharding as JSON, without its devices; None for none, and for one device's default memory.

    Raises:
        CompileError: neither named nor of a single device.
    """
    if sharding is None:
        return None
    host = sharding.memory_kind if sharding.memory_kind == "pinned_host" else None
    if isinstance(sharding, NamedSharding):
        axes = [[str(name), int(size)] for name, size in sharding.mesh.shape.items()]
        spec = [list(part) if isinstance(part, tuple) else part for part in sharding.spec]
        return {"axes": axes, "spec": spec, "memory_kind": host}
    if isinstance(sharding, SingleDeviceSharding):
        return {"axes": [], "spec": [], "memory_kind": host} if host else None
    msg = (
        f"Sharding {sharding} cannot be carried to another device. Expected jax.sharding.NamedSharding, "
        "for example NamedSharding(mesh, PartitionSpec('data'))."
    )
    raise CompileError(msg)


def _on_the_set_mesh(sharding: Any) -> Any:
    """A bare partition spec as the sharding that it means under `jax.set_mesh`; anything else as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    bare = isinstance(sharding, PartitionSpec) and not mesh.empty
    return NamedSharding(mesh, sharding) if bare else sharding


def _keys(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    nums: Sequence[int],
    names: Sequence[str],
) -> set[int | str]:
    """Positions and keywords of the arguments that numbers and names mean, as they were passed."""
    keys: set[int | str] = {number % len(args) for number in nums if -len(args) <= number < len(args)}
    if names:
        parameters = list(inspect.signature(function).parameters)
        keys |= {
            name if name in kwargs else parameters.index(name) for name in names if name in kwargs or name in parameters
        }
    return keys


def _paths(function: Callable[..., Any], traced: Mapping[int | str, Any]) -> tuple[str, ...]:
    """Each array leaf's path from the argument's name, such as ``params['w1']``."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    found: list[str] = []
    for key, value in traced.items():
        name = (
            names[key]
            if isinstance(key, int) and key < len(names)
            else (key if isinstance(key, str) else f"args[{key}]")
        )
        leaves = jax.tree_util.tree_flatten_with_path(value)[0]
        found += [name + jax.tree_util.keystr(path) for path, leaf in leaves if _is_array(leaf)]
    return tuple(found)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf's shape, dtype and sharding. One device's default sharding is dropped: the target's device takes its place."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jax.eval_shape(lambda x: x, leaf)
    placed = sharding if sharding_text(sharding) is not None else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=getattr(leaf, "weak_type", False))


def _serialised(jitted: Any, leaves: Sequence[Any], platform: str) -> tuple[bytes, int]:
    """The program's bytes and its number of devices.

    JAX asks leave for each custom call whose meaning it may change between versions; the worker runs this same version,
    so leave is given for those that it names.
    """
    allowed: set[str] = set()
    while True:
        checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(allowed)]
        try:
            exported = jax.export.export(jitted, platforms=[platform], disabled_checks=checks)(*leaves)
            return bytes(exported.serialize()), exported.nr_devices
        except ValueError as error:
            named = set(re.findall(r"custom_call\s+@([\w.$]+)", str(error)))
            if "compatibility guarantees" not in str(error) or named <= allowed:
                raise
            allowed |= named


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        inner = itertools.chain.from_iterable(p if isinstance(p, (list, tuple)) else [p] for p in eqn.params.values())
        for value in inner:
            if hasattr(value, "eqns"):
                yield from _equations(getattr(value, "jaxpr", value))


def _refusal(name: str, platform: str, error: Exception, callbacks: str) -> CompileError:
    """What the step has that cannot be compiled elsewhere, and what to type instead."""
    text = str(error)
    if callbacks:
        what = f"it takes values from Python ({callbacks}), which nothing gives on hardware that is absent"
        instead = (
            "Plan the step with arrays of the same shapes and dtypes in their place. Calls that give nothing back, such as "
            "jax.debug.print, may stay: they are left out."
        )
    elif "cudnn" in text.lower():
        what, instead = NO_CUDNN
    elif "No supported GPU" in text:
        what = "it has a Pallas kernel for GPU, which asks for the attached GPU while it is lowered"
        instead = "Plan it on a machine with that GPU, or use the kernel's reference implementation for the estimate."
    elif _SIZES in text:
        what = (
            f"its mesh is of the devices that are here, which are not as many as the target's ({text.splitlines()[0]})"
        )
        instead = "Are as many there, as CPUs, when it is made? The command line sees to that for scripts."
    else:
        what = f"jax.export refused it: {text.splitlines()[0] if text else type(error).__name__}"
        instead = "Plan it on a machine with that hardware."
    return CompileError(f"{name} cannot be compiled for an absent {platform}: {what}. {instead}")
