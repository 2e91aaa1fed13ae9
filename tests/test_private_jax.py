"""Each touch of JAX that is not documented still finds what it knows, by name: with a new JAX the one that breaks fails here.

Without it the package goes on by a public fallback, or without an answer, so that other tests may stay green.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem_callbacks._compat import (
    arrays,
    checkpoints,
    coordination,
    executables,
    exported,
    gradient_calls,
    jit_settings,
    remat3,
    trace_state,
)

COMPAT, ROOT = Path(arrays.__file__).parent, Path(__file__).resolve().parent.parent
X = jnp.ones((8, 4))
OPTIONS = {"xla_embed_ir_in_executable": True}


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def _bridge(name: str) -> bool:
    from jax._src import xla_bridge

    return hasattr(xla_bridge, name)


def _traced_under_a_checkpoint() -> bool:
    found: list[bool] = []

    def seen(x: jax.Array) -> jax.Array:
        found.append(checkpoints.inside_checkpoint())
        return x

    jax.make_jaxpr(jax.checkpoint(seen))(X)
    return found[-1]


def _client_of_processes() -> bool:
    from jax._src import distributed

    return hasattr(distributed.global_state, "client")


def _texts_of_processes() -> bool:
    from jax._src.lib import _jax

    names = (coordination._SET, coordination._LIST, coordination._DELETE)
    return all(hasattr(_jax.DistributedRuntimeClient, name) for name in names)


def _live() -> object:
    compiled = jax.jit(double).lower(X).compile()
    return compiled if executables._live() else None


def _of_live(answer: Callable[[object], object]) -> bool:
    compiled = _live()
    return compiled is not None and answer(executables._live()[0]) is not None


def _fields_of_exported() -> bool:
    program = jax.export.export(jax.jit(double))(X)
    return all(isinstance(getattr(program, name, None), tuple) for name in exported._FIELDS)


def _vjp() -> bool:
    return gradient_calls._seeing(gradient_calls._module_of_gradients().get(gradient_calls._NAME)) is not None


def _options_of_a_jit() -> bool:
    return jit_settings.compiler_options_of(jax.jit(double, compiler_options=OPTIONS)) == OPTIONS


def _shardings_of_a_trace() -> bool:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jit_settings.in_shardings_of(jax.jit(double, in_shardings=place).trace(X), 1) == (place,)


def _has_newer_checkpoints() -> bool:
    return hasattr(jax.config, remat3._NAME)


def _params_of_a_newer_checkpoint() -> bool:
    with remat3._flag(True):
        jaxpr = jax.make_jaxpr(jax.checkpoint(jnp.sin))(X)
    return any(remat3.held_params(eqn) for eqn in jaxpr.eqns)


TOUCHES: dict[str, Callable[[], bool]] = {
    "arrays: Array.clone, Array._arrays": lambda: arrays._cloned(X) is not None,
    "arrays: Array.traceback": lambda: arrays.creation_site(jnp.asarray(np.ones(3))) != arrays.NO_TRACEBACK,
    "backends: xla_bridge.backends_are_initialized": lambda: _bridge("backends_are_initialized"),
    "backends: xla_bridge._plugins_registered": lambda: _bridge("_plugins_registered"),
    "checkpoints: core.trace_ctx": _traced_under_a_checkpoint,
    "checkpoints: closures of jax.checkpoint": lambda: checkpoints.is_checkpointed(jax.checkpoint(double)),
    "coordination: distributed.global_state.client": _client_of_processes,
    "coordination: key_value_set, key_value_dir_get, key_value_delete": _texts_of_processes,
    "executables: Client.live_executables": lambda: _live() is not None,
    "executables: LoadedExecutable.fingerprint": lambda: _of_live(executables._fingerprint),
    "executables: get_compiled_memory_stats": lambda: _of_live(executables._statistics),
    "executables: hlo_modules": lambda: _live() is not None and bool(executables.programs_here()),
    "exported: Exported._in_named_shardings, _out_named_shardings": _fields_of_exported,
    "gradient_calls: vjp, and the frame of value_and_grad": _vjp,
    "jit_settings: _jit_info.compiler_options_kvs": _options_of_a_jit,
    "jit_settings: _jit_info": lambda: jit_settings.with_compiler_options(jax.jit(double), OPTIONS) is not None,
    "jit_settings: Traced._params": _shardings_of_a_trace,
    "remat3: config.remat3": lambda: remat3._flag is not None or not _has_newer_checkpoints(),
    "remat3: parameters of an equation": lambda: not _has_newer_checkpoints() or _params_of_a_newer_checkpoint(),
    "trace_state: core.trace_state_clean": lambda: trace_state._TRACES_NOTHING is not None,
}


@pytest.mark.core
@pytest.mark.parametrize("touch", TOUCHES)
def test_what_is_private_is_as_it_is_known(touch: str):
    assert TOUCHES[touch](), f"this JAX has another form of {touch}"


def test_every_file_that_touches_private_jax_is_asked():
    files = {path.stem for path in COMPAT.glob("*.py")} - {"__init__"}
    assert {touch.partition(":")[0] for touch in TOUCHES} == files


def test_a_touch_that_breaks_is_named():
    code = """
        import json
        from jax._src import distributed
        from tests.test_private_jax import TOUCHES

        del distributed.State.client  # as a new JAX may have it
        print(json.dumps([touch for touch, is_known in TOUCHES.items() if not is_known()]))
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["coordination: distributed.global_state.client"]
