"""Pages by task, concepts and peers: the index has all, figures are those of files, pictures those of the pool."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import allocation_picture, cuts_picture, padding_picture
from benchmarks.sources import RESULTS, ROOT
from jaxmem_callbacks.records.units import MIB, format_bytes
from jaxmem_callbacks.transforms.cuts import choose_cuts
from tests.test_docs import DOCUMENTS

DOCS = ROOT / "docs"


def page(name: str) -> str:
    """A page on one line, so that no sentence is cut."""
    return " ".join((DOCS / name).read_text().split())


def result(name: str) -> dict:
    (path,) = RESULTS.glob(f"{name}*.json")
    return json.loads(path.read_text())


def test_the_index_links_every_page_and_the_readme_every_task():
    index = (DOCS / "README.md").read_text()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()
    tasks = [name for name in pages if name.startswith("tasks/")]
    assert len(tasks) == 6
    readme = (ROOT / "README.md").read_text()
    assert [name for name in tasks if f"](docs/{name})" not in readme] == []


def test_sections_that_are_linked_exist():
    """As renderers name them: lower case, words joined by hyphens."""
    missing = []
    for path in DOCUMENTS:
        for name, section in re.findall(r"\]\(([\w./]*\.md)#([\w-]+)\)", path.read_text()):
            headings = re.findall(r"^#+ (.*)$", (path.parent / name).read_text(), re.MULTILINE)
            if section not in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}:
                missing.append(f"{path.name}: {name}#{section}")
    assert missing == []


def test_tags_that_pages_name_are_told_in_figures():
    known = set(re.findall(r"`(memory/\w+)", (DOCS / "figures.md").read_text() + (DOCS / "plan.md").read_text()))
    named = {tag for path in DOCUMENTS for tag in re.findall(r"`(memory/\w+)", path.read_text())}
    assert named - known == set()


def test_figures_of_a_bigger_model_are_those_of_the_files():
    text = page("tasks/fit_a_bigger_model.md")
    temporary = list(result("accumulation")["temp_bytes"]["in_a_scan"].values())
    whole, four = (f"{number / MIB:.1f} MiB" for number in temporary[:2])
    assert f"eight layers on 4096 rows take {whole} of temporaries whole, and {four} over 4 microbatches" in text
    plan = result("plan_nnx_transformer_h100_sxm")
    points = {each["step_bytes"]: each["extra_flops"] / each["flops"] for each in plan["candidates"]}
    plain = max(points)
    shares = {
        format_bytes(size): extra / (1 - extra) for size, extra in points.items()
    }  # of the operations without remat
    assert f"needs {format_bytes(plain)} on an H100 as it is" in text
    for size in ("79.0 MiB", f"{format_bytes(min(points))}"):
        assert f"{size} for {100 * shares[size]:.1f} % more operations" in text or (
            f"{size} for {100 * shares[size]:.1f} % more (" in text
        )


def test_figures_of_the_pod_are_those_of_the_file():
    text = page("tasks/plan_a_pod.md")
    plan = result("plan_pod_h100_sxm_64")
    plain = next(each["flops"] for each in plan["candidates"] if each["policy"]["remat"] == "none")
    rows = {}
    for each in plan["candidates"]:
        policy = each["policy"]
        words = (
            "without remat"
            if policy["remat"] == "none"
            else f"`full, keep {policy['keep']:.3g}`"
            if policy["keep"]
            else "`full`"
        )
        rows[f"`{policy['sharding']}`, {words}"] = (each["step_bytes"] / 2**30, 100 * each["extra_flops"] / plain)
    told = re.findall(r"\| (`\w+`, [^|]+?) \| ([\d.]+) GiB[^|]*\| \+([\d.]+) %", text)
    assert len(told) == 4
    for words, size, extra in told:
        gib, share = rows[words]
        assert (size, extra) == (f"{gib:.3g}", f"{share:.1f}"), words
    assert f"{plan['budget_bytes'] / 2**30:.1f} GiB" in text
    assert f"It took {plan['compiles']} compiles." in text
    budget = plan["budget_bytes"] / 2**30
    fsdp, zero1 = (
        sorted(row for words, row in rows.items() if words.startswith(f"`{way}`, `full") and row[0] <= budget)
        for way in ("fsdp", "zero1")
    )
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    for words, (size, extra) in (
        ("`fsdp`, chosen", fsdp[-1]),
        ("`fsdp`, least bytes", fsdp[0]),
        ("`zero1`, most that fits", zero1[-1]),
    ):
        assert f"| {words} | {size:.1f} GiB | +{extra:.1f} % |" in lines
    assert f"The budget is {budget:.1f} GiB." in " ".join(lines)


def test_figures_of_peers_are_those_of_the_files():
    text = page("peers.md")
    found = result("peers")
    theirs, ours = (found["failure_texts"][name] for name in ("stormlog", "jaxmem_callbacks"))
    failures, others = theirs["failures"], theirs["others"]
    assert f"have {failures['all'] + others['all']} texts" in text
    assert f"{failures['all']} failures of memory that ran out and {others['all']} that only look like one" in text
    assert (
        f"of a GPU's {failures['gpu all']} failures | of a TPU's {failures['tpu all']} | of all {failures['all']} "
        f"| of the {others['all']} that are none |"
    ) in text
    for tool, one, other in (
        (f"stormlog {found['stormlog']}", failures, others),
        ("`jm.parse_oom`", ours["failures"], ours["others"]),
    ):
        taken = [one["gpu taken"], one["tpu taken"], one["taken"], other.get("taken")]
        assert f"| {tool} | {' | '.join(map(str, taken))} |" in text
    assert (ours["failures"]["taken"], ours["others"].get("taken")) == (failures["all"], 0)
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    assert f"| stormlog {found['stormlog']} takes for a failure | {failures['taken']} | {others['taken']} |" in lines
    taken = ours["failures"]["taken"], ours["others"].get("taken")
    assert f"| `jm.parse_oom` takes for a failure | {taken[0]} | {taken[1]} |" in lines


def test_what_watching_costs_is_told_as_it_was_measured():
    content, text = result("hook_cost"), page("peers.md")
    one, eight = (
        content["by_devices"][count]["monitor, everything on"]["whole_step_mean_ratio"] for count in ("1", "8")
    )
    assert f"| `jm.MemoryMonitor` | {one:.3f} | {eight:.3f} |" in text
    beside = [content["by_devices"][count].get("stormlog tracker") for count in ("1", "8")]
    told = [f"{each['whole_step_mean_ratio']:.3f}" for each in beside if each]
    assert (f"| stormlog's tracker | {' | '.join(told)} |" if told else "stormlog was not in this run") in text


def test_a_kept_loss_divides_the_pool_as_told():
    text = page("allocation.md")
    moments = allocation_picture.one_loss()
    (refused,) = [moment for moment in moments if moment.refused_bytes]
    assert refused.free_bytes // MIB == 47  # 48 less the loss
    assert refused.largest_bytes < refused.refused_bytes < refused.free_bytes
    fragmentation = 1 - refused.largest_bytes / refused.free_bytes
    assert f"here {fragmentation:.2f}" in text
    freed, last = moments[-2:]
    assert (freed.largest_bytes, freed.free_bytes) == (48 * MIB, 48 * MIB)
    assert {name for _, _, name in last.taken} == {"state", "temporaries"}


def test_a_pool_that_grows_refuses_what_one_piece_has():
    grown, whole = allocation_picture.growing()
    assert [len(moment.regions) for moment in grown] == [5, 5, 5]
    assert (grown[-1].free_bytes, grown[-1].largest_bytes) == (62 * MIB, 32 * MIB)
    assert grown[-1].refused_bytes == 40 * MIB > grown[-1].largest_bytes
    assert [(len(moment.regions), moment.refused_bytes) for moment in whole] == [(1, 0)] * 3
    assert "the pool has 62 MiB free. The largest piece has 32, and a request for 40 is refused" in page(
        "allocation.md"
    )


def test_a_request_is_cut_from_the_smallest_block_that_is_large_enough():
    blocks, asked, cut = allocation_picture.search()
    assert cut == min(size for size, _ in blocks if size >= asked)
    assert any(size < asked and number == allocation_picture.bin_of(asked) for size, number in blocks)
    assert f"{format_bytes(asked)} are asked for" in page("allocation.md")


def test_the_tiles_of_the_picture_hold_what_was_measured():
    row = next(row for row in padding_picture.measured() if row["array"] == padding_picture.EXAMPLE)
    (rows, columns), (high, wide), (down, across) = padding_picture.tiles(row)
    assert rows * columns * 4 == row["own_bytes"]
    assert down * across * high * wide * 4 == row["device_bytes"]


@pytest.mark.parametrize(
    "name", ["allocation_steps", "allocation_growth", "allocation_bins", "cuts", "padding", "memory_spaces"]
)
def test_every_picture_is_shown_where_it_belongs(name):
    assert (DOCS / "images" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    shown = [path.name for path in DOCUMENTS if f"images/{name}.png)" in path.read_text()]
    assert shown == [{"allocation": "allocation.md", "cuts": "remat.md"}.get(name.split("_")[0], "gpu_and_tpu.md")]


def test_the_cuts_of_the_picture_are_in_its_valleys_and_come_closer():
    found = cuts_picture.profile()
    live, cuts = cuts_picture.live_bytes(found), choose_cuts(found)
    lowest = min(live[cuts[0] : cuts[-1]])
    assert {int(live[cut]) for cut in cuts} == {int(lowest)}
    gaps = [after - before for before, after in itertools.pairwise(cuts)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < gaps[0]


def test_pictures_can_be_drawn():
    assert [name for name, _ in allocation_picture.pictures()] == [
        "allocation_steps.png",
        "allocation_growth.png",
        "allocation_bins.png",
    ]
    assert len(padding_picture.padding_figure().axes) == 2
    assert Path(allocation_picture.IMAGES, "padding.png").exists()
