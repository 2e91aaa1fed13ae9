"""Records, units and names: what passes between rooms says what it means, and refuses what means nothing."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem_callbacks.programs.steps.program import disagreement_words
from jaxmem_callbacks.records import errors
from jaxmem_callbacks.records.errors import JaxmemError, PolicyError, did_you_mean
from jaxmem_callbacks.records.policies import REMAT_SYNONYMS, StepPolicy, canonical_remat
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.units import GIB, MIB, format_bytes, format_extra, parse_bytes


def program(**figures: int) -> ProgramMemory:
    sizes = {"argument_bytes": 100, "output_bytes": 60, "alias_bytes": 50, "temp_bytes": 7}
    return ProgramMemory(name="step", platform="tpu", target="v5e:1x1", **{**sizes, **figures})


def test_a_step_needs_its_buffer_assignment_else_the_larger_of_sum_and_total():
    assert program().step_bytes == 100 + 60 - 50 + 7
    assert program(constant_bytes=3).step_bytes == 100 + 60 - 50 + 7 + 3
    assert program(total_bytes=300).step_bytes == 300
    assert program(total_bytes=99).step_bytes == 117  # a total that leaves out a color of XLA's
    assert program(total_bytes=300, assigned_bytes=99).step_bytes == 99
    assert [each.step_source for each in (program(), program(total_bytes=300), program(assigned_bytes=1))] == [
        "arguments + outputs - aliased + temporaries + constants",
        "the runtime's own total",
        "the compiler's buffer assignment",
    ]


def test_figures_of_one_step_that_differ_by_more_than_a_hundredth_are_explained():
    assert disagreement_words(program(total_bytes=118, assigned_bytes=117)) == ()
    (less,) = disagreement_words(program(total_bytes=99))
    assert less == (
        "step needs 117 B by arguments + outputs - aliased + temporaries + constants, and the runtime's own total is 99 B. It "
        "leaves out memory that XLA keeps apart, as a flag such as xla_gpu_temp_buffer_use_separate_color asks for; the "
        "program asks for 117 B."
    )
    (more,) = disagreement_words(program(assigned_bytes=100))
    assert "constants add up to 117 B. It counts memory that no value is given; the program asks for 100 B." in more


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("72GiB", 72 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("4096 B", 4096),
        ("4096", 4096),
        ("512mib", 512 * MIB),
        ("1kB", 1000),
        ("0", 0),
        (12, 12),
    ],
)
def test_sizes_are_read_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["72 gigs", "GiB", "", "1e3", "-1 B", "1.2.3 B", True, 1.5, None])
def test_what_is_no_size_is_refused_with_one_that_is(text):
    with pytest.raises(ValueError, match=r"Not a size: .*for example '72GiB' or '512MiB'"):
        parse_bytes(text)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"A size is not negative: got -1\. Expected bytes as an int"):
        parse_bytes(-1)


@given(st.integers(min_value=0, max_value=2**60))
def test_a_printed_size_is_the_size_to_one_decimal(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(1, count * 0.051)


def test_unknown_bytes_are_unknown_and_not_zero():
    assert format_bytes(None) == "unknown"
    assert [format_bytes(count) for count in (0, 1536, 102400, 3 * 2**40)] == ["0 B", "1.5 KiB", "100 KiB", "3.0 TiB"]


def test_work_that_is_done_again_never_reads_as_none():
    shares = (0.098, 0.0006, 0.0004, 1e-9, 0, -0.02)
    assert [format_extra(share) for share in shares] == ["+9.8%", "+0.1%", "+<0.1%", "+<0.1%", "+0.0%", "-2.0%"]
    assert [format_extra(share, signed=False) for share in shares[:4]] == ["9.8%", "0.1%", "<0.1%", "<0.1%"]


@given(st.sampled_from([(name, word) for name, words in REMAT_SYNONYMS.items() for word in (name, *words)]))
def test_every_synonym_has_one_canonical_spelling(pair):
    name, word = pair
    assert canonical_remat(f" {word.upper()} ") == name


def test_no_remat_and_saving_everything_are_different_programs():
    words = [word for synonyms in REMAT_SYNONYMS.items() for word in (synonyms[0], *synonyms[1])]
    assert len(words) == len(set(words))
    assert canonical_remat("off") == "none"
    assert canonical_remat("save_all") == "everything_saveable"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ful", "Unknown remat policy 'ful'. Did you mean `full`? Expected one of: none, full, everything_saveable"),
        (7, "Unknown remat policy 7. A policy is given by its name. Expected one of: none, full"),
        (None, "Unknown remat policy None. A policy is given by its name."),
        (jax.checkpoint_policies.dots_saveable, "A policy is given by its name. Expected one of: none, full"),
    ],
)
def test_an_unknown_policy_is_answered_with_the_known_ones(word, message):
    with pytest.raises(PolicyError, match=re.escape(message)):
        canonical_remat(word)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"remat": "full", "save": "context"},
            "save='context' is one text, expected a tuple of names: save=('context',).",
        ),
        ({"remat": "full", "offload": "x"}, "offload='x' is one text"),
        ({"donate": "state"}, "donate='state': expected 'auto', a tuple of argument names such as ('state',), or ()."),
        ({"remat": "full", "segments": 0}, "segments=0: expected a whole number of at least 1, 'blocks'"),
        ({"remat": "full", "segments": True}, "segments=True: expected a whole number"),
        (
            {"segments": 3},
            "so segments, levels, keep, assume_fusion, save and offload would do nothing. Use remat='full'.",
        ),
        ({"save": ("x",)}, "Use remat='full'."),
        ({"assume_fusion": False}, "remat='none' leaves the loss untouched"),
        ({"remat": "full", "assume_fusion": "no"}, "assume_fusion='no': expected true or false"),
        ({"remat": "full", "offload": True}, "offload=True: expected a tuple of names, or ()."),
        ({"remat": "names", "save": 3}, "save=3: expected a tuple of names, or ()."),
        ({"remat": "names", "save": ("a", 3)}, "save=('a', 3): expected a tuple of names, or ()."),
        ({"donate": 0}, "donate=0: expected 'auto', a tuple of argument names such as ('state',), or ()."),
        ({"donate": (0, 1)}, "donate=(0, 1): expected 'auto', a tuple of argument names"),
        ({"remat": "full", "segments": "3"}, "segments='3': expected a whole number of at least 1, 'blocks'"),
        ({"remat": "full", "levels": "2"}, "levels='2': expected 1 or 2."),
        ({"remat": "full", "levels": 2.0}, "levels=2.0: expected 1 or 2."),
        ({"remat": "full", "keep": "half"}, "keep='half': expected a share from 0"),
        ({"remat": "full", "keep": None}, "keep=None: expected a share from 0"),
        ({"microbatches": "4"}, "microbatches='4': expected a whole number of at least 1"),
        ({"microbatches": 2.0}, "microbatches=2.0: expected a whole number of at least 1"),
        ({"remat": "save_names"}, "remat='save_only_these_names' needs the names to keep: save=('context', ...)"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(PolicyError, match=re.escape(message)):
        StepPolicy(**options)


def test_a_policy_is_frozen_and_canonical():
    policy = StepPolicy(remat="dots", save=["a"], donate=["state"])
    assert (policy.remat, policy.save, policy.donate) == ("dots_saveable", ("a",), ("state",))
    assert policy.changes_gradients
    assert not StepPolicy().changes_gradients
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.remat = "none"


def test_every_error_is_the_librarys_and_of_a_kind_that_python_knows():
    own = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, JaxmemError)]
    assert len(own) >= 8
    assert all(value is JaxmemError or issubclass(value, (ValueError, RuntimeError)) for value in own)


def test_a_hint_is_given_only_for_what_is_near():
    assert did_you_mean("remta", ["remat", "donate"]) == " Did you mean `remat`?"
    assert did_you_mean("xyz", ["remat", "donate"]) == ""
