"""Orbax: checkpoints of a state and a note, written and read. Complete when a call returns.

Arrays that Orbax restores can be in memory that XLA does not own: a step that donates them then copies, and holds two. They
are copied once here, so that the first step after a restore needs what it needed before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxmem_callbacks.recovery.snapshots import own_copy

_STATE, _NOTE, _ONE = "state", "jaxmem", "array"


def checkpoints_in(folder: Path, *, keep: int | None = None, alone: bool = False) -> OrbaxCheckpoints:
    """The checkpoints of a folder; see `transforms.frameworks.checkpoints_in`."""
    return OrbaxCheckpoints(folder, keep=keep, alone=alone)


@final
class OrbaxCheckpoints:
    """An Orbax `CheckpointManager` with two items a step: ``state``, and ``jaxmem``, a note in JSON.

    Args:
        folder: Made where it is missing.
        keep: The number of newest ones that stay; None for all.
        alone: Written by this process without the others of the run.
    """

    def __init__(self, folder: Path, *, keep: int | None = None, alone: bool = False) -> None:
        self._folder = folder.absolute()
        own = jax.process_index()
        processes = ocp.options.MultiprocessingOptions(
            primary_host=own if alone else 0,
            active_processes={own} if alone else None,
            barrier_sync_key_prefix="jaxmem_alone" if alone else None,
        )
        if alone:  # Orbax makes no folder where not every process takes part
            self._folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=not alone,
                enable_async_checkpointing=False,
                multiprocessing_options=processes,
            ),
            item_handlers={  # left to themselves they let process 0 write, also where it takes no part
                _STATE: ocp.StandardCheckpointHandler(multiprocessing_options=processes),
                _NOTE: ocp.JsonCheckpointHandler(multiprocessing_options=processes),
            },
        )

    def save(self, step: int, state: Any, note: Mapping[str, Any]) -> Path:
        """Write one; a step that is there already is written again."""
        if step in self._manager.all_steps():
            self._manager.delete(step)
        items = {
            _STATE: ocp.args.StandardSave(jax.tree.map(_plain, _in_tree(state))),
            _NOTE: ocp.args.JsonSave(dict(note)),
        }
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._manager.wait_until_finished()
        return self._folder / str(step)

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete ones, in order."""
        return tuple(sorted(self._manager.all_steps()))

    def note(self, step: int) -> dict[str, Any]:
        """What stands beside one; empty for a checkpoint that has no note."""
        if not (self._folder / str(step) / _NOTE).exists():
            return {}
        return self._manager.restore(step, args=ocp.args.Composite(**{_NOTE: ocp.args.JsonRestore()}))[_NOTE]

    def restore(self, step: int, like: Any) -> Any:
        """The state of one, its arrays placed as those of ``like``, in memory that XLA owns."""
        tree = _in_tree(like)
        arguments = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(jax.tree.map(_abstract, tree))})
        found = jax.tree.map(_as_wanted, self._manager.restore(step, args=arguments)[_STATE], tree)
        return found if tree is like else found[_ONE]

    def written(self, step: int) -> int | None:
        """When one was begun, by the clock of then; what Orbax notes of it is in a file of its own."""
        try:
            return self._manager.metadata(step).init_timestamp_nsecs
        except Exception:  # noqa: BLE001 - Orbax raises what it likes of a file that was cut
            return None


def _in_tree(state: Any) -> Any:
    """The state itself, or in a tree of one where it is a bare array, which Orbax does not write."""
    return {_ONE: state} if jax.tree_util.treedef_is_leaf(jax.tree.structure(state)) else state


def _plain(leaf: Any) -> Any:
    """Random keys as their integers, since Orbax writes typed ones only where all processes take part; numbers as arrays."""
    if isinstance(leaf, (bool, int, float)):
        return np.asarray(leaf, jax.dtypes.result_type(leaf))
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, (bool, int, float)):
        leaf = jax.ShapeDtypeStruct((), jax.dtypes.result_type(leaf))
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)


def _as_wanted(leaf: Any, like: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(leaf, impl=_kind_of_key(like))
    return own_copy(leaf, like)


def _kind_of_key(like: Any) -> Any:
    """The generator of a key, also of one that is a shape: only a trace has that of both."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
