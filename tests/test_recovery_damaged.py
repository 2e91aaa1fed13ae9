"""Damaged checkpoints: the newest whole one is found, and what was passed over is said; a save that fails ends no run."""

from __future__ import annotations

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
