"""The parts of a report by themselves: secrets, environment, bounds of memory, attached targets, and its two forms."""

from __future__ import annotations

import contextvars
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.environment.process import reported_environment
from jaxmem_callbacks.programs.reading.hlo import library_bytes, parse_module
from jaxmem_callbacks.programs.steps import registry
from jaxmem_callbacks.programs.targets.target import attached_target
from jaxmem_callbacks.records.arrays import HeapMap, LiveBuffer
from jaxmem_callbacks.records.errors import TargetError
from jaxmem_callbacks.records.oom import Holder, Hole, MemoryLimit, OomFacts
from jaxmem_callbacks.records.page import page_html
from jaxmem_callbacks.records.runs import Unavailable
from jaxmem_callbacks.records.secrets import scrubbed, secret_values, without_secrets
from jaxmem_callbacks.recovery.failure import FailingProgram, OomFailure, host_limits
from jaxmem_callbacks.recovery.reporting import holes_now, largest_holes, new_folder, summarize
from jaxmem_callbacks.recovery.reports.live_buffers import VARIABLE
from jaxmem_callbacks.recovery.reports.remedies import Forecast, Forecasts, forecast, remedies
from jaxmem_callbacks.writers.oom_report import oom_markdown, oom_model
from tests import sample_plans
from tests.oom_reports import HOSTILE, hostile_report

GIB = 2**30
SECRETS = {
    "a token by its prefix": ("hf_AbCdEfGhIjKlMnOpQr", "hf_"),
    "GitHub's": ("clone with ghp_0123456789abcdefghijABCDEFGHIJ", "0123456789ab"),
    "Amazon's": ("id AKIAIOSFODNN7EXAMPLE", "IOSFODNN"),
    "OpenAI's": ("sk-proj-abcdefghijk", "abcdefghijk"),
    "Slack's": ("xoxb-123456-abcdef", "123456-abcdef"),
    "a web token": ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "SflKxw"),
    "a bearer": ("Authorization: Bearer abc.def-ghi123", "abc.def"),
    "a key and its value": ("api_key=tiger", "tiger"),
    "in JSON": ('{"password": "ocelot", "n": 1}', "ocelot"),
    "an argument of its own": ("--wandb-api-key lynx --steps 5", "lynx"),
    "an address with a password": ("s3://me:jaguar@host/data", "jaguar"),
    "an address with a query": ("https://host/data?sig=puma", "puma"),
    "hexadecimal": ("key 0123456789abcdef0123456789abcdef", "0123456789abcdef"),
    "a private key": ("-----BEGIN RSA PRIVATE KEY-----\nMIIlion\n-----END RSA PRIVATE KEY-----", "MIIlion"),
    "what looks random": ("wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY1", "wJalrXUtn"),
}
HARMLESS = (
    "RESOURCE_EXHAUSTED: Out of memory allocating 137438953472 bytes.",
    "Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.72GiB (rounded to 4000000000)requested by op",
    "state.params['Transformer_0']['EncoderBlock_11']['MultiHeadDotProductAttention_0']['query']['kernel']",
    "jit(train_step)/transpose(jvp(Transformer))/EncoderBlock_11/MlpBlock_0/dot_general",
    "https://docs.jax.dev/en/latest/gpu_memory_allocation.html",
)


@pytest.mark.parametrize(("text", "secret"), SECRETS.values(), ids=SECRETS)
def test_secrets_are_hidden(text, secret):
    assert secret in text
    assert secret not in without_secrets(text)
    assert "[hidden]" in without_secrets(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_a_report_is_made_of_stays(text):
    assert without_secrets(text) == text


def test_values_of_secret_variables_are_hidden_wherever_they_stand():
    known = secret_values({"MY_SERVICE_TOKEN": "plain words", "HOME": "/data/me", "RUN_KEY": "zebra-1"})
    assert known == ("plain%20words", "plain words", "zebra-1")
    limit = MemoryLimit(name="say plain words", limit_bytes=1, used_bytes=0, source="zebra-1")
    assert scrubbed(limit, known) == dataclasses.replace(limit, name="say [hidden]", source="[hidden]")


def test_only_harmless_values_of_the_environment_are_shown():
    given = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "a value with spaces",
        "XLA_FLAGS": "--xla_gpu_autotune_level=2 --xla_dump_to=/data/me/x word",
        "JAX_COMPILATION_CACHE_DIR": "/data/me/cache",
        "AWS_SECRET_ACCESS_KEY": "lion",
    }
    assert reported_environment(given) == {
        "JAX_COMPILATION_CACHE_DIR": "set; its value is not shown",
        "XLA_FLAGS": "--xla_gpu_autotune_level=2 --xla_dump_to=(not shown)",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "set; its value is not shown",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def written(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_bounds_of_groups_and_machine_are_read(tmp_path):
    proc = written(
        tmp_path / "proc",
        {
            "self/status": "Name: x\nVmSize:\t 1048576 kB\n",
            "self/cgroup": "0::/jobs/one\n",
            "meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
        },
    )
    groups = written(
        tmp_path / "groups",
        {
            "jobs/one/memory.max": "max\n",
            "jobs/one/memory.current": "1\n",
            "jobs/memory.max": f"{3 * GIB}\n",
            "jobs/memory.current": f"{2 * GIB}\n",
            "jobs/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    bounds = [(limit.name, limit.limit_bytes, limit.left_bytes) for limit in host_limits(proc, groups)]
    assert bounds == [
        ("control group", 3 * GIB, 3 * GIB // 2),
        ("the machine's memory and swap", 8 * GIB, 4 * GIB),
    ]
    assert host_limits(tmp_path / "nowhere", tmp_path / "nowhere") == ()


def sentence_of(facts, *devices):
    return summarize(OomFailure(error=MemoryError(), facts=facts, evidence="", program=None), devices)


def test_the_cause_is_told_from_figures_or_unknown():
    in_pieces = MemoryLimit(
        name="gpu:0",
        limit_bytes=10 * GIB,
        used_bytes=4 * GIB,
        source="",
        largest_free_bytes=GIB,
        pool_bytes=10 * GIB,
    )
    asked = OomFacts(phase="run", platform="gpu", requested_bytes=2 * GIB)
    found = sentence_of(asked, in_pieces)
    assert (found.cause, found.lacking_bytes) == ("fragmentation", GIB)
    assert "6.0 GiB of 10.0 GiB are free on gpu:0 now" in found.sentence
    found = sentence_of(dataclasses.replace(asked, requested_bytes=7 * GIB), in_pieces)
    assert (found.cause, found.lacking_bytes) == ("capacity", GIB)
    found = sentence_of(asked)
    assert (found.cause, found.lacking_bytes) == ("unknown", None)
    assert "unknown, because what was free is not stated" in found.sentence
    needs = OomFacts(phase="compile", platform="tpu", used_bytes=30 * GIB, limit_bytes=16 * GIB)
    found = sentence_of(needs)
    assert (found.cause, found.lacking_bytes) == ("capacity", 14 * GIB)
    assert "needs 30.0 GiB while it was compiled; there are 16.0 GiB" in found.sentence
    nearly = dataclasses.replace(needs, used_bytes=2**20, limit_bytes=2**20)  # more by less than is printed
    assert (sentence_of(nearly).cause, sentence_of(nearly).lacking_bytes) == ("capacity", None)


def test_what_a_pool_may_still_grow_by_is_not_free_in_it():
    """By the statistics after the failure, where the text says no more than what was asked for."""
    pool = MemoryLimit(
        name="gpu:0",
        limit_bytes=16 * GIB,
        used_bytes=9 * GIB,
        source="",
        largest_free_bytes=GIB // 2,
        pool_bytes=10 * GIB,
    )
    asked = OomFacts(phase="run", platform="gpu", requested_bytes=4 * GIB)
    found = sentence_of(asked, pool)
    assert (found.cause, found.lacking_bytes) == ("refused", None)
    assert "the device had no more to give: the pool could still grow by 6.0 GiB" in found.sentence
    found = sentence_of(asked, dataclasses.replace(pool, pool_bytes=13 * GIB))
    assert (found.cause, found.lacking_bytes) == ("fragmentation", 7 * GIB // 2)
    found = sentence_of(asked, dataclasses.replace(pool, used_bytes=11 * GIB, pool_bytes=14 * GIB))
    assert (found.cause, found.lacking_bytes) == ("growth", GIB)
    assert "neither that nor the 3.0 GiB free in it was enough alone" in found.sentence
    unsaid = dataclasses.replace(pool, pool_bytes=None)  # an allocator that does not say what its pool holds
    assert sentence_of(asked, unsaid).cause == "unknown"
    tpu = dataclasses.replace(unsaid, name="tpu:0")  # has no pool: all of its memory is the runtime's
    assert sentence_of(dataclasses.replace(asked, platform="tpu"), tpu).cause == "fragmentation"


def test_where_the_hosts_memory_ran_out_nothing_of_a_gpu_is_told():
    gpu = MemoryLimit(name="gpu:0", limit_bytes=80 * GIB, used_bytes=4 * GIB, source="")
    bound = MemoryLimit(name="control group", limit_bytes=32 * GIB, used_bytes=31 * GIB, source="")
    facts = OomFacts(platform="host", requested_bytes=8 * GIB)
    found = summarize(OomFailure(error=MemoryError(), facts=facts, evidence="", program=None, limits=(bound,)), [gpu])
    assert (found.cause, found.lacking_bytes) == ("capacity", 7 * GIB)
    assert "1.0 GiB of the 32.0 GiB of the control group are left now" in found.sentence
    asked = {"cause": "capacity", "lacking_bytes": 7 * GIB, "platform": "gpu"}
    assert [(each.what, each.lines) for each in remedies(None, Forecasts(), (), facts=facts, **asked)] == [
        ("Does the loader hold more batches on the host than it needs?", ())
    ]


def test_settings_of_the_allocator_come_first_where_fragmentation_is_the_cause():
    asked = {"lacking_bytes": None, "platform": "gpu"}
    first = remedies(None, Forecasts(), (), cause="fragmentation", **asked)
    assert [remedy.lines[0].partition("  #")[0] for remedy in first] == [
        "state, report = jm.defragment(state)",
        'jm.apply_environment("gpu_preallocate")',
        'jm.apply_environment("gpu_async")',
    ]
    assert not any(remedy.compiled or remedy.saves_bytes for remedy in first)
    grown = remedies(None, Forecasts(), (), cause="growth", **asked)
    assert [remedy.lines[0].partition("  #")[0] for remedy in grown] == [
        'jm.apply_environment("gpu_preallocate")',
        'jm.apply_environment("gpu_async")',
    ]
    # The device had no more: a pool that asks for more of it, and arrays that are moved, change nothing.
    (held,) = remedies(None, Forecasts(), (), cause="refused", **asked)
    assert held.what.startswith("Does something else hold memory of the GPU: another process, or PyTorch")
    assert held.lines == ()
    assert remedies(None, Forecasts(), (), cause="capacity", lacking_bytes=None, platform="cpu") == ()


def forecasts_of(*tried):
    """Of a step of 10 GiB: kind, GiB that it then needs, extra operations and what else is known of it."""
    return Forecasts(
        plain=sample_plans.candidate(10 * 1024, 0),
        tried=tuple(
            Forecast(kind=kind, policy=jm.StepPolicy(**policy), step_bytes=gib * GIB, extra_share=extra)
            for kind, gib, extra, policy in tried
        ),
    )


def ranked(forecasts, holders=()):
    failing = FailingProgram(name="train_step", known_by="", step=jm.jit_step(lambda state, batch: (state, batch)))
    found = remedies(failing, forecasts, holders, cause="capacity", lacking_bytes=3 * GIB, platform="cpu")
    return [remedy.what.partition(":")[0].partition(" (")[0] for remedy in found if remedy.saves_bytes is not None]


def test_a_remedy_that_computes_hardly_anything_again_is_not_told_as_free():
    failing = FailingProgram(name="train_step", known_by="", step=jm.jit_step(lambda state, batch: (state, batch)))
    asked = {"cause": "capacity", "lacking_bytes": 3 * GIB, "platform": "cpu"}
    for extra, costs in (
        (0.2, "20.0% more operations"),
        (0.0003, "<0.1% more operations"),
        (0.0, "no more operations"),
    ):
        told, *_ = remedies(failing, forecasts_of(("remat", 4, extra, {"remat": "full"})), (), **asked)
        assert told.costs == costs


def test_remedies_that_save_enough_are_ranked_by_what_they_cost():
    kept = Holder(
        name="kept", known_by=VARIABLE, kind="", type_text="float32[1]", count=9, bytes=4 * GIB, devices=(), site=""
    )
    dear = ("remat", 4, 0.3, {"remat": "full"})
    slices = ("microbatches", 6, 0.0, {"microbatches": 2})
    half = ("rows", 5, -0.5, {})
    in_slices = "The same batch in 2 microbatches"
    assert ranked(forecasts_of(half, dear, slices), [kept]) == [
        *(in_slices, "Let go of kept", "Stronger remat", "Half the batch"),
    ], "what costs no operations stands above 30 % more of them, and another training below everything"
    cheap = ("remat", 4, 0.004, {"remat": "full"})
    assert ranked(forecasts_of(cheap, slices)) == ["Stronger remat", in_slices], "within a percent remat disturbs less"
    unknown = ("remat", 4, None, {"remat": "full"})
    slow = ("microbatches", 6, 0.2, {"microbatches": 2})
    assert ranked(forecasts_of(unknown, slow)) == [in_slices, "Stronger remat"], (
        "a cost that nobody knows is no small one"
    )
    too_little = ("microbatches", 8, 0.0, {"microbatches": 2})
    assert ranked(forecasts_of(too_little, dear)) == ["Stronger remat", in_slices], "what is enough comes first"


def test_holes_are_told_with_the_arrays_on_both_sides():
    def buffers(*rows):
        return tuple(LiveBuffer(address=at, bytes=size, label=label) for at, size, label in rows)

    far = 2**40
    heap = HeapMap(
        device="gpu:0",
        step=-1,
        time_s=0.0,
        buffers=buffers((0, 256, "a"), (1024, 256, "b"), (1280, 256, "c"), (2048, 256, "a"), (far, 256, "d")),
    )
    assert largest_holes([heap]) == (
        (
            Hole(device="gpu:0", bytes=768, below="a", above="b"),
            Hole(device="gpu:0", bytes=512, below="c", above="a"),
        ),
        "",
    )
    assert largest_holes([Unavailable(figure="heap_map", device="gpu:0", reason="9 arrays are alive")]) == (
        (),
        "9 arrays are alive",
    )
    assert "among the rest of the process's memory" in holes_now("cpu")[1]


def test_nothing_is_compiled_without_a_step_or_with_too_little_left():
    assert "is no step of jm.jit_step" in forecast(None, 60, None).how


@pytest.mark.parametrize(
    ("platform", "kind", "count", "name"),
    [("cpu", "cpu", 8, "cpu"), ("gpu", "NVIDIA H100 80GB HBM3", 8, "h100_sxm:8"), ("tpu", "TPU v5 lite", 4, "v5e:2x2")],
)
def test_attached_devices_are_targets(platform, kind, count, name):
    try:
        found = attached_target(platform, kind, count)
    except TargetError as error:  # its compiler is not installed here
        told = str(error)
    else:
        assert found.device_count == count
        told = f"Target {found.name!r} needs a compiler"
    assert f"Target {name!r} needs a compiler" in told


def test_devices_like_no_target_are_refused():
    with pytest.raises(
        TargetError, match=r"3 attached devices of the kind 'Abacus' \(gpu\) are like no target\. Expected"
    ):
        attached_target("gpu", "Abacus", 3)


def test_values_inside_a_librarys_fusion_are_found():
    text = """HloModule m

%fused (p: f32[8,8]) -> f32[] {
  %p = f32[8,8]{1,0} parameter(0)
  %b = f32[4096,4096]{1,0} broadcast(%p), dimensions={}
  %d = f32[1024,1024]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %r = f32[] reduce(%d)
}

ENTRY %main (x: f32[8,8]) -> f32[] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %f = f32[] fusion(%x), kind=kCustom, calls=%fused
}
"""
    assert library_bytes(parse_module(text)) == 4 * 1024 * 1024
    assert library_bytes(parse_module(text.replace("kCustom", "kLoop"))) == 0


def test_what_a_librarys_fusion_returns_has_its_room_in_the_compilers_figures():
    text = """HloModule m

%fused (p: f32[8,8]) -> (f32[1024,1024], f32[512,1024]) {
  %p = f32[8,8]{1,0} parameter(0)
  %s = f32[256,1024]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %d = f32[1024,1024]{1,0} dot(%s, %s), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %e = f32[1024,512]{1,0} dot(%d, %s), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %b = f32[512,1024]{1,0} bitcast(%e)
  ROOT %r = (f32[1024,1024]{1,0}, f32[512,1024]{1,0}) tuple(%d, %b)
}

ENTRY %main (x: f32[8,8]) -> (f32[1024,1024], f32[512,1024]) {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %f = (f32[1024,1024]{1,0}, f32[512,1024]{1,0}) fusion(%x), kind=kCustom, calls=%fused
}
"""
    assert library_bytes(parse_module(text)) == 4 * 256 * 1024


def test_a_second_of_many_reports_is_no_endless_search(tmp_path):
    for number in range(1, 1000):
        (tmp_path / ("oom-19700101-000000-process0-pid1" + (f"-{number}" if number > 1 else ""))).mkdir()
    with pytest.raises(FileExistsError, match="holds 1000 reports of one second"):
        new_folder(tmp_path, process=0, pid=1, time_s=0.0)


def test_who_else_has_entered_a_guard_since_does_not_change_what_failed(tmp_path):
    step = jm.jit_step(lambda state, batch: (state + jnp.sort(batch @ batch.T, axis=0).sum(), {}), donate_argnames=())
    one, other, guard = (
        contextvars.copy_context(),
        contextvars.copy_context(),
        jm.oom_guard(outdir=tmp_path, plan_seconds=0),
    )
    one.run(guard.__enter__)
    step(jnp.float32(0), jnp.ones((512, 64)))
    asked = dict(registry.steps())[step].memory.temp_bytes
    assert asked > 2**19
    other.run(guard.__enter__)
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory allocating {asked} bytes.")
    one.run(guard.__exit__, type(error), error, None)
    other.run(guard.__exit__, None, None, None)
    (folder,) = tmp_path.glob("oom-*")
    assert (
        json.loads((folder / "facts.json").read_text())["program"]["known_by"]
        == "probably this one: what it takes is as large as what was asked for"
    )


def test_nothing_that_users_gave_is_markup():
    report = hostile_report()
    page, text = page_html(oom_model(report, version="0")), oom_markdown(report)
    assert page.count("<script") == 2, "the model, which is data, and the page's own module"
    assert page.count("\\u003cscript\\u003e") > 25
    assert "\u202e" not in page, "a character that turns around what follows it"
    assert page.count("\\u0026amp; \\\\u202e") > 25, "but it can be seen"
    outside_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert HOSTILE not in outside_code
    assert "<script" not in outside_code
