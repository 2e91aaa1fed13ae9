"""`make demo`: train a byte-level transformer with presets, and show what they save, what happened and where to look.

    python examples/demo.py [--steps 300] [--logdir runs/demo]

Leaves: a table of the plain step against the preset's, a run in TensorBoard, its events in words.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import text
from flax import nnx
from nnx_transformer import Transformer, loss_fn, train_step
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.memory import step_flops
from jaxmem_callbacks.records.units import format_bytes
from jaxmem_callbacks.writers.events import event_title

HERE = Path(__file__).resolve().parent
WIDTH, LAYERS, LENGTH, BATCH = 128, 12, 256, 4
COMPARED = 4  # steps that are run twice, plain and with the preset
JUDGED = 16  # held-out batches
FEWEST, MOST, TRAINING_S = 120, 300, 75  # so many steps as fit into the time, within these bounds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way to make the step, its compiler's account, and a few steps of it."""

    memory: jm.StepMemory
    flops: int
    losses: Sequence[float]
    step_s: float


def plain_step(model: Transformer, optimizer: nnx.Optimizer, batch: jax.Array) -> dict[str, jax.Array]:
    """The same step under a name of its own, so that the monitor keeps the two programs apart."""
    return train_step(model, optimizer, batch)


def make_model() -> tuple[Transformer, nnx.Optimizer]:
    model = Transformer(width=WIDTH, layers=LAYERS, length=LENGTH, dropout=0.1, rngs=nnx.Rngs(0))
    model.train()
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def measure(step: Callable[..., Any], batches: Sequence[np.ndarray]) -> Measured:
    """Compile once, then run a few steps on a fresh model; the first one is not timed."""
    model, optimizer = make_model()
    memory = jm.step_memory(step, model, optimizer, batches[0])
    flops = step_flops(step, model, optimizer, batches[0]).flops
    losses = [float(step(model, optimizer, batches[0])["loss"])]
    start = time.perf_counter()
    losses += [float(step(model, optimizer, batch)["loss"]) for batch in batches[1:]]
    step_s = (time.perf_counter() - start) / (len(batches) - 1)
    return Measured(memory=memory, flops=flops, losses=losses, step_s=step_s)


def comparison(plain: Measured, preset: Measured, name: str) -> Table:
    """Before and after, row by row."""
    table = Table(
        title="One training step, before and after", title_justify="left", title_style="bold", box=SIMPLE_HEAD
    )
    table.add_column("")
    for heading in ("plain step", name, "change"):
        table.add_column(heading, justify="right")
    for row in ("arguments", "outputs", "aliased", "temporaries", "total"):
        before, after = bytes_of(plain.memory, row), bytes_of(preset.memory, row)
        change = f"{before / after:.1f} times less" if after and row in ("temporaries", "total") else ""
        change = "results reuse arguments" if row == "aliased" else change
        style = "bold" if row == "total" else None
        table.add_row(row, format_bytes(before), format_bytes(after), change, style=style, end_section=row == "total")
    extra = preset.flops - plain.flops
    table.add_row("FLOPs", giga(plain.flops), giga(preset.flops), "")
    table.add_row("extra FLOPs", "none", giga(extra), f"{extra / plain.flops:+.0%}, recomputed")
    table.add_row("time", f"{plain.step_s:.2f} s", f"{preset.step_s:.2f} s", "")
    return table


def bytes_of(memory: jm.StepMemory, row: str) -> int:
    fields = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp", "total": "step"}
    return getattr(memory, f"{fields[row]}_bytes")


def giga(flops: int) -> str:
    return f"{flops / 1e9:.1f} G"


@nnx.jit
def evaluate(model: Transformer, batch: jax.Array) -> jax.Array:
    return loss_fn(model, batch)


def held_out_loss(model: Transformer, rows: np.ndarray) -> float:
    """Mean loss in nats a byte, with dropout off."""
    model.eval()
    loss = np.mean([float(evaluate(model, batch)) for batch in text.batches(rows, 2 * BATCH)])
    model.train()
    return float(loss)


def train(step: Callable[..., Any], rows: np.ndarray, monitor: jm.MemoryMonitor, console: Console) -> Transformer:
    """One epoch; the last batch is shorter, as it is in most data loaders."""
    model, optimizer = make_model()
    count = math.ceil(len(rows) / BATCH)
    columns = (
        TextColumn("  training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=count)
        for i, batch in enumerate(text.batches(rows, BATCH)):
            metrics = step(model, optimizer, batch)
            monitor(i, metrics)
            loss = float(metrics["loss"])  # waits for the step; a real run would look at the loss of the step before
            progress.update(task, advance=1, description=f"loss {loss:.3f}")
            if i % max(1, count // 10) == 0 or i == count - 1:
                live = monitor.sample(i).get("memory/live_arrays_gib", math.nan) * 1024
                progress.console.print(f"  step {i:4d}   loss {loss:6.3f}   live arrays {live:6.1f} MiB")
    return model


def describe(console: Console, preset: jm.Preset, train_text: np.ndarray, held_out: np.ndarray) -> None:
    model, _ = make_model()
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    console.print(f"[bold]jaxmem_callbacks {jm.__version__} on jax {jax.__version__}[/], {jax.devices()[0]}\n")
    console.print(f"model    transformer in Flax NNX, {size / 1e6:.1f} million parameters, {LAYERS} scanned layers")
    console.print(f"batch    {BATCH} sequences of {LENGTH} bytes; Optax AdamW, dropout 0.1")
    sizes = f"{len(train_text) / 1e6:.1f} MB, and {len(held_out) / 1e6:.1f} MB held out"
    console.print(f"text     source files of Python's standard library: {sizes}")
    limit = format_bytes(preset.monitor.limit_bytes)
    console.print(f"preset   {preset.name}; its device has {limit}\n")


def list_events(console: Console, monitor: jm.MemoryMonitor) -> None:
    console.print(f"\n[bold]Events of the run: {len(monitor.events)}[/]")
    for event in monitor.events:
        console.print(f"\n  [bold yellow]{event_title(event.kind)}[/] at step {event.step}")
        for paragraph, style in ((event.message, ""), (f"To do: {event.action}", "dim")):
            filled = textwrap.fill(paragraph, console.width - 2, initial_indent="  ", subsequent_indent="  ")
            console.print(filled, style=style, markup=False, highlight=False)


def tensorboard_line(logdir: Path) -> str:
    """What to type, with the tensorboard of this environment where there is one."""
    program = Path(sys.executable).parent / "tensorboard"
    known = str(near(program)) if program.exists() else "pip install tensorboard && tensorboard"
    return f"{known} --logdir {near(logdir)}"


def near(path: Path) -> Path:
    """The path from the working folder, where it is inside."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def clear(logdir: Path) -> None:
    """One event file a run: the files of the demo's run before go."""
    for path in (*logdir.glob("events.out.tfevents.*"), *logdir.glob("memory*.jsonl")):
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: as many as fit into about a minute, 120 to 300")
    parser.add_argument("--logdir", type=Path, default=HERE.parent / "runs" / "demo")
    args = parser.parse_args()
    console = Console()
    console = console if console.width <= 100 else Console(width=100)  # noqa: PLR2004 - columns that read well

    clear(args.logdir)
    preset = jm.load_preset("donate", "full_remat", HERE / "demo.yaml")
    train_text, held_out = text.standard_library()
    describe(console, preset, train_text, held_out)
    few = list(text.batches(text.sequences(train_text, COMPARED * BATCH, LENGTH), BATCH))
    judged = text.sequences(held_out, JUDGED * BATCH, LENGTH)
    plain, step = jm.jit_step(plain_step, jm.load_preset("monitor_only")), jm.jit_step(train_step, preset)

    with jm.MemoryMonitor(preset, logdir=args.logdir) as monitor:
        with console.status("compiling the step twice: plain, and with the preset"):
            before, after = measure(plain, few), measure(step, few)
        console.print(comparison(before, after, "donate+full_remat"))
        console.print(
            f"Bytes: by the compiler. FLOPs: counted in the trace. Time: mean of {COMPARED - 1} steps.", style="dim"
        )
        apart = max(abs(a / b - 1) for a, b in zip(before.losses, after.losses, strict=True))
        console.print(
            f"Same mathematics: losses of {COMPARED} steps of each differ by at most {apart:.0e}, relative.\n"
        )

        steps = args.steps or min(MOST, max(FEWEST, round(TRAINING_S / after.step_s)))
        rows = text.sequences(train_text, steps * BATCH - BATCH // 2, LENGTH, seed=1)
        first = held_out_loss(make_model()[0], judged)
        console.print(f"[bold]Training {steps} steps[/]; the last batch has {BATCH // 2} sequences instead of {BATCH}")
        model = train(step, rows, monitor, console)
        last = held_out_loss(model, judged)
    console.print(f"\n[bold]Held-out loss {first:.3f} -> {last:.3f}[/] nats a byte")
    list_events(console, monitor)
    console.print("\n[bold]See it in TensorBoard.[/] Type this, and open the tab [bold]Memory[/]:\n")
    console.print(f"    {tensorboard_line(args.logdir)}\n", style="bold green", highlight=False, soft_wrap=True)
    console.print("The tab shows memory over time, the events, and what makes each program's peak.")
    console.print("The tabs Time Series (memory/) and Text (memory/events) show parts of it.\n")


if __name__ == "__main__":
    main()
