"""Options of XLA's compilers as a policy carries them: with the platform and the JAX line that they were found for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from jaxmem_callbacks.records.errors import PolicyError, did_you_mean

OptionValue: TypeAlias = bool | int | float | str
PLATFORMS = ("cpu", "gpu", "tpu")
# What compilers call a platform, where JAX has another word for it.
_AS_JAX_SAYS = {"cuda": "gpu", "rocm": "gpu"}
_PREFIX = "xla_"
_EXAMPLE = (
    "compiler_options={'platform': 'gpu', 'jax': '0.12', 'xla_gpu_enable_latency_hiding_scheduler': False}, a mapping"
)


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
                "anew for this hardware and this JAX."
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
