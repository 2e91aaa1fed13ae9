"""``jaxmem simulate TRACE``: the allocator settings under which a run would have survived, by its trace of allocations."""

from __future__ import annotations

import argparse

from jaxmem_callbacks.api.simulation import device_bytes_of, simulate_ways, size_of, trace_of
from jaxmem_callbacks.cli.exit_codes import NONE_SURVIVES, OK
from jaxmem_callbacks.cli.typed import named, place, whole
from jaxmem_callbacks.records.advice import advise
from jaxmem_callbacks.records.documents import Document, Table, put_document
from jaxmem_callbacks.records.errors import SimulationError
from jaxmem_callbacks.records.terminal import put
from jaxmem_callbacks.simulator.cases import CASES
from jaxmem_callbacks.writers.simulation import save_figure, simulation_document, simulation_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=named,
        nargs="?",
        help="a trace's file, a monitor's logdir with one, or a name from --list",
    )
    parser.add_argument("--list", action="store_true", help="name the traces that come with the package")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--device-memory", metavar="SIZE", help="memory of the GPU, such as 80GiB")
    memory.add_argument("--target", metavar="GPU", help="a GPU by name, such as h100_sxm, for its memory")
    parser.add_argument("--outside", metavar="SIZE", default="0B", help="what others hold of it, such as 600MiB")
    parser.add_argument(
        "--defragment-at",
        metavar="STEP",
        type=whole("steps"),
        action="append",
        default=[],
        help="also move arrays after this step",
    )
    parser.add_argument("--before-0.11", dest="old", action="store_true", help="the pool as in jaxlib 0.10")
    parser.add_argument("--figure", metavar="FILE", type=place, help="draw the largest block over the steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Read, replay under every way, print.

    Returns:
        0, or 1 where no way survives.

    Raises:
        JaxmemError: no trace, or no memory to replay it in; the command line turns it into exit code 2.
    """
    if args.list:
        rows = [(name, (make.__doc__ or "").split("\n")[0]) for name, make in CASES.items()]
        put_document(Document([Table((), rows)]))
        return OK
    if args.trace is None:
        listed = advise("command.typed", typed="simulate --list")
        msg = f"jaxmem simulate needs a trace. Name a file, a logdir, or one of `{listed}`."
        raise SimulationError(msg)
    trace = trace_of(args.trace)
    found = simulate_ways(
        trace,
        device_bytes_of(args.device_memory or args.target, trace),
        outside_bytes=size_of(args.outside, "outside"),
        partitioned=not args.old,
        defragment_steps=args.defragment_at,
    )
    if args.figure is not None:
        save_figure(found, args.figure)
    if args.json:
        put(simulation_json(found) + "\n", as_json=True)
    else:
        put_document(simulation_document(found))
    return OK if found.advised is not None else NONE_SURVIVES
