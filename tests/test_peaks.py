"""What a buffer is to a step: judged on small programs whose truth is known, and on made-up HLO for what is rare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.programs.memory import buffer_table
from jaxmem_callbacks.programs.reading.buffer_assignment import Value
from jaxmem_callbacks.programs.reading.buffers import (
    Argument,
    Arguments,
    BufferClassifier,
    HloDataflow,
    pass_of_name,
)
from jaxmem_callbacks.programs.reading.hlo import element_count, padded_bytes, parse_module, unpadded_bytes, user_source
from jaxmem_callbacks.programs.targets import worker_main
from jaxmem_callbacks.records.documents import aligned
from jaxmem_callbacks.records.peaks import GROUPS, REFUSED, Buffer, peak_model, peak_of, with_total
from jaxmem_callbacks.transforms.arg_roles import kind_of_path
from tests.sample_plans import sentences

pytestmark = pytest.mark.core
WIDTH, DEPTH, ROWS = 256, 3, 4


def loss(params: Any, batch: Any) -> Any:
    for weight in params:
        batch = jnp.tanh(batch @ weight)
    return (batch**2).mean()


def clipped_step(params: Any, batch: Any) -> Any:
    """All gradients are alive together: the norm of all of them comes before the first is used."""
    value, grads = jm.value_and_grad(loss)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in grads))
    return [weight - grad / norm for weight, grad in zip(params, grads, strict=True)], value


def arguments() -> Any:
    return [jnp.ones((WIDTH, WIDTH))] * DEPTH, jnp.ones((ROWS, WIDTH))


@pytest.mark.parametrize(("microbatches", "least"), [(1, DEPTH - 1), (2, DEPTH)])
def test_gradients_that_are_alive_together_are_all_told(microbatches: int, least: int) -> None:
    step = jm.jit_step(clipped_step, jm.StepPolicy(microbatches=microbatches), donate_argnames=())
    memory = jm.step_memory(step, *jax.eval_shape(arguments))
    peak = memory.peak()
    one = WIDTH * WIDTH * 4
    assert peak.bytes - memory.step_bytes <= peak.bytes_of("constants")  # which jax 0.10 leaves out of its figures
    assert peak.bytes_of("parameters") == DEPTH * one
    # Without microbatches the fullest moment is just before the last of them is made; some are where results will be.
    assert peak.bytes_of("gradients") == least * one
    assert peak.bytes_of("results") == pytest.approx((DEPTH - least + 1) * one, rel=0.01)
    assert peak.bytes_of("unknown") == 0


# --- HLO text --------------------------------------------------------------------------------------------------------

HLO = """HloModule jit_step


%double (d: f32[8,8]) -> f32[8,8] {
  %d = f32[8,8]{1,0} parameter(0)
  ROOT %doubled = f32[8,8]{1,0} add(%d, %d), metadata={op_name="jit(step)/transpose(jvp())/mul"}
}

%forward (carry: (s32[], f32[6,4,8])) -> (s32[], f32[6,4,8]) {
  %carry = (s32[], f32[6,4,8]{2,1,0}) parameter(0)
  %kept = f32[4,8]{1,0} tanh(%carry#1), metadata={op_name="jit(step)/jvp()/while/body/tanh"}
  %stack = f32[6,4,8]{2,1,0} dynamic-update-slice(%carry#1, %kept, %carry#0), metadata={op_name="jit(step)/jvp()/while/body"}
  ROOT %next = (s32[], f32[6,4,8]{2,1,0}) tuple(%carry#0, %stack)
}

%prefetch (p: bf16[4,8]) -> bf16[2,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %half = bf16[2,8]{1,0} slice(%p), slice={[0:2], [0:8]}
}

%fetch (f: f32[4,8]) -> f32[2,8] {
  %f = f32[4,8]{1,0} parameter(0)
  ROOT %quarter = f32[2,8]{1,0:S(1)} slice(%f), slice={[0:2], [0:8]}
}

%always (c: (s32[], f32[6,4,8])) -> pred[] {
  %c = (s32[], f32[6,4,8]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%backward (back: (s32[], f32[6,4,8], f32[8,8])) -> (s32[], f32[6,4,8], f32[8,8]) {
  %back = (s32[], f32[6,4,8]{2,1,0}, f32[8,8]{1,0}) parameter(0)
  %slice = f32[4,8]{1,0} dynamic-slice(%back#1, %back#0), metadata={op_name="jit(step)/transpose(jvp())/while/body/dynamic_slice"}
  %laid = f32[8,4]{1,0} copy(%slice)
  %product = f32[8,8]{1,0} dot(%laid, %slice), metadata={op_name="jit(step)/transpose(jvp())/while/body/dot_general"}
  %sum = f32[8,8]{1,0} add(%back#2, %product), metadata={op_name="jit(step)/transpose(jvp())/while/body/add_any"}
  ROOT %after = (s32[], f32[6,4,8]{2,1,0}, f32[8,8]{1,0}) tuple(%back#0, %back#1, /*index=2*/%sum)
}

ENTRY %main (w: f32[8,8], x: f32[4,8]) -> (f32[8,8], f32[8,8]) {
  %w = f32[8,8]{1,0} parameter(0), metadata={op_name="w"}
  %x = f32[4,8]{1,0} parameter(1), metadata={op_name="x"}
  %laid_out = f32[8,8]{0,1} copy(%w)
  %narrow = bf16[8,8]{0,1} convert(%laid_out)
  %zero = s32[] constant(0)
  %empty = f32[6,4,8]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %first = (s32[], f32[6,4,8]{2,1,0}) tuple(%zero, %empty)
  %loop = (s32[], f32[6,4,8]{2,1,0}) while(%first), condition=%always, body=%forward, metadata={op_name="jit(step)/jvp()/while"}
  %spent = f32[4,8]{1,0} exponential(%x), metadata={op_name="jit(step)/jvp()/exp"}
  %loss = f32[] reduce(%spent, %zero), to_apply=%double, metadata={op_name="jit(step)/jvp()/reduce_sum"}
  %none = f32[8,8]{1,0} broadcast(%zero)
  %second = (s32[], f32[6,4,8]{2,1,0}, f32[8,8]{1,0}) tuple(%loop#0, %loop#1, %none)
  %loop.2 = (s32[], f32[6,4,8], f32[8,8]{1,0}) while(%second), body=%backward, metadata={op_name="s/transpose(jvp())/while"}
  %twice = f32[8,8]{1,0} call(%loop.2#2), to_apply=%double
  %metric = f32[8,8]{1,0} negate(%w), metadata={op_name="jit(step)/neg"}
  %plain = f32[4,8]{1,0} sine(%x), metadata={op_name="jit(step)/jvp()/sin"}
  %cast = bf16[4,8]{1,0} convert(%plain), metadata={op_name="jit(step)/jvp()/convert_element_type"}
  %cast-start = ((bf16[4,8]{1,0}), bf16[2,8]{1,0}, u32[]) async-start(%cast), calls=%prefetch
  %cast-done = bf16[2,8]{1,0} async-done(%cast-start)
  %used = bf16[2,8]{1,0} negate(%cast-done), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %norms = f32[4]{0} reduce(%used, %zero), to_apply=%double, metadata={op_name="jit(step)/transpose(jvp())/reduce_sum"}
  %told = f32[4]{0} negate(%norms), metadata={op_name="jit(step)/neg"}
  %turned = f32[4,8]{1,0:S(1)} cosine(%x), metadata={op_name="jit(step)/jvp()/cos"}
  %evict-start = (f32[4,8]{1,0}, f32[4,8]{1,0:S(1)}, u32[]) copy-start(%turned)
  %evicted = f32[4,8]{1,0} copy-done(%evict-start)
  %part-start = ((f32[4,8]{1,0}), f32[2,8]{1,0:S(1)}, u32[]) async-start(%evicted), calls=%fetch
  %part = f32[2,8]{1,0:S(1)} async-done(%part-start)
  %joined = f32[4,8]{1,0:S(1)} custom-call(%part, %part), custom_call_target="ConcatBitcast"
  %returned = f32[4,8]{1,0} negate(%joined), metadata={op_name="jit(step)/transpose(jvp())/neg"}
  %random = f32[8,8]{1,0} custom-call(), custom_call_target="Random"
  %noise = f32[8,8]{1,0} negate(%random)
  %both = f32[8,8]{1,0} add(%noise, %metric), metadata={op_name="jit(step)/transpose(jvp())/add_any"}
  %new = f32[8,8]{1,0} subtract(%w, %twice), metadata={op_name="jit(step)/sub"}
  ROOT %out = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%new, %both)
}
"""
KNOWN = Arguments(by_number={0: Argument(path="params['w']", kind="parameters", elements=64)})


def value(name: str, *index: int) -> Value:
    shape = parse_module(HLO).instructions[name].shape
    return Value(
        name=name, index=index, bytes=4, offset=0, shape=shape.strip("()").split(", ")[index[0]] if index else shape
    )


@pytest.mark.parametrize(
    ("name", "index", "group"),
    [
        ("stack", (), "saved activations"),  # read by the backward loop, two loops and three tuples later
        ("kept", (), "temporaries"),  # read by the forward loop only
        ("spent", (), "temporaries"),
        ("product", (), "gradients"),  # summed in the loop, doubled in a call, subtracted outside
        ("sum", (), "gradients"),
        ("laid", (), "temporaries"),  # as large as no parameter
        ("norms", (), "temporaries"),  # read outside and as large as no parameter
        ("metric", (), "temporaries"),
        ("narrow", (), "temporaries"),
        ("cast", (), "saved activations"),
        ("plain", (), "temporaries"),  # the backward pass reads what it was cast to
        ("none", (), "temporaries"),  # zeros to begin with
        ("evict-start", (0,), "saved activations"),  # put out of a TPU's own memory, fetched in parts and joined
        ("noise", (), "unknown"),
    ],
)
def test_a_value_is_followed_to_its_readers(name: str, index: tuple[int, ...], group: str) -> None:
    classifier = BufferClassifier(parse_module(HLO), KNOWN)
    found, why = classifier.classify(value(name, *index))
    assert found == group
    assert bool(why) == (group == "unknown")


def test_what_a_tpu_puts_out_of_its_own_memory_has_the_name_of_what_made_it() -> None:
    origin = parse_module(HLO).origin("evict-start", (0,))
    assert origin is not None
    assert origin.op_name == "jit(step)/jvp()/cos"


def test_a_copy_of_an_argument_is_told_as_one() -> None:
    classifier = BufferClassifier(parse_module(HLO), KNOWN)
    assert classifier.copied_argument(value("narrow")) == "params['w']"
    assert classifier.copied_argument(value("metric")) is None
    assert classifier.copied_argument(value("stack")) is None


def test_readers_are_found_in_every_pass_and_in_the_result() -> None:
    flow = HloDataflow(parse_module(HLO))
    assert flow.readers([("loop", 1)]).passes == {"backward"}
    assert flow.readers([("x", None)]).passes == {"forward"}
    assert flow.readers([("new", None)]).is_result
    assert not flow.readers([("stack", None)]).is_result
    assert flow.made_in("noise") is None
    assert flow.made_in("laid") == "backward"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("jit(step)/jvp()/while/body/tanh", "forward"),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/tanh", "backward"),
        ("jit(step)/jvp(transpose(jvp()))/mul", "forward"),  # a gradient inside the loss
        ("jit(step)/while/body/transpose(jvp(layer_0))/mul", "backward"),
        ("jit(step)/add", "outside"),
        ("jit(step)/custom_jvp_call/transpose", "outside"),
        ("params['w']", None),
        (None, None),
    ],
)
def test_names_tell_the_pass(name: str | None, told: str | None) -> None:
    assert pass_of_name(name) == told


@pytest.mark.parametrize(
    ("shape", "elements", "size"),
    [
        ("bf16[6,128,129]{2,1,0:T(8,128)(2,1)}", 6 * 128 * 129, 6 * 128 * 129 * 2),
        ("f32[]", 1, 4),
        ("pred[3]{0}", 3, 3),
        ("s4[5]{0:E(4)}", 5, 3),
        ("f8e4m3fn[7]{0}", 7, 7),
        ("(f32[2]{0}, c64[<=3]{0})", 2, 32),
        ("mystery[4]", 4, None),
        ("memory between the buffers", 0, None),
    ],
)
def test_shapes_without_padding(shape: str, elements: int, size: int | None) -> None:
    assert (element_count(shape), unpadded_bytes(shape)) == (elements, size)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[100,256]{1,0:T(8,128)}", 104 * 256 * 4),
        ("bf16[32,16,5,64,3]{3,1,4,2,0:T(8,128)(2,1)}", 32 * 5 * 3 * 16 * 128 * 2),
        ("s32[]{:T(128)}", 512),
        ("f32[4,3]{0,1}", 48),
        ("(f32[2]{0:T(128)}, pred[3])", 512 + 3),
        ("mystery[4]{0}", 0),
    ],
)
def test_shapes_with_padding(shape: str, size: int) -> None:
    assert padded_bytes(shape) == size


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("params['w']", "parameters"),
        ("state.opt_state[0].mu['w']", "optimizer state"),
        ("momentum['w']", "optimizer state"),
        ("batch['x']", "batch"),
        ("leaves[3]", "other"),
        ("", "other"),
    ],
)
def test_a_written_path_tells_the_kind(path: str, kind: str) -> None:
    assert kind_of_path(path) == kind


# --- the record ------------------------------------------------------------------------------------------------------


def buffer(size: int, group: str, **fields: Any) -> Buffer:
    return Buffer(bytes=size, shape="f32[2]{0}", kind="temporary", group=group, **fields)


some_buffers = st.lists(
    st.builds(buffer, st.integers(1, 2**40), st.sampled_from(sorted(GROUPS)), unpadded_bytes=st.none() | st.just(1))
)


@given(buffers=some_buffers)
def test_groups_always_add_up(buffers: list[Buffer]) -> None:
    peak = peak_of(buffers)
    assert peak.bytes == sum(each.bytes for each in buffers) == sum(group.bytes for group in peak.groups)
    assert sum(group.count for group in peak.groups) == len(buffers)
    assert sum(peak.bytes_of(name) for name in GROUPS) == peak.bytes
    assert 0 <= peak.waste_bytes <= peak.bytes
    few = peak.largest(1)
    assert (few.bytes, few.groups, few.words) == (peak.bytes, peak.groups, peak.words)
    assert len(few.buffers) == len(peak.groups)


def test_the_words_name_what_matters_and_the_table_names_all() -> None:
    held = [
        buffer(800, "saved activations", operation="jit(step)/jvp()/tanh"),
        buffer(196, "parameters", unpadded_bytes=96),
        buffer(4, "constants"),
    ]
    peak = peak_of([*held, buffer(50, "saved activations", memory_space="host")], moment="jit(step)/dot (a.py:3)")
    assert peak.bytes == 1000
    assert peak.words == "saved activations 800 B (80%), parameters 196 B (20%), all else 4 B"
    text = str(peak)
    for part in ("The peak of 1000 B", "100 B", "jit(step)/jvp()/tanh", "reached at jit(step)/dot (a.py:3)"):
        assert part in text
    assert "In host memory meanwhile, no part of it: 50 B." in text
    rows = aligned(buffer_table([held[1], buffer(1, "unknown", source="a.py:4")]))
    assert rows[1].split()[:4] == ["196", "B", "100", "B"]
    assert "unknown" in rows[2]


def test_the_page_names_the_file_of_the_peak_and_not_its_folder() -> None:
    for source, shown in (("/runs/me/train.py:3", "train.py:3"), ("a.py:3", "a.py:3"), ("lib/flax/nn.py:3", "nn.py:3")):
        peak = peak_of([buffer(10, "parameters")], moment=f"jit(step)/jvp()/dot ({source})")
        assert peak_model(peak)["moment"] == f"jit(step)/jvp()/dot ({shown})"
    assert peak_model(peak_of([]))["moment"] is None


def test_what_buffers_do_not_explain_is_unknown_and_says_why() -> None:
    peak = peak_of([buffer(10, "parameters")], basis=REFUSED)
    whole = with_total(peak, 25, "it was refused")
    assert (whole.bytes, whole.bytes_of("unknown"), whole.basis) == (25, 15, REFUSED)
    assert "unknown: it was refused." in str(whole)
    assert "the compiler refused the program" in sentences(whole)
    assert with_total(peak, 10, "no") is peak
    assert with_total(peak, None, "no") is peak


def test_a_group_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"There is no group 'weights' in a peak\. Expected one of batch, constants, "):
        peak_of([]).bytes_of("weights")
    assert dataclasses.replace(peak_of([]), moment=None).words == ""


def test_what_calls_our_command_is_no_line_of_the_users():
    ours, jax_file = Path(jm.__file__).parent, ("/v/site-packages/jax/_src/lax/slicing.py", 5)
    command = [(str(ours / "cli" / "inspect.py"), 40), (str(ours / "cli" / "main.py"), 60), ("/v/bin/jaxmem", 8)]
    step = (str(ours / "programs" / "steps" / "jit.py"), 9)
    assert user_source([jax_file, step, *command]) == ":".join(map(str, jax_file))
    assert user_source([step, *command]) is None
    assert user_source([step, ("/u/train.py", 7), *command]) == "/u/train.py:7"
    elsewhere = ("/other/jaxmem_callbacks/programs/targets/worker_main.py", 87)
    assert user_source([elsewhere]) is None, "by another installation, and read from the cache"
    assert Path(worker_main.__file__).as_posix().endswith(elsewhere[0].removeprefix("/other"))
    assert user_source([step, ("/u/climate/train.py", 7)]) == "/u/climate/train.py:7", "called by no command"
