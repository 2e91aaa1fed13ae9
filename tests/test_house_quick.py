"""`make quick` holds what it promises: which tests start processes is seen in their code, and refused where it was not seen."""

from __future__ import annotations

import subprocess
from pathlib import Path
from subprocess import run as start
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import quick, sample_runs
from tests.test_recovery_limit import runs

pytest_plugins = ["pytester"]


def starts_one():
    subprocess.run(["true"], check=True)


def starts_one_by_another_name():
    start(["true"], check=True)


def starts_one_inside_another_function():
    return [lambda number: [number, starts_one_by_another_name()]]


def starts_one_of_another_file():
    return runs(None, ())


@pytest.fixture
def a_process():
    return starts_one()


@pytest.mark.parametrize("kind", ["a", "b"])
@given(st.integers())
def starts_one_for_each_example(kind, number):
    return TABLE[kind](number)


class Starting:
    def go(self):
        starts_one()


def starts_one_in_a_method():
    Starting().go()


def starts_none(number):
    return sample_runs, number, "subprocess"


TABLE = {"a": starts_none, "b": starts_one_of_another_file}


def item(function, *fixtures, marks=(), names=()):
    """What quick.is_quick looks at in a collected test."""
    found = {each.__name__: [SimpleNamespace(func=each)] for each in fixtures}
    return SimpleNamespace(
        obj=function,
        fixturenames=[*found, *names],
        get_closest_marker=lambda name: name if name in marks else None,
        _fixtureinfo=SimpleNamespace(name2fixturedefs=found),
    )


@pytest.mark.parametrize(
    "function",
    [
        starts_one,
        starts_one_by_another_name,
        starts_one_inside_another_function,
        starts_one_of_another_file,
        starts_one_for_each_example,
        starts_one_in_a_method,
    ],
)
def test_a_test_that_starts_a_process_is_not_quick(function):
    assert not quick.is_quick(item(function))


def test_a_test_is_as_quick_as_its_fixtures_and_its_marks():
    assert quick.is_quick(item(starts_none, starts_none))
    assert not quick.is_quick(item(starts_none, a_process))
    assert not quick.is_quick(item(starts_none, names=["pytester"]))
    for mark in ("slow", "targets", "browser", "adapters"):
        assert not quick.is_quick(item(starts_none, marks=[mark]))


def test_a_quick_test_that_starts_a_process_or_takes_long_fails_with_what_to_write(pytester):
    pytester.makeconftest("from tests.conftest import *\nfrom tests import quick\nquick.MOST_S = 0.5")
    pytester.makepyfile(
        """
        import os, time, pytest

        def test_a_shell():
            os.posix_spawn("/bin/true", ["true"], {})

        @pytest.mark.slow
        def test_a_marked_shell():
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

        def test_a_loop():
            end = time.process_time() + 0.6
            while time.process_time() < end:
                pass
        """
    )
    ran = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-m", "quick", "-o", "markers=quick\nslow\noptimised")
    ran.assert_outcomes(passed=1, failed=1, errors=1, deselected=1)
    ran.stdout.fnmatch_lines(
        [
            "*Quick tests of test_*.py took 0.* s of the processor, expected at most 0.5. Mark those that take long *",
            "*A quick test started a process (os.posix_spawn: '/bin/true'). Mark it by @pytest.mark.slow.",
        ]
    )


def test_the_slow_files_are_there():
    assert not [name for name in quick.slow_files() if not Path(__file__).with_name(name).exists()]
