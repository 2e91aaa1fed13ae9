"""Targets: hardware to compile for, attached or not."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxmem_callbacks.programs.targets.compilers import require_compiler
from jaxmem_callbacks.records.errors import TargetError
from jaxmem_callbacks.records.units import GIB, format_bytes

_GPUS_PER_HOST = 8
_ALIKE = 0.7
# The largest slices have 9,216 chips; libtpu takes any number and then builds a device for each.
_MOST_CHIPS = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Hardware to compile for.

    Attributes:
        name: The canonical name, such as ``v5e:2x2`` or ``h100_sxm:8``.
        platform: ``tpu``, ``cuda`` or ``cpu`` (the attached one).
        device_count: Devices in it, as JAX counts them. A program whose arguments carry no shardings uses one.
        memory_bytes: Memory of one device. TPU: what the compiler lets a program use. GPU: the whole device memory,
            of which JAX's allocator takes three quarters by default. None where unknown.
        topology: What the compiler's topology is called there, such as ``v5e:2x2`` or ``1x1x8``.
        topology_options: Further options of the topology.
        target_config: The GPU's figures in the compiler's own text format, else None.
        apart: Whether programs for the CPU are compiled in a worker too, where a crash or a limit ends no caller.
    """

    name: str
    platform: Literal["tpu", "cuda", "cpu"]
    device_count: int
    memory_bytes: int | None = None
    topology: str = ""
    topology_options: Mapping[str, str | Sequence[int]] = field(default_factory=dict)
    target_config: str | None = field(default=None, repr=False)
    apart: bool = False

    @property
    def device_kind(self) -> str:
        """What JAX calls one of its devices, as far as the figures show it; empty where they do not."""
        found = re.search(r'device_description_str: "([^"]*)"', self.target_config or "")
        return found[1] if found else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tpu:
    """One TPU generation, as libtpu 0.0.51 has it.

    Attributes:
        smallest: Its smallest topology.
        memory_gib: What is printed as available HBM of one device.
        devices_per_chip: Devices that JAX shows of one chip.
        longest: Chips along one dimension at most; None where the compiler names no limit.
        options: Further options of the topology.
    """

    smallest: str
    memory_gib: float
    devices_per_chip: int = 1
    longest: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


# v4 chips have two cores that JAX shows as one device; the compiler needs an option for it.
_TPUS = {
    "v2": _Tpu(smallest="2x2", memory_gib=7.48, devices_per_chip=2),
    "v3": _Tpu(smallest="2x2", memory_gib=15.48, devices_per_chip=2),
    "v4": _Tpu(smallest="1x1x1", memory_gib=30.75, options={"chip_config_name": "megacore"}),
    "v5e": _Tpu(smallest="1x1", memory_gib=15.75, longest=16),
    "v5p": _Tpu(smallest="1x1x1", memory_gib=95.73),
    "v6e": _Tpu(smallest="1x1", memory_gib=31.24),
    "tpu7x": _Tpu(smallest="1x1x1", memory_gib=94.74, devices_per_chip=2),
}
_ROOMIEST = "v5p"
_SOLD = 0.9  # of the memory that a card is sold with, at least
_MUCH_LESS = 0.9  # of its memory: what has more does not place much less
# What an accelerator type of Google Cloud counts for each chip, such as v5p-64: TensorCores in these generations, else chips
# (cloud.google.com/tpu/docs/system-architecture-tpu-vm).
_TYPES_COUNT = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}
_ALIASES = {
    "a100_40gb": "a100_sxm_40",
    "h200_sxm": "h200",
    "rtx_pro_6000": "rtx6000pro",
    "rtx_a6000": "a6000",
    "rtx_6000_ada": "rtx6000ada",
    "rtx_3090": "rtx3090",
    "rtx_4090": "rtx4090",
    "rtx_5090": "rtx5090",
    "tesla_t4": "t4",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v6lite": "v6e",
    "trillium": "v6e",
    "7x": "tpu7x",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "attached": "cpu",
}

# Hardware that is another one than any here, however alike the names: without a compiler at hand, and without figures.
_NO_COMPILER = re.compile(
    r"(mi\d{2,3}\w?|gfx\w*|rocm|amd|instinct|radeon|[vpk]100|k80|[pm][46]0|gtx|titan|metal|mps|m[1-9])"
)
_NO_FIGURES = re.compile(r"(gh200|l40|l20|a2|a10|a16|a30|a800|h800|h20|gb10|thor)")
_ONLY_A_KIND = {"gpu", "cuda", "nvidia", "tpu"}

_BRANDS = {"nvidia", "geforce", "tesla", "google", "cloud", "gpu", "tpu"}


def target_names() -> tuple[str, ...]:
    """Every name that `resolve_target` knows, TPU kinds first, without aliases."""
    return (*_TPUS, *_gpu_figures(), "cpu")


def memory_of_kind(device_kind: str) -> int | None:
    """Memory of a GPU by the maker's name of it, such as ``NVIDIA H100 80GB HBM3``; None where the table does not have it.

    Args:
        device_kind: ``Device.device_kind``, which may be less precise than the table, as ``NVIDIA H200``.
    """
    sizes = {
        figures["device_memory_size"]
        for figures in _gpu_figures().values()
        if f"{figures['device_description_str']} ".startswith(f"{device_kind} ")
    }
    return sizes.pop() if len(sizes) == 1 else None


def gpu_of_kind(device_kind: str) -> str | None:
    """The target that a GPU is by the maker's name of it; None where the table has none, or more than one."""
    names = [
        name
        for name, figures in _gpu_figures().items()
        if f"{figures['device_description_str']} ".startswith(f"{device_kind} ")
    ]
    return names[0] if len(names) == 1 else None


def resolve_target(text: str, *, require_installed: bool = True) -> Target:
    """The hardware that a name stands for.

    Args:
        text: ``v5e:2x2``, ``v4:2x2x1``, ``h100_sxm:8``, a bare name (the smallest topology, or one GPU) or ``cpu``.
            Capitals and hyphens do not matter; ``rtx-4090``, ``trillium`` and the like are understood.
        require_installed: Check that its compiler is installed, without importing it.

    Returns:
        The target; ``name`` is its canonical spelling.

    Raises:
        TargetError: a name that fits several cards, such as ``a100`` (the message lists them), an unknown one (it lists all,
            and the nearest), a topology that the compiler does not build (it names those near it), or a compiler that is not
            installed (it is the line to type).
    """
    if not isinstance(text, str):
        msg = (
            f"target={text!r}: expected the name of hardware as text, such as 'h100_sxm' or 'v5e:2x2'. Without a target it is "
            "what is attached."
        )
        raise TargetError(msg)
    word, _, shape = text.strip().lower().replace("-", "_").partition(":")
    kind = _ALIASES.get(word, word)
    if kind in _TPUS:
        target = _tpu(kind, shape, text)
    elif kind in _gpu_figures():
        target = _gpu(kind, shape, text)
    elif kind == "cpu" and not shape:
        return Target(name="cpu", platform="cpu", device_count=1)
    else:
        _require_one_card(word, shape, text)
        msg = (
            f"Unknown target {text!r}.{_slice_meant(word) or _meant(word)} Expected one of: {', '.join(target_names())}; "
            "with a topology or a count where it has several devices, such as 'v5e:2x2' or 'h100_sxm:8'."
        )
        raise TargetError(msg)
    if require_installed:
        require_compiler(target.platform, target.name)
    return target


def _require_one_card(word: str, shape: str, text: str) -> None:
    """Refuse a name that several cards have, which differ in memory and speed."""
    fitting = _cards(word)
    if len(fitting) > 1:
        count = f":{shape}" if shape else ""
        cards = ", ".join(f"{name} ({format_bytes(_gpu_figures()[name]['device_memory_size'])})" for name in fitting)
        msg = f"Target {text!r} fits {len(fitting)} cards: {cards}. Type one of them, such as '{fitting[-1]}{count}'."
        raise TargetError(msg)


def _cards(word: str) -> list[str]:
    """The GPUs of the model that a name holds, without those that another word of it rules out."""
    typed = _parts(_unbranded(word))
    return [
        name
        for name, figures in _gpu_figures().items()
        if _model(name) in typed
        and all(
            part in _parts(name) | _parts(figures["device_description_str"].lower())
            or _is_size(part, figures["device_memory_size"])
            for part in typed
        )
    ]


def _parts(name: str) -> set[str]:
    """The words of a name, with an RTX's number by itself and a module's generation left out."""
    apart = re.sub(r"rtx(\d+)", r"rtx_\1_", name).replace("-", "_")
    return {re.sub(r"^sxm\d$", "sxm", each) for each in _words(apart) if each and each not in _BRANDS}


def _model(name: str) -> str:
    """The word of a card's name that is its model: ``a100``, ``4090``."""
    return re.findall(r"\d+", name)[0] if name.startswith("rtx") else name.partition("_")[0]


def _is_size(word: str, size: int) -> bool:
    """Whether a number in a name is a card's memory as it is sold, of which the driver keeps some."""
    return word.isdecimal() and _SOLD * int(word) * 10**9 < size <= int(word) * GIB


def roomier(target: Target) -> Target | None:
    """As many TPU devices of the kind that has most memory, which may place what a target's own compiler refuses.

    Args:
        target: Any target.

    Returns:
        None for what is no TPU, has as much memory itself, or is in a shape that the other kind has not.
    """
    if target.platform != "tpu" or (target.memory_bytes or 0) >= _TPUS[_ROOMIEST].memory_gib * GIB * _MUCH_LESS:
        return None
    kind, _, shape = target.topology.partition(":")
    devices = _TPUS[kind].devices_per_chip
    sides = [*map(int, shape.split("x")), *([devices] if shape.count("x") == 1 else [])]
    if math.prod(sides) != target.device_count:
        return None
    try:
        return _tpu(_ROOMIEST, "x".join(map(str, sides)), target.name)
    except TargetError:
        return None


def of_so_many(target: Target, devices: int) -> str:
    """Name of a target of the same kind with another number of devices; empty where its compiler builds none.

    Args:
        target: Any target; of the CPU there is one.
        devices: As JAX counts them.
    """
    kind = target.name.partition(":")[0]
    if target.platform == "cpu":
        return ""
    if target.platform == "cuda":
        return "" if devices > _GPUS_PER_HOST and devices % _GPUS_PER_HOST else f"{kind}:{devices}"
    chips, odd = divmod(devices, _TPUS[kind].devices_per_chip)
    return "" if odd else _slice_of(kind, chips)


def _slice_of(kind: str, chips: int) -> str:
    """The topology of so many chips that is nearest to a cube; empty where there is none."""
    if not 1 <= chips <= _MOST_CHIPS:
        return ""
    dimensions, longest = _TPUS[kind].smallest.count("x") + 1, _TPUS[kind].longest or chips
    sides = [n for n in range(1, min(chips, longest) + 1) if chips % n == 0]
    near = (
        each
        for each in itertools.product(sides, repeat=dimensions)
        if math.prod(each) == chips and all(n == 1 or n % 2 == 0 for n in each[:2])
    )
    # A dimension of one chip comes last, as Google writes it.
    shape = min(near, key=lambda each: (max(each) - min(each), [n == 1 for n in each], each), default=None)
    return "" if shape is None else f"{kind}:{'x'.join(map(str, shape))}"


def _meant(word: str) -> str:
    """A misspelt name's hint, by its canonical name, which the list shows; another number is another GPU, not a mistake.

    A name in which all words of one of ours stand is that one, such as the maker's: ``nvidia_h100_80gb_hbm3``, ``tpu_v5p``.
    """
    kinds = _words(word)
    if word in _ONLY_A_KIND:
        return " That is a kind of hardware: name the card or the generation."
    if any(map(_NO_COMPILER.fullmatch, kinds)):
        return (
            " Its compiler is not to be had without the hardware: plan on a machine that has it, without a target, or plan for a "
            "card that is known and give its memory as the budget."
        )
    models = {_model(name): name for name in _gpu_figures() if _model(name) not in _gpu_figures()}
    names = (*target_names(), *_ALIASES, *models)
    within = [*_cards(word), *(name for name in names if _words(name) <= _words(word))]
    if within:
        near = max(within, key=lambda name: len(_words(name)))
    else:
        near = next(iter(difflib.get_close_matches(_unbranded(word), names, n=1, cutoff=_ALIKE)), "")
    name = models.get(near, _ALIASES.get(near, near))
    is_another_card = near in models and near in _parts(word)
    is_another_card = is_another_card or any(map(_NO_FIGURES.fullmatch, kinds))
    if _is_another_number(word, near) or is_another_card:
        such = f", such as `{name}`," if near else ""
        return (
            f" No figures of it are known here: plan for one like it{such} and give as the budget what JAX takes of its own "
            "memory, three quarters by default."
        )
    return near and f" Did you mean `{name}`?"


def _words(name: str) -> set[str]:
    """The words of a name; a size of memory is its number, as our names have it."""
    return {re.sub(r"^(\d+)gi?b?$", r"\1", each) for each in re.split(r"[\s_]+", name)}


def _unbranded(word: str) -> str:
    """A name without its maker's or its kind's, which many others begin with too."""
    return "_".join(each for each in re.split(r"[\s_]+", word) if each not in _BRANDS)


def _is_another_number(word: str, name: str) -> bool:
    """Whether two names have model numbers of four digits that differ, as an RTX 4080 and an RTX 4090."""
    one, other = re.findall(r"\d{4}", word), re.findall(r"\d{4}", name)
    return bool(one and other) and one != other


def _slice_meant(word: str) -> str:
    """The topology that an accelerator type of Google Cloud stands for, such as ``v5p_64``; empty for other words."""
    kind, _, count = _unbranded(word).rpartition("_")
    kind = _ALIASES.get(kind, kind)
    if kind not in _TYPES_COUNT or not re.fullmatch(r"[1-9][0-9]{0,5}", count) or int(count) % _TYPES_COUNT[kind]:
        return ""
    chips = int(count) // _TYPES_COUNT[kind]
    name = _slice_of(kind, chips)
    return name and f" As Google Cloud counts, that is {chips} chip{'s' * (chips > 1)}: `{name}`."


def _tpu(kind: str, shape: str, text: str) -> Target:
    facts = _TPUS[kind]
    shape = shape or facts.smallest
    dimensions = facts.smallest.count("x") + 1
    if not re.fullmatch("x".join([r"[1-9][0-9]{0,8}"] * dimensions), shape):
        example = f"{kind}:{'x'.join('2' * dimensions)}"
        msg = f"Target {text!r}: a {kind} topology has {dimensions} dimensions of chips. Type for example {example!r}."
        raise TargetError(msg)
    sides = tuple(map(int, shape.split("x")))
    _require_slice(kind, sides, text)
    return Target(
        name=f"{kind}:{shape}",
        platform="tpu",
        device_count=math.prod(sides) * facts.devices_per_chip,
        memory_bytes=int(facts.memory_gib * GIB),
        topology=f"{kind}:{shape}",
        # Said though it is the newer compilers' own choice: older ones refuse a slice smaller than a host.
        topology_options={**facts.options, "chips_per_host_bounds": [*(min(side, 2) for side in sides[:2]), 1]},
    )


def _require_slice(kind: str, sides: tuple[int, ...], text: str) -> None:
    """Refuse a topology that the compiler does not build, naming those near it, the nearest in number of chips first."""
    longest, chips = _TPUS[kind].longest, math.prod(sides)
    if chips > _MOST_CHIPS:
        example = f"{kind}:{'x'.join(['16'] * len(sides))}"
        msg = f"Target {text!r}: {chips} chips are expected to be at most {_MOST_CHIPS}. Type for example {example!r}."
        raise TargetError(msg)
    near = sorted(
        itertools.product(*(_sides_near(side, in_hosts=at < 2, longest=longest) for at, side in enumerate(sides))),  # noqa: PLR2004 - hosts are flat
        key=lambda each: (abs(math.prod(each) - chips), each),
    )
    if sides in near:
        return
    names = [f"{kind}:{'x'.join(map(str, each))}" for each in near]
    where = "each dimension" if len(sides) == 2 else "the first two dimensions"  # noqa: PLR2004 - as above
    most = f", and at most {longest}" if longest else ""
    msg = (
        f"Target {text!r}: {kind} has no such topology. Expected 1 or an even number of chips{most} along {where}, as a host "
        f"holds 2x2 of them; near it: {', '.join(names)}. Type for example {names[0]!r}."
    )
    raise TargetError(msg)


def _sides_near(side: int, *, in_hosts: bool, longest: int | None) -> list[int]:
    """Numbers of chips along one dimension that the compiler takes: the given one, or its neighbours."""
    side = min(side, longest or side)
    return [side - 1, side + 1] if in_hosts and side > 1 and side % 2 else [side]


def _gpu(kind: str, shape: str, text: str) -> Target:
    count = int(shape or "1") if re.fullmatch(r"[1-9][0-9]{0,6}", shape or "1") else 0
    if not count or (count > _GPUS_PER_HOST and count % _GPUS_PER_HOST):
        msg = (
            f"Target {text!r}: expected a number of GPUs, at most {_GPUS_PER_HOST} or a multiple of it "
            f"(whole hosts). Type for example '{kind}:{_GPUS_PER_HOST}'."
        )
        raise TargetError(msg)
    hosts, per_host = (1, count) if count <= _GPUS_PER_HOST else (count // _GPUS_PER_HOST, _GPUS_PER_HOST)
    figures = _gpu_figures()[kind]
    return Target(
        name=kind if count == 1 else f"{kind}:{count}",
        platform="cuda",
        device_count=count,
        memory_bytes=figures["device_memory_size"],
        topology=f"1x{hosts}x{per_host}",
        target_config=_target_config(figures),
    )


@functools.cache
def _gpu_figures() -> dict[str, dict[str, Any]]:
    import yaml

    text = (
        importlib.resources.files("jaxmem_callbacks.programs.targets").joinpath("gpu_targets.yaml").read_text("utf-8")
    )
    return yaml.safe_load(text)


def _target_config(figures: Mapping[str, Any]) -> str:
    """The figures as XLA's ``GpuTargetConfigProto`` in text form."""
    apart = {"cuda_compute_capability", "feature_extension", "device_description_str"}
    plain = " ".join(f"{key}: {value}" for key, value in figures.items() if key not in apart)
    major, minor = figures["cuda_compute_capability"]
    extension = f" feature_extension: {figures['feature_extension']}" if "feature_extension" in figures else ""
    return (
        f"gpu_device_info {{ {plain} cuda_compute_capability {{ major: {major} minor: {minor}{extension} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 } '
        f'device_description_str: "{figures["device_description_str"]}"'
    )


_TPU_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# Number of devices -> topology, of the kinds whose chips are one device each.
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
_SHAPES = {"v5e": _FLAT, "v6e": _FLAT, "v4": _CUBE, "v5p": _CUBE}


def attached_target(platform: str, device_kind: str, count: int) -> Target:
    """The target that the attached devices are; the CPU's compiled in a worker too.

    Args:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        device_kind: What JAX calls one device.
        count: Devices that the program is for.

    Raises:
        TargetError: no target is like them, or its compiler is not installed.
    """
    if platform == "cpu":
        return replace(resolve_target("cpu"), device_count=count, apart=True)
    if platform == "gpu" and (name := gpu_of_kind(device_kind)) is not None:
        return resolve_target(name if count == 1 else f"{name}:{count}")
    kind = _TPU_KINDS.get(device_kind) if platform == "tpu" else None
    shape = _SHAPES.get(kind or "", {}).get(count)
    if kind is not None and (count == 1 or shape is not None):
        return resolve_target(kind if shape is None else f"{kind}:{shape}")
    msg = (
        f"{count} attached devices of the kind {device_kind!r} ({platform}) are like no target. Expected one of those that "
        "docs/targets.md lists; name it yourself by target=."
    )
    raise TargetError(msg)


def nearest_target(platform: str, kind: str) -> str | None:
    """The target that is most like one device, by its name; None where none is of its model, or it is a part or a laptop's.

    Args:
        platform: JAX's word for it.
        kind: Its device kind, such as ``NVIDIA H100 80GB HBM3`` or ``TPU v5 lite``.
    """
    if platform == "cpu":
        return "cpu"
    if platform == "tpu":
        return _TPU_KINDS.get(kind)
    text = re.sub(r"rtx (?:(pro) )?(\d+)(?: (ada))?", lambda m: f"rtx{m[2]}{m[1] or m[3] or ''}", kind.lower())
    words = {re.sub(r"^sxm\d*$", "sxm", word.removesuffix("gb")) for word in re.split(r"[^a-z0-9]+", text)}
    if words & {"mig", "laptop"}:
        return None
    if "pcie" not in words:
        words.add("sxm")  # a module's kind may name nothing but its memory; a card's names PCIe
    names = [name for name in target_names() if resolve_target(name, require_installed=False).platform == "cuda"]
    same = [name for name in names if name.split("_")[0] in words]
    return max(same, key=lambda name: len(words.intersection(name.split("_"))), default=None)
