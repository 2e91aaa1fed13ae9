"""Texts of failures that really happen here: of a CPU under a limit of its address space, and of a TPU's compiler."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from tests import forked
from tests.target_step import GIB, needs_compiler, shape

pytestmark = pytest.mark.core
ROOT = Path(__file__).resolve().parent.parent
WANTED = 2**31
# The backend and its threads take their address space before the limit is set.
LIMITED = f"""
import json, resource, sys
import jax, jax.numpy as jnp, numpy as np
import jaxmem_callbacks as jm

x = jnp.ones((256, 256))
(x @ x).block_until_ready()
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 600 * 2**20,) * 2)
told = {{}}
def with_jax(): return jnp.zeros(({WANTED} // 4,), jnp.float32).block_until_ready()
for name, make in (("jax", with_jax), ("numpy", lambda: np.ones({WANTED}, np.int8))):
    try:
        make()
    except Exception as error:
        facts = jm.parse_oom(error)
        told[name] = [str(error), facts and [facts.phase, facts.platform, facts.requested_bytes]]
print(json.dumps(told), flush=True)
with_jax()
"""


def test_a_cpu_under_a_limit_and_the_log_of_its_end(tmp_path, capsys):
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = forked.run([sys.executable, "-c", LIMITED], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["jax"][1] == ["run", "cpu", WANTED], told
    assert told["numpy"][1] == [None, "host", WANTED], told
    log = tmp_path / "train.log"
    log.write_text(done.stderr)
    assert main(["oom", str(log)]) == 0
    out = capsys.readouterr().out
    assert "asked for 2.0 GiB on the CPU" in out
    assert f"Out of memory allocating {WANTED} bytes" in out


@pytest.mark.slow
def test_a_tpus_compiler_that_refuses_a_program():
    needs_compiler("v5e")

    def step(x):
        big = jnp.sin(x)[:, None] * jnp.cos(x)[None, :]  # 40 GiB that nothing fuses away
        return big @ jnp.sort(big, axis=0)

    for function, args, at_least in (
        (step, (shape(102_400),), 39 * GIB),
        (lambda x: x + 1, (shape(5 * GIB),), 5 * GIB),
    ):
        result = compile_for_target(function, args, target="v5e", donate_argnums=())
        assert result.refusal is not None
        facts = jm.parse_oom(result.refusal)
        assert facts is not None
        assert (facts.phase, facts.platform) == ("compile", "tpu")
        assert facts.limit_bytes is not None
        assert 14 * GIB < facts.limit_bytes <= 16 * GIB
        needed = facts.used_bytes or facts.requested_bytes
        assert needed is not None
        assert needed >= at_least
        # What is read for plans and what is read of texts is one.
        assert (result.needed_bytes, result.limit_bytes) == (needed, facts.limit_bytes)
