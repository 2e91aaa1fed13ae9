"""A script as its user has it: the hook on `jax.jit` that finds its step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, cast

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmem_callbacks._compat.trace_state import has_tracer
from jaxmem_callbacks.cli.frames import call_of_user, caller_of, is_asked_for_shapes, is_of_user, variable_of_user
from jaxmem_callbacks.cli.grad_patches import GradPatches, JitScope
from jaxmem_callbacks.cli.source import is_unedited, source_of
from jaxmem_callbacks.cli.trace_log import AT_ONCE, GRADIENTS, JITS, LOOPS, Edit, TraceLog
from jaxmem_callbacks.programs.memory import as_step
from jaxmem_callbacks.programs.steps.registry import announce
from jaxmem_callbacks.programs.steps.step import JitStep
from jaxmem_callbacks.programs.steps.user_jit import LOOP, jax_traced
from jaxmem_callbacks.programs.targets.exporting import asks_for_cudnn
from jaxmem_callbacks.programs.targets.target import Target
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.errors import ScriptError
from jaxmem_callbacks.records.policies import StepPolicy
from jaxmem_callbacks.records.source_files import Owner
from jaxmem_callbacks.transforms.policy import Gradients, active_policy
from jaxmem_callbacks.transforms.tracing import open_jaxpr, subjaxprs

# A function whose trace fails is traced again at its next call, so many times.
_TRIES = 3
_BACKWARD = "transpose("  # what JAX's names of operations have where a gradient is taken
_PLAIN = (bool, int, float, str, type(None))


class Watching:
    """Makes what stands for a jit, and for a loop.

    Args:
        seen: Records what is called.
        gradients: Knows where gradients are taken.
        step: The name of the step; None for what takes a gradient.
        elsewhere: Whether it is to be compiled for hardware that is not here.

    Attributes:
        is_on: Whether a script is looked at; afterwards, what was made meanwhile does only what it stands for.
    """

    def __init__(self, seen: TraceLog, gradients: GradPatches, step: str | None, *, elsewhere: bool) -> None:
        self.seen, self.gradients, self.step, self.elsewhere = seen, gradients, step, elsewhere
        self.is_on = True
        self._known: weakref.WeakKeyDictionary[Callable[..., Any], set[Hashable]] = weakref.WeakKeyDictionary()

    def jit(self, real: Callable[..., Any], made_as: type[Watched]) -> Callable[..., Any]:
        """A jit whose functions are watched, whoever makes them but this library.

        Args:
            real: The jit.
            made_as: What stands for the functions that it makes.
        """
        signature = inspect.signature(real)

        @functools.wraps(real)
        def jit(*args: Any, **options: Any) -> Any:
            made = real(*args, **options)
            whose = caller_of(inspect.currentframe())
            if not self.is_on or whose is Owner.LIBRARY:
                return made
            watched = functools.partial(
                made_as, whose=whose, options=signature.bind_partial(*args, **options).arguments
            )
            if args or "fun" in options:
                return watched(made, self, args[0] if args else options["fun"])
            return lambda function: watched(made(function), self, function)

        return jit

    def loop(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A loop of `jax.lax`, which is compiled and run by itself where nothing is traced around it."""
        signature, (body, names) = inspect.signature(real), LOOPS[real.__name__]

        @functools.wraps(real)
        def loop(*args: Any, **options: Any) -> Any:
            frame = inspect.currentframe()
            if not self.is_on or caller_of(frame) is not Owner.USER or is_asked_for_shapes(frame):
                return real(*args, **options)
            try:
                given = dict(signature.bind(*args, **options).arguments)
            except TypeError:
                return real(*args, **options)  # whose error names what is wrong
            data = [given[name] for name in names if name in given]
            written = self._call(real, names, given)
            watched = Watched(jax.jit(_loop(real, body, names, given, written)), self, given[body], written=written)
            watched.known = self._kinds_of(given[body])
            with watched.seen_call(tuple(data), {}):
                return real(*args, **options)

        return loop

    def _kinds_of(self, body: Callable[..., Any]) -> set[Hashable]:
        """Kinds of arguments for which the body of a loop was traced, and is no step."""
        try:
            return self._known.setdefault(body, set())
        except TypeError:  # one that cannot be referred to
            return set()

    def _call(self, real: Callable[..., Any], names: tuple[str, ...], given: Mapping[str, Any]) -> str:
        """A loop as people write it where it is to be jitted; empty where it holds what has no name."""
        words: dict[str, str] = {}
        for name, value in given.items():
            is_plain = isinstance(value, _PLAIN)
            words[name] = name if name in names else repr(value) if is_plain else self.written(value)
        if not all(words.values()):
            return ""
        taken = ", ".join(name for name in names if name in given)
        arguments = ", ".join(f"{name}={word}" for name, word in words.items())
        return advise("step.loop", data=taken, loop=real.__name__, arguments=arguments)

    def written(self, function: Any) -> str:
        """How people write the function that they jitted: empty where that has no name of its own, as a method has none."""
        if (gradient := self.gradients.written.get(function) if callable(function) else None) is not None:
            return gradient
        is_plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
        name = function.__qualname__.rpartition("<locals>.")[2] if is_plain else ""
        return name if name.isidentifier() else ""


def _loop(
    real: Callable[..., Any], body: str, names: tuple[str, ...], given: Mapping[str, Any], written: str
) -> Callable[..., Any]:
    """A loop as a function of its data, with its body's name."""
    taken = [name for name in names if name in given]
    rest = {name: value for name, value in given.items() if name not in taken}

    def run(*data: Any) -> Any:
        return real(**rest, **dict(zip(taken, data, strict=True)))

    run.__name__ = run.__qualname__ = getattr(given[body], "__name__", real.__name__)
    setattr(run, LOOP, written)
    run.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess] - as `inspect` reads it
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in taken]
    )
    return run


class Watched:
    """A jitted function, which announces its calls where it is the step. All else is the jitted function's own.

    Args:
        made: What the jit made.
        watching: What is looked for.
        function: What was jitted.
        whose: Whose file jits it.
        options: The jit's.
        written: How people write it, where the function has no name.

    Attributes:
        known: Kinds of arguments that it was traced for.
    """

    def __init__(  # noqa: PLR0913 - what jitted it, and how it is written
        self,
        made: Any,
        watching: Watching,
        function: Any,
        *,
        whose: Owner = Owner.USER,
        options: Mapping[str, Any] | None = None,
        written: str | None = None,
    ) -> None:
        functools.update_wrapper(self, made)  # its attributes too, which `functools.wraps` of this one hands on
        # A pmap has these as attributes of its own, which would hide the methods of this class.
        for name in ("lower", "trace"):
            self.__dict__.pop(name, None)
        self.watched_jit = made
        self.known: set[Hashable] = set()
        self._watching, self._function, self._options = watching, function, dict(options or {})
        self._whose = whose
        self._written = watching.written(function) if written is None else written
        self._edits: dict[Edit, None] = {}
        self._is_replaced = True  # whether each gradient that was seen is one that its user can write otherwise
        self._is_noted = False
        self._is_step, self._tries, self._refusal = False, _TRIES, ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the jitted function."""
        with self.seen_call(args, kwargs):
            return self.watched_jit(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As the jitted function's; a step that is compiled by hand is one too."""
        with self.seen_call(args, kwargs):
            return self.watched_jit.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As the jitted function's."""
        with self.seen_call(args, kwargs):
            return self.watched_jit.trace(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "watched_jit":  # of one that is not made yet
            raise AttributeError(name)
        return getattr(self.watched_jit, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self.watched_jit)

    def __copy__(self) -> Watched:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.watched_jit,)

    @contextmanager
    def seen_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None]:
        """Around a call, which is announced first where it is the step's."""
        watching = self._watching
        gradients, seen = watching.gradients, watching.seen
        is_own = watching.is_on and not gradients.is_within and not has_tracer(args, kwargs)
        if is_own:
            if is_of_user(self._function):
                seen.jitted[self._name] = None
            if self._is_found(args, kwargs):
                gradients.has_warned = True  # from here on a plan traces the step
                seen.edits, seen.step = dict(self._edits) if self._gradients == "own" else {}, self._known_as
                seen.trainer = call_of_user(inspect.currentframe()) if self._whose is Owner.PACKAGE else ""
                with gradients.within(is_own=False):  # what is called in there is the plan's
                    self._announce(args, kwargs)
        with gradients.within(is_own=is_own) as here:
            yield
        self._learn(here)
        if is_own and here.takes_gradient and watching.step not in (None, self._name):
            seen.pass_by(self._name, str(watching.step))
        if here.takes_gradient and self._refusal:
            gradients.warn(f"{self._name} takes a gradient, but does not trace ({self._refusal})")

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", "a function without a name")

    @property
    def _known_as(self) -> str:
        """How people write it; empty where its name means something else by now, such as a decorator's wrapper around it."""
        names = getattr(self._function, "__globals__", {})
        meant = names.get(self._written, self)
        is_own = isinstance(meant, Watched) and meant.watched_jit is self.watched_jit
        return self._written if is_own or meant is self._function else ""

    def _announce(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around = active_policy()  # that of `jm.apply_policy`, where the script calls the trainer under one
        policy = StepPolicy() if around is None else around.policy
        announce(JitStep(self.watched_jit, policy, gradients=self._gradients), args, kwargs)

    @property
    def _gradients(self) -> Gradients:
        """Which gradients are to obey a policy: those of packages too, where it takes one there."""
        return "own" if self._is_noted and self._is_replaced else "all"

    def _is_found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is the step: by its name, or by a trace for every kind of arguments that it was not traced for yet."""
        named = self._watching.step
        if named is not None:
            return self._name == named
        kind = _kind((args, kwargs))
        if kind not in self.known and self._tries:
            if not self._is_traced(args, kwargs):
                return False
            self.known.add(kind)
        return self._is_step and kind in self.known

    def _is_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See whether it takes a gradient. A trace that fails is left to the call itself, which fails as the user knows it.

        One that fails for want of cuDNN is its step all the same where that is compiled elsewhere, and is refused there.
        """
        with self._watching.gradients.within(is_own=True) as here:
            try:
                self._is_step |= self._takes_gradient(args, kwargs)
            except Exception as error:  # noqa: BLE001 - whatever the user's own step raises
                if self._watching.elsewhere and here.takes_gradient and asks_for_cudnn(error):
                    self._is_step = True
                    return True
                self._tries -= 1
                self._refusal = f"{type(error).__name__}: {error}".partition("\n")[0]
                return False
            finally:
                self._learn(here)
        if here.takes_gradient and not self._is_step and is_of_user(self._function):
            self._watching.seen.without_effect[self._name] = None
            self._watching.gradients.warn(
                f"{self._name} takes a gradient, and none of its results depends on it", "return what it updates"
            )
        return True

    def _takes_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what it gives back depends on a gradient."""
        if hasattr(self.watched_jit, "trace"):
            return takes_gradient(jax_traced(self.watched_jit.trace(*args, **kwargs)).jaxpr)
        return takes_gradient(as_step(self.watched_jit).traced(args, kwargs).jaxpr)

    def _learn(self, here: JitScope) -> None:
        """How its gradients are written. JAX keeps traces: a later one may show nothing."""
        self._edits |= here.edits
        self._is_noted |= here.takes_gradient
        self._is_replaced &= not here.is_foreign


def takes_gradient(program: Any) -> bool:
    """Whether the results of a traced program depend on a gradient that it takes, wherever in it and in whatever way.

    What is computed and never used counts for nothing: to make its parameters, a model is often called once.
    """
    opened = open_jaxpr(program)
    used, _ = dce_jaxpr(opened, [True] * len(opened.outvars), True)
    return _has_backward(used)


def _has_backward(jaxpr: Any) -> bool:
    return any(
        _BACKWARD in str(equation.source_info.name_stack)
        or any(map(_has_backward, map(open_jaxpr, subjaxprs(equation))))
        for equation in jaxpr.eqns
    )


def _itself(jitted: Any) -> Any:
    return jitted


def _kind(arguments: Any) -> Hashable:
    """What makes JAX trace again, as far as it matters here: shapes, types, switches and words."""

    def kind_of(leaf: Any) -> Hashable:
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return leaf.shape, str(leaf.dtype)
        return leaf if isinstance(leaf, (bool, str)) else type(leaf)

    leaves, tree = jax.tree.flatten(arguments)
    return str(tree), *map(kind_of, leaves)  # a tree's own hash is that of its static parts, which need not have one


class Pmapped(Watched):
    """A function under `jax.pmap`. The script ends at its first call that takes a gradient, with what to write."""

    def __init__(self, made: Any, watching: Watching, function: Any, **how: Any) -> None:
        super().__init__(made, watching, function, **how)
        method = _inner(function)[0]
        is_method = inspect.ismethod(method)
        holder = variable_of_user(inspect.currentframe(), method.__self__) if is_method else ""
        self._method = f"{holder}.{method.__name__}" if holder else ""

    def _takes_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        traced, results = jax.make_jaxpr(
            functools.partial(self.watched_jit, **kwargs), static_argnums=self._static, return_shape=True
        )(*args)
        self._results = jax.tree.leaves(results)
        return takes_gradient(traced)

    def _announce(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._watching.seen.refused = ScriptError(self.refused(args))
        announce(types.SimpleNamespace(name=self._name), args, kwargs)

    def is_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it takes a gradient; not where it cannot be traced: its call then fails."""
        try:
            return self._takes_gradient(args, kwargs)
        except Exception:  # noqa: BLE001 - whatever the user's own step raises
            return False

    @property
    def _static(self) -> tuple[int, ...]:
        return _places(self._options.get("static_broadcasted_argnums", ()))

    def refused(self, args: Sequence[Any]) -> str:
        """Why no plan is made of it, and what to write."""
        why = (
            f"{self._name} takes a gradient under jax.pmap, and no plan is made of it: policies and shardings need "
            "jax.jit. It was stopped before its first step."
        )
        if self._whose is Owner.PACKAGE:
            return f"{why} An installed package puts it under jax.pmap. Does that package, or a newer one, train under jax.jit?"
        function = self._expression(args)
        if not function:
            return (
                f"{why} Can it run under jax.shard_map inside of jax.jit, over a mesh of all devices? Its arguments then have no "
                "axis of devices."
            )
        axis = str(self._options.get("axis_name") or "devices")
        whole = self._whole(args)
        kept = [place for place in range(len(args)) if place not in self._static]
        divided = advise("step.pmap.divided", axis=axis)
        specs = ", ".join("jax.P()" if place in whole else divided for place in kept)
        donated = [at for at, place in enumerate(kept) if place in _places(self._options.get("donate_argnums", ()))]
        arguments = f"step, donate_argnums={donated!r}" if donated else "step"
        names = self._names(len(args))
        once = " and ".join(names[place] for place in kept if place in whole)
        split = " and ".join(names[place] for place in kept if place not in whole)
        lines = advise("step.pmap", axis=axis, function=function, specs=f"({specs},)", arguments=arguments)
        return (
            f"{why} Take jax.pmap off {self._name}, and write:\n{lines}\n"
            f"No argument then has an axis of devices. Pass {once or 'none'} as one copy, not replicated, and "
            f"{split or 'none'} with the rows of all devices in the first dimension. Is something drawn at random on "
            "each device? "
            f"Its key is then the same on all, unless the device's place on the axis {axis} is folded into it."
        )

    def _expression(self, args: Sequence[Any]) -> str:
        """The function under the pmap as code, its static arguments bound; empty where it has no name or they have none."""
        function, bound = _inner(self._function)
        name = self._watching.written(function) or self._method
        names = self._names(len(args))
        static = {names[place]: args[place] for place in self._static if place < len(args)}
        if static and vars(type(args[0])).get(self._name) is self:  # of a class, whose object is static
            holder = variable_of_user(inspect.currentframe(), args[0])
            name = f"{holder}.{self._name}" if holder else ""
            del static[names.pop(0)]
        if not name or not all(isinstance(value, _PLAIN) for value in (bound | static).values()):
            return ""
        words = [f"{key}={value!r}" for key, value in bound.items()]
        if static:  # by name, for one may stand before an array
            given = [f"{key}={static[key]!r}" if key in static else f"{key}={key}" for key in names]
            taken = ", ".join(key for key in names if key not in static)
            return advise("step.pmap.static", names=taken, function=name, arguments=", ".join(given + words))
        return advise("step.pmap.partial", function=name, arguments=", ".join(words)) if words else name

    def _names(self, count: int) -> list[str]:
        """Names of the arguments by place."""
        try:
            names = list(inspect.signature(self._function).parameters)
        except (TypeError, ValueError):
            names = []
        return [*names[:count], *(f"argument {place}" for place in range(len(names), count))]

    def _whole(self, args: Sequence[Any]) -> set[int]:
        """Places of arguments that every device has alike: they are returned updated, or are not divided."""
        axes = self._options.get("in_axes", 0)
        several = list(axes) if isinstance(axes, tuple | list) else [axes] * len(args)
        made = Counter((leaf.shape, leaf.dtype) for leaf in self._results)
        whole: set[int] = set()
        for place, value in enumerate(args):
            if place in self._static:
                continue
            leaves = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype"))
            if (place < len(several) and several[place] is None) or (leaves and leaves <= made):
                whole.add(place)
                made -= leaves
        return whole


def _inner(function: Any) -> tuple[Any, dict[str, Any]]:
    """What partials by keyword are around, and what they bind."""
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        bound |= function.keywords
        function = cast("functools.partial[Any]", function).func
    return function, bound


class Named(Pmapped):
    """The same in a script that names its step itself: it is asked about where that is the step, and else runs as it is."""

    @contextmanager
    def seen_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None]:
        """Around a call, which is nobody's affair."""
        del args, kwargs
        yield


def refuse_pmapped(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a step under `jax.pmap`, that of `jm.jit_step` too.

    Args:
        step: What a script reached.
        args: The arguments of its first call.
        kwargs: The keyword arguments.

    Raises:
        ScriptError: it takes a gradient; with what to write.
    """
    inner = step.__wrapped__ if isinstance(step, JitStep) else step
    if isinstance(inner, Pmapped) and inner.is_step(args, kwargs):
        raise ScriptError(inner.refused(args))


def _places(argnums: Any) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(cast("Iterable[int]", argnums))


_CPU_DEVICES = "xla_force_host_platform_device_count"
_MOST_DEVICES = 64  # a script may make a copy of its state for each
_MADE = {("jax", "pmap"): Pmapped}  # what makes other jitted functions -> what stands for them


@contextmanager
def as_written(script: str, *, step: str | None = None, target: Target | None = None) -> Generator[TraceLog]:
    """Inside, an unedited script's step is announced to `first_calls_seen_by`, and its gradients obey the policy of a step.

    Args:
        script: As typed: ``train.py``, or ``train.py:name``, whose step need not be found. One that makes a step of this
            library is left alone.
        step: The name of the jitted function that is the step; None for the first that takes a gradient.
        target: What the step is to be compiled for; None for the attached devices.
    """
    seen = TraceLog()
    if target is not None:
        _see_devices_of(target)
    source = source_of(script)
    is_found_by_name, is_edited = source.function is not None, not is_unedited(source.path)
    gradients = GradPatches(seen, has_warned=is_found_by_name or step is not None)
    watching = Watching(seen, gradients, step, elsewhere=target is not None and target.platform != "cpu")
    before: list[tuple[types.ModuleType, str, Any]] = []

    def replace(module: types.ModuleType, attribute: str) -> None:
        place = (module.__name__, attribute)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name that JAX deprecates, which the script may not even use
            real = getattr(module, attribute, None)
        if real is None:  # a framework that goes with another JAX
            return
        before.append((module, attribute, real))
        if place in GRADIENTS:
            new = gradients.instead_of(*place, real)
        elif place in AT_ONCE:
            new = gradients.at_once(real)
        else:
            made_as = _MADE.get(place, Watched) if not (is_edited or is_found_by_name) else Named
            new = watching.loop(real) if place[0] == "jax.lax" else watching.jit(real, made_as)
        setattr(module, attribute, new)

    try:
        unedited = (
            *GRADIENTS,
            *AT_ONCE,
            *(() if is_found_by_name else (*JITS, *(("jax.lax", name) for name in LOOPS))),
        )
        places: dict[str, list[str]] = {}
        for module_name, attribute in (*(() if is_edited else unedited), *_MADE):
            places.setdefault(module_name, []).append(attribute)
        with _when_imported(places, replace):
            yield seen
    finally:
        watching.is_on = False
        for module, attribute, real in reversed(before):
            setattr(module, attribute, real)


@contextmanager
def _when_imported(
    places: Mapping[str, Sequence[str]], act: Callable[[types.ModuleType, str], None]
) -> Generator[None]:
    """Inside, ``act`` is called with each module and attribute once the module is there: now, or when the script imports it."""

    def act_on(module: types.ModuleType) -> None:
        for attribute in places[module.__name__]:
            act(module, attribute)

    finder = _Finder({name for name in places if sys.modules.get(name) is None}, act_on)  # None: not to be imported
    for name in places:
        if name not in finder.names:
            act_on(sys.modules[name])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.names.clear()
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds some modules as the other finders do, and calls ``act`` with each when it was imported."""

    def __init__(self, names: set[str], act: Callable[[types.ModuleType], None]) -> None:
        self.names, self.act = names, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of one of the modules, whose loader calls ``act`` as well; None for any other."""
        if fullname not in self.names:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.act)
        return spec


class _Loader(Loader):
    """Loads a module as its own loader does, which is what the module knows, and calls ``act`` with it."""

    def __init__(self, own: Loader, act: Callable[[types.ModuleType], None]) -> None:
        self.own, self.act = own, act

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """The module, not executed; None for one as Python makes it."""
        return self.own.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute it."""
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        self.act(module)


def _see_devices_of(target: Target) -> None:
    """Let the script see as many devices as the target has, where its own are CPUs: a mesh of all of them is then the target's.

    A number that the user has set holds, and so does a backend that has started already.
    """
    is_set = jax.config.values["jax_num_cpu_devices"] > 0 or _CPU_DEVICES in os.environ.get("XLA_FLAGS", "")
    if 1 < target.device_count <= _MOST_DEVICES and not is_set:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", target.device_count)
