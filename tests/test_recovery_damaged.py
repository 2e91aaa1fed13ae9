"""Damaged checkpoints: the newest whole one is found, and what was passed over is said; a save that fails ends no run."""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.errors import RecoveryError, RecoveryWarning

pytestmark = pytest.mark.core


def loss(params, x):
    return (jnp.tanh(x @ params["w"]) ** 2).mean()


def train_step(params, x):
    value, grads = jm.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}


def state(number: float):
    return {"w": jnp.full((4, 4), number)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    recovery = jm.Recovery(train_step, checkpoints=folder)
    for step in (1, 2, 3):
        assert recovery.save_before_oom(step, state(step)) == folder / "saved" / str(step)
    return folder


@pytest.fixture
def recovery(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "kept")
    return jm.Recovery(train_step, checkpoints=tmp_path / "kept"), tmp_path / "kept" / "saved"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def cut(folder: Path) -> None:
    """Every file ends in its middle, as on a disk that was full."""
    for path in files_of(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(folder: Path) -> None:
    for path in files_of(folder):
        path.write_bytes(b"")


def overwritten(folder: Path) -> None:
    for path in files_of(folder):
        path.write_bytes(b"\xff\x00[" * 20)


def another_json(folder: Path) -> None:
    for path in files_of(folder):
        path.write_text('{"policy": [1], "state": 5, "save": "x"}')


def a_list(folder: Path) -> None:
    for path in files_of(folder):
        path.write_text("[1, 2]")


DAMAGE = {each.__name__: each for each in (cut, emptied, overwritten)}


@pytest.mark.parametrize("damage", [*DAMAGE.values(), another_json, a_list], ids=lambda each: each.__name__)
def test_a_damaged_note_of_an_old_one_hides_no_other(damage, recovery):
    run, folder = recovery
    damage(folder / "1" / "jaxmem")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step, found = run.restore(state(0))
    assert (step, float(found["w"][0, 0])) == (3, 3.0)
    assert run.latest == 3


NO_NOTES = ("", "{", "null", "[]", "3", "\0\0\0", "[" * 100_000, '{"form": 1}', '{"form": NaN}')
OTHER_VALUES = (None, True, 3, -1, 10**400, "x", "\x1b[31m", [], {}, [[[[1]]]], float("nan"), [3], {"a": {"b": 1}})


def mutated(note):
    """The note with each of its values, two levels deep, as something else."""
    paths = [(key,) for key in note] + [
        (key, inner) for key in note if isinstance(note[key], dict) for inner in note[key]
    ]
    for path, value in itertools.product(paths, OTHER_VALUES):
        changed = json.loads(json.dumps(note))
        functools.reduce(operator.getitem, path[:-1], changed)[path[-1]] = value
        yield path, json.dumps(changed)


def restored_or_told(run):
    """The step that comes back, what was said of it, and why none did."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return run.restore(state(0))[0], "".join(str(each.message) for each in said), ""
        except RecoveryError as error:
            return None, "", str(error)


def test_no_change_to_the_newest_note_restores_an_older_one_silently(recovery):
    run, folder = recovery
    path = folder / "3" / "jaxmem" / "metadata"
    note = json.loads(path.read_text())
    tried = [((), text) for text in NO_NOTES] + list(mutated(note))[::3]
    tried += [change for change in mutated(note) if change[0] == ("save",)]
    for where, text in tried:
        path.write_text(text)
        step, said, refused = restored_or_told(run)
        assert step == 3 or "step 3" in refused, (where, text[:60])
        assert "\x1b" not in said + refused
        if where in ((), ("save",)) and not (where and json.loads(text)["save"] in (3, 10**400)):
            assert "of step 3 was written under other conditions" in said, (where, text[:60])


@pytest.mark.parametrize("lost", ["metadata", "."])
def test_a_missing_note_of_the_newest_is_said_and_its_step_restored(lost, recovery):
    run, folder = recovery
    gone = folder / "3" / "jaxmem" / lost
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    step, said, _ = restored_or_told(run)
    assert (step, run.latest) == (3, 3)
    assert "policy, plan, mesh and versions are unknown" in said


def test_one_that_was_saved_after_a_return_stays_the_newest_beside_a_higher_one_without_a_note(recovery):
    run, folder = recovery
    run.restore(state(0), step=1)
    run.save_before_oom(2, state(22))
    cut(folder / "3" / "jaxmem")
    step, said, _ = restored_or_told(run)
    assert (step, run.latest) == (2, 2)
    assert re.search(r"The note of step 3 in .* cannot be read; by the clock it is older than step 2", said)


def test_without_notes_and_clocks_the_highest_step_is_the_newest(recovery):
    run, folder = recovery
    for step in (1, 2, 3):
        cut(folder / str(step) / "jaxmem")
        (folder / str(step) / "_CHECKPOINT_METADATA").write_text("{")
    assert restored_or_told(run)[0] == 3


@pytest.mark.parametrize("snapshots", ["host", "orbax"])
@pytest.mark.parametrize(
    "make",
    [lambda: jnp.arange(6.0).reshape(2, 3), lambda: jax.random.key(7), lambda: 3],
    ids=["array", "key", "number"],
)
def test_a_state_that_is_one_bare_array_comes_back_as_it_was(make, snapshots, tmp_path, capfd):
    preset = jm.load_preset("recover", recovery={"snapshots": snapshots})
    run = jm.Recovery(lambda s, x: (s, {"loss": x}), preset, checkpoints=tmp_path)
    after, _ = run.step(0, make(), jnp.float32(1))
    assert run.save_before_oom(1, after) == tmp_path / "saved" / "1"
    step, back = run.restore(make())
    assert step == 1
    assert type(back) is type(after)
    assert (back.dtype, back.shape, back.sharding) == (after.dtype, after.shape, after.sharding)
    assert jnp.array_equal(*(jax.random.key_data(each) if "key" in str(each.dtype) else each for each in (back, after)))
    assert "could not be saved" not in capfd.readouterr().err


@pytest.mark.parametrize("damage", [*DAMAGE.values(), shutil.rmtree], ids=lambda each: each.__name__)
def test_damaged_arrays_of_the_newest_are_passed_over_and_named(damage, recovery):
    run, folder = recovery
    damage(folder / "3" / "state")
    with pytest.warns(
        RecoveryWarning, match=r"step 3 in .* cannot be read: \w+.* Step 2, the newest one before it that is whole"
    ):
        step, found = run.restore(state(0))
    assert (step, float(found["w"][0, 0])) == (2, 2.0)
    with pytest.raises(RecoveryError, match=r"The checkpoint of step 3 in .* cannot be read"):
        run.restore(state(0), step=3)


def test_arrays_that_are_whole_beside_a_damaged_note_are_restored_with_a_warning(recovery):
    run, folder = recovery
    for step in (1, 2, 3):
        cut(folder / str(step) / "jaxmem")
    with pytest.warns(
        RecoveryWarning, match=r"its note cannot be read \(.*\), so policy, plan, mesh and versions are unknown"
    ):
        step, found = run.restore(state(0))
    assert (step, float(found["w"][0, 0])) == (3, 3.0)


def test_where_none_is_whole_each_is_named(recovery):
    run, folder = recovery
    for step in (1, 2, 3):
        emptied(folder / str(step) / "state")
    with pytest.raises(RecoveryError, match=r"step 3 in .*step 2 in .*step 1 in .*No other one is whole\."):
        run.restore(state(0))


def test_a_save_that_fails_is_reported_once_and_ends_no_run(tmp_path, capfd):
    (tmp_path / "file").write_text("no folder")
    run = jm.Recovery(train_step, checkpoints=tmp_path / "file" / "kept")
    assert [run.save_before_oom(step, state(step)) for step in (1, 2)] == [None, None]
    said = capfd.readouterr().err
    assert said.count("could not be saved") == 1
    assert "recovery: the state before step 1 could not be saved: NotADirectoryError" in said
    with pytest.raises(RecoveryError, match="saving needs a folder, and Recovery has none"):
        jm.Recovery(train_step).save_before_oom(1, state(1))
