"""dm-haiku: the transformer example of its published sources."""

import logging
import random
import re
import tempfile

from absl import flags
from examples.transformer import train

from benchmarks.gallery import outcome

train.MAX_STEPS, train.LOG_EVERY, train.BATCH_SIZE = 4, 1, 8  # a row for each of eight devices
with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as text:
    text.write("the quick brown fox jumps over the lazy dog. " * 200)
flags.FLAGS(["train", f"--dataset_path={text.name}"])
random.seed(0)  # the example shuffles by it

losses, hooks = [], outcome.hooks()


class Kept(logging.Handler):
    """The example logs each step's loss."""

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"'loss': ([\d.e+-]+)", record.getMessage())
        if found:
            losses.append(float(found[1]))
            for hook in hooks:
                hook(len(losses) - 1)


logger = logging.getLogger("absl")
logger.addHandler(Kept())
logger.setLevel(logging.INFO)
train.main(None)
outcome.keep(losses)
