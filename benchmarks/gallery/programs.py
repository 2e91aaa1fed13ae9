"""The list of programs. It was fixed before the first was tried: none is taken out or exchanged for another one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"


class Line(NamedTuple):
    """A JAX line, with an environment of its own.

    Attributes:
        python: Minor version.
        packages: What is installed with this project.
        sources: Packages whose published sources carry examples, which an installed package has not.
    """

    python: str
    packages: tuple[str, ...]
    sources: tuple[str, ...] = ()


# The training packages together, in the newest versions that agree on a JAX.
_NEWEST = (
    *("jax>=0.12,<0.13", "maxtext", "google-tunix", "keras-hub", "kauldron", "brax", "dm-haiku", "equinox", "flowjax"),
    *("rejax", "tensorflow-cpu"),
    # What MaxText imports, and names among the requirements of its extra for CUDA alone.
    *("aqtp", "cloud-tpu-diagnostics", "drjax", "einshape", "fire", "gcsfs", "google-cloud-mldiagnostics"),
    *("google-cloud-storage-control", "math-verify", "ml-goodput-measurement", "pathwaysutils", "pyglove", "seqio"),
    *("tiktoken", "tokamax", "xprof"),
)
LINES: dict[str, Line] = {
    "0.12": Line("3.12", _NEWEST, ("dm-haiku==0.0.17", "flax==0.12.12")),
    # One version: of its hundreds of nightly ones pip would try all before it gives up.
    "0.11": Line("3.12", ("marin-levanter==0.2.227.dev40316220070",)),
}


class Program(NamedTuple):
    """A program, in the file of its name in `SCRIPTS`.

    Attributes:
        origin: Where the training loop comes from: a package, whose trainer is called as it is; else what it was written after.
        line: The JAX line that it runs on.
        packaged: Whether the training comes unedited from a package registry. The file then only calls it, on small settings.
        devices: How many devices it trains on.
        examples: The folder of a package's published sources that its file imports from; edited where printed lines name it.
    """

    origin: str
    line: str = "0.12"
    packaged: bool = True
    devices: int = 1
    examples: str = ""


PROGRAMS: dict[str, Program] = {
    "maxtext_pretrain": Program("maxtext: trainers.pre_train.train"),
    "maxtext_sft": Program("maxtext: trainers.post_train.sft.train_sft, on Tunix"),
    "tunix_peft": Program("google-tunix: sft.peft_trainer.PeftTrainer"),
    "tunix_grpo": Program("google-tunix: rl.grpo.grpo_learner.GRPOLearner"),
    "keras_fit": Program("keras: Model.fit"),
    "keras_hub_fit": Program("keras-hub: GPT2CausalLM.fit"),
    "levanter_lm": Program("marin-levanter: trainer.Trainer", line="0.11"),
    "kauldron_train": Program("kauldron: kd.train.Trainer"),
    "brax_ppo": Program("brax: training.agents.ppo.train"),
    "haiku_transformer": Program("dm-haiku: examples/transformer/train.py of its sources", examples="dm_haiku-0.0.17"),
    "flax_lm1b": Program("flax: examples/lm1b/train.py of its sources", examples="flax-0.12.12/examples/lm1b"),
    "flowjax_fit": Program("flowjax (Equinox): train.fit_to_data"),
    "rejax_ppo": Program("rejax: PPO.train, all of it in one scan"),
    "equinox_mlp": Program("Equinox's documented loop", packaged=False),
    "ppo_scan": Program("PureJaxRL: PPO in one scan", packaged=False),
    "dit": Program("DiT: a diffusion transformer", packaged=False),
    "easylm": Program("EasyLM: LLaMA over a mesh of 8 devices", packaged=False, devices=8),
    "nanodo": Program("nanodo: a decoder-only transformer and its loop", packaged=False),
    "gan": Program("Flax's DCGAN: two steps in turn", packaged=False),
}
