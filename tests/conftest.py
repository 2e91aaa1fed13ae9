"""Eight virtual CPU devices, set the way that overwrites nothing of the environment; the backend starts after this file."""

import gc
import logging
import os
import signal
import sys
import time

import jax
import pytest
from jaxlib import xla_client

from tests import quick
from tests.processes import EMITTED_QUICKLY, UNOPTIMISED

os.environ.pop("COLUMNS", None)  # pytest's own word for its workers: what is printed here is as wide as in a file
# Containers often set it. Each of some hundred processes that tests start would compile the package's sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.update(UNOPTIMISED)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(20_000, 10, 10)  # traces make many objects, and each collection goes through JAX's own as well
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # see quick_compiles


def read_flags_of_xla():
    """XLA reads its flags once, here: what tests see of the environment, and give to processes that they start, is the user's."""
    given = os.environ.get("XLA_FLAGS", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{given} {EMITTED_QUICKLY['XLA_FLAGS']}")
        xla_client.CompileOptions()


read_flags_of_xla()


@pytest.fixture(scope="session", autouse=True)
def compiles_of_this_run(tmp_path_factory):
    """Compiles for absent hardware are kept for this run only: the user's cache is neither read nor filled."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # of all processes of this run
    os.environ["JAXMEM_CACHE_DIR"] = str(shared / "compiles")


@pytest.fixture(autouse=True)
def quick_compiles(request):
    """Machine code is not optimised: what is computed and kept is decided before, and compiles are most of the suite's time."""
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimised") is None)
    yield
    jax.config.update("jax_disable_most_optimizations", True)  # for what the next file makes before its first test


@pytest.fixture(autouse=True)
def logging_as_found():
    """A script that sets logging up, as absl's app does, sets it up for its own test only."""
    level, handlers = logging.root.level, [*logging.root.handlers]
    yield
    logging.root.setLevel(level)
    for each in logging.root.handlers[:]:
        if each not in handlers:
            logging.root.removeHandler(each)


@pytest.fixture(autouse=True)
def recorded_answers(request, monkeypatch):
    """What the planner makes of compilers' answers is tested on those in tests/answers/: see tests/recorded.py."""
    if request.node.get_closest_marker("recorded"):
        from tests.recorded import answers_of

        answers_of(request.path.stem).stand_in(monkeypatch)


@pytest.fixture(scope="module")
def browser():
    """A browser window for a file's tests; skips them where there is none."""
    from tests.browser import Browser, require

    require()
    with Browser() as window:
        yield window


@pytest.fixture(scope="module", autouse=True)
def nothing_of_earlier_files():
    """What earlier files left in cycles is gone, arrays among it; what they keep is not gone through by each collection."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Files that wait for compilers of absent hardware come first, then the slow ones: no process is left alone with one."""
    slow = quick.slow_files()
    for item in items:
        if item.path.name in slow:
            item.add_marker(pytest.mark.slow)
        if quick.is_quick(item):
            item.add_marker(pytest.mark.quick)
    targets = {item.path for item in items if item.get_closest_marker("targets")}
    items.sort(key=lambda item: (item.path not in targets, -slow.get(item.path.name, 0)))


running = {"quick": False, "since": 0.0}
seconds_of = {}  # of each file's quick tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    running.update(quick=item.get_closest_marker("quick") is not None, since=time.process_time())
    try:
        return (yield)
    finally:
        running["quick"] = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """Quick tests of a file take a few seconds of the processor."""
    yield
    if running["quick"]:
        spent = seconds_of[item.path] = seconds_of.get(item.path, 0.0) + time.process_time() - running["since"]
        if spent > quick.MOST_S and item.config.option.markexpr == "quick":  # other runs are made on slow machines, too
            pytest.fail(
                f"Quick tests of {item.path.name} took {spent:.1f} s of the processor, expected at most {quick.MOST_S:g}."
                " Mark those that take long by @pytest.mark.slow, or name the file in tests/slow_files.txt."
            )


def refuse_processes(event, arguments):
    if running["quick"] and event in quick.STARTED:
        pytest.fail(f"A quick test started a process ({event}: {arguments[0]!r}). Mark it by @pytest.mark.slow.")


sys.addaudithook(refuse_processes)


def pytest_terminal_summary(terminalreporter):
    """A compiler or browser that is missing is told at the end, one line each: what a run did not prove is never silent."""
    reasons = {str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    for line in sorted(reason.removeprefix("Skipped: ") for reason in reasons if "not proved" in reason):
        terminalreporter.write_line(line, yellow=True)
