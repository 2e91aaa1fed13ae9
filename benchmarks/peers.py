"""What a peer and this library make of the same texts. Writes results/peers_jax_<version>.json.

    python -m benchmarks.peers

The texts of tests/data/oom_wordings.jsonl and oom_prose.jsonl enter, each with the answer that is right for it: failures for want
of memory as public reports, documents and sources word them, texts that only look like one, and prose about one. They were made
for this library, whose tests hold it to all of them; so its own share is no proof. The peer is installed by `make bench-peers`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable

import jaxmem_callbacks as jm
from benchmarks.sources import ROOT, write_result

TEXTS = [ROOT / "tests" / "data" / name for name in ("oom_wordings.jsonl", "oom_prose.jsonl")]


def recognised(is_oom: Callable[[str], bool]) -> dict[str, dict[str, int]]:
    """How many texts are taken for a failure for want of memory: of those that are one, by platform, and of the others."""
    rows = [json.loads(line) for file in TEXTS for line in file.read_text("utf-8").splitlines()]
    found: dict[str, Counter[str]] = {"failures": Counter(), "others": Counter()}
    for row in rows:
        group = found["failures" if row["expect"]["is_oom"] else "others"]
        place = row["expect"].get("platform") or "unsaid"
        group["all"] += 1
        group["taken"] += is_oom(row["text"])
        if row["expect"]["is_oom"]:
            group[f"{place} all"] += 1
            group[f"{place} taken"] += is_oom(row["text"])
    return {name: dict(sorted(group.items())) for name, group in found.items()}


def main() -> None:
    """Ask both, and write the result file."""
    if not importlib.util.find_spec("stormlog"):
        sys.exit("stormlog is not installed, and no result goes without it: make bench-peers")
    from stormlog.oom_flight_recorder import classify_oom_exception  # pyright: ignore[reportMissingImports]

    texts = {
        "stormlog": recognised(lambda text: classify_oom_exception(RuntimeError(text)).is_oom),
        "jaxmem_callbacks": recognised(lambda text: jm.parse_oom(text) is not None),
    }
    write_result("peers", stormlog=importlib.metadata.version("stormlog"), failure_texts=texts)


if __name__ == "__main__":
    main()
