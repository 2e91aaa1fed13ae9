"""Names that mean a secret, and whether what stands behind one is hidden."""

from __future__ import annotations

import functools
import re

HIDDEN = "[hidden]"

NO, OPAQUE, WEAK, STRONG = range(4)  # what is hidden behind a name: nothing; what looks random; no figures; all


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words(
    "password passwords passwd passphrase passcode passwort pwd pwds psw secret secrets credential credentials cred creds "
    "apikey apikeys dsn webhook webhooks connectionstring connstr htpasswd netrc"
)
_SECRET_ENDS = (
    *("password", "passwd", "passphrase", "secret", "apikey", "secretkey", "accesskey", "privatekey", "accountkey"),
    *("authtoken", "accesstoken", "apitoken", "pwd", "creds", "sshpass", "dbpass", "userpass", "smtppass", "pgpass"),
    *("storepass", "keypass", "passcode"),
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
    "license subscription server webhook ssh tls ssl rsa pem deploy app application consumer admin root project write read "
    "ingest wandb openai anthropic hf huggingface aws gcp azure google gemini groq mistral cohere together replicate comet "
    "neptune mlflow datadog sentry stripe twilio sendgrid github gitlab slack discord"
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
HEADERS = _words("authorization cookie cookies setcookie proxyauthorization")
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
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
LONGEST_NAME = 200
SLASHES = 2  # texts with more are paths


@functools.lru_cache(maxsize=4096)
def level_of(name: str, *, collection: bool = False) -> int:
    """What is hidden behind a name, whose value is a text or a collection."""
    words = [part.lower() for part in PARTS.findall(name[-LONGEST_NAME:])]
    if words[-2:] == ["key", "data"]:
        words.pop()
    while len(words) > 1 and words[-1] in _WHICH:
        words.pop()
    if not words:
        return NO
    if collection and words[-1] in (
        "auth",
        "tokens",
    ):  # who logs in and how; tokens of text, among which none looks random
        return STRONG if words[-1] == "auth" else WEAK
    if collection and words[-1] == "keys" and name.isupper() and _KEYS_OF.isdisjoint(words):
        return WEAK  # keys of a mapping, in a constant of a program
    joined = "".join(words[-2:])
    if joined in HEADERS or joined in ("connectionstring", "connstr", "databaseurl") or "webhook" in words:
        return STRONG
    level = _level_of(words[-1], words[:-1], name)
    if level is not None:
        return level
    return OPAQUE if words[-1] in _OPAQUE_WORDS or not _VENDORS.isdisjoint(words) else NO


def _level_of(last: str, before: list[str], name: str) -> int | None:
    """By a name's last word and those before it; None where that decides nothing."""
    nearest = before[-1] if before else ""
    one = last.removesuffix("s")
    if last in ("pass", "pw"):
        return WEAK if not before else NO if nearest in _PASSES else STRONG
    if last in _ABOUT:
        return NO
    if (
        last in _SECRET_WORDS
        or last.endswith(_SECRET_ENDS)
        or one.endswith(_SECRET_ENDS)
        or any(part in word for word in before for part in _INSIDE)
    ):
        return STRONG
    if last in ("key", "keys"):
        is_setting = bool(before) and name.isupper()
        return STRONG if is_setting or not _KEYS_OF.isdisjoint(before) else NO
    if last == "token" or (last == "tokens" and not _TOKENS_OF.isdisjoint(before)):
        return NO if nearest in _TOKENS_OF_TEXT else STRONG if before else WEAK
    return WEAK if last in ("auth", "pat") and before else None


# What is no secret, whatever its name: nothing, a switch, a type or a shape, a reference to somewhere else.
HARMLESS = re.compile(
    r"(?:none|null|nil|true|false|yes|no|on|off|unset|empty|str|int|bytes|bool|\*+|x{3,}|"
    r"\W+|[a-z_][\w.]*(?:[([{]+|\(\))|[a-z][\w.]{0,30}\[[^\]]*\]\S{0,60}|os\.(?:getenv|environ\.get)\([\"']\w+[\"']\)|"
    r"\$\w+|\$\{[^}]*\}|\$\([^)]*\)|<[\w -]*>|"
    r"\(?not shown\)?|set; its value is not shown)",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?%?(?:[kmgtp]?i?b|s|ms|us)?", re.IGNORECASE)
_OPAQUE_TEXT = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_+/=.~:|%-]{12,}")


# Where a collection or a call under a weak name holds a secret: a word that mixes letters and digits and is no type or number.
_ODD = re.compile(r"(?<![\w.-])(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[\w+/=-]{6,}(?![\w([./])")
_ORDINARY = re.compile(
    r"\w*_\d+|(?:b?float|u?int|complex)\d+\w*|0x[\da-f]+|\d+x\d[\dx]*|[\d.]+(?:e[-+]?\d+|[KMGT]i?B)", re.IGNORECASE
)
_COLLECTED = re.compile(r"[([{<]|[A-Za-z_][\w.]*\(|- |[\w\"']+:\s")
_PATH = re.compile(r"[/~.$\\]|[A-Za-z]:[\\/]")


def is_hidden(level: int, value: str) -> bool:
    """Whether a value is a secret, behind a name of this level."""
    value = value.strip()
    if not value or value.startswith(HIDDEN) or HARMLESS.fullmatch(value):
        return False
    if level == STRONG:
        return True
    if level == WEAK:
        return not _FIGURE.fullmatch(value) and (not _COLLECTED.match(value) or is_odd(value))
    return _OPAQUE_TEXT.fullmatch(value) is not None and not _FIGURE.fullmatch(value) and value.count("/") <= SLASHES


def is_odd(value: str) -> bool:
    """Whether a collection or a call holds a word that looks like a secret."""
    return any(not _ORDINARY.fullmatch(word) for word in _ODD.findall(value))


def is_folder(name: str, value: str) -> bool:
    """Whether this is a shell's folder, which has the name of a password in the strings by which databases are reached."""
    return name in _FOLDERS and _PATH.match(value) is not None
