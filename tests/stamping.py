"""What the monitor's hook does with its sampler, for tests of the sampler alone."""

from __future__ import annotations

import time


def stamp(sampler, step, metrics=None):
    now = time.time()
    sampler.ring.append((step + 1, step, now))
    if now >= sampler.due_s[0]:
        sampler.attend(step + 1, step, now, metrics)
