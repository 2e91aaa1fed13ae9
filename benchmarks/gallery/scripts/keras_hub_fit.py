"""KerasHub: `GPT2CausalLM.fit`, from scratch, on tokens."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import keras_hub
import numpy as np

from benchmarks.gallery import outcome

keras.utils.set_random_seed(0)
LENGTH, VOCABULARY = 128, 512
backbone = keras_hub.models.GPT2Backbone(
    vocabulary_size=VOCABULARY,
    num_layers=4,
    num_heads=4,
    hidden_dim=128,
    intermediate_dim=512,
    max_sequence_length=LENGTH,
)
model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rows = np.random.default_rng(0).integers(0, VOCABULARY, (64, LENGTH + 1))
inputs = {"token_ids": rows[:, :-1], "padding_mask": np.ones((64, LENGTH), "int32")}

losses = []
callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))]
for monitor in outcome.hooks():
    from jaxmem_callbacks.integrations.keras import MemoryCallback

    callbacks.append(MemoryCallback(monitor))
model.fit(inputs, rows[:, 1:], batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
outcome.keep(losses, [weight.numpy() for weight in model.weights])
