"""flowjax: `fit_to_data` trains an Equinox flow."""

import flowjax.train.loops
import jax
import jax.numpy as jnp
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data

from benchmarks.gallery import outcome

for monitor in outcome.hooks():
    flowjax.train.loops.step = monitor.wrap(flowjax.train.loops.step)
x = jax.random.normal(jax.random.key(0), (1024, 8))
flow = masked_autoregressive_flow(
    jax.random.key(1), base_dist=Normal(jnp.zeros(8)), flow_layers=4, nn_width=64, nn_depth=2
)
flow, losses = fit_to_data(jax.random.key(2), flow, x, max_epochs=3, batch_size=256, show_progress=False)
outcome.keep(losses["train"], flow)
