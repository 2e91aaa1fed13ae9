"""What to type where a user's script failed in a way that JAX's own words do not explain."""

from __future__ import annotations

from jaxmem_callbacks.programs.targets.exporting import NO_CUDNN, asks_for_cudnn

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


def advice(error: Exception) -> str:
    """Why it failed here and what to do, as sentences without the last full stop; empty where that is not known."""
    if asks_for_cudnn(error):
        why, instead = NO_CUDNN
        return f"{why}. {instead.removesuffix('.')}"
    return next((f"{why}. {instead}" for words, (why, instead) in _ELSEWHERE.items() if words in str(error)), "")
