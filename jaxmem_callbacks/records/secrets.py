"""The removal of secrets from texts.

Every text of the outside (environment, arguments, exceptions, logs, names of metrics) passes this one function on its way into a
file or a stream. Hidden are: tokens by their makers' prefixes, values of names that mean a secret, passwords and queries of
addresses, keys in PEM form, long texts that look random, and the values of the environment's own secrets wherever they stand.

Time grows with the text alone: names are found one after the other, what was hidden is not read again, and each pattern begins
at a fixed mark.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxmem_callbacks.records.secret_values import (
    HARMLESS,
    HIDDEN,
    LONGEST_NAME,
    NAME,
    NO,
    OPENERS,
    QUOTED,
    SLASHES,
    STRONG,
    WEAK,
    after_commands,
    columns,
    is_folder,
    is_hidden,
    is_odd,
    level_of,
    passwords_among,
    values,
)

_Record = TypeVar("_Record")
# --- Secrets by their own form ---

_B = r"(?<![A-Za-z0-9])"  # not in the middle of a word
_PREFIXES = (
    r"hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|rtr)-[\w.-]{8,}|"
    r"GR1348941[\w-]{8,}|xox[a-z]-[\w.-]{6,}|xoxe\.[\w.-]{6,}|xapp-[\w-]{6,}|sk-(?:proj|ant|svcacct|admin|or|lf)-[\w-]{6,}|"
    r"sk-(?=[\w-]*[\dA-Z])[\w-]{8,}|(?:sk|rk|pk)_(?:test|live|prod)_\w{6,}|whsec_\w{8,}|sk_[a-z0-9]{32,}|pplx-\w{8,}|gsk_\w{8,}|xai-\w{8,}|"
    r"nvapi-[\w-]{6,}|r8_\w{8,}|tgp_v1_[\w-]{8,}|csk-\w{16,}|fw_\w{20,}|wandb_v\d_\w{6,}|lsv2_(?:pt|sk)_\w{6,}|pcsk_\w{8,}|"
    r"AIza[\w-]{6,}|ya29\.[\w.-]{6,}|1//0[\w-]{20,}|GOCSPX-[\w-]{8,}|AQ\.Ab[\w-]{16,}|"
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|ANPA|AIPA|ANVA)[A-Z0-9]{8,}|ABSK[A-Za-z0-9+/=]{20,}|bedrock-api-key-[\w+/=]{8,}|"
    r"LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{16,}|do[opr]_v1_\w{6,}|dapi[a-f0-9]{16,}(?:-\d)?|dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.]{8,}|"
    r"hv[bsr]\.[\w-]{8,}|s\.[A-Za-z0-9]{24}\b|[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{20,}|pscale_(?:tkn|oauth|pw)_[\w=.-]{8,}|PMAK-[\w-]{8,}|"
    r"pn[ub]_\w{16,}|pul-[a-f0-9]{16,}|rdme_\w{16,}|rubygems_\w{8,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{8,}|dckr_[op]at_[\w-]{8,}|cio[A-Za-z0-9]{32}\b|"
    r"SG\.[\w.=-]{6,}|xkeysib-[\w-]{8,}|sntry[su]_[\w+/=]{8,}|sm_[aps]at_\w{8,}|shippo_(?:live|test)_\w{8,}|shp(?:at|ca|pa|ss)_\w{6,}|"
    r"sq0[a-z]{3}-[\w-]{8,}|EAAA[\w-]{20,}|EAA[A-Z][A-Za-z0-9]{40,}|(?:SK|AC)[0-9a-fA-F]{32}\b|tfp_[\w.=-]{16,}|tskey-[\w-]{6,}|"
    r"sgp_\w{16,}|ntn_\w{16,}|figd_[\w-]{8,}|lin_(?:api|oauth)_\w{8,}|NR(?:AK|II|JS|RA|IQ|AL)-[\w-]{8,}|API-[A-Z0-9]{20,}|ops_eyJ[\w+/=]{8,}|"
    r"A3-[A-Z0-9]{6}-[A-Z0-9-]{20,}|AGE-SECRET-KEY-1\w{8,}|AKCp\w{20,}|cmVmd\w{20,}|ATATT3[\w=-]{8,}|ATBB\w{16,}|CLOJARS_\w{16,}|"
    r"duffel_(?:test|live)_[\w=-]{8,}|dt0[a-z]\d{2}\.[\w.]{8,}|EZ[AT]K\w{16,}|FLW(?:SEC|PUB)K[\w-]{8,}|fio-u-[\w=-]{16,}|fo1_[\w-]{16,}|"
    r"fm[12][ar]?_[\w+/=]{16,}|gl(?:c|sa)_[\w+/=]{16,}|HRKU-[\w-]{8,}|ico-\w{16,}|CFPAT-[\w-]{8,}|p8e-\w{16,}|pat[A-Za-z0-9]{14}\.[a-f0-9]{32,}|"
    r"[ps]at\.[\w-]{16,}\.\w{16,}\.\w{16,}|tk-us-[\w-]{16,}|v1\.0-[a-f0-9]{24}-[a-f0-9]{32,}|sha256~[\w-]{16,}|sl\.[\w=-]{30,}|"
    r"sb(?:p|_secret)_\w{16,}|vc[aikpr]_\w{16,}|AVNS_\w{8,}|CCIP(?:AT|RJ)_\w{16,}|napi_\w{16,}|re_[A-Za-z0-9]{8}_\w{16,}|a[ks]-[A-Za-z0-9]{22}\b|rnd_[A-Za-z0-9]{24,}|secret_[A-Za-z0-9]{32,}|"
    r"\d{5,16}:A[\w-]{34}|\d{15,16}[|%][\w-]{27,}|[MNO][\w-]{22,28}\.[\w-]{6}\.[\w-]{27,}|[\w~.]{3}\dQ~[\w~.-]{31,34}|"
    r"[a-f0-9]{32}-us\d{1,2}\b|[a-f0-9]{32}-[a-f0-9]{8}-[a-f0-9]{8}\b|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk\b|(?:pub)?key-[a-f0-9]{16,}|"
    r"s-s4t2(?:ud|af)-\w{16,}|perm[:-][\w=.-]{20,}|eyJ[\w-]{8,}(?:\.[\w-]*){1,4}|eyJ[\w+/=-]{30,}|ZXlK[\w+/=-]{20,}|"
    r"\$(?:1|2[abxy]?|5|6|7|y|apr1|argon2\w*|scrypt|pbkdf2[\w-]*)\$[\w./$+=,-]{8,}"
)
_SCHEMED = r"(?<![\w+.-])(?P<scheme>[a-zA-Z][\w+.-]{0,40}:)//"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"----[- ]BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?[- ]----.*?"
            r"(?:----[- ]END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?[- ]----|\Z)",
            re.DOTALL,
        ),
        HIDDEN,
    ),
    (re.compile(r"(PuTTY-User-Key-File-\d).*?(?:Private-MAC:[^\n]*|\Z)", re.DOTALL), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<![\w.-])((?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks)/)[^\s'\"<>]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(jdbc:oracle:\w{1,10}:)[^\s@'\"]{1,200}@"), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"(?<![\w.+:-])[\w.+-]{1,64}:[^\s:@/'\"]{1,200}@((?:[\w-]{1,63}\.)+[a-z]{2,}|localhost|[\w-]{1,63}(?=:\d))"
        ),
        rf"{HIDDEN}@\1",
    ),
    (
        re.compile(r"(?<![\w-])(Bearer|Basic|Token|ApiKey)(\s+)(?=\S*[\d=.])[\w.~+/=-]{6,}", re.IGNORECASE),
        rf"\1\2{HIDDEN}",
    ),
    (
        re.compile(r"((?<![\w-])(?:-u|--user|--proxy-user|-U)[\"']?[\s,=]{1,4}[\"']?[^\s:\"',=]{1,64}:)[^\s\"']+"),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"(\bcurl\b[^\n]{0,300}?\s[\"']?-[a-zA-Z#]{0,10}[uU][\"',\s]{0,5}[^\s:\"']{1,64}:)[^\s\"']+"),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"((?<![\w-])(?:-U|--user)[\"',\s=]{1,5}[^\s:%\"',=]{1,64}%)[^\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(-pass(?:in|out)?[\"',\s=]{1,5}pass:)[^\s\"']+"), rf"\1{HIDDEN}"),
    (re.compile(r"(%2F%2F)(?:(?!%2F|%40|%3F)[^\s\"'&]){1,300}%40", re.IGNORECASE), rf"\1{HIDDEN}%40"),
    (re.compile(r"(/t/)tk-[\w-]+|(conda[\w.-]{0,60}(?::\d{1,5})?/t/)[^\s/\"']+"), rf"\1\2{HIDDEN}"),
    (
        re.compile(
            r"(\b(?:login|machine|default|user)\s+(?:\S{1,200}\s+){0,5}?(?:password|passwd|account)\s+)(?!\|)\S+"
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"((?<![\w.*-])[\w.*-]{1,64}:(?:\d{4,5}|\*):[^\s:]{1,64}:[^\s:]{1,64}:)[^\s\"']+"),
        rf"\1{HIDDEN}",
    ),
)
_TOKENS = re.compile(f"{_B}(?:{_PREFIXES})")
_ADDRESS = re.compile(rf"{_SCHEMED}(?P<rest>[^\s\"'<>`]+)")
_HOOK = re.compile(r"\Ahooks\.[^/]+/|/\w{0,20}hook\w{0,4}/|/bot(?=\d)|/with/key/", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"(?:[\w-]+(?:\.[\w-]+)+|localhost|\[[\da-f:]+\]):\d{1,5}", re.IGNORECASE)
_HEXADECIMAL = re.compile(r"(?<![0-9a-zA-Z])(?=\d{0,40}[a-fA-F])[0-9a-fA-F]{32,}(?![0-9a-zA-Z])")
# Hashes of programs and of files, which reports are about.
_HASH_OF = re.compile(
    r"(?:finger_?print|hash(?:es)?|sha-?\d*|md5|digest|checksum|commit|revision|etag|module_id|operations|"
    r"cache[ _-]key|build[ _-]?id)"
    r"[\"'`]?\s{0,3}[=:@-]?\s{0,3}[\"'`]?(?:\w{1,10}[:-])?\Z|(?:^|[\s/])(?:jit|pmap|pjit)_[\w.<>-]{0,200}-\Z",
    re.IGNORECASE,
)
_HASHED_FILE = re.compile(r"-[0-9a-f]{16}\.zip|\.(?:zip|hlo|pb|txt|bin|json)\b")
_LONG_PART, _DIGITS = 20, 2  # shorter parts, and those with one digit, are words of paths and names
_LONG = re.compile(r"[A-Za-z0-9+/_=-]{32,}")
_MANGLED = re.compile(r"_{1,3}Z(?:N|T|S|L|\d)")
_TURNS, _TURNING_PART = 8, 24


def _address(match: re.Match[str]) -> str:
    """An address without who logs in, without its query, and without what follows the part that makes it a webhook's."""
    rest = _without_login(match["rest"])
    rest = re.sub(r"\?.+", f"?{HIDDEN}", rest, count=1)
    hook = _HOOK.search(rest)
    return f"{match['scheme']}//{rest if hook is None or hook.end() == len(rest) else rest[: hook.end()] + HIDDEN}"


def _without_login(rest: str) -> str:
    """Up to the last ``@``, since a password may hold that and ``/``."""
    at = rest.rfind("@")
    host, slash, _ = rest.partition("/")
    if at < 0:
        return rest
    if "@" not in host and (":" not in host or not slash or _HOST_AND_PORT.fullmatch(host)):
        return rest  # an `@` in a path, such as a version's
    if "@" in host and ":" not in host and "/" in rest[:at]:
        at = host.rfind("@")
    return f"{HIDDEN}{rest[at:]}"


def _without_hexadecimal(match: re.Match[str]) -> str:
    text = match.string
    is_hash = _HASH_OF.search(text, max(match.start() - 220, 0), match.start()) or _HASHED_FILE.match(text, match.end())
    return match[0] if is_hash else HIDDEN


def _is_random(text: str) -> bool:
    """Whether a long word mixes cases and digits, as tokens do and paths and identifiers rarely."""
    if _MANGLED.match(text):
        return False
    bare = text.rstrip("=")
    whole = [re.sub(r"[/+]", "", bare)] if bare.count("/") <= SLASHES and "=" not in bare else []
    return any(_mixes(part) for part in [*re.split(r"[/_=-]", text), *whole])


def _mixes(part: str) -> bool:
    if len(part) < _LONG_PART or _HEXADECIMAL.fullmatch(part):  # hashes were looked at with what stands before them
        return False
    digits = len(re.findall(r"\d", part))
    if re.search(r"[a-z]", part) and re.search(r"[A-Z]", part):
        return digits >= _DIGITS
    turns = len(re.findall(r"\d(?=[a-zA-Z])|[a-zA-Z](?=\d)", part))
    return len(part) >= _TURNING_PART and turns >= _TURNS and not re.search(r"\dx\d", part)


# --- The doors ---

_LEAST = 6  # shorter values of variables would hide parts of ordinary words
_LONG_VALUE = 12
_FRESH_S = 1.0
_LONG_TEXT = 200_000  # characters; longer ones are not kept


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Values that environment variables with a secret's name hold, and passwords in addresses, the longest first."""
    found: set[str] = set()
    for name, value in variables.items():
        if level_of(name) >= WEAK and not HARMLESS.fullmatch(value) and not is_folder(name, value):
            found.add(value.strip())
            found |= set(QUOTED.findall(value)) if value[:1] in OPENERS else set()
        if "://" in value:
            found |= set(_passwords_in(value))
    forms = {form for value in found for form in _forms(value) if len(form) >= _LEAST}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _passwords_in(value: str) -> Iterator[str]:
    for match in _ADDRESS.finditer(value):
        login, at, _ = match["rest"].rpartition("@")
        password = login.partition(":")[2]
        if at and password:
            yield password
            yield urllib.parse.unquote(password)


def _forms(value: str) -> set[str]:
    """The value as it is, and as addresses, JSON and Python write it."""
    return {value, urllib.parse.quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}


def without_secrets(text: str, known: tuple[str, ...] | None = None) -> str:
    """A text with everything hidden that is or looks like a secret.

    Args:
        text: Any.
        known: Values to hide wherever they stand; None for those of the process's environment.
    """
    known = secret_values(os.environ) if known is None else known
    if len(text) < LONGEST_NAME:
        return _hidden_again(text, known)
    return _long_again(text, known) if len(text) < _LONG_TEXT else _hidden(text, known)


def recent_secrets() -> tuple[str, ...]:
    """The environment's secrets of a second ago at most, for who writes a thousand texts in that time."""
    global _recent  # noqa: PLW0603 - one a process; two threads at most make it twice
    now = time.monotonic()
    if now >= _recent[0]:
        _recent = (now + _FRESH_S, secret_values(os.environ))
    return _recent[1]


_recent: tuple[float, tuple[str, ...]] = (0.0, ())


@functools.lru_cache(maxsize=4096)
def _hidden_again(text: str, known: tuple[str, ...]) -> str:
    """Names of metrics, devices and arguments come again and again."""
    return _hidden(text, known)


@functools.lru_cache(maxsize=32)
def _long_again(text: str, known: tuple[str, ...]) -> str:
    return _hidden(text, known)


def _hidden(text: str, known: tuple[str, ...]) -> str:
    for value in known:
        if value in text:
            text = _without(text, value)
    if "://" in text:
        text = _ADDRESS.sub(_address, text)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    for found in (columns, after_commands, values):
        text = _without_spans(text, found(text))
    text = _TOKENS.sub(HIDDEN, text)
    text = _HEXADECIMAL.sub(_without_hexadecimal, text)
    return _LONG.sub(lambda match: HIDDEN if _is_random(match[0]) else match[0], text)


def _without_spans(text: str, spans: Iterable[tuple[int, int]]) -> str:
    parts: list[str] = []
    end = 0
    for start, stop in spans:
        parts += (text[end:start], HIDDEN)
        end = stop
    return "".join((*parts, text[end:]))


def _without(text: str, value: str) -> str:
    if len(value) >= _LONG_VALUE:
        return text.replace(value, HIDDEN)
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", HIDDEN, text)


def scrubbed(
    record: _Record, known: tuple[str, ...] | None = None, *, then: Callable[[str], str] | None = None
) -> _Record:
    """Any records, mappings and lists with every text in them, however deep, passed through `without_secrets`.

    What a secret's key, or its neighbour in a list of arguments, holds is hidden, in whatever collection; each keeps its form.
    Numbers in records stay, which have figures there. What identifies a program, and a policy, which a step is made by, stay.

    Args:
        record: Of any kind.
        known: As for `without_secrets`.
        then: What else is done to each text.
    """
    secrets = secret_values(os.environ) if known is None else known

    def clean(text: str) -> str:
        return without_secrets(text, secrets) if then is None else then(without_secrets(text, secrets))

    return cast("_Record", _Scrubber(clean).scrubbed(record))


_KEPT = frozenset(("fingerprint", "operations", "policy"))


@dataclasses.dataclass(frozen=True)
class _Scrubber:
    """Removes secrets from values of any kind.

    Attributes:
        clean: What is done to each text.
        numbers: Whether a number may be a secret; in records it is a figure.
    """

    clean: Callable[[str], str]
    numbers: bool = True

    def scrubbed(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.clean(value)
        if value is None or isinstance(value, int | float | bytes):
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = dataclasses.replace(self, numbers=False)
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            changed = {
                name: new
                for name, old in fields.items()
                if name not in _KEPT and (new := inner.scrubbed(old)) is not old and new != old
            }
            return dataclasses.replace(value, **changed) if changed else value
        if isinstance(value, Mapping):
            return self._mapping(cast("Mapping[Any, Any]", value))
        if isinstance(value, tuple | list):
            made = self._items(cast("Sequence[Any]", value))
            return made if isinstance(value, list) else tuple(made)
        return value

    def _mapping(self, pairs: Mapping[Any, Any]) -> dict[Any, Any]:
        named = next((pairs[key] for key in ("name", "Name", "key", "Key") if key in pairs), None)
        values = {
            key: each if key in _KEPT else self._beside(named if key in ("value", "Value") else key, each)
            for key, each in pairs.items()
        }
        return _renamed((self.scrubbed(key), each) for key, each in values.items())

    def _items(self, items: Sequence[Any]) -> list[Any]:
        texts = [each if isinstance(each, str) else "" for each in items]
        passwords = dict(passwords_among(texts))
        made: list[Any] = []
        name: Any = None
        for number, each in enumerate(items):
            if number in passwords:
                made.append(each[: passwords[number]] + HIDDEN)
            else:
                made.append(self._beside(name, each))
            is_option = (
                isinstance(name, str) and name.startswith("-") and name.endswith("s") and not name.endswith("ss")
            )
            name = name if is_option and isinstance(each, str) and not each.startswith("-") else each
        return made

    def _beside(self, name: Any, value: Any) -> Any:
        if not isinstance(name, str) or (isinstance(value, str) and value.startswith("--")):
            return self.scrubbed(value)
        bare = name.lstrip("-")
        is_name = NAME.fullmatch(bare) and not is_folder(bare, value if isinstance(value, str) else "")
        collected = isinstance(value, Mapping | tuple | list | set | frozenset)
        level = level_of(bare, collection=collected) if is_name else NO
        return self.scrubbed(value) if level == NO else self._hidden(level, value, inside=False)

    def _hidden(self, level: int, value: Any, *, inside: bool) -> Any:
        """A value of a secret's name: all texts, bytes and numbers in it hidden; where the name is weak, those that look it."""
        if isinstance(value, str):
            is_secret = is_hidden(level, value) and (level == STRONG or not inside or is_odd(value))
            return HIDDEN if is_secret else self.clean(value)
        if isinstance(value, bytes | bytearray):
            return HIDDEN.encode() if is_hidden(level, value.decode("latin-1")) else value
        if isinstance(value, int) and not isinstance(value, bool):
            return HIDDEN if self.numbers and is_hidden(level, str(value)) else value
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return _renamed((self.scrubbed(key), self._hidden(level, each, inside=True)) for key, each in pairs)
        if isinstance(value, list | tuple | set | frozenset):
            items = [self._hidden(level, each, inside=True) for each in cast("Iterable[Any]", value)]
            return items if isinstance(value, list) else tuple(items) if isinstance(value, tuple) else frozenset(items)
        return self.scrubbed(value)


def _renamed(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Two names that are the same once their secrets are hidden stay two."""
    made: dict[Any, Any] = {}
    for name, each in pairs:
        new, number = name, 1
        while new in made:
            number += 1
            new = f"{name} ({number})"
        made[new] = each
    return made
