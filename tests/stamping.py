"""What the monitor's hook does with its sampler, for tests of the sampler alone."""

from __future__ import annotations

import time


def stamp(sampler, step, metrics=None):
    now = time.time()
    sampler.ring.append((step + 1, step, now))
    if now >= sampler.due.next_s:
        sampler.sample(step + 1, step, now, metrics)
