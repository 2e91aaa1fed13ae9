"""A user's script: its train step, found inside the first call of it."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.machinery
import linecache
import os
import pathlib
import re
import shlex
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxmem_callbacks.cli.exit_codes import OK, Leaving, code_of
from jaxmem_callbacks.cli.source import Source, as_module, is_unedited, source_of, source_text, syntax_of
from jaxmem_callbacks.cli.trace_log import TraceLog
from jaxmem_callbacks.cli.typed import named
from jaxmem_callbacks.cli.undisturbed import InMain, Streams, opened, own_streams, undisturbed
from jaxmem_callbacks.programs.steps.registry import first_calls_seen_by
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.arrays import ArrayCensus
from jaxmem_callbacks.records.errors import ScriptError, did_you_mean
from jaxmem_callbacks.records.terminal import flush, is_quiet, put

if TYPE_CHECKING:
    from jaxmem_callbacks.cli.live_arrays import Copy
    from jaxmem_callbacks.planning.interrupts import Interruption


_JITS, _OWN_JITS = {"jit", "filter_jit", "pjit"}, {"jit_step"}
_GRADIENTS = {"grad", "value_and_grad", "filter_grad", "filter_value_and_grad"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def other_steps(script: pathlib.Path, step: str) -> str:
    """Which other steps a script has, and how to name one; empty where there is none, or the script cannot be read.

    A step is a function that takes a gradient in its own lines, is jitted by a decorator or by its name, and is not called by
    another one. In a script that makes a step of this library only such steps are found by their names.
    """
    names = dict.fromkeys(each.name for each in steps_written_in(script) if each.name != step)
    if not names:
        return ""
    others = " or ".join(advise("option.typed", option="step", value=name) for name in names)
    return f"{step} is the first step that {script.name} calls. Another one by its name: {others}."


def steps_written_in(script: pathlib.Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The definitions of a script's steps, by their lines, without those that another one calls."""
    tree = syntax_of(script)
    if tree is None:
        return []
    jits = _JITS | _OWN_JITS if is_unedited(script) else _OWN_JITS
    jitted = {name for call in _calls(tree) if _names(call.func) & jits for name in _first_name(call)}
    steps = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        and (node.name in jitted or any(_names(each) & jits for each in node.decorator_list))
        and any(_names(call.func) & _GRADIENTS for call in _own_calls(node))
    ]
    inner = {name for node in steps for call in _own_calls(node) for name in _names(call.func)}
    return sorted((node for node in steps if node.name not in inner), key=lambda node: node.lineno)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def _own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """Calls in a function's own lines: those of functions inside it are made when these are called."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _own_calls(node)


def _first_name(call: ast.Call) -> set[str]:
    """The name of the function that a call is given first, through a `functools.partial` too."""
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Call) and "partial" in _names(given.func):
        return _first_name(given)
    return _names(given) if isinstance(given, ast.Name | ast.Attribute) else set()


def _names(node: ast.AST) -> set[str]:
    """The last name of a piece of code such as ``jax.jit``; of a decorator such as ``partial(jax.jit, ...)`` those in it too."""
    if isinstance(node, ast.Call):
        return {name for each in (node.func, *node.args) for name in _names(each)}
    name = getattr(node, "attr", getattr(node, "id", None))
    return {name} if isinstance(name, str) else set()


_NAMED = advise("option.typed", option="step", value="NAME")

_BY_NAME = (
    "Put what makes the step into a function that returns (train_step, args), of which shapes without shardings will do, and all "
    "else under `if __name__ == '__main__':`"
)
# Words of an error -> why a script has it that runs elsewhere, and what to do here.
_ELSEWHERE = {
    "coordinator_address should be defined": (
        "jax.distributed.initialize() found no cluster here, and a plan needs none",
        f"{_BY_NAME}, and name it behind the script: SCRIPT.py:function",
    ),
    "must be >= the product of mesh_shape": (
        "its mesh has more devices than are here, and a plan needs none of them",
        f"{_BY_NAME}, and name it behind the script: SCRIPT.py:function. Devices and axes are the options --target and --mesh",
    ),
}

_OF_A_POOL = re.compile(r"_\d+$")  # how `concurrent.futures` ends the names of its threads


def add_script_arguments(parser: argparse.ArgumentParser, *, other: str = "") -> None:
    """``SCRIPT``, ``-m`` and ``--args``, of every command that reaches a script's step; to be added last.

    Args:
        parser: The command's.
        other: What may stand in the script's place, or an empty text.
    """
    parser.add_argument(
        "--step",
        metavar="NAME",
        help="the step's name, in a script with several; else the first jm.jit_step step that it calls, or where it "
        "does not use this library the first jitted function that takes a gradient",
    )
    parser.add_argument(
        "script",
        nargs="?",
        type=named,
        metavar="SCRIPT",
        help="your training script or notebook, which needs no edit, run up to the first call of its step; or SCRIPT.py:name, "
        "where name() returns (train_step, args)" + other,
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="instead of SCRIPT: a module, as python -m runs it; or MODULE:name"
    )
    parser.add_argument(
        "--args",
        dest="script_args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARG",
        help="the script's own arguments: all that follows; a bare -- means the same",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What a script was about to run.

    Attributes:
        step: What `jm.jit_step` returned, or the step that ``SCRIPT.py:name`` gave.
        args: The arguments of its first call.
        kwargs: The keyword arguments.
        when: When that was, in words.
        alive: Arrays that were alive then and are no arguments; None where JAX does not start.
        copies: Of the arrays that were alive, second copies of arguments.
        others: Which other steps the script has, and how to name one; empty where the step was named, or is the only one.
    """

    step: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    when: str
    alive: ArrayCensus | None
    copies: Sequence[Copy] = ()
    others: str = ""


Work: TypeAlias = Callable[[Reached], Callable[[], int]]


class ScriptFailedError(Exception):
    """The script raised something of its own, which has been shown; nothing of it is this library's.

    Attributes:
        wants_arguments: Whether it may have ended for want of its own arguments.
    """

    def __init__(self, message: str, *, wants_arguments: bool = False) -> None:
        super().__init__(message)
        self.wants_arguments = wants_arguments


class _StopScript(BaseException):
    """Ends the script at its first step. No Exception, so that the script's own handlers let it pass."""


def at_step(  # noqa: PLR0913 - what was typed, and what is done with it
    script: str,
    work: Work,
    argv: Sequence[str] = (),
    *,
    command: str = "inspect",
    step: str | None = None,
    seen: TraceLog | None = None,
    script_to_stderr: bool = False,
) -> int:
    """Run a script up to its first step, or call the function that it names, do some work there, and end the script.

    Args:
        script: ``train.py``, run as ``__main__``, or ``train.py:name``, imported, where ``name()`` returns
            ``(train_step, args)``.
        work: What to do with the step. It runs inside the call that the script makes, in its thread, while all its contexts
            and settings hold. What it raises is raised here, and the script sees nothing of it. It returns a
            function that prints its result, which is called at once, and which signals do not interrupt.
        argv: The script's own arguments.
        command: What ``jaxmem`` was asked for.
        step: The step's name; None for the first that is announced.
        seen: What `as_written` sees, for the message of a script without a step.
        script_to_stderr: Whether what the script prints goes to standard error.

    Returns:
        The exit code.

    Raises:
        ScriptError: no such file or name, or the script ends without calling a step; the message has the line to add.
        ScriptFailedError: the script itself failed; its traceback is on stderr.
    """
    source = source_of(script, command)
    path, name = source.path, source.function
    with (
        own_streams(script_to_stderr=script_to_stderr) as streams,
        _explained(path, f"{command} {script}", argv),
        _as_python_runs(source, argv) as module,
        _late_settings_reported(path, command),
        InMain() as in_main,
    ):
        if name is None:
            first = _FirstStep(
                path.absolute(), work, named=step, seen=seen or TraceLog(), streams=streams, in_main=in_main
            )
            return _run(path, module, first)
        reached = _ask(path, module, name)
        with undisturbed(streams, in_main) as interruption:
            _require_jit(reached)
            return _print(work(reached), streams, interruption)


def show_start(script: str) -> None:
    """Show on a terminal what is done first, which may take minutes. To be called before JAX is imported."""
    if sys.stderr.isatty() and not is_quiet():
        put(f"jaxmem: running {script} up to the first call of its step\n", sys.stderr)
        sys.stderr.flush()


def reach_step(
    script: str, argv: Sequence[str] = (), *, step: str | None = None, seen: TraceLog | None = None
) -> Reached:
    """The step that a script reaches and its arguments, where the script's contexts do not matter; see `at_step`."""
    found: list[Reached] = []

    def keep(reached: Reached) -> Callable[[], int]:
        found.append(reached)
        return lambda: OK

    at_step(script, keep, argv, step=step, seen=seen)
    return found[0]


def require_program(program: str) -> None:
    """Refuse a ``--beside`` that names no file or no function, before anything is run.

    Raises:
        ScriptError: with what to type.
    """
    path, name = _split(program)
    typed = "--beside " + program
    if name is None:
        msg = (
            f"{typed}: expected a file and the function in it that returns (function, args), such as "
            f"{path.stem or 'train'}.py:make_eval. Without arguments it gives, for example, eval_step, (state, batch)."
        )
        raise ScriptError(msg)
    if not path.is_file():
        like = advise("option.typed", option="beside", value=f"train.py:{name}")
        msg = f"{typed}: there is no file {path}. Expected one as in: {like}."
        raise ScriptError(msg)


def reach_program(program: str, argv: Sequence[str] = ()) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``FILE.py:name`` gives: a program that runs beside the step, and its arguments.

    Args:
        program: Where ``name()`` returns ``(function, args)``; the file is imported.
        argv: The script's own arguments.

    Raises:
        ScriptError, ScriptFailedError: as `reach_step`.
    """
    require_program(program)
    reached = reach_step(program, argv)
    return reached.step, reached.args


def _split(script: str) -> tuple[pathlib.Path, str | None]:
    file, colon, name = script.rpartition(":")
    return (pathlib.Path(file), name) if colon and name.isidentifier() else (pathlib.Path(script), None)


@contextlib.contextmanager
def _explained(path: pathlib.Path, typed: str, argv: Sequence[str]) -> Generator[None]:
    """Explain how a script is run that may have ended for want of its arguments, or of the package around it."""
    try:
        yield
    except ScriptFailedError as error:
        cause = error.__cause__
        module = as_module(path, cause, _last_line(cause)) if isinstance(cause, ImportError) else None
        if module is not None:
            name, folder = module
            what, own = typed.partition(" ")[0], f" -- {shlex.join(argv)}" if argv else ""
            line = (
                advise("script.module", command=what, module=name + own)
                if folder == pathlib.Path.cwd()
                else advise("script.module_elsewhere", folder=shlex.quote(str(folder)), command=what, module=name + own)
            )
            why = f"It imports as a module of a package does, and is run like one:\n    {line}"
        elif error.wants_arguments:
            given = f"It was given: {shlex.join(argv)}." if argv else "It was given no arguments of its own."
            why = f"{given} Its arguments follow a bare --, as in: {advise('script.arguments', typed=typed)}"
        else:
            raise
        msg = f"{error} {why}"
        raise ScriptFailedError(msg) from cause


@contextlib.contextmanager
def _as_python_runs(source: Source, argv: Sequence[str]) -> Generator[types.ModuleType]:
    """``sys`` as ``python SCRIPT`` or ``python -m MODULE`` sets it. The module stays alive: the step's globals are in it."""
    path = source.path
    name = "__main__" if source.function is None else source.module or path.stem
    module = types.ModuleType(name)
    module.__file__ = str(path)
    if source.module is not None:
        module.__package__ = source.module.rpartition(".")[0]
        module.__spec__ = importlib.machinery.ModuleSpec(source.module, None, origin=str(path))
    if path.suffix == ".ipynb":
        vars(module)["display"] = print  # which IPython has without an import
    before = (sys.argv, list(sys.path), sys.modules.get(name))
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(path.resolve().parent if source.module is None else pathlib.Path.cwd()))
    sys.modules[name] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules[name] = before[2]


@contextlib.contextmanager
def _late_settings_reported(path: pathlib.Path, command: str) -> Generator[None]:
    """Report the settings that a script makes too late here: JAX reads them when it is imported, which is before the script."""

    def settings() -> set[tuple[str, str]]:
        return {(name, value) for name, value in os.environ.items() if name.startswith("JAX_")}

    before = settings()
    try:
        yield
    finally:
        _report_late(sorted(settings() - before), path, command)


def _report_late(made: Sequence[tuple[str, str]], path: pathlib.Path, command: str) -> None:
    if made:
        typed = " ".join(f"{name}={shlex.quote(value)}" for name, value in made)
        put(
            f"jaxmem: {path} sets {', '.join(name for name, _ in made)}, which JAX reads when it is imported, and here that was "
            f"before the script. What follows is without it. Type: {typed} jaxmem {command} {path}\n",
            sys.stderr,
        )


class _FirstStep:
    """Sees the calls of a script's steps: does the work inside the first, and ends the script at each.

    Args:
        script: Its file, wherever the script goes.
        work: What is to be done.
        named: The name of the step; None for any.
        seen: Records what was passed by.
        streams: Of the command.
        in_main: Has the main thread do something.

    Attributes:
        code: The work's exit code.
        error: What the work raised.
        others: Names of steps that were passed by.
        runs: Whether the main thread is in the script.
    """

    def __init__(  # noqa: PLR0913 - what was typed, and where it runs
        self,
        script: pathlib.Path,
        work: Work,
        *,
        named: str | None,
        seen: TraceLog,
        streams: Streams,
        in_main: InMain,
    ) -> None:
        self.named, self.seen = named, seen
        self.code: int | None = None
        self.error: BaseException | None = None
        self.others: dict[str, None] = {}
        self.runs = False
        self._script, self._work, self._streams, self._in_main = script, work, streams, in_main
        self._at_work = (
            threading.RLock()
        )  # a step that another thread calls meanwhile waits, and is ended like this one
        self._is_working = False
        self._leaving: Leaving | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the step was reached: what the script does from then on is for want of the step's result."""
        return self._is_working or self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the work is done."""
        return self.code is not None or self.error is not None

    def outcome(self) -> int:
        """The exit code; what the work raised is raised."""
        if self.error is not None:
            raise self.error
        assert self.code is not None
        return self.code

    def wait(self) -> None:
        """Until the work is done that another thread does."""
        with self._at_work:
            if self._leaving is not None:
                self._leaving.cancel()

    def __call__(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step's first call."""
        with self._at_work:
            if self._is_working:  # a trace of the step may call other ones
                return
            if self.named is not None and step.name != self.named:
                self.seen.pass_by(step.name, self.named)
                self.others[step.name] = None
                return
            if not self.is_over:
                self._do(step, args, kwargs)
        if threading.current_thread() is not threading.main_thread():
            _end_threads_silently()
            self._in_main(self._end)  # which may wait for what this thread will never give
        raise _StopScript

    def _do(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from jaxmem_callbacks.cli.live_arrays import alive_beside, copies_of_arguments

        self._is_working, signals = True, None
        try:
            if self.seen.refused is not None:
                raise self.seen.refused  # noqa: TRY301 - reported as what the work raises
            with undisturbed(self._streams, self._in_main) as interruption:
                signals = interruption.late
                others = other_steps(self._script, step.name) if self.named is None else ""
                alive, when = alive_beside(args, kwargs), "when the script called it"
                copies = copies_of_arguments(step, args, kwargs, alive)
                reached = Reached(
                    step=step, args=args, kwargs=kwargs, when=when, alive=alive, copies=copies, others=others
                )
                _require_jit(reached)
                self.code = _print(self._work(reached), self._streams, interruption)
        except BaseException as error:  # noqa: BLE001 - the script's own handlers are not to see it
            self.error = error
        finally:
            self._is_working = False
            self._leaving = Leaving(lambda: code_of(self.outcome), signals)

    def _end(self) -> None:
        if self.runs:
            self.runs = False
            raise _StopScript


def _print(result: Callable[[], int], streams: Streams, interruption: Interruption) -> int:
    """Print the result of the work, which is done."""
    interruption.work_is_done()
    with contextlib.redirect_stdout(streams.answer):
        code = result()
        flush()
    return code


def _require_jit(reached: Reached) -> None:
    """Refuse a step under `jax.pmap`.

    Raises:
        ScriptError: with what to write.
    """
    from jaxmem_callbacks.cli.jit_hook import refuse_pmapped  # which imports JAX

    refuse_pmapped(reached.step, reached.args, reached.kwargs)


def _run(path: pathlib.Path, module: types.ModuleType, first: _FirstStep) -> int:
    """The script until its step. A script that swallows even the stop is let go on, and stopped at each step."""
    ended: SystemExit | ScriptFailedError | None = None
    with first_calls_seen_by(first):
        try:
            first.runs = True
            try:
                _execute(path, module, is_over=lambda: first.has_begun)
            except (SystemExit, ScriptFailedError) as error:
                ended = error
            _wait_for_threads()
            first.runs = False
        except _StopScript:
            first.runs = False
        first.wait()
    if first.is_over:
        return first.outcome()
    if isinstance(ended, ScriptFailedError):
        raise ended
    if ended is not None and ended.code not in (None, 0):
        words = f"with exit code {ended.code}" if isinstance(ended.code, int) else f"with the words {ended.code!s}"
        msg = f"{path} ended by itself {words}, before its first step."
        raise ScriptFailedError(msg, wants_arguments=True) from ended
    raise ScriptError(_no_step(path, first.named, list(first.others | first.seen.jitted), first.seen))


def _wait_for_threads() -> None:
    """Wait for the script's threads, as Python does at a script's end. Those of pools wait for work that does not come."""
    for thread in threading.enumerate():
        is_own = thread in (threading.main_thread(), threading.current_thread())
        if not (is_own or thread.daemon or _OF_A_POOL.search(thread.name)):
            thread.join()


def _no_step(path: pathlib.Path, named: str | None, called: Sequence[str], seen: TraceLog) -> str:
    """What a script did instead of calling a step, and what to type."""
    others = f" Jitted functions that it called: {', '.join(called)}." if called else ""
    if named is not None:
        return f"{path} ran to its end and never called a step named {named!r}.{did_you_mean(named, called)}{others}"
    written = [each for each in steps_written_in(path) if each.name not in called]
    if written:
        steps = ", ".join(f"{each.name} (line {each.lineno})" for each in written)
        return (
            f"{path} ran to its end and never called its step: {steps}.{others} Let it call it once, or add a function "
            f"that returns it with its arguments, arrays or jax.ShapeDtypeStruct, and type {path}:make in place of {path}:\n"
            f"    {advise('script.maker', step=written[0].name)}"
        )
    if seen.without_effect:
        return (
            f"{path} ran to its end and trained nothing: no result of {' and '.join(seen.without_effect)} depends on "
            "the gradient taken there, and JAX leaves out what no result needs. Return the parameters and the optimizer's state "
            "that are updated. What changes in a Flax NNX module stays changed under @nnx.jit; under @jax.jit return the "
            "module too."
        )
    if seen.outside:
        return (
            f"{path} ran to its end and took its gradient outside of jit, at {seen.outside}.{others} Put the gradient and the "
            f"update of the parameters into one function, and jit that{f'; or name one of these: {_NAMED}' if called else ''}."
        )
    if is_unedited(path):
        return (
            f"{path} ran to its end and never called a jitted function that takes a gradient.{others} Jit the whole step"
            f"{f', or name one of these functions: {_NAMED}' if called else ''}."
        )
    return f"{path} ran to its end and never called a step of jm.jit_step. Is the step of its loop made by it?"


def _end_threads_silently() -> None:
    """A step that is called in a thread ends that thread, perhaps after the script, and Python would show how."""
    before = threading.excepthook
    if getattr(before, "is_silent", False):
        return

    def hook(raised: threading.ExceptHookArgs) -> None:
        if not issubclass(raised.exc_type, _StopScript):
            before(raised)

    vars(hook)["is_silent"] = True
    threading.excepthook = hook


def _ask(path: pathlib.Path, module: types.ModuleType, name: str) -> Reached:
    from jaxmem_callbacks.cli.live_arrays import alive_beside

    _execute(path, module)
    maker = getattr(module, name, None)
    if not callable(maker):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        msg = (
            f"{path} has no function {name!r}.{did_you_mean(name, names)} It has: {', '.join(sorted(names)) or 'none'}."
        )
        raise ScriptError(msg)
    with _own_traceback(path):
        made = maker()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):  # noqa: PLR2004 - a pair
        expected = "Expected a function and its arguments: (train_step, (state, batch, ...))."
        msg = f"{path}:{name}() returned {type(made).__name__}. {expected}"
        raise ScriptError(msg)
    args = tuple(made[1])
    return Reached(step=made[0], args=args, kwargs={}, when=f"when {name}() returned it", alive=alive_beside(args, {}))


def _execute(path: pathlib.Path, module: types.ModuleType, is_over: Callable[[], bool] = lambda: False) -> None:
    with _own_traceback(path, is_over):
        if module.__package__:
            importlib.import_module(module.__package__)
        text = source_text(path)
        if path.suffix == ".ipynb":  # so that tracebacks show the cells' lines
            lines = text.decode().splitlines(keepends=True)
            linecache.cache[str(path)] = (len(text), None, lines, str(path))
        else:
            linecache.cache.pop(str(path), None)  # of another file at this place, as where the working folder changed
        code = compile(text, str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - running the user's script is what was asked for


@contextlib.contextmanager
def _own_traceback(path: pathlib.Path, is_over: Callable[[], bool] = lambda: False) -> Generator[None]:
    """Show a failure as Python would: the script's own frames, none of this library's before them.

    Args:
        path: The script.
        is_over: Whether its step was reached: what fails then fails for want of the step's result.
    """
    try:
        yield
    except Exception as error:
        if is_over():
            return
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename != str(path):
            place = place.tb_next
        shown_to = opened(sys.stderr, 2)
        traceback.print_exception(
            error.with_traceback(place), file=shown_to
        )  # none of the script's, such as where it does not parse
        why = _hint(error) or ("its own alarm went off" if _is_of_alarm(error) else "")
        msg = f"{path} failed before its first step{f': {why}. Its' if why else '; its'} own traceback is above."
        raise ScriptFailedError(msg, wants_arguments="argv" in _last_line(error)) from error


def _hint(error: Exception) -> str:
    """Why a script failed here and what to do, as sentences without the last full stop; empty where that is not known."""
    from jaxmem_callbacks.programs.targets.exporting import NO_CUDNN, asks_for_cudnn  # which imports JAX

    if asks_for_cudnn(error):
        why, instead = NO_CUDNN
        return f"{why}. {instead.removesuffix('.')}"
    return next((f"{why}. {instead}" for words, (why, instead) in _ELSEWHERE.items() if words in str(error)), "")


def _is_of_alarm(error: Exception) -> bool:
    """Whether the script's handler of its timers raised it."""
    code = getattr(signal.getsignal(signal.SIGALRM), "__code__", None)
    return code is not None and any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def _last_line(error: BaseException) -> str:
    """The line of code that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""
