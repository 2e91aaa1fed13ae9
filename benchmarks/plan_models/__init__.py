"""The models that automatic remat is judged on, each as its users write it, beside the remat they would write by hand.

A family is one file with one factory, whose arguments are sizes: the defaults are for compilers of absent hardware, the
tests take tiny ones. `FAMILIES` maps a short name, for command lines, to the factory.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.plan_models.big_vision_vit import big_vision_vit
from benchmarks.plan_models.case import PlanCase as PlanCase
from benchmarks.plan_models.dit import dit
from benchmarks.plan_models.dropout_transformer import dropout_transformer
from benchmarks.plan_models.encoder_decoder import encoder_decoder
from benchmarks.plan_models.equinox_transformer import equinox_transformer
from benchmarks.plan_models.equinox_vit import equinox_vit
from benchmarks.plan_models.gpt import gpt_50k_words, gpt_131k_words, gpt_512_words
from benchmarks.plan_models.haiku_transformer import haiku_transformer
from benchmarks.plan_models.linen_transformer import linen_transformer
from benchmarks.plan_models.lm1b import lm1b
from benchmarks.plan_models.lstm import lstm
from benchmarks.plan_models.maxtext_decoder import maxtext_decoder
from benchmarks.plan_models.mixer import mixer
from benchmarks.plan_models.mixture import mixture
from benchmarks.plan_models.nanodo import nanodo
from benchmarks.plan_models.nnx_transformer import nnx_transformer
from benchmarks.plan_models.ppo import ppo
from benchmarks.plan_models.resnet import resnet
from benchmarks.plan_models.unet import unet
from benchmarks.plan_models.vit import vit

FAMILIES: dict[str, Callable[..., PlanCase]] = {
    factory.__name__: factory
    for factory in (
        linen_transformer,
        nnx_transformer,
        dropout_transformer,
        mixture,
        vit,
        resnet,
        unet,
        lstm,
        equinox_transformer,
        mixer,
        encoder_decoder,
        nanodo,
        lm1b,
        gpt_512_words,
        gpt_50k_words,
        gpt_131k_words,
        maxtext_decoder,
        big_vision_vit,
        dit,
        ppo,
        haiku_transformer,
        equinox_vit,
    )
}
