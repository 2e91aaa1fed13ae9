"""StepPolicy: what plans choose, presets name and steps obey. Two tables here have the policies' names and synonyms.

Options of XLA's compilers are a part of a policy, with the platform and the JAX line that they were found for.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from jaxmem_callbacks.records.errors import PolicyError, did_you_mean

OptionValue: TypeAlias = bool | int | float | str
PLATFORMS = ("cpu", "gpu", "tpu")
# What compilers call a platform, where JAX has another word for it.
_AS_JAX_SAYS = {"cuda": "gpu", "rocm": "gpu"}
_PREFIX = "xla_"
_EXAMPLE = (
    "compiler_options={'platform': 'gpu', 'jax': '0.12', 'xla_gpu_enable_latency_hiding_scheduler': False}, a mapping"
)
# Canonical spelling -> other frameworks' words for it. `none` (no wrapper) and `everything_saveable` are different
# programs: the second costs more memory than no remat at all, so `save_all` is a synonym of it and never of `none`.
REMAT_SYNONYMS: dict[str, tuple[str, ...]] = {
    "none": ("off", "disabled"),
    "full": ("nothing_saveable", "recompute", "recompute_all"),
    "everything_saveable": ("save_all",),
    "dots_saveable": ("dots", "checkpoint_dots"),
    "dots_with_no_batch_dims_saveable": (
        "dots_with_no_batch_dims",
        "checkpoint_dots_with_no_batch_dims",
    ),
    "save_only_these_names": ("save_names", "names"),
    "offload_dot_with_no_batch_dims": ("offload_dots", "offload"),
    "save_and_offload_only_these_names": ("offload_names", "save_and_offload"),
}
# MaxText's words -> the tensors that they keep, by the names that its models give. They mean something only in a loss that
# names some of these; those that it does not name are left out. Words that end in `_offloaded` keep them in host memory.
_QKV = ("query_proj", "value_proj", "key_proj", "qkv_proj")
_MINIMAL = (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")
MAXTEXT_REMAT: dict[str, tuple[str, ...]] = {
    "minimal": _MINIMAL,
    "minimal_with_context": (*_MINIMAL, "context"),
    "minimal_flash": (*_MINIMAL, "context"),
    "minimal_offloaded": _MINIMAL,
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_qkv_proj": _QKV,
    "qkv_proj_offloaded": _QKV,
    "save_out_proj": ("out_proj",),
}
_CANONICAL = {word: name for name, synonyms in REMAT_SYNONYMS.items() for word in (name, *synonyms)} | {
    word: word for word in MAXTEXT_REMAT
}
_LEVELS = (1, 2)
_SHOWN = 3  # places of own checkpoints that a sentence names
_OWN_CHECKPOINTS = ("keep", "replace")
_NEEDS_NAMES = {"save_only_these_names", "save_and_offload_only_these_names"}
# Words of `StepPolicy.offload` that are no names of the model: what the library itself stores between the passes of a loop.
OFFLOAD_CUTS, OFFLOAD_KEPT = "cuts", "kept"
# Given to what the library itself chose to keep.
KEPT = "jaxmem_kept"
# The same for what waits in host memory, by the policy's own words for it.
ON_HOST = {OFFLOAD_CUTS: "jaxmem_cut_on_host", OFFLOAD_KEPT: "jaxmem_kept_on_host"}

# Where the state is on a mesh: canonical spelling -> other words for it.
SHARDING_SYNONYMS: dict[str, tuple[str, ...]] = {
    "replicate": ("replicated", "ddp", "data_parallel"),
    "zero1": ("zero_1", "zero-1"),
    "fsdp": ("zero3", "zero_3", "zero-3", "fully_sharded"),
    "fsdp_tensor": ("fsdp+tensor", "fsdp_tp", "fsdp+tp"),
}
# Under these the weights are divided over the axis of the batch, so that a loop gathers what it uses.
GATHERED = ("fsdp", "fsdp_tensor")
_SHARDING_WORDS = {word: name for name, synonyms in SHARDING_SYNONYMS.items() for word in (name, *synonyms)}
# Words of `StepPolicy.state_offload`.
STATE_OFFLOAD = ("optimizer",)
# The part of a loss that a plain number of chunks means.
HEAD = "head"
Chunks = tuple[tuple[str, int], ...]
MeshAxes = str | tuple[str, ...] | None
ShardingRules = tuple[tuple[str, MeshAxes], ...]


def jax_line(version: str) -> str:
    """The first two numbers of a JAX version, such as ``0.12``: options have other names and effects in another one."""
    return ".".join(version.split(".")[:2])


def platform_word(platform: str) -> str:
    """JAX's word for a platform: ``cpu``, ``gpu`` or ``tpu``."""
    return _AS_JAX_SAYS.get(platform, platform)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CompilerOptions:
    """Options of one compile, and where they count.

    Attributes:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        jax: The JAX line, such as ``0.12``.
        values: Pairs of a name, without dashes, and its value; sorted by name.
    """

    platform: str
    jax: str
    values: tuple[tuple[str, OptionValue], ...]

    def __repr__(self) -> str:
        return repr(self.written)

    @property
    def written(self) -> dict[str, OptionValue]:
        """The mapping that `StepPolicy` and YAML take."""
        return {"platform": self.platform, "jax": self.jax, **self.by_name}

    @property
    def by_name(self) -> dict[str, OptionValue]:
        """What the compiler is given."""
        return dict(self.values)

    @property
    def words(self) -> str:
        """The options as XLA's flags are written, such as ``xla_gpu_autotune_level=0``."""
        return ", ".join(f"{name}={flag_text(value)}" for name, value in self.values)

    def refuse_elsewhere(self, platform: str, version: str) -> None:
        """Refuse a compile for other hardware, or by another JAX, than these options are for.

        Args:
            platform: What is compiled for, in JAX's word or the compiler's.
            version: JAX's.

        Raises:
            PolicyError: names the options, what they are for and what this is.
        """
        here, line = platform_word(platform), jax_line(version)
        if (here, line) != (self.platform, self.jax):
            msg = (
                f"The policy's compiler_options {self.words} are for {self.platform} and jax {self.jax}, and this compiles for "
                f"{here} with jax {line}, where they may be unknown or do something else. Leave compiler_options out, or plan "
                "again for this hardware and this JAX."
            )
            raise PolicyError(msg)

    def require_agreement(self, given: Mapping[str, Any], source: str) -> None:
        """Refuse another value for an option than the user gave elsewhere.

        Args:
            given: The user's own options.
            source: Where they are written.

        Raises:
            PolicyError: names the option and both values.
        """
        for name, value in self.values:
            if name in given and flag_text(given[name]) != flag_text(value):
                msg = (
                    f"The policy has compiler_options {name}={flag_text(value)}, and {source} has "
                    f"{name}={flag_text(given[name])}. Leave out one of the two."
                )
                raise PolicyError(msg)


def flag_text(value: Any) -> str:
    """A value as a flag has it: ``true`` for True."""
    return str(value).lower() if isinstance(value, bool) or str(value) in ("True", "False") else str(value)


def compiler_options_from(given: Any) -> CompilerOptions:
    """Options with their platform and JAX line, from a mapping or pairs of all three.

    Raises:
        PolicyError: no mapping; no platform, no JAX line or no option; a name or value that no compiler takes.
    """
    if isinstance(given, CompilerOptions):
        return given
    try:
        pairs: dict[Any, Any] = dict(given)
    except (TypeError, ValueError):
        pairs = {}
    platform, line = pairs.pop("platform", None), pairs.pop("jax", None)
    if not pairs or platform is None or line is None:
        msg = (
            f"compiler_options={given!r}: expected options with the platform and the JAX line that they are for, since other "
            f"compilers know others. Type for example {_EXAMPLE}."
        )
        raise PolicyError(msg)
    word = platform_word(platform) if isinstance(platform, str) else platform
    if word not in PLATFORMS:
        hint = did_you_mean(str(word), PLATFORMS)
        msg = f"compiler_options have platform={platform!r}.{hint} Expected one of: {', '.join(PLATFORMS)}."
        raise PolicyError(msg)
    if not isinstance(line, str) or not re.fullmatch(r"\d+\.\d+(\.\w+)*", line):
        msg = f"compiler_options have jax={line!r}: expected a version as a text, such as '0.12'."
        raise PolicyError(msg)
    for name, value in pairs.items():
        require_option(name, value)
    return CompilerOptions(
        platform=cast("str", word),
        jax=jax_line(line),
        values=tuple(sorted(cast("dict[str, OptionValue]", pairs).items())),
    )


def require_option(name: Any, value: Any) -> None:
    """Refuse what is no option of a compiler.

    Raises:
        PolicyError: another name than compilers have, or another value.
    """
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        bare = str(name).lstrip("-")
        hint = f" Write {bare!r}." if bare != name and bare.startswith(_PREFIX) else ""
        msg = f"compiler_options have {name!r}, expected names that begin with {_PREFIX!r}, without dashes.{hint}"
        raise PolicyError(msg)
    if not isinstance(value, bool | int | float | str):
        msg = f"compiler_options have {name}={value!r}, expected True, False, a number or a text."
        raise PolicyError(msg)


def canonical_remat(name: str) -> str:
    """The one spelling of a remat policy, from any synonym.

    Raises:
        PolicyError: no such policy; the message lists all and the nearest.
    """
    word = name.strip().lower() if isinstance(name, str) else name
    if isinstance(word, str) and word in _CANONICAL:
        return _CANONICAL[word]
    hint = did_you_mean(word, _CANONICAL) if isinstance(word, str) else " A policy is given by its name."
    msg = f"Unknown remat policy {name!r}.{hint} Expected one of: {', '.join(REMAT_SYNONYMS)}."
    raise PolicyError(msg)


def canonical_sharding(value: Any) -> str | ShardingRules:
    """The one spelling of a sharding: a name from any synonym, or rules as pairs of a logical name and mesh axes.

    Args:
        value: A name; a mapping from logical axis names to a mesh axis, several or None; or the same as pairs, the first
            match first.

    Raises:
        PolicyError: no such name, or no rules; the message lists the names and shows a rule.
    """
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _SHARDING_WORDS:
            return _SHARDING_WORDS[word]
        msg = f"Unknown sharding {value!r}.{did_you_mean(word, _SHARDING_WORDS)} {_SHARDING_EXPECTED}"
        raise PolicyError(msg)
    pairs: Any = tuple(cast("Mapping[Any, Any]", value).items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not pairs:
        msg = f"sharding={value!r}: {_SHARDING_EXPECTED}"
        raise PolicyError(msg)
    return tuple(_sharding_rule(pair) for pair in cast("tuple[Any, ...]", pairs))


def canonical_chunks(value: Any) -> int | Chunks:
    """The one spelling of chunks: a number for the head alone, else pairs of a part of the loss and a number.

    Args:
        value: A number; a mapping from parts to numbers; or the same as pairs.

    Raises:
        PolicyError: neither; the message shows both.
    """
    if _is_whole(value) and value >= 1:
        return value
    pairs: Any = tuple(cast("Mapping[Any, Any]", value).items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, list | tuple) and pairs and all(map(_is_chunk, cast("Any", pairs))):
        found = tuple((str(path).strip("/"), int(count)) for path, count in cast("Any", pairs))
        return found[0][1] if [path for path, _ in found] == [HEAD] else found
    msg = (
        f"chunks={value!r}: expected a whole number of at least 1 for the head of the loss, or numbers by scope such as "
        "{'head': 16, 'mlp': 4}."
    )
    raise PolicyError(msg)


def _is_chunk(pair: Any) -> bool:
    """Whether something is a part of a loss and a number."""
    if not isinstance(pair, list | tuple) or len(cast("Any", pair)) != 2:  # noqa: PLR2004 - a pair
        return False
    path, count = cast("tuple[Any, Any]", tuple(cast("Any", pair)))
    return isinstance(path, str) and bool(path.strip("/")) and _is_whole(count) and count >= 1


_SHARDING_EXPECTED = (
    f"Expected one of: {', '.join(SHARDING_SYNONYMS)}; or rules from logical axis names to mesh axes such as "
    "{'embed': 'fsdp', 'mlp': 'tensor'}."
)


def _sharding_rule(pair: Any) -> tuple[str, MeshAxes]:
    """One pair, its mesh axes as a name, a tuple of names or None."""
    if isinstance(pair, list | tuple) and len(cast("tuple[Any, ...]", pair)) == 2 and isinstance(pair[0], str):  # noqa: PLR2004 - a pair
        name, axes = cast("tuple[str, Any]", tuple(pair))
        if axes is None or isinstance(axes, str):
            return name, axes
        if isinstance(axes, list | tuple) and axes and all(isinstance(axis, str) for axis in cast("Any", axes)):
            return name, tuple(cast("tuple[str, ...]", axes))
    msg = f"sharding has the rule {pair!r}. {_SHARDING_EXPECTED}"
    raise PolicyError(msg)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPolicy:
    """What is done to a train step to make it cheaper in memory.

    Attributes:
        remat: What the backward pass keeps, by canonical name or synonym; ``none`` leaves the loss untouched, ``full``
            keeps only the values at the cuts, and what waits for the loss's head and is expensive to recompute. A word of
            MaxText's, such as ``minimal``, keeps those of its tensors that the loss names.
        segments: Number of segments the loss is cut into; ``blocks`` for one around each block that repeats, such as a layer, and
            nothing around the rest, as its author would write it; or None to choose by live bytes.
        levels: 1, or 2 for checkpoints around groups of segments and for loops of loops: about the root of what one level
            keeps, for one more forward computation.
        keep: Share, from 0 to 1, of the bytes of intermediates expensive to recompute that are kept in addition; those that save
            most operations a byte come first.
        assume_fusion: Whether cuts are chosen for a compiler that does elementwise work inside what reads it, as those of GPUs
            and TPUs do. False is for one that holds what JAX keeps, as a CPU's does; `jm.plan` sets it for a CPU.
        save: Names given by ``checkpoint_name`` in the model that are kept in addition.
        offload: What waits in host memory between forward and backward: such names, and two words for what the library stores
            of loops over layers: ``cuts`` (what each step hands to the next) and ``kept`` (what ``keep`` keeps of each step).
        own_checkpoints: What becomes of checkpoints that the loss has already (``jax.checkpoint``, ``nn.remat``, ``nnx.remat``,
            ``eqx.filter_checkpoint``): ``keep`` leaves them as they are written, and the policy acts on the rest; ``replace``
            takes them out of the trace, and the policy replaces them, also where ``remat`` is ``none``.
        microbatches: Number of slices of the batch over which gradients are accumulated, so that the activations of one
            live at a time; 1 takes the batch whole.
        chunks: Number of chunks in which the head of the loss is computed, such as the logits of a large vocabulary and what
            comes behind them; or numbers by part of the loss, ``head`` or a scope such as ``mlp``. 1 computes all at once.
        donate: ``auto`` (every argument that the step returns updated), argument names, an empty tuple for none, or
            None where nothing was given (``jit_step`` then takes ``auto``).
        sharding: Where the state is on a mesh: ``replicate``, ``zero1`` (optimizer state sharded), ``fsdp`` (parameters
            too), ``fsdp_tensor``, or rules from logical axis names to mesh axes; None where nothing was given.
        compiler_options: Options of XLA's compiler, with the ``platform`` and the ``jax`` line that they are for, as a mapping:
            ``{"platform": "gpu", "jax": "0.12", "xla_gpu_...": False}``. `jm.jit_step` compiles with them, there and nowhere
            else. None for none.
        state_offload: What of the state waits in host memory and comes to the device for its update alone: ``optimizer`` for
            the arrays of the optimizer's state. `jm.place_state` places it there before the loop. None leaves all on the device.
    """

    remat: str = "none"
    segments: int | Literal["blocks"] | None = None
    levels: int = 1
    keep: float = 0.0
    assume_fusion: bool = True
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    own_checkpoints: Literal["keep", "replace"] = "keep"
    microbatches: int = 1
    chunks: int | Mapping[str, int] | Chunks = 1
    donate: Literal["auto"] | tuple[str, ...] | None = None
    sharding: str | ShardingRules | None = None
    compiler_options: CompilerOptions | Mapping[str, OptionValue] | None = None
    state_offload: Literal["optimizer"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", canonical_remat(self.remat))
        for name in ("save", "offload"):
            value = getattr(self, name)
            if isinstance(value, str):
                msg = f"{name}={value!r} is one text, expected a tuple of names: {name}=({value!r},)."
                raise PolicyError(msg)
            object.__setattr__(self, name, _names(value, f"{name}={value!r}: expected a tuple of names, or ()."))
        if self.donate is not None and self.donate != "auto":
            example = repr(self.donate) if isinstance(self.donate, str) else "'state'"
            msg = f"donate={self.donate!r}: expected 'auto', a tuple of argument names such as ({example},), or ()."
            object.__setattr__(self, "donate", _names(self.donate, msg))
        if self.sharding is not None:
            object.__setattr__(self, "sharding", canonical_sharding(self.sharding))
        if self.compiler_options is not None:
            object.__setattr__(self, "compiler_options", compiler_options_from(self.compiler_options))
        if not _is_whole(self.microbatches) or self.microbatches < 1:
            msg = f"microbatches={self.microbatches!r}: expected a whole number of at least 1, where 1 takes the batch whole."
            raise PolicyError(msg)
        object.__setattr__(self, "chunks", canonical_chunks(self.chunks))
        if self.state_offload not in (None, *STATE_OFFLOAD):
            hint = did_you_mean(str(self.state_offload), STATE_OFFLOAD)
            msg = (
                f"state_offload={self.state_offload!r}.{hint} Expected 'optimizer' for the optimizer's state, or None."
            )
            raise PolicyError(msg)
        self._check_remat()

    def _check_remat(self) -> None:
        """Numbers in their ranges, and no two words that contradict each other."""
        if self.segments not in (None, "blocks") and not (_is_whole(self.segments) and self.segments >= 1):
            msg = (
                f"segments={self.segments!r}: expected a whole number of at least 1, 'blocks' for one around each block that "
                "repeats, or None to choose by live bytes."
            )
            raise PolicyError(msg)
        if not _is_whole(self.levels) or self.levels not in _LEVELS:
            msg = f"levels={self.levels!r}: expected 1 or 2. A third level would compute everything a fourth time."
            raise PolicyError(msg)
        if isinstance(self.keep, bool) or not isinstance(self.keep, numbers.Real) or not 0 <= self.keep <= 1:
            msg = (
                f"keep={self.keep!r}: expected a share from 0 (only the values at the cuts) to 1 (all that is expensive to "
                "recompute)."
            )
            raise PolicyError(msg)
        if not isinstance(cast("object", self.assume_fusion), bool):
            msg = f"assume_fusion={self.assume_fusion!r}: expected true or false; false is for a CPU's compiler."
            raise PolicyError(msg)
        if self.own_checkpoints not in _OWN_CHECKPOINTS:
            hint = did_you_mean(str(self.own_checkpoints), _OWN_CHECKPOINTS)
            msg = (
                f"own_checkpoints={self.own_checkpoints!r}.{hint} Expected 'keep' (the checkpoints that the loss has stay) or "
                "'replace' (the policy replaces them)."
            )
            raise PolicyError(msg)
        if self.remat == "none" and (
            self.segments is not None
            or self.levels > 1
            or self.keep
            or not self.assume_fusion
            or self.save
            or self.offload
        ):
            msg = (
                "remat='none' leaves the loss untouched, so segments, levels, keep, assume_fusion, save and offload would do "
                "nothing. Use remat='full'."
            )
            raise PolicyError(msg)
        if OFFLOAD_KEPT in self.offload and (not self.keep or self.levels > 1):
            msg = (
                f"offload=('kept',) moves what keep keeps of each step of a loop at one level, here keep={self.keep!r} and "
                f"levels={self.levels}: it would do nothing. Use keep=1.0 and levels=1, or offload=('cuts',)."
            )
            raise PolicyError(msg)
        if self.remat in _NEEDS_NAMES and not (self.save or self.offload):
            msg = (
                f"remat={self.remat!r} needs the names to keep: save=('context', ...) with names from checkpoint_name."
            )
            raise PolicyError(msg)

    @property
    def options(self) -> CompilerOptions | None:
        """The compiler options, in the form that they have once they are checked."""
        return cast("CompilerOptions | None", self.compiler_options)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What is to wait in host memory: names, the words for what the library stores, and ``dots`` where remat asks for it."""
        return (*self.offload, *(["dots"] if self.remat == "offload_dot_with_no_batch_dims" else []))

    @property
    def chunked(self) -> Chunks:
        """The parts of the loss that are computed in several chunks, with their numbers."""
        pairs = ((HEAD, self.chunks),) if isinstance(self.chunks, int) else cast("Chunks", self.chunks)
        return tuple((path, count) for path, count in pairs if count > 1)

    @property
    def changes_gradients(self) -> bool:
        """Whether the policy acts inside ``jm.value_and_grad`` (and so needs the step to call it)."""
        return self.microbatches > 1 or self._acts_on_loss

    @property
    def _acts_on_loss(self) -> bool:
        return self.remat != "none" or self.own_checkpoints == "replace" or bool(self.chunked)

    @property
    def rewrites_loss(self) -> bool:
        """Whether a loss may be traced and written again: for what acts on it, or to gather what a sharding divides."""
        return self._acts_on_loss or self.sharding in GATHERED


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(value: Any, expected: str) -> tuple[str, ...]:
    """Names, as a tuple.

    Raises:
        PolicyError: no names, in the words given.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise PolicyError(expected)
    names = tuple(cast("Iterable[Any]", value))
    if not all(isinstance(name, str) for name in names):
        raise PolicyError(expected)
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCheckpoint:
    """A checkpoint that the author of a loss wrote.

    Attributes:
        place: The line that calls what is checkpointed, ``file:line``; empty where JAX recorded none.
        function: The checkpointed function's name; empty where it has none of its own.
        times: How often one evaluation of the loss passes it, trips of loops included.
    """

    place: str
    function: str = ""
    times: int = 1

    @property
    def words(self) -> str:
        """Such as ``models/decoders.py:1159 around block, 12 times``."""
        around = f" around {self.function}" if self.function else ""
        return f"{self.place or 'no line was recorded'}{around}, {'once' if self.times == 1 else f'{self.times} times'}"


def own_checkpoints_words(found: Sequence[OwnCheckpoint]) -> str:
    """What stays as it is and where, in one clause; of many places the first ones."""
    shown = "; ".join(each.words for each in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more places" if len(found) > _SHOWN else ""
    return f"The loss has its own checkpoints ({shown}{more}), and they are left alone"


def gradient_words(policy: StepPolicy) -> str:
    """What of a policy acts on gradients, such as ``remat='full', microbatches=4``."""
    plain, names = StepPolicy(), ("remat", "own_checkpoints", "microbatches", "chunks")
    return ", ".join(f"{name}={value!r}" for name in names if (value := getattr(policy, name)) != getattr(plain, name))


def policy_words(policy: StepPolicy) -> str:
    """A policy in few words, such as ``fsdp: full, keep 0.35, 4 microbatches``."""
    words = [policy.remat]
    if policy.segments is not None:
        words.append("blocks" if policy.segments == "blocks" else f"{policy.segments} segments")
    if policy.levels > 1:
        words.append(f"{policy.levels} levels")
    if policy.keep:
        words.append(f"keep {policy.keep:.3g}")
    words += [
        f"{name} {', '.join(names)}" for name, names in (("save", policy.save), ("offload", policy.offload)) if names
    ]
    if policy.own_checkpoints == "replace":
        words.append("own checkpoints replaced")
    if policy.microbatches > 1:
        words.append(f"{policy.microbatches} microbatches")
    words += [f"{path} in {count} chunks" for path, count in policy.chunked]
    if policy.donate is not None:
        words.append("donating" if policy.donate == "auto" else f"donating {', '.join(policy.donate) or 'nothing'}")
    words += [] if policy.state_offload is None else [f"{policy.state_offload} state on the host"]
    words += [] if policy.options is None else [policy.options.words]
    placed = policy.sharding
    if isinstance(placed, tuple):
        placed = " ".join(f"{name}={axes}" for name, axes in placed)
    return (f"{placed}: " if placed else "") + ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfitPolicy(StepPolicy):
    """The policy that came nearest in a plan in which nothing fits. Whoever is to run it refuses it.

    Attributes:
        reason: What did not fit, and by how much.
    """

    reason: str = field(default="", compare=False)


def mesh_words(mesh: Mapping[str, int]) -> str:
    """The axes of a mesh, such as ``data=2, fsdp=4``."""
    return ", ".join(f"{name}={size}" for name, size in mesh.items())
