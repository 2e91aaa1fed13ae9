"""The models that automatic remat is judged on, each as its users write it, beside the remat they would write by hand.

A family is one file with one factory, whose arguments are sizes: the defaults are for compilers of absent hardware, the
tests take tiny ones. `FAMILIES` maps a short name, for command lines, to the factory.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.plan_models.case import PlanCase as PlanCase
from benchmarks.plan_models.dropout_transformer import dropout_transformer
from benchmarks.plan_models.encoder_decoder import encoder_decoder
from benchmarks.plan_models.equinox_transformer import equinox_transformer
from benchmarks.plan_models.linen_transformer import linen_transformer
from benchmarks.plan_models.lstm import lstm
from benchmarks.plan_models.mixer import mixer
from benchmarks.plan_models.mixture import mixture
from benchmarks.plan_models.nnx_transformer import nnx_transformer
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
    )
}
