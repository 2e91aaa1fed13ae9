"""``jaxmem oom LOG``: what is read of logs with dumps, tables and several failures, in what time, and what is printed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.cli.main import main
from jaxmem_callbacks.records.oom import OomFacts, OomLog
from jaxmem_callbacks.recovery.texts.explain import sentence, tries, why
from jaxmem_callbacks.recovery.texts.log import read_oom_log

GIB, MIB = 2**30, 2**20
ROOT = Path(__file__).resolve().parent.parent
STEP = "I0101 00:00:00.000000 123 train.py:7] step 41 loss 0.51, device memory 12.3GiB of 80GiB\n"
POOL_FAILS = (
    "W xla/tsl/framework/bfc_allocator.cc:520] Allocator (GPU_0_bfc) ran out of memory trying to allocate 4.00GiB (rounded to"
    " 4294967296) from the lower end requested by op\n"
    "If the cause is memory fragmentation maybe the environment variable 'TF_GPU_ALLOCATOR=cuda_malloc_async' will help\n"
    "I BFCAllocator dump for GPU_0_bfc\n"
)
CHUNKS = (
    f"I InUse at 7f0000000000 of size {6 * GIB} tag lower allocation_annotation xla.execute{{executable=jit_train_step}} next 1\n"
    f"I Free  at 7f0180000000 of size {3 * GIB} tag lower next 2\n"
    f"I InUse at 7f0240000000 of size {256 * MIB} next 3\n"
    f"I Free  at 7f0250000000 of size {GIB} next 18446744073709551615\n"
)
STATS = f"I      Summary of in-use Chunks by size: \nI Stats: \nLimit: {16 * GIB}\nInUse: {6 * GIB + 256 * MIB}\n"
FULL_STATS = f"Limit: {10 * GIB + 256 * MIB}\nInUse: {6 * GIB + 256 * MIB}\n"  # the pool has all that it may have
NO_LIMIT = f"I Total bytes in pool: {8 * GIB} memory_limit_: 0\nLimit: 0\nInUse: {6 * GIB}\n"
BEYOND = f"Limit: {2**64 - 1}\nInUse: {6 * GIB}\n"  # as an allocator without one prints it
STATUS = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB. [executable_name='jit_train_step']\n"
    "BufferAssignment OOM Debugging.\nPeak buffers:\n\tBuffer 1:\n\t\tSize: 3.00GiB\n"
    '\t\tOperator: op_name="jit(train_step)/jvp(Net)/dot_general" source_file="train.py" source_line=31\n'
    "\t\tXLA Label: fusion\n\t\tShape: f32[24,32,1048576]\n\t\t==========================\n\n"
    "\tBuffer 2:\n\t\tSize: 512.00MiB\n\t\tEntry Parameter Subshape: bf16[16384,16384]\n\t\t==========================\n"
)
GPU_LOG = (
    STEP * 3
    + POOL_FAILS
    + CHUNKS
    + STATS
    + "E pjrt_stream_executor_client.cc:2826] Execution of replica 0 failed: "
    + STATUS
    + 'Traceback (most recent call last):\n  File "train.py", line 31\n'
    + "jax.errors.JaxRuntimeError: "
    + STATUS
)
TPU_LOG = """\
Compilation failure: Ran out of memory in memory space hbm. Used 17.60G of 16.00G hbm. Exceeded hbm capacity by 1.60G.

  Largest program allocations in hbm:

  1. Size: 512.00M
     Operator: op_type="OneHot" op_name="one_hot"
     Shape: f32[4,128,128,9,18]{4,3,0,2,1:T(8,128)}
     Unpadded size: 40.50M
     Extra memory due to padding: 471.50M (12.6x expansion)
     XLA label: %fusion.1668 = f32[4,128,128,9,18] fusion(s32[4,128,128,9] %copy.130), kind=kLoop
     Allocation type: HLO temp
     ==========================

  2. Size: 2.50G
     Operator: op_name="jit(train_step)/scan"
     Shape: bf16[40,32,1048576]{2,1,0}
     ==========================
"""


def read(text: str, piece: int = 2**20) -> OomLog | None:
    return read_oom_log(text[low : low + piece] for low in range(0, len(text), piece))


def one(text: str) -> OomLog:
    found = read(text)
    assert found is not None
    return found


def test_a_gpu_log_tells_figures_dump_and_tables_with_their_lines():
    found, lines = one(GPU_LOG), GPU_LOG.splitlines()
    assert found.facts == OomFacts(
        phase="run",
        platform="gpu",
        requested_bytes=4 * GIB,
        limit_bytes=16 * GIB,
        used_bytes=6 * GIB + 256 * MIB,
        fragmentation=True,  # by the dump
        allocator="GPU_0_bfc",
        program="jit_train_step",
    )
    assert found.failures == 1
    assert found.line_count == len(lines)
    assert "Execution of replica 0 failed" in lines[found.line - 1]
    words = {
        "requested_bytes": "4.00GiB",
        "limit_bytes": "Limit",
        "allocator": "GPU_0_bfc",
        "program": "jit_train_step",
    }
    assert {name for name, word in words.items() if word not in lines[found.where[name] - 1]} == set()
    assert "Limit" in lines[found.where["used_bytes"] - 1] or "InUse" in lines[found.where["used_bytes"] - 1]
    pool = found.pool
    assert pool is not None
    assert (pool.pool_bytes, pool.in_use_bytes, pool.free_bytes) == (10 * GIB + 256 * MIB, 6 * GIB + 256 * MIB, 4 * GIB)
    assert (pool.in_use_count, pool.free_count, pool.largest_free_bytes) == (2, 2, 3 * GIB)
    assert pool.fragmentation == 0.25
    assert [(chunk.bytes, chunk.operator) for chunk in pool.largest] == [(6 * GIB, "jit_train_step"), (256 * MIB, "")]
    assert f"of size {6 * GIB}" in lines[pool.largest[0].line - 1]
    # The table is printed twice, and told once.
    assert [(buffer.bytes, buffer.shape, buffer.source) for buffer in found.buffers] == [
        (3 * GIB, "f32[24,32,1048576]", "train.py:31"),
        (512 * MIB, "bf16[16384,16384]", ""),
    ]
    assert "3.00GiB" in lines[found.buffers[0].line - 1]


def test_a_job_that_took_more_than_it_may_had_no_negative_memory_free():
    found = read_oom_log(["=>> PBS: job killed: mem 16843012kb exceeded limit 16777216kb"])
    assert "needs 16.1 GiB in the host's memory; there are 16.0 GiB in all: it did not fit" in sentence(found)


def test_a_tpu_log_tells_its_tables_largest_first():
    found = one(TPU_LOG)
    assert found.facts.phase == "compile"
    assert [(buffer.bytes, buffer.operator, buffer.label) for buffer in found.buffers] == [
        (round(2.5 * GIB), "jit(train_step)/scan", ""),
        (512 * MIB, "one_hot", "%fusion.1668"),
    ]
    assert sentence(found) == (
        "An allocation of a program that the log does not name needs 17.6 GiB on the TPU while it was compiled; there are"
        " 16.0 GiB in all: it did not fit for lack of capacity, since the whole program is larger than the limit."
    )


@pytest.mark.parametrize("piece", [1, 37, 4096])
def test_where_a_log_is_cut_makes_no_difference(piece):
    text = GPU_LOG if piece == 1 else STEP * 2000 + GPU_LOG + STEP * 2000
    assert read(text, piece) == one(text)


HEADS = {
    "a launcher": "[rank3]: ",
    "Ray": "(TrainWorker pid=917, ip=10.0.0.1) ",
    "a clock in colour": "\x1b[36m2026-01-11 00:02:21\x1b[0m ",
    "colours with colons": "\x1b[38:2::255:0:0mtrain:\x1b[0m ",
    "kubectl": "[pod/train-0-abcde/main-1] ",
    "stern": "train-0 main ",
    "stern's other form": "train-0 \u203a main | ",
    "journald": "Jan 02 03:04:05 node17 train.sh[4242]: ",
    "syslog": "<13>1 2026-01-11T00:02:21Z host app 12 - - ",
    "loguru": "2026-01-11 00:02:21.123 | ERROR    | __main__:f:10 - ",
    "logging": "ERROR:root:",
    "Hydra": "[2026-01-11 00:02:21,123][__main__][ERROR] - ",
    "absl": "I0111 00:02:21.123456 140000 train.py:10] ",
    "glog with a year": "E0000 00:00:1700000000.123 77 a.cc:1] ",
    "W&B": "wandb: ",
    "torchrun": "[default0]:",
    "Slurm": "[node17:rank3] ",
    "a platform": "app[web.1]: ",
    "a letter": "> ",
    "a form that nobody knows": "@7 {train} ~~> ",
    "a progress bar": " 30%|███       | 3/10 [00:01<00:02]\r",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("piece", [37, 2**20])
def test_what_stands_at_the_head_of_every_line_changes_nothing(head, piece):
    text = "".join(head + line for line in GPU_LOG.splitlines(keepends=True))
    assert read(text, piece) == one(GPU_LOG)


@pytest.mark.parametrize("piece", [37, 2**20])
@pytest.mark.parametrize(
    "more", [{}, {"stream": "stderr", "time": "2026-01-11T00:02:21Z", "rank": 3}], ids=["alone", "more"]
)
def test_one_json_object_a_line_is_read_like_its_messages(more, piece):
    text = "".join(json.dumps({"level": "error", "msg": line, **more}) + "\n" for line in GPU_LOG.splitlines())
    assert read(text, piece) == one(GPU_LOG)


def test_numbers_of_a_head_may_differ_and_lines_of_others_may_stand_between():
    lines = [
        f"Jan 02 03:04:{second % 60:02} node17 train.sh[42]: {line}\n" + "one line of its own\n" * (second % 3 == 0)
        for second, line in enumerate(GPU_LOG.splitlines())
    ]
    found = one("".join(lines))
    assert (found.facts.requested_bytes, found.facts.program) == (4 * GIB, "jit_train_step")


def test_what_is_said_many_times_is_no_head():
    status = "RESOURCE_EXHAUSTED: OOM in worker 3: out of memory\n"
    assert one(status * 50).line == 1
    killed = "kernel: Out of memory: Killed process 7 (python3)\n"
    assert one(killed * 50).facts == OomFacts(platform="host")
    table = "| CUDA_ERROR_OUT_OF_MEMORY | the driver has no memory left |\n| CUDA_ERROR_INVALID_VALUE | an argument |\n"
    assert read(table * 20) is None
    patterns = '  - "RESOURCE_EXHAUSTED: Out of memory"\n  - "CUDA_ERROR_OUT_OF_MEMORY"\n'
    assert read(patterns * 20) is None


def test_several_failures_are_counted_and_the_first_that_a_program_met_is_told():
    driver = "E failed to allocate 18.00GiB (19327352832 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"
    second = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB.\n"
    found = one(driver + STEP * 5 + GPU_LOG + STEP * 300 + second + STEP * 300 + second)
    assert found.failures == 4
    assert found.facts.requested_bytes == 4 * GIB
    assert [buffer.bytes for buffer in found.buffers] == [3 * GIB, 512 * MIB]


KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.\n"
CUBLAS = "E cuda_blas.cc:190] failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED\n"
GPU_LINES = POOL_FAILS + CHUNKS + "E client.cc:7] CUDA_ERROR_OUT_OF_MEMORY [executable_name='jit_train_step']\n"


@pytest.mark.parametrize("between", ["", STEP * 3, STEP * 400], ids=["at once", "later", "much later"])
@pytest.mark.parametrize("gpu", [POOL_FAILS, GPU_LINES, CUBLAS], ids=["a pool", "a pool and its program", "a library"])
@pytest.mark.parametrize(
    "host", [KILLED, "MemoryError\n", "kernel: Out of memory: Killed process 7 (python3)\n", "State: OUT_OF_MEMORY\n"]
)
def test_of_failures_of_two_memories_the_first_is_told_and_nothing_of_the_other(gpu, host, between):
    first = one(STEP + gpu + between + host)
    assert (first.facts.platform, first.failures, first.line < 10) == ("gpu", 2, True)
    second = one(STEP + host + between + gpu)
    assert (second.facts, second.line, second.failures, second.pool) == (OomFacts(platform="host"), 2, 2, None)
    assert jm.parse_oom(STEP + host + between + gpu) == second.facts
    found = jm.parse_oom(STEP + gpu + between + host)
    assert found is not None
    assert found.platform == "gpu"


def test_a_driver_that_a_pool_asks_for_less_is_no_failure_before_the_host_is_out_of_memory():
    assert one(DRIVER + STEP * 400 + KILLED).facts.platform == "host"


def reserving(asked: int, *, free: int, reserved: int, reservable: int, compacted: int) -> str:
    return (
        f"Attempting to reserve {asked}.00G at the bottom of memory. That was not possible. There are {free}.00G free,"
        f" {reserved}.00G reserved, and {reservable}.00G reservable. If fragmentation is eliminated,"
        f" the maximum reservable bytes would be {compacted}.00G,"
        f" so compaction will {'' if asked <= compacted else 'not '}enable this reservation."
    )


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB.",
            "unknown",
            "what was free is not stated",
        ),
        (
            "Attempting to allocate 5.94M. That was not possible. There are 4.20M free.",
            "capacity",
            "more was asked for than was",
        ),
        ("Allocation (size=200) would exceed memory (size=100) :: #a", "capacity", "it alone is larger than the limit"),
        (
            "RESOURCE_EXHAUSTED: Failed to instantiate CUDA graph: CUDA_ERROR_OUT_OF_MEMORY",
            "refused",
            "the device itself was full",
        ),
        (
            "Attempting to allocate 31.06M. That was not possible. There are 58.64M free.",
            "fragmentation",
            "not in one piece",
        ),
        (
            POOL_FAILS + CHUNKS + "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB.",
            "fragmentation",
            "piece",
        ),
        (
            POOL_FAILS + CHUNKS + FULL_STATS + "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB.",
            "capacity",
            "than was free",
        ),
        (
            POOL_FAILS + CHUNKS + "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB.",
            "unknown",
            "whether the pool could still grow is not stated",
        ),
        (
            POOL_FAILS + CHUNKS + BEYOND + "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB.",
            "unknown",
            "whether the pool could still grow is not stated",
        ),
        (
            NO_LIMIT + "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB.",
            "unknown",
            "whether the pool could still grow is not stated",
        ),
        (
            reserving(5, free=9, reserved=6, reservable=3, compacted=3),
            "capacity",
            "more was asked for than was free and not reserved",
        ),
        (
            reserving(3, free=9, reserved=5, reservable=2, compacted=4),
            "fragmentation",
            "not in one piece",
        ),
    ],
)
def test_why_it_did_not_fit_is_told_or_unknown_because(text, cause, words):
    found = one(text)
    assert why(found)[0] == cause
    assert words in why(found)[1]
    assert why(found)[1] in sentence(found)


def pool_log(asked: int, pool: int, limit: int, used: int, before: str = "") -> str:
    told = f"I Total bytes in pool: {pool} memory_limit_: {limit} available bytes: {limit - pool}\n"
    return f"{before}W Allocator (GPU_0_bfc) ran out of memory trying to allocate {asked}\n{told}Limit: {limit}\nInUse: {used}\n"


DRIVER = "I failed to allocate 6.00GiB (6442450944 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n"


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        (pool_log(4 * GIB, 10 * GIB, 16 * GIB, 9 * GIB), "refused", "could still grow by 6.0 GiB"),
        (pool_log(4 * GIB, 10 * GIB, 16 * GIB, 9 * GIB, before=DRIVER), "refused", "something else holds the rest"),
        (
            pool_log(4 * GIB, 14 * GIB, 16 * GIB, 11 * GIB),
            "growth",
            "neither that nor the 3.0 GiB free in it was enough alone",
        ),
        (pool_log(6 * GIB, 14 * GIB, 16 * GIB, 11 * GIB), "capacity", "more was asked for than was free"),
        (pool_log(3 * GIB, 14 * GIB, 16 * GIB, 11 * GIB), "fragmentation", "not in one piece"),
        (
            DRIVER + "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.",
            "refused",
            "the device itself was full",
        ),
        (
            f"W Allocator (GPU_0_bfc) ran out of memory trying to allocate {GIB}\nLimit: {16 * GIB}\nInUse: {9 * GIB}\n",
            "unknown",
            "what the pool itself had free is not stated",
        ),
    ],
)
def test_a_pool_that_could_grow_and_a_driver_that_refused_are_no_fragmentation(text, cause, words):
    found = one(text)
    assert why(found)[0] == cause
    assert words in why(found)[1]
    assert why(found)[1] in sentence(found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB. [executable_name='jit_step']",
            "jm.jit_step(step, ",
        ),
        ("Scoped allocation with size 34.08M and limit 32.00M exceeded scoped vmem limit", "smaller blocks?"),
        (
            "Failed to allocate a 64-byte pinned host staging buffer for a device-to-host transfer.",
            "HOST_MEMORY_LIMIT_GB",
        ),
        (
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 16.0 TiB for an array with shape (2,)",
            "Does the loader hold more batches on the host",
        ),
        ("NCCL WARN Cuda failure 2 'out of memory'", "XLA_CLIENT_MEM_FRACTION"),
        ("Autotuning failed for HLO: x: Out of memory while trying to allocate 4.00GiB", "xla_gpu_autotune_level"),
        (GPU_LOG, "gpu_async"),
        (pool_log(4 * GIB, 14 * GIB, 16 * GIB, 11 * GIB), "gpu_preallocate"),
        (GPU_LOG, "jm.defragment(state)"),
    ],
)
def test_what_can_be_tried_suits_the_failure(text, line):
    assert any(line in told for each in tries(one(text)) for told in each)


def test_where_the_device_had_no_more_it_is_asked_who_holds_it():
    text = pool_log(4 * GIB, 10 * GIB, 16 * GIB, 9 * GIB, before=DRIVER)
    words, line = tries(one(text))[0]
    assert words.startswith("Does something else hold memory of the GPU: another process, or PyTorch")
    assert line == ""
    assert not any("defragment" in line or "apply_environment" in line for _, line in tries(one(text)))


@pytest.mark.parametrize(
    "text",
    [
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes (allocated so far: 512 bytes).",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_where_another_librarys_request_was_refused_it_is_asked_who_holds_the_rest(text):
    found = one(text)
    assert why(found)[0] == "refused"
    assert tries(found)[0][0].startswith("Does something else hold memory of the GPU")


def test_fifty_megabytes_take_seconds_and_little_memory():
    def pieces() -> Iterator[str]:
        for _ in range(300):
            yield STEP * 1000
        yield POOL_FAILS
        for _ in range(200):
            yield CHUNKS * 300
        yield STATS + "E " + STATUS
        for _ in range(100):
            yield STEP * 1000

    began = time.perf_counter()
    found = read_oom_log(pieces())
    seconds = time.perf_counter() - began
    assert found is not None
    assert found.pool is not None
    assert found.pool.in_use_count == 2 * 300 * 200
    assert found.line_count > 600_000
    assert seconds < 40  # a few on a quiet machine
    tracemalloc.start()
    read_oom_log(STEP * 1000 for _ in range(40))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * MIB


@pytest.mark.core
def test_the_command_prints_the_sentence_the_figures_and_what_can_be_tried(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text(GPU_LOG)
    assert main(["oom", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "The program jit_train_step asked for 4.0 GiB on the GPU; 4.0 GiB were free, 3.0 GiB in one piece:"
    )
    assert "fragmentation 25%" in told
    assert "?." not in told
    assert "not compiled" in told
    assert all(len(line) <= 200 for line in told.splitlines())
    assert main(["oom", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cause"], found["pool"]["fragmentation"], found["facts"]["requested_bytes"]) == (
        "fragmentation",
        0.25,
        4 * GIB,
    )
    assert all(item["compiled"] is False for item in found["tries"])


def test_a_log_without_a_failure_exits_1_and_one_that_is_not_there_2(tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.log"
    path.write_bytes(STEP.encode() * 3 + b"\xff\xfe\x00")
    assert main(["oom", str(path)]) == 1
    assert "has no failure" in capsys.readouterr().out
    assert main(["oom", "--json", str(path)]) == 1
    assert json.loads(capsys.readouterr().out) == {"found": False}
    assert main(["oom", str(tmp_path / "other.log")]) == 2
    assert "other.log cannot be read: No such file or directory. Expected a file" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GPU_LOG.encode())))
    assert main(["oom", "-"]) == 0
    assert "jit_train_step" in capsys.readouterr().out


def test_a_hint_ends_in_a_point_or_in_its_question_mark(tmp_path, capsys):
    path = tmp_path / "train.log"
    ends = set()
    for text in (KILLED, "Failed to allocate a 64-byte pinned host staging buffer for a transfer.", CUBLAS, DRIVER):
        path.write_text(text)
        assert main(["oom", str(path)]) == 0
        hints = capsys.readouterr().out.partition("What can be tried")[2].splitlines()[1:]
        ends |= {line[-2:] for line in hints if line[2] != " " and not line.endswith(":")}
        assert not any(end.endswith(("?.", "..", ".?")) for end in ends)
    assert {end[-1] for end in ends} == {"?", "."}


def test_a_log_that_powershell_wrote_is_read(tmp_path, capsys):
    path = tmp_path / "train.log"
    told = []
    for encoding in ("utf-8", "utf-16"):
        path.write_bytes(GPU_LOG.replace("\n", "\r\n").encode(encoding))
        assert main(["oom", "--json", str(path)]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]


@pytest.mark.core
def test_the_command_starts_no_jax(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(TPU_LOG)
    code = f"import sys; from jaxmem_callbacks.cli.main import main; main(['oom', {str(path)!r}]); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0
