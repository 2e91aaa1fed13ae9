"""Names that mean a secret, and where their values stand in a text: behind the name, behind an option, below a table's header.

What follows a secret's name is one value, whatever its form: a quoted text, a collection, a call, a block of lines, the words
of an option. A collection that is not closed ends where its lines stop to belong together.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import cast

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
    r"\$\w+|\$\{[^}]*\}|\$?\{\{[\w. -]+\}\}|\$\([^)]*\)|<[\w -]*>|"
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


# --- A name, a mark and a value ---

NAME = re.compile(r"(?<!%[0-7])[A-Za-z][\w.$-]*")
_QUOTE = r"(?:\\{0,15}[\"'`]|&quot;|&#0?39;|&#x27;|%22)"
_NEXT_LINE = r"(?:\\\r?\n\s*)?"
_JOINT = re.compile(
    rf"(?P<close>{_QUOTE})?\]?(?:(?:\s*,)?\s*{_QUOTE}?(?:value|Value|VALUE){_QUOTE}?\s*[:=]\s*|"
    rf"\s*(?P<mark>=>|:=|\?=|::?=|={{1,3}}|->|:|,|>|\||%3[DdAa])\s*{_NEXT_LINE}|"
    rf"(?P<gap>[ \t]*\\\r?\n\s*|[ \t]+{_NEXT_LINE}|\s+(?=[\"'])))"
)
_OPEN = re.compile(rf"(?P<prefix>[bBrRuUfF]{{0,2}})(?P<quote>\"\"\"|'''|{_QUOTE})")
QUOTED = re.compile(r"[\"']([^\"']+)[\"']")
_SCHEME = r"(?:(?:Bearer|Basic|Token|Digest|Negotiate|Bot|ApiKey|AWS4-HMAC-SHA256)\s+)?"
_TO_SPACE = re.compile(rf"{_SCHEME}[^\s\"'`<|]+")
_TO_MARK = re.compile(rf"{_SCHEME}[^\s\"'`<|,;&)\]}}]+")
_TO_SEMICOLON = re.compile(r"[^;\n\"'`]+")
_TO_PERCENT = re.compile(r"(?:(?!%(?:0A|20|22|26|27|2C|3B|7D))[^\s\"'`&])+", re.IGNORECASE)
_TO_END = {quote: re.compile(rf"[^\n{quote}]+") for quote in ("", '"', "'", "`")}
_TRIPLE = 3
_CLOSERS = ",;)]}>."
_WORD = re.compile(r"[a-z]+[.,:;]?")
_BEGINS = re.compile(r"(?:^|[\n,;{(\[&?/|-])[ \t]*\Z")
_LINE_START = re.compile(r"(?:^|\n)[ \t]*(?:-[ \t]+)?(?:export[ \t]+)?[\"'`]?\Z")
# A file by its ending, and a place in it.
_PLACE = re.compile(
    r"\.(?:py|ipynb|ya?ml|json[lc]?|toml|ini|cfg|conf|env|txt|log|out|err|md|rst|[ct]sv|sh|cc?|cpp|h|cu|rs|go|[jt]s|html|xml|hlo):"
    r"\d{1,7}(?::\d{1,7})?(?![\w.])"
)
_MADE_OF = re.compile(r"(?:\A|\.)(?:[A-Z]\w*|login)\Z")  # a class or a login, whose arguments are the value
_NAMED = re.compile(
    rf"{_QUOTE}?[,;\s]\s*{_QUOTE}?(?:name|key){_QUOTE}?\s*[:=]\s*{_QUOTE}?(?P<name>{NAME.pattern})", re.IGNORECASE
)


def values(text: str) -> Iterator[tuple[int, int]]:
    """Where values of names that mean a secret stand."""
    done = 0
    for name in NAME.finditer(text):
        if name.start() >= done and (span := _value(text, name)) is not None:
            done = span[1]
            yield span


def _value(text: str, name: re.Match[str]) -> tuple[int, int] | None:
    bare = name[0].rstrip(".-")
    if bare.lower() == "value":
        return _value_before_its_name(text, name)
    if text.startswith("(", name.end()):
        return _arguments(text, name.end(), bare)
    level = max(level_of(bare), level_of(bare, collection=True))
    joint = _JOINT.match(text, name.end()) if level > NO else None
    if joint is None:
        return None
    level = level_of(bare, collection=_is_collection(text, joint))
    if level == NO or not _is_joined(text, name, joint, level):
        return None
    begin, end = _extent(text, name, joint, level)
    if end <= begin or not is_hidden(level, text[begin:end]) or is_folder(bare, text[begin:end]):
        return None
    if joint["gap"] is not None or joint["mark"] == ",":
        end = _last_word_end(text, bare, end) if text[max(name.start() - 1, 0)] == "-" else end
    return begin, end


def _value_before_its_name(text: str, value: re.Match[str]) -> tuple[int, int] | None:
    joint = _JOINT.match(text, value.end())
    if joint is None or joint["mark"] not in (":", "=", "=>"):
        return None
    opened = _OPEN.match(text, joint.end())
    word = None if opened else _TO_MARK.match(text, joint.end(), joint.end() + _SEEN)
    if opened:
        begin, end = opened.end(), _closing(text, opened)
    else:
        begin, end = joint.end(), joint.end() if word is None else word.end()
    named = _NAMED.match(text, end)
    return (begin, end) if named and is_hidden(level_of(named["name"]), text[begin:end]) else None


def _arguments(text: str, start: int, name: str) -> tuple[int, int] | None:
    """What ``SecretStr('x')``, ``BasicAuth('me', 'x')`` and ``login('x')`` are called with."""
    made_of = _MADE_OF.search(name)
    if not made_of or (made_of[0].lstrip(".") != "login" and (level_of(name) < WEAK or name == "Token")):
        return None
    if not _OPEN.search(text, start, start + _SEEN):
        return None
    end = _bracket_end(text, start, len(text)) - 1
    held = text[start + 1 : end]
    return (start + 1, end) if _OPEN.search(held) and is_hidden(STRONG, held) else None


def _is_collection(text: str, joint: re.Match[str]) -> bool:
    at = joint.end()
    return text[at : at + 1] in OPENERS or ("\n" in joint[0] and text.startswith("- ", at))


def _is_joined(text: str, name: re.Match[str], joint: re.Match[str], level: int) -> bool:
    """Whether what follows a name is its value."""
    start = joint.end()
    is_option = text[max(name.start() - 1, 0) : name.start()] == "-"
    if joint["gap"] is not None and not _may_follow_a_gap(text, name, start, is_option=is_option):
        return False
    if text.startswith(HIDDEN, start) or (joint["mark"] == ":" and _PLACE.match(text, name.end() - _suffix(name[0]))):
        return False
    if (
        level == WEAK
        and joint["mark"] in (":", "|")
        and not joint["close"]
        and not _is_collection(text, joint)
        and not _BEGINS.search(text[max(name.start() - 40, 0) : name.start()])
    ):
        return False  # "the next token: ", "the second pass: "
    return joint["mark"] != "," or bool(joint["close"] and _OPEN.match(text, start) and (is_option or level == STRONG))


def _suffix(name: str) -> int:
    return len(name) - max(name.rfind("."), 0)


def _may_follow_a_gap(text: str, name: re.Match[str], start: int, *, is_option: bool) -> bool:
    """Whether a name and a value stand next to each other: ``--token x``, and ``DB_PASS x1`` as tables have it."""
    if is_option:
        return text[start : start + 1] != "-"
    word = _TO_SPACE.match(text, start)
    return word is not None and name[0].isupper() and "_" in name[0] and not _WORD.fullmatch(word[0])


# --- How far a value reaches ---

OPENERS = ("(", "[", "{")
_BRACKETS = re.compile(rf"{_QUOTE}|[\[({{\])}}\n]")
_CALLED = re.compile(r"[\w.$]*(?=[\[({])")
_BRACED = re.compile(r"\{(?:[^{}\n\"']|\}\})*\}(?=[;\s\"'`]|\Z)")  # in the strings by which databases are reached
_ADJOINS = re.compile(r"[^\s\"'`<|,;&)\]}([{]*")
_BELONGS = re.compile(r"\s|[\])}]")
_BLOCK_HEAD = re.compile(r"[|>][+-]?\d?[ \t]*\n")
_INDENT = re.compile(r"(?P<indent>[ \t]*)(?P<item>(?:-[ \t]+)*)(?P<blank>\r?$)?", re.MULTILINE)
_MORE_WORDS = re.compile(rf"{_QUOTE}?\s*,\s*(?={_QUOTE}[^-])|{_QUOTE}?[ \t]+{_NEXT_LINE}(?=[^-\s|;&<>)\]}}])")
_BARE_WORD = re.compile(r"[^\s\"'`|;&<>]+")
_SEEN = 400  # characters at the beginning of what may be no secret, which decide how much is read


def _extent(text: str, name: re.Match[str], joint: re.Match[str], level: int) -> tuple[int, int]:
    """Where the value begins and ends that follows a name, whatever its form."""
    start = joint.end()
    block = _block_end(text, name, joint)
    if block is not None and (block[1] or not _OPEN.match(text, start)):
        return start, block[0]
    opened = _OPEN.match(text, start)
    if opened:
        return opened.end(), _closing(text, opened)
    head = text[max(name.start() - 40, 0) : name.start()]
    if level >= WEAK and (called := _CALLED.match(text, start)):
        braced = _BRACED.match(text, start) if joint["mark"] == "=" else None
        is_secret = level == STRONG or is_odd(text[start : start + _SEEN])
        limit = len(text) if is_secret else min(len(text), start + _SEEN)
        if head[-1:] in _TO_END and head[-1:] and not joint["close"]:  # an argument that is quoted ends with its quote
            quote = text.find(head[-1], start, limit)
            limit = limit if quote < 0 else quote
        end = braced.end() if braced else _bracket_end(text, called.end(), limit)
        while not braced and (at := _adjoining_end(text, end, limit)) > end:
            end = at
        return start, end
    return start, _plain_end(text, name, joint, level, head)


def _adjoining_end(text: str, start: int, limit: int) -> int:
    end = cast("re.Match[str]", _ADJOINS.match(text, start, limit)).end()
    return _bracket_end(text, end, limit) if text.startswith(OPENERS, end, limit) else end


def _closing(text: str, opened: re.Match[str], limit: int | None = None) -> int:
    """The end of a quoted value; where its quote was cut off, the end of the line."""
    quote, at = opened["quote"], opened.end()
    escapes = len(quote) - len(quote.lstrip("\\"))
    limit = len(text) if limit is None else limit
    line = text.find("\n", at, limit)
    last = limit if line < 0 or len(quote) == _TRIPLE else line
    while (found := text.find(quote, at, last)) >= 0:
        ahead = text[max(found - 20, 0) : found]
        before = len(ahead) - len(ahead.rstrip("\\"))
        if before == 0 or (escapes == 0 and before % 2 == 0):
            return found
        at = found + len(quote)
    return last


def _bracket_end(text: str, start: int, limit: int) -> int:
    """Behind the bracket that closes the one at `start`; where none does, the end of the last line that belongs to it."""
    depth, at = 0, start
    while (mark := _BRACKETS.search(text, at, limit)) is not None:
        at = mark.end()
        if mark[0] == "\n":
            before = text[max(mark.start() - 2, 0) : mark.start()].rstrip()
            if not before.endswith((",", *OPENERS)) and not _BELONGS.match(text, at):
                return mark.start()
        elif mark[0] in OPENERS:
            depth += 1
        elif mark[0] in ("]", ")", "}"):
            depth -= 1
            if depth == 0:
                return at
        elif opened := _OPEN.match(text, mark.start(), limit):
            end = _closing(text, opened, limit)
            at = min(end + len(opened["quote"]), limit) if text.startswith(opened["quote"], end) else end
    return limit


def _block_end(text: str, name: re.Match[str], joint: re.Match[str]) -> tuple[int, bool] | None:
    """The end of the lines that are indented under a name, or are items at its own indent, and whether they are several."""
    header = _BLOCK_HEAD.match(text, joint.end())
    if joint["mark"] != ":" or ("\n" not in joint[0] and header is None):
        return None
    line = text.rfind("\n", 0, name.start()) + 1
    own = cast("re.Match[str]", _INDENT.match(text, line)).end("item") - line
    at = text.find("\n", name.end()) + 1
    end, number = 0, 0
    while 0 < at < len(text):
        indent = cast("re.Match[str]", _INDENT.match(text, at))
        width = indent.end("indent") - at
        if indent["blank"] is None and width <= own and not (width == own and indent["item"]):
            break
        stop = text.find("\n", at)
        at = stop + 1
        if indent["blank"] is None:
            end, number = len(text) if stop < 0 else stop, number + 1
    return (end, number > 1 or header is not None) if number else None


def _plain_end(text: str, name: re.Match[str], joint: re.Match[str], level: int, head: str) -> int:
    start = joint.end()
    to_end = _TO_END.get(head[-1:], _TO_END[""])  # a line that is quoted ends with its quote
    words = "".join(part.lower() for part in PARTS.findall(name[0])[-2:])
    if words in HEADERS:
        pattern = to_end
    elif (joint["mark"] or "").startswith("%"):
        pattern = _TO_PERCENT
    elif head.rstrip(" ").endswith(";") or (
        joint["mark"] == "=" and ";" in text[start : start + 200] and level == STRONG
    ):
        pattern = _TO_SEMICOLON
    elif level == STRONG and joint["mark"] == ":" and _LINE_START.search(head):
        pattern = to_end
    else:
        pattern = _TO_SPACE if level == STRONG else _TO_MARK
    found = pattern.match(text, start)
    if found is None:
        return start
    end = found.end()
    while end > start and text[end - 1] in _CLOSERS and pattern is _TO_SPACE:
        end -= 1
    return end


def _last_word_end(text: str, name: str, end: int) -> int:
    """The end of the last word of an option that takes several, as ``--api-keys`` does."""
    if not name.endswith("s") or name.endswith("ss"):
        return end
    while (more := _MORE_WORDS.match(text, end)) is not None:
        opened = _OPEN.match(text, more.end())
        word = None if opened else _BARE_WORD.match(text, more.end())
        if opened is None and word is None:
            return end
        end = _closing(text, opened) if opened else cast("re.Match[str]", word).end()
    return end


# --- Commands and tables ---

# Commands, the options that a password follows as the next word, and those that it follows in the same word.
_COMMANDS: dict[str, tuple[str, str]] = {
    command: (following, joined)
    for commands, following, joined in (
        ("sshpass rdesktop", "-p", "-p"),
        ("mysql mysqldump mysqladmin mysqlimport mysqlsh mysqlcheck mariadb mariadb-dump mariadb-admin", "", "-p"),
        ("7z 7za 7zr 7zz rar unrar", "", "-p"),
        ("login mongo mongosh mongodump mongorestore mongoexport mongoimport cqlsh rabbitmqadmin beeline", "-p", ""),
        ("zip unzip zipcloak sqlcmd bcp isql osql tsql ipmitool", "-P", "-P"),
        ("redis-cli valkey-cli keydb-cli", "-a", ""),
        ("ldapsearch ldapadd ldapmodify ldapdelete ldapmodrdn ldappasswd ldapwhoami ldapcompare ldapexop", "-w", "-w"),
        ("plink pscp psftp putty", "-pw", ""),
        ("snmpget snmpwalk snmpset snmpbulkwalk", "-A -X", ""),
        ("openssl", "-k -K", ""),
        ("htpasswd", "", ""),
    )
    for command in commands.split()
}
_COMMAND = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, _COMMANDS))})(?![\w.-])")
_SHELL_QUOTE = re.compile(r"\\{0,15}[\"']|")
_SHELL_WORD = re.compile(
    r"(?P<quote>\\{0,15}[\"'])(?P<quoted>(?:(?!(?P=quote))[^\n])*)(?P=quote)|(?!\[\\*[\"'])[^\s\"',\]][^\s\"']*"
)
_PIPES = ("|", ";", "&", "||", "&&")


def after_commands(text: str) -> Iterator[tuple[int, int]]:
    """Where a command that is known to take a password by a short option has it."""
    done = 0
    for command in _COMMAND.finditer(text):
        if command.start() < done:
            continue
        done = (text.find("\n", command.end()) + 1 or len(text) + 1) - 1
        while text.endswith("\\", 0, done) and done < len(text):  # the command goes on
            done = (text.find("\n", done + 1) + 1 or len(text) + 1) - 1
        first = cast("re.Match[str]", _SHELL_QUOTE.match(text, command.end())).end()
        words = list(_SHELL_WORD.finditer(text, first, done))
        for number, offset in passwords_among([command[0], *(word["quoted"] or word[0] for word in words)]):
            word = words[number - 1]
            group = "quoted" if word["quoted"] else 0
            yield word.start(group) + offset, word.end(group)


def passwords_among(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Which words of commands are passwords, and where in them they begin."""
    following: frozenset[str] = frozenset()
    joined: tuple[str, ...] = ()
    for number, word in enumerate(words):
        command = word.rsplit("/", 1)[-1].removesuffix(".exe")
        if command in _COMMANDS:
            following, joined = (frozenset(_COMMANDS[command][0].split()), tuple(_COMMANDS[command][1].split()))
            if command == "htpasswd":
                yield from _third_word(words, number)
        elif word in _PIPES:
            following, joined = frozenset(), ()
        elif number and words[number - 1] in following and not word.startswith(("-", HIDDEN)):
            yield number, 0
        elif word not in following and word.startswith(joined) and joined:
            offset = len(joined[0])
            if len(word) > offset and not word.startswith(("-", HIDDEN), offset):
                yield number, offset


def _third_word(words: Sequence[str], number: int) -> Iterator[tuple[int, int]]:
    """The password of ``htpasswd -b file name password``, in which ``-n`` stands for the file."""
    options = "".join(word for word in words[number + 1 : number + 6] if word.startswith("-"))
    before = 2 - ("n" in options) + ("C" in options) + ("r" in options)
    bare = [at for at in range(number + 1, min(len(words), number + 10)) if not words[at].startswith("-")]
    if "b" in options and len(bare) > before and words[bare[before]] != HIDDEN:
        yield bare[before], 0


_CELL_NAME = r"[\"']?[A-Za-z][\w-]*[\"']?"
_HEADER = re.compile(rf"^[ \t|]*{_CELL_NAME}(?:[ \t]*(?P<mark>[,;|\t])[ \t]*{_CELL_NAME})+[ \t|]*\r?\n", re.MULTILINE)


def columns(text: str) -> Iterator[tuple[int, int]]:
    """Where cells stand below the name of a secret, in a table with a header."""
    done = 0
    for header in _HEADER.finditer(text):
        if header.start() < done:
            continue
        mark = header["mark"]
        names = [text[slice(*cell)] for cell in _cells(text, header.start(), header.end(), mark)]
        levels = {number: level for number, name in enumerate(names) if (level := level_of(name.strip("\"'"))) > NO}
        at = header.end() if levels else len(text)
        while at < len(text):
            done = text.find("\n", at) + 1 or len(text)
            cells = _cells(text, at, done, mark)
            at = done
            if len(cells) != len(names):
                break
            for number, level in levels.items():
                if is_hidden(level, text[slice(*cells[number])]):
                    yield cells[number]


def _cells(text: str, start: int, end: int, mark: str) -> list[tuple[int, int]]:
    row = re.compile(
        rf"[ \t]*(?P<cell>\"(?:[^\"\n]|\"\")*\"|[^{re.escape(mark)}\n]*?)[ \t\r]*(?:{re.escape(mark)}|\n|$)"
    )
    cells: list[tuple[int, int]] = []
    end -= text.endswith("\n", 0, end)
    while start < end and (cell := row.match(text, start, end)):
        cells.append(cell.span("cell"))
        start = cell.end()
    return cells
