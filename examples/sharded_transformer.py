"""The Linen transformer's own model and step, sharded: a mesh, a preset with `fsdp` and jm.infer_shardings were added.

Without an accelerator it makes eight virtual CPU devices, so that it runs anywhere:
python examples/sharded_transformer.py --steps 50 --presets donate fsdp full_remat --mesh data=2,fsdp=4
"""

from __future__ import annotations

import argparse

import jax
import linen_transformer
import numpy as np
import optax
import text
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem_callbacks as jm


def new_state(rows: np.ndarray) -> TrainState:
    model = linen_transformer.Transformer()
    params = model.init(jax.random.key(0), rows[:1, :-1], train=False)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def held(state: TrainState) -> str:
    """Bytes of the state on one device, and of the whole."""
    device = jax.local_devices()[0]
    shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == device]
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return f"{sum(s.data.nbytes for s in shards) / 2**20:.1f} of {whole / 2**20:.1f} MiB"


def main() -> TrainState:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--logdir", default="runs/sharded")
    parser.add_argument("--presets", nargs="+", default=["donate", "fsdp", "full_remat"])
    parser.add_argument("--mesh", default="data=2,fsdp=-1")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # asks nothing of GPUs and TPUs

    train, _ = text.standard_library()
    rows = text.sequences(train, count=args.steps * 16, length=64)
    preset = jm.load_preset(*args.presets)
    mesh = jm.make_mesh(args.mesh)
    split = NamedSharding(mesh, PartitionSpec(tuple(name for name in mesh.axis_names if name != "tensor")))
    with jax.set_mesh(mesh):
        # Born where it belongs: no device ever holds the whole state.
        shapes = jax.eval_shape(new_state, rows)
        state = jax.jit(new_state, out_shardings=jm.infer_shardings(shapes, mesh, preset))(rows)
        print(f"mesh {dict(mesh.shape)}, the state takes {held(state)} on each device")

        step = jm.jit_step(linen_transformer.train_step, preset)
        with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
            for i, batch in enumerate(text.batches(rows, 16)):
                state, metrics = step(state, jax.device_put(batch, split))
                monitor(i, metrics)
                if i % 10 == 0 or i == args.steps - 1:
                    print(f"step {i:4d}  loss {metrics['loss']:.3f}  next byte right {metrics['accuracy']:.1%}")
    print(f"after {args.steps} steps it takes {held(state)} on each device")
    return state


if __name__ == "__main__":
    main()
