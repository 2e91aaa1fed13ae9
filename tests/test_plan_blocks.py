"""A checkpoint around each block, as the author of a loss would write it, is always among the candidates of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem_callbacks as jm
from jaxmem_callbacks.planning.compiles import Compiler
from jaxmem_callbacks.planning.problem import Problem
from jaxmem_callbacks.planning.request import Budget
from jaxmem_callbacks.planning.search import RematSearch, candidates_for
from jaxmem_callbacks.programs.targets.compile import compile_for_target
from jaxmem_callbacks.transforms.costs import jaxpr_flops
from tests.said import Said
from tests.target_step import keeps_remat, needs_compiler, shape

# As a plan for a CPU compiles them.
FULL, BLOCKS = jm.StepPolicy(remat="full", assume_fusion=False), jm.StepPolicy(remat="full", segments="blocks")
ENDS = {each.segments: each for each in (FULL, BLOCKS)}
LAYERS, ROWS, WIDTH, RANK, WORDS = 4, 4096, 256, 8, 2048
OPTIMIZER = optax.sgd(1e-3)  # of AdamW a GPU's compiler has five times as many loops to make
DONATED = ("params", "opt_state")


def residual(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["w"] + p["b"] + (x @ p["down"]) @ p["up"])


def wide(x: jax.Array, p: Any) -> jax.Array:
    return x + jax.nn.gelu(x @ p["in"]) @ p["out"]


def attended(x: jax.Array, p: Any) -> jax.Array:
    """A decoder's block in bfloat16, its norms and softmax in float32."""

    def normed(x):
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]).astype(jnp.bfloat16)

    heads = x.reshape(-1, 128, 4, WIDTH // 4)
    scores = jnp.einsum("bqhe,bkhe->bhqk", normed(heads.reshape(x.shape)).reshape(heads.shape), heads).astype(
        jnp.float32
    )
    mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores).astype(jnp.bfloat16), heads).reshape(x.shape)
    x = x + mixed @ p["w"].astype(jnp.bfloat16)
    return x + jax.nn.gelu(normed(x) @ p["in"].astype(jnp.bfloat16)) @ p["out"].astype(jnp.bfloat16)


def step_of(gradient: Callable[..., Any], block: Callable[..., Any]) -> Any:
    """A step of a net of blocks: under a loss of their own width, or with a tied head in float32 where there are words."""

    def loss(params: Any, batch: Any) -> Any:
        words = params.get("words")
        x = batch["x"] if words is None else words[batch["x"]].astype(jnp.bfloat16)
        for p in params["blocks"]:
            x = block(x, p)
        if words is not None:
            logits = x.astype(jnp.float32) @ words.T
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(batch["x"], -1)).mean()
        x = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * params["scale"]
        return jnp.square(x - batch["y"]).mean()

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = gradient(loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def arguments(*, words: int = 0, rows: int = ROWS, **weights: tuple[int, ...]) -> tuple[Any, ...]:
    params = {
        "blocks": [{name: shape(*sizes) for name, sizes in weights.items()} for _ in range(LAYERS)],
        **({"words": shape(words, WIDTH)} if words else {"scale": shape(WIDTH)}),
    }
    batch = {"x": shape(rows, dtype=jnp.int32)} if words else {"x": shape(rows, WIDTH), "y": shape(rows, WIDTH)}
    return params, jax.eval_shape(OPTIMIZER.init, params), batch


MLP = {"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}
NETS = {
    "residual": (residual, arguments(w=(WIDTH, WIDTH), b=(WIDTH,), down=(WIDTH, RANK), up=(RANK, WIDTH))),
    "wide": (wide, arguments(**MLP)),
    "decoder": (attended, arguments(words=WORDS, rows=2048, w=(WIDTH, WIDTH), scale=(WIDTH,), **MLP)),
}
TARGETS = [
    pytest.param("h100_sxm", marks=[pytest.mark.targets, pytest.mark.recorded]),
    pytest.param("cpu", marks=[pytest.mark.core, keeps_remat]),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("net", NETS)
def test_no_checkpoint_around_each_block_by_hand_beats_the_plan(net: str, target: str) -> None:
    """A row has at most 1.02 of its bytes and operations; and in its bytes as a budget a step of no more operations fits."""
    needs_compiler(target)
    block, args = NETS[net]
    hand = step_of(jax.value_and_grad, jax.checkpoint(block))
    theirs = compile_for_target(hand, args, target=target, donate_argnames=DONATED, keep_hlo=False).needed_bytes
    operations = jaxpr_flops(jax.make_jaxpr(hand)(*args))
    step = step_of(jm.value_and_grad, block)
    plan = jm.plan(step, *args, target=target, progress=False)
    ratios = [max((each.step_bytes or 0) / (theirs or 1), each.flops / operations) for each in plan.candidates]
    assert plan.compiles <= 8
    assert min(ratios) <= 1.02, [(each.policy, each.step_bytes, each.flops) for each in plan.candidates]
    within = jm.plan(step, *args, target=target, budget=theirs, progress=False)
    chosen = next(each for each in within.candidates if each.policy == within.policy)
    assert chosen.fits
    assert chosen.flops <= 1.001 * operations


def compiler_for(budget: int | None, net: str = "wide") -> Compiler:
    block, args = NETS[net]
    given = Budget(bytes=budget, limit_bytes=budget, reason="asked for")
    step = step_of(jm.value_and_grad, block)
    return Compiler(Problem(train_step=step, args=args, kwargs={}, target=None, budget=given))


def asked(
    compiler: Compiler, needs: dict[Any, int | None], *, kept: int = 1000, left: int = 8
) -> tuple[list[jm.StepPolicy], RematSearch]:
    """What is asked of a compiler that needs so many bytes for each kind of segments, and the search.

    What a step keeps besides takes up to ``kept``. Refused without a figure is what needs None.
    """

    def bytes_of(policy: jm.StepPolicy) -> int | None:
        least = 4 * kept if policy.remat == "none" else needs[policy.segments]
        return None if least is None else least + int(policy.keep * kept)

    queue = Said(bytes_of)
    queue.remaining = left
    search = RematSearch(compiler, queue)
    search.run(frontier=compiler.problem.budget.bytes is None)
    return queue.asked, search


@pytest.fixture(scope="module")
def dearer() -> Any:
    """Which of the two lower ends computes more again, and which less."""
    return dearer_of(compiler_for(None))


def dearer_of(compiler: Compiler) -> Any:
    ends = {each.segments: compiler.facts(each).flops for each in (FULL, BLOCKS)}
    return max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)


@pytest.mark.core
@pytest.mark.parametrize("budget", [None, 1300], ids=["frontier", "budget"])
@pytest.mark.parametrize("needs", [1000, 1100, None])
def test_what_takes_no_more_bytes_and_operations_goes_on_alone(
    dearer: Any, needs: int | None, budget: int | None
) -> None:
    more, less = dearer
    places, search = asked(compiler_for(budget), {less: 1000, more: needs})
    assert places[:3] == [jm.StepPolicy(), FULL, BLOCKS]
    assert 3 < len(places) <= 8
    assert {each.segments for each in places[3:]} == {less}
    assert search.full is search.found[ENDS[less]]


@pytest.mark.core
def test_both_go_on_where_each_has_less_of_one() -> None:
    """Fewest bytes come first; above them what computes less again, from the bytes at which it begins."""
    compiler = compiler_for(None, "residual")
    more, less = dearer_of(compiler)
    lower = ENDS[more]
    kept = candidates_for(compiler, lower)[-1].bytes
    places, search = asked(compiler, {less: kept + kept // 2, more: kept}, kept=kept)
    assert search.full is search.found[lower]
    assert {each.segments for each in places[3:]} == {more, less}
    assert 6 < len(places) <= 8


@pytest.mark.core
def test_a_step_that_takes_more_than_one_that_computes_less_is_replaced() -> None:
    """A compiler may pack the buffers of one step badly: what is asked for then is beside it, not what is above it."""
    compiler = compiler_for(None, "decoder")
    lower = ENDS[dearer_of(compiler)[1]]
    unlucky: list[float] = []

    def bytes_of(policy: jm.StepPolicy) -> int:
        if policy.remat == "none":
            return 9000
        if policy.segments != lower.segments:
            return 8000
        if 0.1 < policy.keep < 0.9 and unlucky in ([], [policy.keep]):
            unlucky[:] = [policy.keep]
            return 7000
        return 1000 + int(3000 * policy.keep)

    queue = Said(bytes_of)
    queue.remaining = 8
    RematSearch(compiler, queue).run(frontier=True)
    kept = [each.keep for each in queue.asked if each.segments == lower.segments and each.remat == "full"]
    assert len(set(kept)) == len(kept) == 6
    assert min(abs(keep - unlucky[0]) for keep in kept if keep != unlucky[0]) < 0.1


def towers(params: Any, opt_state: Any, batch: Any) -> Any:
    """A step of an actor and a critic, in which nothing repeats."""

    def loss(params: Any, batch: Any) -> Any:
        several = []
        for tower in params:
            x = batch["x"]
            for weight in tower:
                x = jnp.tanh(x @ weight)
            several.append(jnp.square(x.sum(-1) - batch["y"]).mean())
        return sum(several)

    value, grads = jm.value_and_grad(loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def towers_compiler(budget: int | None, step: Any = towers, *leading: int) -> Compiler:
    widths = [[WIDTH, 512, 384, 640, 4], [WIDTH, 448, 576, 320, 1]]
    params = [[shape(*sizes) for sizes in itertools.pairwise(each)] for each in widths]
    batch = {"x": shape(*leading, ROWS, WIDTH), "y": shape(*leading, ROWS)}
    given = Budget(bytes=budget, limit_bytes=budget, reason="asked for")
    args = params, jax.eval_shape(OPTIMIZER.init, params), batch
    return Compiler(Problem(train_step=step, args=args, kwargs={}, target=None, budget=given))


@pytest.mark.core
@pytest.mark.parametrize("budget", [None, 800], ids=["frontier", "budget"])
def test_where_remat_hardly_helps_other_cuts_are_asked_for_that_keep_least_and_most(budget: int | None) -> None:
    """What is computed again may take as much as what was kept: then the step that keeps most takes least."""
    compiler = towers_compiler(budget)

    def bytes_of(policy: jm.StepPolicy) -> int:
        return 1000 if policy.remat == "none" else 1070 if policy.segments is None else 950 - int(200 * policy.keep)

    queue = Said(bytes_of)
    search = RematSearch(compiler, queue)
    search.run(frontier=budget is None)
    others = [each for each in queue.asked if each.segments is not None]
    assert [each.keep for each in others[:2]] == [0.0, 1.0]
    assert all(each.segments == others[0].segments for each in others)
    assert min(search.found.values(), key=lambda each: each.step_bytes or 0).step_bytes == 750


@pytest.mark.core
@pytest.mark.parametrize("kept_share", [0.4, 0.6, 0.8])
def test_between_two_peaks_the_offer_of_least_bytes_is_found(kept_share: float) -> None:
    """What is kept makes the one, from this share on; what is computed again makes the other."""
    compiler = towers_compiler(None)
    found: dict[Any, dict[float, int]] = {}

    def bytes_of(policy: jm.StepPolicy) -> int:
        plain = 10 * most
        if policy.remat == "none" or policy.segments in (None, "blocks"):
            return plain
        if policy.segments not in found:
            lower = jm.StepPolicy(remat="full", segments=policy.segments)
            found[policy.segments] = {each.policy.keep: each.bytes for each in candidates_for(compiler, lower)}
        beyond = found[policy.segments][policy.keep] - kept_share * max(found[policy.segments].values())
        return plain - most + int(beyond if beyond > 0 else -2 * beyond)

    most = max(each.bytes for each in candidates_for(compiler, FULL))
    queue = Said(bytes_of)
    queue.remaining = 8
    search = RematSearch(compiler, queue)
    search.run(frontier=True)
    ((segments, kept),) = found.items()
    each_needs = {keep: bytes_of(jm.StepPolicy(remat="full", segments=segments, keep=keep)) for keep in kept}
    assert min(found.step_bytes or 0 for found in search.found.values()) <= min(each_needs.values()) + 0.1 * most
    assert each_needs[0.0] > min(each_needs.values()) + 0.3 * most


def scanned(params: Any, opt_state: Any, batches: Any) -> Any:
    """Steps of `towers`, one for each batch."""

    def learn(carry: Any, batch: Any) -> Any:
        params, opt_state, value = towers(*carry, batch)
        return (params, opt_state), value

    (params, opt_state), values = jax.lax.scan(learn, (params, opt_state), batches)
    return params, opt_state, values.mean()


@pytest.mark.core
@pytest.mark.parametrize("policy", [FULL, jm.StepPolicy(remat="full", assume_fusion=False, microbatches=2)])
@pytest.mark.parametrize(("step", "leading"), [(towers, ()), (scanned, (16,))])
def test_an_offer_counts_what_it_computes_again_in_the_whole_step(policy: Any, step: Any, leading: Any) -> None:
    """A scan takes the gradient of a loss as often as it turns, and so do microbatches."""
    compiler = towers_compiler(None, step, *leading)
    offered = candidates_for(compiler, policy)
    for offer in (offered[1], offered[len(offered) // 2]):
        again = compiler.facts(offer.policy).flops - compiler.plain.flops
        assert offer.flops == pytest.approx(again, rel=0.05)


@pytest.mark.core
def test_without_a_compile_left_they_are_not_asked_for() -> None:
    places, search = asked(compiler_for(None), {None: 1000, "blocks": 900}, left=2)
    assert places == [jm.StepPolicy(), FULL]
    assert not search._queue.results.notes


@pytest.mark.core
def test_two_levels_are_around_what_takes_less(dearer: Any) -> None:
    places, _ = asked(
        compiler_for(900), {None: 1100, "blocks": 1000} if dearer[1] == "blocks" else {None: 1000, "blocks": 1100}
    )
    assert [(each.levels, each.segments) for each in places[3:4]] == [(2, dearer[1])]


@pytest.mark.core
@keeps_remat
def test_the_largest_batch_is_under_the_lower_end_that_takes_less() -> None:
    block, args = NETS["decoder"]
    step = step_of(jm.value_and_grad, block)
    needs = [
        jm.step_memory(jm.apply_policy(step, policy), *args, target="cpu").program.step_bytes or 0
        for policy in (FULL, BLOCKS)
    ]
    search = {"batch": {"multiple_of": 1024, "at_most": 2048}}
    plan = jm.plan(step, *args, target="cpu", budget=sum(needs) // 2, search=search, progress=False)
    least = (FULL, BLOCKS)[needs.index(min(needs))]
    assert (plan.chosen.batch_rows, plan.policy.segments, plan.chosen.fits) == (2048, least.segments, True)
