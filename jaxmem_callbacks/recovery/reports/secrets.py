"""Texts that may hold secrets enter, the same texts without them leave. Used on every text of a report, whatever its source.

Hidden are: tokens by their makers' prefixes, values of words that name a secret, passwords and queries of addresses, keys in
PEM form, long texts that look random, and the value of every environment variable whose name says that it is a secret.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

_Record = TypeVar("_Record")
HIDDEN = "[hidden]"
_WORDS = (
    "token",
    "secret",
    "passw(?:or)?d",
    "passphrase",
    "api[_-]?key",
    "access[_-]?key",
    "private[_-]?key",
    "credential",
    "auth",
    "signature",
    "cookie",
    "session[_-]?id",
)
_NAMES_ONE = rf"(?:{'|'.join(_WORDS)})"
_LEAST = 6  # shorter values of variables would hide parts of ordinary words
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"\b([a-zA-Z][\w+.-]*://)[^\s/@'\"]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s?'\"]+\?)[^\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(Bearer|Basic|Token)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (
        re.compile(rf"([\w.-]*{_NAMES_ONE}[\w.-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;)\]}}]+)", re.IGNORECASE),
        rf"\1{HIDDEN}",
    ),
    (re.compile(rf"(--?[\w-]*{_NAMES_ONE}[\w-]*\s+)(?!-)\S+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-|sk-|pk_live_|sk_live_|rk_live_|npm_|pypi-|dop_v1_|ya29\.|AIza|"
            r"shpat_|SG\.|key-|r8_|gsk_|nvapi-|tskey-|wandb_)[\w.-]{6,}"
        ),
        HIDDEN,
    ),
    (re.compile(r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?"), HIDDEN),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), HIDDEN),
)
_LONG_PART, _DIGITS, _SLASHES = 20, 2, 2  # shorter parts, and those with one digit, are words of paths and names
_LONG = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
_SECRET_NAME = re.compile(rf"{_NAMES_ONE}|(?:^|_)key(?:$|_)|(?:^|_)pat(?:$|_)", re.IGNORECASE)


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Values that environment variables with a secret's name hold, the longest first."""
    found = {value for name, value in variables.items() if _SECRET_NAME.search(name) and len(value) >= _LEAST}
    return tuple(sorted(found, key=len, reverse=True))


def without_secrets(text: str, known: tuple[str, ...] = ()) -> str:
    """A text with everything hidden that is or looks like a secret.

    Args:
        text: Any.
        known: Values to hide wherever they stand.
    """
    for value in known:
        text = text.replace(value, HIDDEN)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return _LONG.sub(lambda match: HIDDEN if _is_random(match[0]) else match[0], text)


def scrubbed(record: _Record, known: tuple[str, ...] = ()) -> _Record:
    """A frozen record with every text in it, however deep, passed through `without_secrets`."""
    return cast("_Record", _scrubbed(record, lambda text: without_secrets(text, known)))


def _scrubbed(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := _scrubbed(old, clean)) != old}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {_scrubbed(key, clean): _scrubbed(each, clean) for key, each in pairs}
    if isinstance(value, tuple | list):
        return tuple(_scrubbed(each, clean) for each in cast("tuple[Any, ...]", value))
    return value


def _is_random(text: str) -> bool:
    """Whether a long word mixes both cases and digits, as tokens do and paths and identifiers rarely."""
    whole = [re.sub(r"[/+=]", "", text)] if text.count("/") <= _SLASHES else []
    return any(
        len(part) >= _LONG_PART
        and re.search(r"[a-z]", part) is not None
        and re.search(r"[A-Z]", part) is not None
        and len(re.findall(r"\d", part)) >= _DIGITS
        for part in [*re.split(r"[/_-]", text), *whole]
    )
