"""Keras: `Model.fit` trains a small decoder."""

import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

from benchmarks.gallery import outcome

keras.utils.set_random_seed(0)
LAYERS, WIDTH, LENGTH, VOCABULARY = 4, 128, 128, 512


def block(x):
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
    y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    return x + keras.layers.Dense(WIDTH)(y)


tokens = keras.Input((LENGTH,), dtype="int32")
x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
for _ in range(LAYERS):
    x = block(x)
model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))
model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rows = np.random.default_rng(0).integers(0, VOCABULARY, (64, LENGTH + 1))

losses = []
callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))]
for monitor in outcome.hooks():
    from jaxmem_callbacks.integrations.keras import MemoryCallback

    callbacks.append(MemoryCallback(monitor))
model.fit(rows[:, :-1], rows[:, 1:], batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
outcome.keep(losses, [weight.numpy() for weight in model.weights])
