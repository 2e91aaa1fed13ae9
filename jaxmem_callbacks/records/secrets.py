"""The removal of secrets from texts.

Every text of the outside (environment, arguments, exceptions, logs, names of metrics) passes this one function on its way into a
file or a stream. Hidden are: tokens by their makers' prefixes, values of names that mean a secret, passwords and queries of
addresses, keys in PEM form, long texts that look random, and the values of the environment's own secrets wherever they stand.

Time grows with the text alone: names are found one after the other, and each pattern begins at a fixed mark.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

_Record = TypeVar("_Record")
HIDDEN = "[hidden]"

# --- Names that mean a secret ---

_NO, _OPAQUE, _WEAK, _STRONG = range(4)  # what is hidden behind a name: nothing; what looks random; no figures; all


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words(
    "password passwords passwd passphrase passcode passwort pwd pwds psw secret secrets credential credentials cred creds "
    "apikey apikeys dsn webhook webhooks connectionstring connstr htpasswd netrc"
)
_SECRET_ENDS = (
    *("password", "passwd", "passphrase", "secret", "apikey", "secretkey", "accesskey", "privatekey", "accountkey"),
    *("authtoken", "accesstoken", "apitoken", "pwd", "creds", "sshpass", "dbpass", "userpass", "smtppass", "pgpass"),
)
_INSIDE = ("password", "passwd", "passphrase", "secret", "credential")
# The last word of a name that is about a secret and holds none, or about tokens of text.
_ABOUT = _words(
    "file files path paths dir folder name names count counts len length size sizes shape type dtype index idx embedding "
    "embeddings embed embedder embedded loss acc accuracy rate per dim axis mask masks limit ttl expiry expires age policy "
    "manager provider helper field sock socket ring error errors required step steps bytes position positions ratio mean max "
    "min sec second seconds logits probs weights kernel bias ids usage format version pass"
)
_WHICH = _words("prod production dev test staging live main new old default value str text plain b64 base64 env raw id")
_KEYS_OF = _words(
    "api access secret private auth account storage shared service encryption encrypt signing sign signature master client "
    "license subscription server webhook ssh deploy app application consumer admin root project write read ingest "
    "wandb openai anthropic hf huggingface aws gcp azure google gemini groq mistral cohere together replicate comet neptune "
    "mlflow datadog sentry stripe twilio sendgrid github gitlab slack discord"
)
_TOKENS_OF = _words("access refresh auth api bearer")
_TOKENS_OF_TEXT = _words(
    "next last first per each eos bos pad unk mask masked cls sep special end start stop image text num max min n padding prefix "
    "decoder encoder input output target prev previous current byte bytes word patch"
)
_PASSES = _words(
    "forward backward fwd bwd first second third single one two multi compiler hlo xla opt optimization optimizer remat "
    "pipeline by low high next last each per gradient grad training eval layer memory scheduling fusion no"
)
_HEADERS = _words("authorization cookie cookies setcookie proxyauthorization")
_VENDORS = _words(
    "adafruit adobe airtable algolia alibaba aliyun asana atlassian confluence jira beamer bitbucket bittrex meraki cloudflare "
    "codecov cohere coinbase confluent contentful datadog discord droneci dropbox etsy facebook fastly finicity finnhub flickr "
    "freshbooks gitter gocardless heroku hubspot intercom jfrog artifactory bintray kraken kucoin launchdarkly linear linkedin "
    "lob looker mailchimp mailgun mapbox mattermost messagebird netlify newrelic nytimes okta plaid privateai rapidapi sendbird "
    "sentry snyk sonar sourcegraph squarespace sumo telegram travis twitch twitter typeform yandex zendesk wandb comet neptune "
    "twilio stripe tencent"
)
_OPAQUE_WORDS = _words("pat sig sas signature session sessionid csrf xsrf otp nonce salt jwt bearer license auth")
_FOLDERS = frozenset(("PWD", "OLDPWD"))
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LONGEST_NAME = 200


@functools.lru_cache(maxsize=4096)
def _level(name: str) -> int:
    """What is hidden behind a name."""
    words = [part.lower() for part in _PARTS.findall(name[-_LONGEST_NAME:])]
    while len(words) > 1 and words[-1] in _WHICH:
        words.pop()
    if not words or name in _FOLDERS:
        return _NO
    joined = "".join(words[-2:])
    if joined in _HEADERS or joined in ("connectionstring", "connstr", "databaseurl") or "webhook" in words:
        return _STRONG
    level = _level_of(words[-1], words[:-1], name)
    if level is not None:
        return level
    return _OPAQUE if words[-1] in _OPAQUE_WORDS or not _VENDORS.isdisjoint(words) else _NO


def _level_of(last: str, before: list[str], name: str) -> int | None:
    """By a name's last word and those before it; None where that decides nothing."""
    nearest = before[-1] if before else ""
    if last in ("pass", "pw"):
        return _WEAK if not before else _NO if nearest in _PASSES else _STRONG
    if last in _ABOUT:
        return _NO
    if last in _SECRET_WORDS or last.endswith(_SECRET_ENDS) or any(part in word for word in before for part in _INSIDE):
        return _STRONG
    if last in ("key", "keys"):
        is_setting = bool(before) and name.isupper()
        return _STRONG if is_setting or not _KEYS_OF.isdisjoint(before) else _NO
    if last == "token" or (last == "tokens" and not _TOKENS_OF.isdisjoint(before)):
        return _NO if nearest in _TOKENS_OF_TEXT else _STRONG if before else _WEAK
    return _WEAK if last in ("auth", "pat") and before else None


# What is no secret, whatever its name: nothing, a switch, a type or a shape, a reference to somewhere else.
_HARMLESS = re.compile(
    r"(?:none|null|nil|true|false|yes|no|on|off|unset|empty|str|int|bytes|bool|\*+|x{3,}|"
    r"\W+|[a-z_][\w.]*[([{]+|[a-z]\w{0,12}\[[^\]]*\]\S{0,60}|\$\w+|\$\{[^}]*\}|\$\([^)]*\)|<[\w -]*>|"
    r"\(?not shown\)?|set; its value is not shown)",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?%?(?:[kmgtp]?i?b|s|ms|us)?", re.IGNORECASE)
_OPAQUE_TEXT = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+/=.~:|%-]{12,}")


def _is_hidden(level: int, value: str) -> bool:
    value = value.strip()
    if not value or value.startswith(HIDDEN) or _HARMLESS.fullmatch(value):
        return False
    if level == _STRONG:
        return True
    if level == _WEAK:
        return not _FIGURE.fullmatch(value) and not _is_code(value)
    return _OPAQUE_TEXT.fullmatch(value) is not None and not _FIGURE.fullmatch(value) and value.count("/") <= _SLASHES


def _is_code(value: str) -> bool:
    """A call or a container, such as ``ShapedArray(uint32[2])`` or ``(state, batch)``."""
    return value[0] in "([{<" or re.match(r"[A-Za-z_][\w.]*\(", value) is not None


# --- A name, a mark and a value ---

_NAME = re.compile(r"[A-Za-z][\w.$-]*")
_QUOTE = r"(?:\\{0,15}[\"'`]|&quot;|&#0?39;|&#x27;|%22)"
_JOINT = re.compile(
    rf"(?P<close>{_QUOTE})?\]?(?:(?:\s*,)?\s*{_QUOTE}?(?:value|Value|VALUE){_QUOTE}?\s*[:=]\s*|"
    r"\s*(?P<mark>=>|:=|\?=|::?=|={1,3}|->|:|,|>|\|)\s*|(?P<gap>[ \t]+|\s+(?=[\"'])))"
)
_OPEN = re.compile(rf"(?P<prefix>[bBrRuUfF]{{0,2}})(?P<quote>\"\"\"|'''|{_QUOTE})")
_SCHEME = r"(?:(?:Bearer|Basic|Token|Digest|Negotiate|Bot|ApiKey|AWS4-HMAC-SHA256)\s+)?"
_TO_SPACE = re.compile(rf"{_SCHEME}[^\s\"'`<|]+")
_TO_MARK = re.compile(rf"{_SCHEME}[^\s\"'`<|,;&)\]}}]+")
_TO_SEMICOLON = re.compile(r"[^;\n\"'`]+")
_TO_END = {quote: re.compile(rf"[^\n{quote}]+") for quote in ("", '"', "'", "`")}
_BLOCK = re.compile(r"[|>][+-]?\d?[ \t]*\n(?:[ \t]+[^\n]*(?:\n|\Z))+")
_TRIPLE = 3
_CLOSERS = ",;)]}>."
_WORD = re.compile(r"[a-z]+[.,:;]?")
_BEGINS = re.compile(r"(?:^|[\n,;{(\[&?/|-])[ \t]*\Z")
_LINE_START = re.compile(r"(?:^|\n)[ \t]*(?:-[ \t]+)?(?:export[ \t]+)?[\"'`]?\Z")


def _values(text: str) -> Iterator[tuple[int, int]]:
    """Where values of names that mean a secret stand."""
    done = 0
    for name in _NAME.finditer(text):
        if name.start() < done:
            continue
        level = _level(name[0].rstrip(".-"))
        if level == _NO:
            continue
        joint = _JOINT.match(text, name.end())
        span = None if joint is None else _value(text, name, joint, level)
        if span is not None:
            done = span[1]
            yield span


def _value(text: str, name: re.Match[str], joint: re.Match[str], level: int) -> tuple[int, int] | None:
    start = joint.end()
    is_option = text[max(name.start() - 1, 0) : name.start()] == "-"
    opened = _OPEN.match(text, start)
    if joint["gap"] is not None and not _may_follow_a_gap(text, name, start, is_option=is_option):
        return None
    if text.startswith(HIDDEN, start):
        return None
    if (
        level == _WEAK
        and joint["mark"] in (":", "|")
        and not joint["close"]
        and not _BEGINS.search(text[: name.start()][-40:])
    ):
        return None  # "the next token: ", "the second pass: "
    if joint["mark"] == "," and not (joint["close"] and opened and (is_option or level == _STRONG)):
        return None
    if opened:
        begin, end = opened.end(), _closing(text, opened)
    else:
        begin, end = start, _unquoted_end(text, name, joint, level)
    return (begin, end) if end > begin and _is_hidden(level, text[begin:end]) else None


def _may_follow_a_gap(text: str, name: re.Match[str], start: int, *, is_option: bool) -> bool:
    """Whether a name and a value stand next to each other: ``--token x``, and ``DB_PASS x1`` as tables have it."""
    if is_option:
        return text[start : start + 1] != "-"
    word = _TO_SPACE.match(text, start)
    return word is not None and name[0].isupper() and "_" in name[0] and not _WORD.fullmatch(word[0])


def _closing(text: str, opened: re.Match[str]) -> int:
    """The end of a quoted value; where its quote was cut off, the end of the line."""
    quote, at = opened["quote"], opened.end()
    escapes = len(quote) - len(quote.lstrip("\\"))
    line = text.find("\n", at)
    last = len(text) if line < 0 or len(quote) == _TRIPLE else line
    while (found := text.find(quote, at, last)) >= 0:
        ahead = text[max(found - 20, 0) : found]
        before = len(ahead) - len(ahead.rstrip("\\"))
        if before == 0 or (escapes == 0 and before % 2 == 0):
            return found
        at = found + len(quote)
    return last


def _unquoted_end(text: str, name: re.Match[str], joint: re.Match[str], level: int) -> int:
    start = joint.end()
    block = _BLOCK.match(text, start)
    if block is not None:
        return block.end()
    head = text[max(name.start() - 40, 0) : name.start()]
    to_end = _TO_END.get(head[-1:], _TO_END[""])  # a line that is quoted ends with its quote
    words = "".join(part.lower() for part in _PARTS.findall(name[0])[-2:])
    if words in _HEADERS:
        pattern = to_end
    elif head.rstrip(" ").endswith(";") or (
        joint["mark"] == "=" and ";" in text[start : start + 200] and level == _STRONG
    ):
        pattern = _TO_SEMICOLON
    elif level == _STRONG and joint["mark"] == ":" and _LINE_START.search(head):
        pattern = to_end
    else:
        pattern = _TO_SPACE if level == _STRONG else _TO_MARK
    found = pattern.match(text, start)
    if found is None:
        return start
    end = found.end()
    while end > start and text[end - 1] in _CLOSERS and pattern is _TO_SPACE:
        end -= 1
    return end


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
    r"sb(?:p|_secret)_\w{16,}|napi_\w{16,}|re_[A-Za-z0-9]{8}_\w{16,}|a[ks]-[A-Za-z0-9]{22}\b|rnd_[A-Za-z0-9]{24,}|secret_[A-Za-z0-9]{32,}|"
    r"\d{5,16}:A[\w-]{34}|\d{15,16}[|%][\w-]{27,}|[MNO][\w-]{22,28}\.[\w-]{6}\.[\w-]{27,}|[\w~.]{3}\dQ~[\w~.-]{31,34}|"
    r"[a-f0-9]{32}-us\d{1,2}\b|[a-f0-9]{32}-[a-f0-9]{8}-[a-f0-9]{8}\b|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk\b|(?:pub)?key-[a-f0-9]{16,}|"
    r"s-s4t2(?:ud|af)-\w{16,}|perm[:-][\w=.-]{20,}|eyJ[\w-]{8,}(?:\.[\w-]*){1,4}|eyJ[\w+/=-]{30,}|ZXlK[\w+/=-]{20,}|"
    r"\$(?:1|2[abxy]?|5|6|7|y|apr1|argon2\w*|scrypt|pbkdf2[\w-]*)\$[\w./$+=,-]{8,}"
)
_SCHEMED = r"(?<![\w+.-])(?P<scheme>[a-zA-Z][\w+.-]{0,40}:)//"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
            r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
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
    (re.compile(r"(\bsshpass\s+-p\s*)\S+"), rf"\1{HIDDEN}"),
    (re.compile(r"(\bmysql\w{0,10}\b[^\n]{0,200}?\s-p)[^\s-]\S*"), rf"\1{HIDDEN}"),
    (
        re.compile(r"(\b(?:login|machine|default|user)\s+(?:\S{1,200}\s+){0,5}?(?:password|passwd|account)\s+)\S+"),
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
_LONG_PART, _DIGITS, _SLASHES = 20, 2, 2  # shorter parts, and those with one digit, are words of paths and names
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
    whole = [re.sub(r"[/+]", "", bare)] if bare.count("/") <= _SLASHES and "=" not in bare else []
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
        if _level(name) >= _WEAK and not _HARMLESS.fullmatch(value):
            found.add(value.strip())
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
    if len(text) < _LONGEST_NAME:
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
    parts: list[str] = []
    end = 0
    for start, stop in _values(text):
        parts += (text[end:start], HIDDEN)
        end = stop
    text = "".join((*parts, text[end:]))
    text = _TOKENS.sub(HIDDEN, text)
    text = _HEXADECIMAL.sub(_without_hexadecimal, text)
    return _LONG.sub(lambda match: HIDDEN if _is_random(match[0]) else match[0], text)


def _without(text: str, value: str) -> str:
    if len(value) >= _LONG_VALUE:
        return text.replace(value, HIDDEN)
    return re.sub(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])", HIDDEN, text)


def scrubbed(
    record: _Record, known: tuple[str, ...] | None = None, *, then: Callable[[str], str] | None = None
) -> _Record:
    """Any records, mappings and lists with every text in them, however deep, passed through `without_secrets`.

    A value whose key, or whose neighbour in a list of arguments, names a secret is hidden whole. What identifies a program,
    and a policy, which a step is made by, stay.

    Args:
        record: Of any kind.
        known: As for `without_secrets`.
        then: What else is done to each text.
    """
    secrets = secret_values(os.environ) if known is None else known

    def clean(text: str) -> str:
        return without_secrets(text, secrets) if then is None else then(without_secrets(text, secrets))

    return cast("_Record", _scrubbed(record, clean))


_KEPT = frozenset(("fingerprint", "operations", "policy"))


def _scrubbed(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, int | float | bytes):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {
            name: new
            for name, old in fields.items()
            if name not in _KEPT and (new := _scrubbed(old, clean)) is not old and new != old
        }
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, Mapping):
        return _mapping(cast("Mapping[Any, Any]", value), clean)
    if isinstance(value, tuple | list):
        items = cast("tuple[Any, ...]", value)
        made = [_scrubbed_beside(before, each, clean) for before, each in zip((None, *items), items, strict=False)]
        return made if isinstance(value, list) else tuple(made)
    return value


def _mapping(pairs: Mapping[Any, Any], clean: Callable[[str], str]) -> dict[Any, Any]:
    """Two names that are the same once their secrets are hidden stay two."""
    made: dict[Any, Any] = {}
    for key, each in pairs.items():
        name = new = _scrubbed(key, clean)
        number = 1
        while new in made:
            number += 1
            new = f"{name} ({number})"
        made[new] = each if key in _KEPT else _scrubbed_beside(key, each, clean)
    return made


def _scrubbed_beside(name: Any, value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(name, str) and isinstance(value, str) and _NAME.fullmatch(bare := name.lstrip("-")):
        level = _level(bare)
        if level > _NO and not value.startswith("--") and _is_hidden(level, value):
            return HIDDEN
    return _scrubbed(value, clean)
