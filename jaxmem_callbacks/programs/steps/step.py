"""`jm.jit_step`: a train step, jitted under a policy, with its donation decided, proved and watched.

At the first call of a new signature the step is lowered, compiled and inspected once, written to the registry and run with that
same compile. Every other call is the jitted function's own, inside the policy's context. `jm.place_state` lays the optimizer's
state of a step into host memory before the loop.
"""

from __future__ import annotations

import functools
import threading
import time
import types
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, final

import jax

from jaxmem_callbacks._compat.jit_settings import compiler_options_of, in_shardings_of
from jaxmem_callbacks._compat.trace_state import has_tracer
from jaxmem_callbacks.config.named import Name, policy_of, resolve_policy
from jaxmem_callbacks.environment.apply import require_applied
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.steps.build_jit import JitOptions, build_jit, host_pins, require_pinned, written_call
from jaxmem_callbacks.programs.steps.donation import (
    donation_message,
    lost_donations,
    note_deleted,
    require_unshared,
    undonated_names,
    with_passing,
)
from jaxmem_callbacks.programs.steps.host_state import fetching, on_device, placed, unsaved
from jaxmem_callbacks.programs.steps.leaves import AbstractCall, Leaf, abstract_call, has_real_arrays, named_arguments
from jaxmem_callbacks.programs.steps.placement import as_placed, mesh_of, require_returned
from jaxmem_callbacks.programs.steps.program import (
    Program,
    Signature,
    Traced,
    changes,
    flags_now,
    operations_of,
    read_program,
    record_copies,
    step_bytes_of,
    without_donation_warning,
)
from jaxmem_callbacks.programs.steps.registry import announce, compiles, watch_compiles
from jaxmem_callbacks.programs.steps.user_jit import (
    Jitted,
    OfArrays,
    OfEquinox,
    already_jitted,
    arrays_apart,
    for_whole_trees,
    hold_modules,
    jax_traced,
    jitted_with,
    of_parts,
    split,
    static_arguments,
    without_undonating_jit,
)
from jaxmem_callbacks.records.arguments import name_of, require_function, require_names
from jaxmem_callbacks.records.errors import DonationError, DonationWarning, PolicyError
from jaxmem_callbacks.records.policies import OwnCheckpoint, StepPolicy
from jaxmem_callbacks.records.presets import Preset
from jaxmem_callbacks.records.programs import Compilation
from jaxmem_callbacks.transforms.accumulation.equivalence_check import require_accumulable
from jaxmem_callbacks.transforms.accumulation.microbatch import refuse_second_accumulation
from jaxmem_callbacks.transforms.gradients import applied
from jaxmem_callbacks.transforms.policy import ActivePolicy, Gradients, activate, require_used
from jaxmem_callbacks.transforms.sharding.infer import require_shardings

_Arguments = ParamSpec("_Arguments")
_Results = TypeVar("_Results")
_PLAIN = (bool, int, float, str)  # whose text is the same in every process


def jit_step(
    train_step: Callable[_Arguments, _Results],
    policy: StepPolicy | Preset | Name | None = None,
    *,
    donate_argnames: str | tuple[str, ...] | None = None,
    state_shardings: Any = None,
    gradients: Gradients = "own",
) -> JitStep[_Arguments, _Results]:
    """The user's step, jitted, under a policy.

        step = jm.jit_step(train_step, "full_remat")
        state, metrics = step(state, batch)

    Args:
        train_step: A plain function, or one that is already jitted: `jax.jit`, ``nnx.jit``, a `functools.partial` or
            ``nnx.cached_partial`` of one. That is used as it is, with its own static arguments and donation. Of a step
            that this function made, the same step under another policy. Switches,
            strings and callables given to a plain function are static without being named.
        policy: What to apply; only donation where left out. Text names a preset (several as ``"donate+full_remat"``, or
            the path of a YAML file), else a word of ``StepPolicy.remat`` or ``StepPolicy.sharding``. ``"fsdp"`` and its like
            are both: the preset is taken, which has that sharding and nothing else.
        donate_argnames: Arguments whose memory the results take over. None: those of the policy, and where that has
            none, every argument that the step returns updated (`programs.steps.donation` has the rule). ``()``: none.
        state_shardings: One `NamedSharding` per array of the state (or one for all): the state must be so, and stays so,
            and is never moved silently. A policy with a sharding pins every argument that is returned
            updated, on the mesh of ``state_shardings`` or else of `jax.set_mesh`; ``state_shardings`` wins for the argument that
            it describes.
        gradients: ``own``: the policy acts on gradients by ``jm.value_and_grad``, ``jm.grad`` and ``jm.nnx.value_and_grad``.
            ``all``: on those by `jax.value_and_grad`, `jax.grad` and Flax NNX's and Equinox's functions too, in your code and
            in any package, while this step is traced; nothing changes for other steps and threads. A step under a policy
            inside it obeys its own.

    Returns:
        A callable with the step's arguments and results; it also has ``lower``, ``trace``, ``policy``, ``__wrapped__``.

    Raises:
        DonationError: ``donate_argnames`` for a step that is already jitted. At the first call: names that are no
            arguments, a donation that was asked for and that the compiled program does not make, one buffer in two
            donated places; nothing has run then, and the state is alive.
        EnvironmentSettingError: a preset whose environment was not applied.
        PresetError: a name that is no preset and no policy.
        PolicyError: another word in ``gradients``; compiler options that contradict your own. At the first call, compiler options
            for other hardware or another JAX, or on a step inside another jit; a policy for gradients on a step that takes none
            that it reaches; a loss whose gradient would be another one over microbatches, which is compared on a few rows of
            that call's batch.
    """
    require_function(train_step, "jm.jit_step")
    given = StepPolicy() if policy is None else resolve_policy(policy)
    require_applied(given)
    names = require_names("jm.jit_step", "donate_argnames", donate_argnames)
    require_shardings("jm.jit_step", "state_shardings", state_shardings)
    if isinstance(train_step, JitStep):
        kept = train_step.policy if policy is None else policy_of(given)
        return train_step.under(kept, names, state_shardings, gradients=gradients)
    return JitStep(
        train_step,
        policy_of(given),
        donate_argnames=names,
        state_shardings=state_shardings,
        gradients=gradients,
    )


class CompiledCall(NamedTuple):
    """A call that was compiled and read, and not run. Holds the caller's arrays: not to be kept."""

    program: Program
    leaves: list[Leaf]
    lowered: jax.stages.Lowered
    function: Callable[..., Any]


class _RetraceSignal(Exception):  # noqa: N818 - a signal from a trace to the call that began it, never seen outside
    """Raised where JAX begins to trace the step for a signature that was not inspected yet; nothing has run then."""


@final
class JitStep(Generic[_Arguments, _Results]):
    """What `jm.jit_step` returns. Constructing the first one registers one `jax.monitoring` listener for the process."""

    def __init__(  # noqa: PLR0913 - `jit_step`'s own words
        self,
        train_step: Callable[_Arguments, _Results],
        policy: StepPolicy,
        *,
        donate_argnames: tuple[str, ...] | None = None,
        state_shardings: Any = None,
        survey: bool = False,
        gradients: Gradients = "own",
    ) -> None:
        donate = policy.donate if donate_argnames is None else tuple(donate_argnames)
        if donate:
            train_step = without_undonating_jit(train_step)
        functools.update_wrapper(self, train_step, updated=())
        self.__wrapped__ = train_step
        self.policy = policy
        self.calls = 0
        self.latest_call: AbstractCall | None = None  # the newest signature, to compile again after a failure
        self.latest: Program | None = None  # what was compiled last
        self.name = name_of(train_step)
        self._own_jit = already_jitted(train_step)
        self._jit_options = JitOptions(
            donate=donate,
            state_shardings=state_shardings,
            policy=policy,
        )
        options = policy.options
        if options is not None:
            options.require_agreement(flags_now(), "XLA_FLAGS or LIBTPU_INIT_ARGS")
        if self._own_jit is not None:
            if policy.state_offload is not None:
                msg = (
                    f"state_offload={policy.state_offload!r} was given for {self.name}, which is already jitted and takes its "
                    "arguments where its own settings say. Pass the plain function to jm.jit_step."
                )
                raise PolicyError(msg)
            self._jit_options.refuse_for_jitted(train_step, donate_argnames)
            self._own_jit = self._own_jit if options is None else jitted_with(self._own_jit, options)
        self._active = ActivePolicy(policy, gradients=gradients, survey=survey)
        self._active.defer = self._leave_unchecked
        self._active.mesh = mesh_of(state_shardings)
        self.unchecked = False  # whether a loss was traced over microbatches and not compared with its whole batch yet
        # A policy that leaves gradients alone adds nothing to JAX's cache key: the user's own jit keeps its compiles.
        self._context = self._active if policy.changes_gradients or policy.rewrites_loss else None
        # Where a call finds a trace to make it begins again (`_first_call`), but for the user's own jit, which traces at once.
        self._entered = activate if self._own_jit is None else applied
        self._jitted: Jitted | None = self._own_jit
        self._call: Callable[..., Any] | None = None
        self._numbers = not isinstance(train_step, OfEquinox)  # whether a number is data
        self._splits = False  # whether modules among the arguments are split into arrays and the rest
        self._inspecting = False
        self._lock = threading.RLock()
        self._known: set[int] = set()  # hashes of signatures: a signature itself can have thousands of entries
        self._last: Signature | None = None
        self._known_bytes = -1  # of the compile that needs most so far
        self._warned = False
        watch_compiles()
        activate(None)  # JAX's cache key grows by the policy's context when that is first made: now, not in mid-run

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Results:
        """Run one step. Adds about a microsecond to the jitted function's own call; no flattening, no sync."""
        self.calls += 1  # a monitor sees by it which steps are in use
        call = self._call
        if call is None:
            return self._first_call(args, kwargs)
        before = compiles.count
        try:
            with self._entered(self._context):
                result = call(*args, **kwargs)
        except _RetraceSignal:
            pass
        except TypeError:
            if self._own_jit is not None or not (hold_modules(args, kwargs) or self._brings_static(args, kwargs)):
                raise  # else the first modules or the first switch, which this jit does not take: another one is made
        except RuntimeError as error:
            self._note_deleted(error, args, kwargs)
            raise
        except ValueError as error:
            self._note_deleted(error, args, kwargs)
            taken_args, taken_kwargs = self._parts(args, kwargs) if self._splits else (args, kwargs)
            if require_pinned(
                named_arguments(self.__wrapped__, taken_args, taken_kwargs), self._jit_options, self.__wrapped__
            ):
                raise  # else a state of other shapes, which is elsewhere: it is made again
        else:
            if compiles.count != before:
                self._after_compile(args, kwargs)
            return result
        return self._first_call(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A step that is a method takes its object first, as what `jax.jit` makes does."""
        return self if instance is None else types.MethodType(self, instance)

    def under(
        self, policy: StepPolicy, donate_argnames: tuple[str, ...] | None, state_shardings: Any, *, gradients: Gradients
    ) -> JitStep:
        """The same step under another policy; donation, places and gradients stay unless new ones are given."""
        own = None if self._jit_options.donate == self.policy.donate else self._jit_options.donate
        is_given = donate_argnames is not None or policy.donate not in (None, self.policy.donate)
        names = own if isinstance(own, tuple) and not is_given else donate_argnames
        placed = self._jit_options.state_shardings if state_shardings is None else state_shardings
        reach = self.gradients if gradients == "own" else gradients
        return JitStep(self.__wrapped__, policy, donate_argnames=names, state_shardings=placed, gradients=reach)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """What the jit's own ``lower`` returns for these arguments, under the policy.

        With microbatches and real arrays the loss is compared, as at a first call. With abstract ones it can't be:
        ``unchecked`` is then True, and what is compiled from here is checked by nobody.
        """
        self._require_here()
        jitted = self._get_or_build_jit(args, kwargs)
        are_real = self.compare(args, kwargs)
        with self._tracing():
            lowered = jitted.lower(args, kwargs)
        self.unchecked = self.unchecked and not are_real
        return lowered

    def compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Hold accumulated gradients against full ones, as at a first call; False where the arguments are no real arrays.

        Raises:
            PolicyError: a loss whose gradient would be another one over microbatches.
        """
        if are_real := has_real_arrays(args, kwargs):
            self._require_accumulable(self._get_or_build_jit(args, kwargs), args, kwargs)
        return are_real

    def placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, the optimizer's state where the policy has it."""
        with self._lock, self._tracing():
            pins = host_pins(self._traced_step, self._jit_options, args, kwargs)
        return placed(pins, named_arguments(self.__wrapped__, args, kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """What the jit's own ``trace`` returns for these arguments, under the policy."""
        jitted = self._get_or_build_jit(args, kwargs)
        full_args, full_kwargs = jitted.full(args, kwargs)
        with self._tracing():
            return jitted.lowering.trace(*full_args, **full_kwargs)

    def compile_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        """Lower, compile, read and register without running; the first call then needs no further compile.

        JAX's caches make it the same compile that the call uses.
        """
        self._require_here()
        with self._lock:
            jitted = self._get_or_build_jit(args, kwargs)
            self.latest_call = abstract_call(args, kwargs)
            with self._tracing():
                lowered, jaxpr = jitted.lowered(args, kwargs)
                require_used(self._active, self.__wrapped__)
                arguments, count = self._arguments(jitted, args, kwargs)
                if self._own_jit is not None:
                    self._jit_options.require_placed(jitted.function, arguments, lowered.out_info)
                compiled = lowered.compile()
                require_returned(self._jit_options.pins, lowered.out_info, compiled.output_shardings, jitted)
            leaves = with_passing(arguments, jitted.leaves(arguments, count, lowered, jaxpr), lowered.out_info)
            program = read_program(
                self.name,
                leaves,
                lowered,
                compiled,
                static=self._static(arguments, leaves),
                requested_names=self._jit_options.donated,
                undonated=self._undonated(jaxpr, arguments, leaves, lowered.out_info, (args, kwargs)),
                operations="" if jaxpr is None else operations_of(jaxpr),
                written=written_call(
                    jitted, arguments, count, leaves, lowered.out_info, own_jit=self._own_jit is not None
                ),
                known_bytes=self._known_bytes,
            )
            if program.memory is not None:
                self._known_bytes = max(self._known_bytes, program.memory.step_bytes)
            self._register(program)
            return CompiledCall(program, leaves, lowered, jitted.function)

    def _static(self, arguments: Sequence[tuple[str, Any]], leaves: Sequence[Leaf]) -> dict[str, Any]:
        """The static arguments: of the user's own jit the numbers and words that its program does not take."""
        if self._own_jit is None:
            return {name: value for name, value in arguments if name in self._jit_options.static}
        taken = {leaf.argument for leaf in leaves}
        return {name: value for name, value in arguments if name not in taken and isinstance(value, _PLAIN)}

    def of_arrays(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[JitStep, tuple[Any, ...], dict[str, Any]]:
        """The step and the call that JAX itself can trace: of a step that Equinox jitted those of the arrays alone."""
        apart = arrays_apart(self.__wrapped__, args, kwargs)
        if apart is None:
            return self, args, kwargs
        function = apart.function
        made = JitStep(function, self.policy, donate_argnames=function.donated, gradients=self.gradients)
        return made, apart.args, apart.kwargs

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """Trace under the policy for these arguments, for a compiler elsewhere.

        Raises:
            PolicyError: the policy did nothing.
        """
        step, args, kwargs = self.of_arrays(args, kwargs)
        if step is not self:
            return step.traced(args, kwargs)
        with self._lock:
            jitted = self._get_or_build_jit(args, kwargs)
            traced = jax_traced(self.trace(*args, **kwargs))
            require_used(self._active, self.__wrapped__)
            arguments, count = self._arguments(jitted, args, kwargs)
            leaves = with_passing(arguments, jitted.leaves(arguments, count, traced, traced.jaxpr), traced.out_info)
            leaves = as_placed(self._jit_options.pinned(leaves), in_shardings_of(traced, len(leaves)))
            out_shardings = tuple(getattr(info, "sharding", None) for info in jax.tree.leaves(traced.out_info))
            undonated = undonated_names(arguments, leaves, traced.out_info)
            return Traced(
                jaxpr=traced.jaxpr,
                leaves=leaves,
                undonated=undonated,
                out_shardings=out_shardings,
                compiler_options=self.compiler_options,
                compiled_with=self.policy.options,
                notes=self.notes,
                frontiers=tuple(self._active.frontiers),
            )

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Compiler options of the step: those that the user gave to his own jit, and those of the policy."""
        step, options = self.__wrapped__, self.policy.options
        own = step.jit if isinstance(step, OfArrays) else self._own_jit
        given = {} if own is None else compiler_options_of(own.lowering)
        return given if options is None else given | options.by_name

    @property
    def gradients(self) -> Gradients:
        """Which gradients of the step obey the policy: ``own`` or ``all``."""
        return self._active.gradients

    @property
    def notes(self) -> tuple[str, ...]:
        """What the policy left as it was in what has been traced so far, a sentence each."""
        return tuple(self._active.notes)

    @property
    def left_alone(self) -> tuple[OwnCheckpoint, ...]:
        """The losses' own checkpoints that the policy left as they were in what has been traced so far."""
        return tuple(self._active.left_alone)

    def without_policy(self) -> JitStep | None:
        """The same step without remat, donation and compiler options by this library, to compare with; None without any."""
        if self._own_jit is not None:
            changes = self.policy.changes_gradients or self.policy.options is not None
            return JitStep(self.__wrapped__, StepPolicy()) if changes else None
        if not (
            self.policy.changes_gradients
            or self.policy.options
            or self._jit_options.donated
            or self._jit_options.donate is None
        ):
            return None
        plain = StepPolicy(sharding=self.policy.sharding, state_offload=self.policy.state_offload)
        return JitStep(self.__wrapped__, plain, donate_argnames=(), state_shardings=self._jit_options.state_shardings)

    @property
    def donation(self) -> Literal["auto"] | tuple[str, ...] | None:
        """Donation as ``donate_argnames`` or the policy asks for it; None where neither does, or the user's own jit decides."""
        return self._jit_options.donate

    @property
    def donated(self) -> tuple[str, ...]:
        """Arguments that this library donates, as decided at the latest new signature; not those of the user's own jit."""
        return tuple(self._jit_options.donated)

    @property
    def state_shardings(self) -> Any:
        """What the state is pinned to by the user's own word, or None."""
        return self._jit_options.state_shardings

    def __repr__(self) -> str:
        reach = "" if self.gradients == "own" else f", gradients={self.gradients!r}"
        return f"jm.jit_step({self.name}, {self.policy}{reach})"

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile and inspect a call with a new signature before anything is executed, then run it."""
        announce(self, args, kwargs)
        try:
            return self._compile_and_run(args, kwargs)
        except (RuntimeError, ValueError) as error:
            self._note_deleted(error, args, kwargs)
            raise

    def _note_deleted(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note_deleted(error, self, args, kwargs, own_jit=self._own_jit is not None)

    def _compile_and_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            jitted = self._get_or_build_jit(args, kwargs)
            if has_tracer(args, kwargs):
                # inside somebody else's trace: nothing is compiled, donated or compared here
                self._require_outermost()
                alone = self.policy.microbatches > 1
                own = ActivePolicy(self.policy, gradients=self.gradients) if alone else self._context
                with self._tracing(), applied(own):
                    return jitted.call(*args, **kwargs)
            self._require_accumulable(jitted, args, kwargs)
            compiled = self.compile_call(args, kwargs)
            self.unchecked = False
            self._require_smaller(compiled.program, args, kwargs)
            self._refuse_or_warn(compiled.program, executed=False)
            require_unshared(compiled.leaves, jitted.function)
            self._call = jitted.call
            with self._tracing():
                result = jitted.call(*args, **kwargs)
            record_copies(self.name, compiled.program, compiled.leaves)
            return result

    def _require_smaller(self, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a state on the host that does not make the step smaller, as compiled; nothing has run yet."""

        def without() -> float:
            step, call = self.with_state_here(args, kwargs)
            return step_bytes_of(self.name, step.lower(*call[0], **call[1]))

        if self.policy.state_offload is None or program.memory is None:
            return
        if words := unsaved(program.host, program.memory.step_bytes, without):
            raise PolicyError(words)

    def with_state_here(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[JitStep, tuple[tuple[Any, ...], dict[str, Any]]]:
        """The step with all of its state on the device, and the shapes of a call of it: what `state_offload` is held against."""
        policy = replace(self.policy, state_offload=None)
        return self.under(policy, None, None, gradients=self.gradients), on_device((args, kwargs))

    def _require_here(self) -> None:
        """Refuse compiler options that are for other hardware than the attached, or for another JAX."""
        if self.policy.options is not None:
            self.policy.options.refuse_elsewhere(jax.default_backend(), jax.__version__)

    def _require_outermost(self) -> None:
        """Refuse what belongs to a jit where the step is part of another program, which is compiled as its own jit says."""
        if self.policy.state_offload is not None:
            msg = (
                f"{self.name} has state_offload={self.policy.state_offload!r} and is called inside another jit or "
                "transformation, whose arguments are where the outermost jit has them. Give the policy to jm.jit_step around the "
                "outermost function, or leave state_offload out."
            )
            raise PolicyError(msg)
        if self.policy.options is not None:
            msg = (
                f"{self.name} has compiler_options {self.policy.options.words} and is called inside another jit or "
                "transformation: one program has the options of its outermost jit alone. Give the policy to jm.jit_step around "
                "the outermost function, or leave compiler_options out."
            )
            raise PolicyError(msg)

    def _brings_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has a static argument where earlier ones had none, such as a word after None."""
        arguments = named_arguments(self.__wrapped__, args, kwargs)
        return not set(static_arguments(arguments, self.__wrapped__)) <= set(self._jit_options.static)

    def _get_or_build_jit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Jitted:
        """The jit for these arguments: the user's own, or one whose static and donated arguments are decided now."""
        if self.policy.microbatches > 1:
            refuse_second_accumulation(self.policy, args, kwargs)
        if self._own_jit is not None:
            return self._own_jit
        with self._lock, self._tracing():
            if not self._splits and (not self._numbers or hold_modules(args, kwargs)):
                self._splits = True  # from now on: a jit that was made for whole trees takes no parts
                self._jit_options.jitted, self._jit_options.static = None, ()
            if self._splits:
                jitted = build_jit(self._traced_parts, self._jit_options, *self._parts(args, kwargs))
                self._jitted = for_whole_trees(jitted, numbers=self._numbers)
            else:
                self._jitted = build_jit(self._traced_step, self._jit_options, args, kwargs)
                if self._call is not self._jitted.call:
                    self._call = None  # of a jit that does not take what this one does
            return self._jitted

    def _leave_unchecked(self) -> None:
        """A loss is traced that must be compared first: while a call is inspected it is noted, else the call begins again."""
        if not self._inspecting:
            raise _RetraceSignal
        self.unchecked = True

    def _require_accumulable(self, jitted: Jitted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare full and accumulated gradients on a few of these arguments' rows, where microbatches are asked for."""
        if self.policy.microbatches == 1:
            return
        with self._tracing():
            if self._own_jit is None:
                on_host = self.policy.state_offload is not None
                function = fetching(self.__wrapped__) if on_host else self.__wrapped__
                require_accumulable(function, args, kwargs, self._compared_under)
            else:
                # JAX refuses a jit with compiler options inside another trace, which the comparison is.
                function = jitted.lowering.__wrapped__ if self.compiler_options else jitted.lowering
                require_accumulable(function, *jitted.full(args, kwargs), self._compared_under)

    def _compared_under(self, compared: Callable[..., None]) -> AbstractContextManager[None]:
        """A new copy of the step's policy, under which each gradient that is accumulated is handed to ``compared``."""
        active = ActivePolicy(self.policy, gradients=self.gradients)
        active.compared = compared
        return applied(active)

    @functools.cached_property
    def _traced_step(self) -> Callable[..., Any]:
        """The plain step; its body runs only while JAX traces, which is how a new signature is noticed before it runs."""
        train_step = self.__wrapped__

        @functools.wraps(train_step)
        def traced_step(*args: Any, **kwargs: Any) -> Any:
            if not self._inspecting:
                raise _RetraceSignal
            return train_step(*args, **kwargs)

        traced_step.__name__ = self.name  # the name in JAX's compile events; a partial has none to take over
        return traced_step

    @functools.cached_property
    def _traced_parts(self) -> Callable[..., Any]:
        """The same of trees whose modules are split."""
        return of_parts(self._traced_step, numbers=self._numbers)

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments, split."""
        return split((args, kwargs), numbers=self._numbers)

    @contextmanager
    def _tracing(self) -> Generator[None]:
        """Where the step may be traced, under its policy."""
        before, self._inspecting = self._inspecting, True
        try:
            with applied(self._context), without_donation_warning():
                yield
        finally:
            self._inspecting = before

    def _arguments(
        self, jitted: Jitted, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[str, Any]], int]:
        """The call's arguments with their names, and how many of them are positional."""
        taken_args, taken_kwargs = self._parts(args, kwargs) if self._splits else jitted.taken(args, kwargs)
        return named_arguments(jitted.function, taken_args, taken_kwargs), len(taken_args)

    def _undonated(
        self,
        jaxpr: Any,
        arguments: list[tuple[str, Any]],
        leaves: list[Leaf],
        results: Any,
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> tuple[str, ...]:
        """Arguments that are returned updated and not donated; of a jit without a trace only those that another one shows."""
        names = undonated_names(arguments, leaves, results)
        if jaxpr is not None or not names:
            return names
        try:
            return self.traced(*call).undonated
        except Exception:  # noqa: BLE001 - the step compiled: what only advises must not stop it
            return ()

    def _register(self, program: Program) -> None:
        self.latest = program
        if hash(program.signature) in self._known:
            return
        self._known.add(hash(program.signature))
        changed = changes(self._last, program.signature)
        self._last = program.signature
        registry.record(program.compilation(self.name, changed), step=self)

    def _refuse_or_warn(self, program: Program, *, executed: bool) -> None:
        """An explicit donation that is lost is an error while nothing has run; an inferred one is a warning, once.

        So is that of a batch which the user's own jit donates: JAX warns of it and runs.
        """
        if self._own_jit is not None and not executed:
            self._jit_options.check_jitted(self.__wrapped__, program.uses, program.undonated)
        lost = lost_donations(program.uses)
        if not lost:
            return
        message = donation_message(self.__wrapped__, lost)
        is_state = self._own_jit is None or not all(use.passing for use in lost)
        if self._jit_options.explicit(own_jit=self._own_jit is not None) and is_state and not executed:
            raise DonationError(message)
        if not self._warned:
            self._warned = True
            warnings.warn(message, DonationWarning, stacklevel=4)

    def _after_compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """JAX compiled during an ordinary call (another sharding, or a signature new to the user's own jit): record it.

        The call has run already, so a donation that is lost can only be warned of; donated arrays still know their shapes.
        """
        with self._lock:
            try:
                program = self.compile_call(args, dict(kwargs)).program
            except Exception as error:  # noqa: BLE001 - what only reports must not stop a run that works
                unknown = f"unknown, because the arguments could not be read again after the call: {error}"
                registry.record(Compilation(program=self.name, time_s=time.time(), signature=(), unavailable=unknown))
                return
            self._refuse_or_warn(program, executed=True)


def place_state(train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The arguments of a step, the optimizer's state among them moved into host memory.

        step = jm.jit_step(train_step, jm.StepPolicy(state_offload="optimizer"))
        params, opt_state, batch = jm.place_state(step, params, opt_state, batch)

    What is optimizer state is found by what the step does with its arguments. The step keeps it there: call this once, before
    the loop, and after a checkpoint was restored into device memory.

    Args:
        train_step: The step, as it was written or as `jm.jit_step` made it.
        *args: The arguments of a call of it, arrays or `jax.ShapeDtypeStruct`; nothing is run.
        **kwargs: Likewise.

    Returns:
        The arguments in order, then those by keyword, in the order of their names. What is not moved is the same object.

    Raises:
        PolicyError: the step returns no optimizer state updated, or it is inside a framework's object.
        TypeError: no function.
    """
    require_function(train_step, "jm.place_state")
    given = train_step if isinstance(train_step, JitStep) else JitStep(train_step, StepPolicy())
    policy = replace(given.policy, state_offload="optimizer")
    step = given.under(policy, None, None, gradients=given.gradients)
    return tuple(step.placed(args, kwargs).values())
