"""Where a text states that memory ran out, and where it only speaks of it."""

from __future__ import annotations

import bisect
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxmem_callbacks.records.oom import OomFacts
from jaxmem_callbacks.recovery.texts import gpu, host, tpu
from jaxmem_callbacks.recovery.texts.rule import Rule, size_of

_BEFORE, _AFTER, _NEAR = 400, 600, 160

# What belongs to the message itself and stands before the words that a rule knows.
_HEAD = re.compile(
    r"(?:(?:[\w.]{1,80}(?:Error|Exception)|[A-Z]{2,20}(?:_[A-Z]{2,20})?|[Rr]esource exhausted|error):\s+){0,4}\Z"
)
# A message that begins like one, with a capital letter or a name of code, yet behind a plain word: a sentence has taken it in.
_BEGINS = re.compile(r"[A-Z]|std::|(?:cuda|hip)Error|\w{1,80}\.\w")
_PLAIN_WORD = re.compile(
    r"(?:\A|[\s(\"'`])(?:(?:of|in|with|against|for|to|from|into|on|by|about|as|like|than|when|whenever|if|whether|and|or|but|that"
    r"|which|what|is|are|was|were|be|the|an?|this|these|such|fewer|more|no|not|never|usually|often|fix|see|get|called|named"
    r"|[a-z]{2,20}(?:[^su]s|ing)),?[ \t]+[\"'`\u201c\u2018(]{0,2}|[a-z]{2,20},?[ \t]+\()\Z"
)
# Words that a program puts before an error that it met.
_MET = re.compile(
    r"\b(?:because|failed|failure|errors?|exception|raised|threw|thrown|got|hit|status|entry|returned|received|encountered|caught|code"
    r"|reason|cause|message|killed|after|due\s+to|instance\s+of"
    r"|(?:failed|failing|died|crashed|exited|exiting|ended|aborted|terminated|stopped|returned)\s+with(?:\s+(?:an?|the|status))?)"
    r",?[ \t]+[\"'`\u201c\u2018(]{0,2}\Z"
)
_WORDS = r"(?:\s+(?:an?|the|this|such|errors?|messages?|failures?|like|as|with|by|of|for|from|out\s+of\s+memory)){0,5}"
_LEADS = re.compile(
    r"(?:"
    # What may come, or is to be avoided.
    r"\b(?:[Ii]f|[Ww]hen(?:ever)?|[Ss]hould|[Ii]n\s+case|[Uu]nless)\s+(?:you|one|users?|it|we|they|jax|xla)\s+(?:ever\s+)?"
    r"(?:sees?|gets?|hits?|meets?|have|has|encounters?|runs?\s+into|fails?|dies|ends?|stops?)"
    r"|\b[Ii]n\s+(?:the\s+)?(?:case|event)\s+of"
    r"|\b(?:[Aa]void|[Pp]revent)(?:s|ed|ing)?"
    r"|\b(?:[Ii]f|[Ww]hen|[Ww]hether)\s+(?:the|an?|your|one|any)(?:\s+(?:worker|main|child|parent|training))?"
    r"|\b(?:may|might|could|can|would|will|to)\s+(?:still\s+|also\s+|then\s+)?(?:fail|cause|raise|throw|give|get|hit|see|meet"
    r"|lead\s+to|end\s+in|result\s+in|run\s+into|trigger|produce)"
    # What never came, and what is named.
    r"|\b(?:[Nn]ever|no\s+longer|not)\s+(?:saw|sees?|seen|met|meets?|got|gets?|hit|fail(?:s|ed)?|raises?|raised|ends?)"
    r"|\b(?:such\s+as|(?:errors?|messages?|failures?|lines?|words|texts?)\s+like|e\.g\.)"
    rf"|\b[Ww]hat\s+(?:does|is|are)){_WORDS}\s+[\"'`\u201c\u2018(]{{0,3}}\Z"
    r"|\b(?:[Tt]he|[Aa]n?|[Tt]hese|[Tt]hose)\s+(?:words?|messages?|errors?|lines?|texts?|wordings?)\s+[\"'`\u201c\u2018]\Z"
    r"|\bmay\s+fail\s+with\s[^\n.;:]{0,60}:\s\Z"
    r"|\b(?:[Pp]reviously|[Ff]ormerly|[Ss]olved|[Ff]ixed|[Rr]esolved):?\s\Z"
    r"|\b[Nn]o\s\Z|\*\*\Z"
)
# libtpu's lines on what it goes on after.
_PASSED_OVER = re.compile(
    r"\b(?:[Ss]uppressing\s[^\n:]{1,60}\sdue\s+to\s+\w{1,60}:|defragment\s+and\s+retry\s+after\s+seeing\s+error:)"
)
# How a sentence, a table of names or an enumeration goes on behind the words.
_FOLLOWS = re.compile(
    r"[\"'`\u201d\u2019)]{0,3},?\s+(?:is|are|will\s+be|can\s+be|was|were|gets?)\s+"
    r"(?:raised|returned|reported|thrown|printed|handled|recovered|caught|what|expected|meant|an?\s|the\s|not\s|no\s)"
    r"|[\"'`\u201d\u2019)]{1,3},?\s+(?:means?|says?|say|comes?|indicates?|shows?|appears?|errors?\b|messages?\b|failures?\b|when(?:ever)?\s"
    r"|if\s|then\b|mean\b|by\s|in\s+(?:str|repr|text|message|output|the\s+log|your)\b|not\s+in\s)"
    r"|\s*=\s*\d|[\"'],\s*(?:\n|\Z)"
)
# A line of source code: what introduces a statement, or a remark at its end.
_CODE = re.compile(
    r"\A\s{0,200}>?\s{0,80}(?:(?:if|elif|while|assert|except|return|raise|def|import)\b[^\n]{0,200}[(\"'=:]"
    r"|with\s+[\w.]{1,80}\(|case\s+[\"']"
    r"|[\w.\[\]]{1,80}\s=\s(?:re\.compile\(|[(\[{]?[rfb]{0,2}[\"'])"
    r"|[^\n]{0,200}\b(?:match|pattern|regex)=[rfb]{0,2}[\"']"
    r"|#:|//|enum\s)"
    r"|\A[^\n#]{0,300}[\w)\]}:,\"']\s{2,4}#\s|\A[ \t]{1,80}#\s"
)
# A command that searches for the words or prints them, in a script or as a shell echoes it.
_COMMAND = re.compile(
    r"(?:\A\s{0,40}|[|;&(`!+$#%>][ \t]{0,4}|\b(?:if|while|until|then|do)\s)(?:sudo\s|command\s|exec\s)?"
    r"(?:[ezp]{0,2}grep|rg|ag|ack|sed|[gm]?awk|perl|echo|printf|jq|findstr|Select-String|git\s(?:log|grep|commit))\s[^\n]{0,300}[\"'/]"
)
# What looks for the words: a variable for them with its value or values, a call, a comparison, a verb.
_SOUGHT = re.compile(
    r"(?:(?i:\b\w{0,40}(?:retr[iy]|pattern|match|ignore|regex|expect|known|alert|filter|trigger|needle|contain|signature|allow|deny"
    r"|expr|substr|marker)\w{0,20})[\"']?(?:\s?=\s?[\"'/]?|\s?[:=]\s?(?:[\[({][^\n]{0,200})?[rfb]{0,2}[\"'/])"
    r"|(?:\.(?:includes|[Cc]ontains|find|search|match|fullmatch|compile|[Ss]tarts[Ww]ith|[Ee]nds[Ww]ith|split|count|index|replace|sub"
    r"|test)|\b(?:assert\w{1,30}|print(?:ln|f)?|strstr))\([^\n]{0,200}[\"'/]"
    r"|(?:[=!]=|=~|\|[=~]|!~)\s{0,4}[*(]{0,2}[\"'/]"
    r"|\b(?:contains|matches|like|LIKE|(?:search|look|watch|wait|scan|check|grep)\w{0,5}\s(?:\w{1,20}\s){0,3}for)\s[\"'/*%]{1,3})\Z"
)
# Titles: of an issue, of a commit, of a part of a document, of a page; and what is to be done about the words.
_TITLE = re.compile(
    r"(?:\b(?:[Ii]ssue|PR|[Bb]ug|[Tt]icket|[Pp]ull [Rr]equest)\s#?\d{1,7}[:)]?\s{1,3}|\A\s{0,8}\[?#\d{1,7}\]?:?\s{1,3}"
    r"|\[(?i:bug|question|issue|feature)\]:?\s{1,3}"
    r"|\A\s{0,8}(?:[-*]\s|[0-9a-f]{7,40}\s)?(?:(?:fix|docs?|feat|chore|perf|refactor)(?:\([^()\n]{1,40}\))?!?:\s)?"
    r"(?:(?:[Ff]ix(?:e[sd])?|[Hh]andle[sd]?|[Cc]atch|[Rr]etry\son|[Ww]ork\saround|[Dd]ocument|[Ee]xplain|[Mm]itigate|[Rr]esolve[sd]?"
    r"|[Cc]lose[sd]?|[Ii]gnore|[Dd]etect|[Rr]ecover\sfrom|[Tt]reat|[Rr]eproduce|[Dd]ebug|[Dd]iagnose)\s(?:\w{1,20}\s){0,5}"
    r"|(?<=:\s)))\Z"
)
_TO_DO = re.compile(r"\b(?:TODO|FIXME|XXX)(?:\([^()\n]{1,40}\))?:")
_PAGE_OR_LINK = re.compile(r"[^\n]{0,200}(?:\s·\s[\w.-]{1,40}/[\w.-]{1,80}|\]\(https?:)")
_HEADING = re.compile(r"\A\s{0,3}#{2,6}\s{1,3}")
_PARAGRAPH = re.compile(r"[ \t\r]{0,8}\n\s{0,8}[A-Za-z]")
_ITEM = re.compile(r"\A\s{0,40}-\s{1,3}[\"']\Z")
_TAG = re.compile(r"<(code|tt|kbd|samp|em|i|b|strong|q|li|td|h[1-6]|title)\b[^<>\n]{0,80}>\s{0,4}\Z")
_TICKS = re.compile(r"`{1,40}")
# Quotes that no program writes; where a word stands at one, a sentence goes on.
_FOREIGN = (("„", "“”"), ("«", "»"), ("»", "«"), ("「", "」"), ("『", "』"), ("《", "》"))
# The line of code that a traceback quotes stands under the line that names its place, further to the right.
_FRAME = re.compile(r"\A\s{0,200}File \"[^\"\n]{1,500}\", line \d{1,9}, in ")
_TABLE = re.compile(r"\A\s{0,20}\|[^\n|]{0,120}\Z")


def is_prose(text: str, start: int, end: int) -> bool:
    """Whether the words between two places are part of a sentence, of a list or of code, and no message of a program."""
    line = max(text.rfind("\n", max(0, start - _BEFORE), start) + 1, start - _BEFORE, 0)
    before, after = text[line:start], text[end : end + _AFTER]
    rest = after.partition("\n")[0]
    head = _HEAD.search(before)
    begins = start - len(head[0] if head else "")
    lead, near = text[line:begins], text[max(0, begins - _NEAR) : begins]
    if _in_code_span(before, rest) or _CODE.match(before) or _is_quoted_by_a_frame(text, line):
        return True
    if _COMMAND.search(lead) or _SOUGHT.search(lead) or _TITLE.search(lead) or _TO_DO.search(before):
        return True
    if _is_part_of_a_document(lead, after) or _is_quoted_abroad(lead, rest):
        return True
    if _PASSED_OVER.search(before) or (_TABLE.match(before) and "|" in rest):
        return True
    quoting = before[: _opening(before, rest)]
    if _FOLLOWS.match(after) or _LEADS.search(near) or _LEADS.search(quoting) or _is_within(quoting):
        return True
    return bool(_BEGINS.match(text, begins)) and _is_within(near)


def _is_within(near: str) -> bool:
    """Whether what comes next stands in a sentence: behind a plain word, which is none that a program puts before an error."""
    return bool(_PLAIN_WORD.search(near)) and not _MET.search(near)


def _in_code_span(before: str, rest: str) -> bool:
    """Whether the words stand in backticks within a line: one each, as in Markdown, or two."""
    opened = ""
    for ticks in _TICKS.findall(before):
        if len(ticks) < len("```"):
            opened = "" if ticks == opened else opened or ticks
    return bool(opened) and opened in rest


def _is_part_of_a_document(lead: str, after: str) -> bool:
    """Whether the words are a heading, an item of a list of texts, a link or part of marked-up text."""
    rest, _, below = after.partition("\n")
    tag = _TAG.search(lead)
    if tag is not None and f"</{tag[1]}" in rest and "<pre" not in lead:
        return True
    if _HEADING.match(lead) and _PARAGRAPH.match(below):
        return True
    return bool(_PAGE_OR_LINK.match(rest)) or bool(_ITEM.match(lead) and rest.rstrip().endswith(('"', "'")))


def _is_quoted_abroad(before: str, rest: str) -> bool:
    """Whether the words stand in quotes of another language, in a sentence that goes on before or behind them."""
    if before.isascii():
        return False
    for opens, closes in _FOREIGN:
        at = before.rfind(opens)
        end = next((place for place, sign in enumerate(rest) if sign in closes), None)
        if at >= 0 and end is not None and not any(sign in before[at + 1 :] for sign in closes):
            return rest[end + 1 :].lstrip()[:1].isalpha() or before[:at].rstrip()[-1:].isalpha()
    return False


def _opening(before: str, rest: str) -> int:
    """Behind the mark that begins the quotation in which the words stand, or 0 where they stand in none."""
    for opens, closes in (('"', '"'), ("“", "”")):
        count = before.count(opens)
        if closes in rest and (count % 2 if opens == closes else count > before.count(closes)):
            return before.rindex(opens) + 1
    return 0


def _is_quoted_by_a_frame(text: str, line: int) -> bool:
    above = text.rfind("\n", max(0, line - 1 - _BEFORE), max(0, line - 1)) + 1
    frame = text[above : max(0, line - 1)]
    return bool(_FRAME.match(frame)) and _margin(text[line : line + 200]) > _margin(frame)


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


RULES: tuple[Rule, ...] = (
    *gpu.STATUSES,
    *tpu.COMPILE,
    *tpu.RUN,
    *host.CPU,
    *host.HOST,
    *gpu.LINES,
    *gpu.FALLBACKS,
    *host.FALLBACKS,
)

# Every wording holds one of these, at most BEFORE characters after its beginning (a test tries each rule). Each begins with
# letters in one case, which Python searches for a hundred times faster than for one pattern of all of them.
_ANNOUNCING = tuple(
    re.compile(words)
    for words in (
        r"ut\s+of\s+(?:host\s+|device\s+)?memory",
        r"an\s+out\s+of\s+[mSVT]",
        r"OUT_OF_(?:(?:DEVICE_|HOST_)?MEMORY|RESOURCES|ME\+)",
        r"INSUFFICIENT_RESOURCES",
        r"llocation\s+still\s+failed",
        r"low\s+on\s+resource:",
        r"ut\s+Of\s+Memory",
        r"OutOfMemory",
        r"OOM\b",
        r"Oom\b",
        r"oom[-_](?:kill|reap)",
        r"iled\s+to\s+alloc",
        r"nable\s+to\s+alloc",
        r"ould\s+not\s+alloc",
        r"iled\s+to\s+(?:CUDA\s|malloc)",
        r"rrno\s+12\]",
        r"annot\s+allocate\s+memory",
        r"ou\s+tried\s+to\s+allocate",
        r"illed\s+process\s",
        r"ue\s+to\s+memory\s",
        r"error:\s+out\s+of\s",
        r"xceeded\s+\w{3,5}\s+capacity",
        r"OOMKilled",
        r"ALLOC(?:ATION)?_FAILED",
        r"AllocFailed",
        r"memory_error\b",
        r"alloc\s+of\s+size",
        r"emory\s+allocation\s+of",
        r"large\s+alloc\s",
        r"TERM_[MS]",
        r"xceed(?:s|ed)\s+job\s",
        r"limit\s+exceeded:",
        r"eyond\s+physical",
        r"exceeding\s+(?:physical\s+)?memory\s",
        r"container\s+oom\s",
        r"allocation\s+failed",
        r"Attempting\s+to\s+(?:alloc|reserve)",
        r"would\s+exceed",
        r"xceed(?:s|ed|ing)\s+(?:the\s+)?(?:avail|memory|limit|legit|total|scoped|(?:step|job)\s+mem)",
        r"PA\s+budget",
        r"sed\s+\d[\d.,]{0,20}\s{0,40}\w{0,5}\s+of\b",
        r"sing\s+\d[\d.,]{0,20}\s{0,40}\w{0,5}\s+of\b",
        r"bad_alloc",
        r"MemoryError",
        r"MemoryAllocation",
        r"rror\s+loading\s+program",
        r"rror\s+allocating",
        r"Scoped\s+allocation",
        r"instantiate\s+command",
        r"running\s+low\s+on\s+memory",
        r"unlikely\s+to\s+have\s+enough\s",
        r"Not\s+enough\s+memory\s+to\s",
        r"does\s+not\s+fit\s",
        r"igh-Smem\s",
        r"exceeds\s+[VSC]MEM\s",
        r"alternate\s+memory,\s",
        r"AllocationFailure\b",
    )
)
BEFORE, AFTER = 700, 3400
"""How far around an announcing word rules look: the longest instruction that libtpu prints between two of its sentences."""
_SENTENCE = 260
_WINDOW = 64_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One place of a text that states that memory ran out.

    Attributes:
        rule: Whose wording it is.
        start: Where it begins in the text.
        end: Where it ends.
        facts: What it states.
    """

    rule: Rule
    start: int
    end: int
    facts: OomFacts

    @property
    def rank(self) -> int:
        """How surely a program failed by these words, and how much they state; 0 is a status with its own wording."""
        return 2 * _STRENGTHS.index(self.rule.strength) + self.rule.vague


_STRENGTHS = ("status", "log", "hint")


@dataclass(kw_only=True, slots=True)
class Budget:
    """How much of announced text is still read; what is beyond repeats it, or is made to cost time.

    Attributes:
        left: Characters.
    """

    left: int = 16 * 2**20


def statements(text: str, start: int = 0, end: int | None = None, *, budget: Budget | None = None) -> list[Statement]:
    """The statements of a text, in its order; of several about the same words, the first rule's.

    Args:
        text: All that is known.
        start: Statements begin here or later.
        end: And before here; None for the text's end.
        budget: What is still read, of several calls together; None for one that is this call's own.
    """
    budget = budget or Budget()
    taken = _Taken()
    for low, high in _windows(text, start, len(text) if end is None else end):
        if budget.left <= 0:
            break
        budget.left -= high - low
        reach = text[low : high + AFTER]
        for rule in RULES:
            if rule.needles and not any(word in reach for word in rule.needles):
                continue
            for match in rule.pattern.finditer(text, low, min(high + AFTER, len(text))):
                if match.start() >= high:
                    break
                if not _fits(rule, match):
                    taken.add(_statement(rule, match))
    return [item for item in taken.items if item.rule.name != _SURVIVED.name]


def _windows(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where statements may begin: bounded parts of a text that follow each other and never overlap."""
    low = high = start
    found = (words.finditer(text, start, min(end + BEFORE, len(text))) for words in _ANNOUNCING)
    for word in heapq.merge(*found, key=lambda match: match.start()):
        first, last = max(start, word.start() - BEFORE), min(word.end(), end)
        if first > high or high - low > _WINDOW:
            if high > low:
                yield low, high
            low = max(first, high)
        high = max(high, last)
    if high > low:
        yield low, high


class _Taken:
    """Statements that do not overlap, in the text's order. Of two about the same words, the one that came first stays."""

    def __init__(self) -> None:
        self.items: list[Statement] = []

    def add(self, item: Statement) -> None:
        """Keep a statement, unless another has its words."""
        place = bisect.bisect(self.items, item.start, key=lambda other: other.start)
        before = place > 0 and self.items[place - 1].end > item.start
        after = place < len(self.items) and self.items[place].start < item.end
        if not before and not after:
            self.items.insert(place, item)


_SURVIVED = Rule(name="goes on", pattern=re.compile(r"(?!)"))
"""Stands for words that a program goes on after or that prose names, so that no vaguer rule takes them for a failure."""


def _statement(rule: Rule, match: re.Match[str]) -> Statement:
    follows = match.end()
    survived = rule.unless is not None and rule.unless.match(match.string, follows, follows + _SENTENCE)
    survived = survived or is_prose(match.string, match.start(), follows)
    return Statement(
        rule=_SURVIVED if survived else rule,
        start=match.start(),
        end=follows,
        facts=OomFacts() if survived else _facts(rule, match),
    )


def _fits(rule: Rule, match: re.Match[str]) -> bool:
    """Whether the stated use stays below the stated limit."""
    if not rule.over:
        return False
    used, limit = size_of(match["used"]), size_of(match["limit"])
    return used is None or limit is None or used < limit


def _facts(rule: Rule, match: re.Match[str]) -> OomFacts:
    """What a match states. The exact count, where one is printed beside a rounded size, is the size."""
    groups = {name: value for name, value in match.groupdict().items() if value}
    sizes = {
        name.removesuffix("_exact"): size_of(value) for name, value in sorted(groups.items()) if name not in _NAMES
    }
    requested, used, limit = (sizes.get(name) for name in ("requested", "used", "limit"))
    return OomFacts(
        phase=rule.phase,
        platform=rule.platform,
        requested_bytes=requested,
        free_bytes=sizes.get("free"),
        largest_free_bytes=sizes.get("largest"),
        limit_bytes=limit,
        used_bytes=used,
        driver_refused=rule.driver or None,
        allocator=groups.get("allocator"),
        program=groups.get("program"),
    )


_NAMES = {"allocator", "program"}
