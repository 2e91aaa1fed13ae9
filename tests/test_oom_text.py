"""What ``jm.parse_oom`` makes of texts: seen ones, and ones made from the sources' wordings, broken, long and hostile."""

from __future__ import annotations

import collections
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.recovery.texts.rule import needles, size_of
from jaxmem_callbacks.recovery.texts.statements import RULES, statements

DATA = Path(__file__).resolve().parent / "data"
NAMES = (
    *("phase", "platform", "requested_bytes", "free_bytes", "largest_free_bytes", "limit_bytes", "used_bytes"),
    *("fragmentation", "allocator", "program"),
)
TOLERANCE = 0.01  # two printed decimals hold no more
NEUTRAL = "I0101 00:00:00.000000 step 12 loss 0.5, device memory 12.3GiB of 80GiB in use, 5 ms to allocate\n"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


SEEN, MADE, PROSE = rows("oom_messages.jsonl"), rows("oom_wordings.jsonl"), rows("oom_prose.jsonl")


def same(got: object, wanted: object) -> bool:
    if isinstance(wanted, int) and isinstance(got, int) and not isinstance(wanted, bool):
        return abs(got - wanted) <= TOLERANCE * wanted
    return got == wanted


def marks(facts: OomFacts | None, expect: dict[str, Any]) -> dict[str, bool]:
    """Field to whether it is right; of a text about something else, only whether it was known as that."""
    found = {"is_oom": (facts is not None) == expect["is_oom"]}
    if expect["is_oom"]:
        found |= {name: facts is not None and same(getattr(facts, name), expect.get(name)) for name in NAMES}
    return found


def wrong(row: dict[str, Any], text: str) -> list[str]:
    return [f"{row['id']}: {name}" for name, right in marks(jm.parse_oom(text), row["expect"]).items() if not right]


@pytest.mark.core
def test_of_seen_texts_every_field_and_every_kind_is_right():
    fields, kinds = collections.Counter[str](), collections.Counter[str]()
    right_fields, right_kinds = collections.Counter[str](), collections.Counter[str]()
    for row in SEEN:
        for name, right in marks(jm.parse_oom(row["text"]), row["expect"]).items():
            kind = row["id"].rpartition("-")[0]
            fields[name] += 1
            kinds[kind] += 1
            right_fields[name] += right
            right_kinds[kind] += right
    assert len(SEEN) == 95
    assert len(kinds) == 25
    assert {
        name: right_fields[name] / count for name, count in fields.items() if right_fields[name] < 0.95 * count
    } == {}
    assert {kind: right_kinds[kind] / count for kind, count in kinds.items() if right_kinds[kind] < 0.95 * count} == {}
    assert right_fields.total() == fields.total()


def test_no_text_about_something_else_is_taken_for_a_failure():
    others = [row for row in (*SEEN, *MADE) if not row["expect"]["is_oom"]]
    assert len(others) >= 40
    assert [row["id"] for row in others if jm.parse_oom(row["text"]) is not None] == []


def test_texts_made_from_the_wordings_of_the_sources():
    assert [line for row in MADE for line in wrong(row, row["text"])] == []


def test_prose_about_a_failure_is_none():
    """Documents, issues, remarks of a log and quoted code name failures; no program met them."""
    assert [row["id"] for row in PROSE if jm.parse_oom(row["text"]) is not None] == []
    around = NEUTRAL * 100
    assert [row["id"] for row in PROSE if jm.parse_oom(f"{around}{row['text']}\n{around}") is not None] == []


def test_prose_beside_a_failure_hides_nothing_of_it():
    met = "\nE pjrt.cc:2] Execution of replica 0 failed: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 77.00MiB.\n"
    for row in PROSE:
        for text in (row["text"] + met, met + row["text"]):
            facts = jm.parse_oom(text)
            assert facts is not None, row["id"]
            assert (facts.phase, facts.platform, facts.requested_bytes) == ("run", "gpu", 77 * 2**20), row["id"]


OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 88 bytes."


@pytest.mark.parametrize(
    "line",
    [
        f"ERROR:root:step 120 failed because {OUT}",
        f"Training failed with the following error: {OUT}",
        f"worker 3 raised XlaRuntimeError: {OUT}",
        f"XlaRuntimeError('{OUT}')",
        f'{{"level": "error", "msg": "{OUT}", "step": 3}}',
        f'level=error msg="{OUT}" step=3',
        f'Got unexpected error "{OUT}"',
        f"W Retrying after failure '{OUT}'",
        f"FAILED tests/test_step.py::test_step - jax.errors.JaxRuntimeError: {OUT}",
        f"E       jax.errors.JaxRuntimeError: {OUT}",
        f"    return fn(*args)\njax.errors.JaxRuntimeError: {OUT}",
        f"The step could not be run. {OUT}",
        f"trial 7 crashed -> {OUT}",
        f"rank 5 died with {OUT}",
        f"If you see this often, lower the batch.\n{OUT}",
        f">>> step(state)\n{OUT}",
        f"```\n{OUT}\n```",
        f"F status.cc:3] Check failed: status is OK ({OUT})",
        f"2026-01-01 10:00:00 trainer crash {OUT}",
        f"# {OUT}",
        f"### {OUT}\nstep 4 is tried again",
        f"<pre>{OUT}</pre>",
        f"<pre><code>{OUT}</code></pre>",
        f"Erreur : « {OUT} »",
        f"Fehler beim Training: „{OUT}“",
        f'errors: ["{OUT}"]',
        f"status={OUT}",
        f"ERROR={OUT}",
        f"retry 3: {OUT}",
        f"retrying: {OUT}",
        f"- {OUT}",
        f"+ python train.py\n{OUT}",
        f"$ python train.py 2>&1 | grep -v INFO\n{OUT}",
        f"train.log:41:{OUT}",
        f"Issue 12 of the run, step 7: {OUT}",
        f"fixed batch of 7 rows: {OUT}",
        f"Debug mode: on. Error: {OUT}",
        '  File "/w/y.py", line 3, in f\n    return g()\n' + OUT,
    ],
)
def test_a_line_of_a_program_is_a_failure(line):
    facts = jm.parse_oom(line)
    assert facts is not None
    assert facts.requested_bytes == 88


def test_every_rule_has_a_text():
    met = {id(item.rule) for row in (*SEEN, *MADE) for item in statements(row["text"])}
    assert [rule.name for rule in RULES if id(rule) not in met] == []


def test_every_match_of_a_rule_holds_a_word_that_it_is_tried_for():
    assert [rule.name for rule in RULES if not rule.needles] == []
    for row in (*SEEN, *MADE, *PROSE):
        for rule in RULES:
            for match in rule.pattern.finditer(row["text"]):
                assert any(word in match[0] for word in rule.needles), (row["id"], rule.name)


@pytest.mark.parametrize(
    ("wording", "words"),
    [
        (r"\bOut of memory allocating <requested>", ("allocating",)),
        (r"[Ff]ailed to (?:load|launch) it", ("ailed",)),
        (r"(?:one|three (?:and )?)", ("one", "three")),
        (r"(?:one|\d{1,3})", ()),
        (r"(?:optional)?short", ("short",)),
        (r"(?!looked)(?<=behind)(?:x|yz){0,3}seen", ("seen",)),
        (r"lette?rs", ("lett",)),
        (r"a{2,3}bc+d\(e\)", ("d(e)",)),
        (r"[^abc\]]x(?P<name>[\w.-]{1,8}named)", ("named",)),
        (r"\w+", ()),
    ],
)
def test_words_that_every_match_of_a_wording_holds(wording, words):
    assert needles(wording) == words


@pytest.mark.parametrize("broken", ["\n    ", " \t "], ids=["lines", "tabs"])
def test_white_space_of_any_kind_breaks_no_wording(broken):
    # Python's bare word is an error's name at a line's start only, and a status that says no more than itself is one line.
    lines = ("MemoryError", "Execution failed: out of memory")
    whole = [row for row in MADE if row["expect"]["is_oom"] and not row["text"].endswith(lines)]
    assert len(whole) >= 65
    assert [line for row in whole for line in wrong(row, row["text"].replace(" ", broken))] == []


def test_in_a_long_log_the_same_is_found():
    """Rules are tried near announcing words only: so each wording is announced, from its first letter to its last."""
    around = NEUTRAL * 1200
    found = [row for row in (*SEEN, *MADE) if row["expect"]["is_oom"]]
    assert [line for row in found for line in wrong(row, f"{around}{row['text']}\n{around}")] == []


HEADS = {
    "a launcher": "[rank3]: ",
    "Open MPI": "[1,2]<stderr>:",
    "Ray": "(TrainWorker pid=917, ip=10.0.0.1) ",
    "srun": "12: ",
    "docker compose": "trainer-1  | ",
    "containerd": "2026-01-11T00:02:21.219090123Z stderr F ",
    "a clock and a launcher": "2026-01-11 00:02:21,219 [0] ",
    "an exception group": "    | ",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_what_stands_at_the_head_of_every_line_breaks_no_message(head):
    whole = [row for row in (*SEEN, *MADE) if not row["text"].startswith((" ", "\n"))]
    assert [line for row in whole for line in wrong(row, head + row["text"].replace("\n", f"\n{head}"))] == []
    group = f"{head}Traceback (most recent call last):\n{head}MemoryError\n"
    assert jm.parse_oom(group) == OomFacts(platform="host")


@pytest.mark.parametrize(
    "written", [json.dumps, repr, lambda text: json.dumps({"log": json.dumps(text)})], ids=["json", "repr", "twice"]
)
def test_a_log_in_json_is_read_like_its_messages(written):
    # A bare word is an error's name at a line's start only.
    whole = [row for row in (*SEEN, *MADE) if not row["text"].endswith("\nMemoryError")]
    assert [line for row in whole for line in wrong(row, written(row["text"]))] == []


def test_colours_stand_in_no_wordings_way():
    def coloured(text: str) -> str:
        return "".join(f"\x1b[1;31m{word}\x1b[0m " for word in text.split(" "))

    assert [line for row in (*SEEN, *MADE) for line in wrong(row, coloured(row["text"]))] == []


@pytest.mark.core
def test_an_exception_is_read_with_its_causes_notes_and_members():
    inner = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.")
    outer = ValueError("the step failed")
    outer.__cause__ = inner
    assert (
        jm.parse_oom(outer) == jm.parse_oom(inner) == OomFacts(phase="run", platform="gpu", requested_bytes=3 * 2**29)
    )
    inner.add_note("with executable_name='jit_step'")
    facts = jm.parse_oom(outer)
    assert facts is not None
    assert facts.program == "jit_step"
    group = ExceptionGroup("two ways", [KeyError("x"), ExceptionGroup("deeper", [inner])])
    assert jm.parse_oom(group) == jm.parse_oom(inner)
    hidden = KeyError("while handling")
    hidden.__context__ = inner
    assert jm.parse_oom(hidden) == jm.parse_oom(inner)
    hidden.__suppress_context__ = True
    assert jm.parse_oom(hidden) is None
    assert jm.parse_oom(MemoryError()) == OomFacts(platform="host")
    assert jm.parse_oom(b"Out of memory allocating 64 bytes.\xff") == OomFacts(
        phase="run", platform="cpu", requested_bytes=64
    )


@pytest.mark.parametrize("head", ["O", "", "E RESOURCE_EXHAUSTED: O", "xhausted: O"])
def test_a_text_that_is_cut_at_its_beginning_is_read(head):
    facts = jm.parse_oom(f"{head}ut of memory while trying to allocate 8.00GiB.\nTraceback (most recent call last):")
    assert facts == OomFacts(phase="run", platform="gpu", requested_bytes=2**33)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8", "utf-8-sig"])
def test_bytes_of_any_encoding_of_letters_are_read(encoding):
    for row in (*SEEN, *MADE):
        assert jm.parse_oom(row["text"].encode(encoding)) == jm.parse_oom(row["text"]), row["id"]


def test_exceptions_that_cannot_speak_or_go_round_in_circles():
    class Mute(Exception):  # noqa: N818 - its name is not the point
        def __str__(self) -> str:
            msg = "no words"
            raise RuntimeError(msg)

    one, two = Mute(), RuntimeError("Out of memory allocating 64 bytes.")
    one.__cause__, two.__cause__ = two, one
    assert jm.parse_oom(one) == OomFacts(phase="run", platform="cpu", requested_bytes=64)
    odd: Any = 3.5
    assert jm.parse_oom(odd) is None


def test_the_failing_status_speaks_before_the_driver():
    """A pool asks the driver for less and less before it gives up; what the program asked for is in the status."""
    driver = "E failed to allocate {0} ({1} bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"
    text = driver.format("18.00GiB", 18 * 2**30) + driver.format("16.20GiB", round(16.2 * 2**30))
    status = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB."
    facts = jm.parse_oom(text + status)
    assert facts is not None
    assert facts.requested_bytes == 2 * 2**30
    alone = jm.parse_oom(text)
    assert alone is not None
    assert alone.requested_bytes == 18 * 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1.50GiB", 3 * 2**29), ("12", 12), ("0B", 0), ("681.08M", 714164142), ("136B", 136), ("16.0 TiB", 2**44)),
        *(
            ("1,073,741,824 bytes", 2**30),
            ("1_024", 1024),
            ("1.5e10", 15 * 10**9),
            ("2kB", 2048),
            ("1,536.5KiB", 1573376),
        ),
        *(
            ("1.073.741.824", None),
            ("10,24", None),
            ("1'024", None),
            ("1e400", None),
            ("1" * 30, None),
            ("0.1234567890123G", 132560718),
        ),
        *(("1.0K", 1024), ("none", None), ("99999999999999999999", None), ("9999999999999999999P", None)),
    ],
)
def test_sizes_are_powers_of_1024(text, size):
    assert size_of(text) == size


SIZES = st.integers(1, 64).map(lambda gib: gib * 2**30)
ASKED = "W Allocator (GPU_0_bfc) ran out of memory trying to allocate {0}\n"
STATS = "I Stats: \nLimit: {limit}\nInUse: {used}\n"
TOLD = {  # how each version of the allocator tells of its pool, and whether it says what the pool holds
    "a table": (STATS, False),
    "the first name": (
        "I total_region_allocated_bytes_: {pool} memory_limit_: {limit} available bytes: 1\n" + STATS,
        True,
    ),
    "the second name": ("I Total bytes in pool: {pool} memory_limit_: {limit} available bytes: 1\n" + STATS, True),
}


def human(size: int) -> str:
    return f"{size / 2**30:.2f}GiB"


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
@given(asked=SIZES, sizes=st.lists(SIZES, min_size=3, max_size=3).map(sorted), written=st.sampled_from([str, human]))
def test_fragmentation_is_claimed_only_where_the_pool_itself_had_enough_free(told, asked, sizes, written):
    used, pool, limit = sizes
    words, says_pool = told
    text = ASKED.format(written(asked)) + words.format(
        **{name: written(size) for name, size in (("used", used), ("pool", pool), ("limit", limit))}
    )
    facts = jm.parse_oom(text)
    assert facts is not None
    assert (facts.requested_bytes, facts.limit_bytes, facts.used_bytes) == (asked, limit, used)
    assert facts.fragmentation is (True if says_pool and asked <= pool - used else None)


@given(asked=SIZES, pool=SIZES, more=SIZES, shares=st.tuples(st.integers(0, 64), st.integers(0, 64)))
def test_the_summary_of_a_pool_claims_it_only_where_no_piece_was_large_enough(asked, pool, more, shares):
    free = pool * max(shares) // 64
    largest = pool * min(shares) // 64
    text = ASKED.format(human(asked)) + (
        f"I Allocator memory summary: rounded request {human(asked)}, total free in pool {human(free)}, largest free chunk "
        f"usable by lower end {human(largest)}, unallocated bytes {human(more)}, pool size {human(pool)}, "
        f"pool limit {human(pool + more)}\n"
    )
    facts = jm.parse_oom(text)
    assert facts is not None
    assert facts.pool_bytes == pool
    said = facts.free_bytes, facts.largest_free_bytes
    assert facts.fragmentation is (True if said[1] < asked <= said[0] else None)


PARTS = [
    *(
        "RESOURCE_EXHAUSTED: ",
        "Out of memory ",
        "while trying to allocate ",
        "ran out of memory ",
        "1.5GiB ",
        "9" * 40,
        "\n",
        " ",
    ),
    *(
        "Attempting to reserve ",
        "That was not possible. There are ",
        "Allocator (",
        "failed to allocate ",
        "(size=",
        " exceed",
    ),
    *(
        "Ran out of memory in memory space vmem while allocating on stack ",
        "Scoped allocation with size ",
        "NCCL ",
        "'",
    ),
    *(
        "OOM when allocating tensor with shape",
        "executable_name='",
        "Limit: ",
        "InUse: ",
        "due to fragmentation",
        "\x00",
        "é",
    ),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=60).map("".join))
@example("")
@example("(" * 500)
def test_no_text_makes_it_raise(text):
    facts = jm.parse_oom(text)
    assert facts is None or isinstance(facts, OomFacts)
    assert jm.parse_oom(text.encode("utf-8", "surrogatepass")) is None or facts is not None


@pytest.mark.parametrize(
    "part",
    [
        *(
            *PARTS,
            "MemoryError\n",
            "Size: ",
            "a",
            "cudaMalloc failed ",
            "Failed to load CUBIN ",
            "\\",
            "\\\\x",
            "1,",
            "1.5e",
        ),
        *(
            "If you see ",
            "Killed process 1 ",
            "1.batch ",
            "x ",
            "Cannot allocate memory ",
            "srun: error: ",
            "0: ",
            "\n | ",
        ),
        *(
            "process was OOM ",
            "container oom ",
            "java.lang.OutOfMemoryError ",
            'exceeds job hard limit "h_vmem" of queue "',
        ),
        *(
            "| grep 'CUDA_ERROR_OUT_OF_MEMORY ",
            "retry_patterns: ['CUDA_ERROR_OUT_OF_MEMORY",
            "``CUDA_ERROR_OUT_OF_MEMORY ",
        ),
        *("« CUDA_ERROR_OUT_OF_MEMORY", "#12: fix CUDA_ERROR_OUT_OF_MEMORY ", "<li>CUDA_ERROR_OUT_OF_MEMORY ", "`"),
        *("to avoid CUDA_ERROR_OUT_OF_MEMORY ", '"Out of memory: ', "`std::bad_alloc", "| CUDA_ERROR_OUT_OF_MEMORY "),
        *("RuntimeError: RESOURCE_EXHAUSTED: ", '  File "x.py", line 1, in f\n    CUDA_ERROR_OUT_OF_MEMORY\n'),
        *("Failed to materialize symbols: ", "unable to mmap 1 bytes from file ", "Exceeded hbm capacity by 1"),
    ],
)
def test_time_grows_with_the_text_alone(part):
    """Four times the text may take no more than ten times as long, where something quadratic takes sixteen times."""
    jm.parse_oom(part * 10)

    def seconds(length: int) -> float:
        text = part * (length // len(part))
        began = time.thread_time()
        jm.parse_oom(text)
        return time.thread_time() - began

    few = min(seconds(20_000) for _ in range(2))
    assert any(seconds(80_000) <= 10 * few + 0.02 for _ in range(2))
