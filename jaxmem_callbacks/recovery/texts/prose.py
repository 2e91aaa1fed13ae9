"""Whether a program met a failure at a place of a text, or the words there only speak about one.

A program prints its message behind a clock, a file, a name or a colon. Prose takes it into a sentence: documents, issues, logs
that give advice ("set ... to avoid ..."), and source code, which tracebacks quote. Only what stands near is looked at.
"""

from __future__ import annotations

import re

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
# The line of code that a traceback quotes stands under the line that names its place, further to the right.
_FRAME = re.compile(r"\A\s{0,200}File \"[^\"\n]{1,500}\", line \d{1,9}, in ")
_TABLE = re.compile(r"\A\s{0,20}\|[^\n|]{0,120}\Z")


def is_prose(text: str, start: int, end: int) -> bool:
    """Whether the words between two places are part of a sentence, of a list or of code, and no message of a program."""
    line = max(text.rfind("\n", max(0, start - _BEFORE), start) + 1, start - _BEFORE, 0)
    before, after = text[line:start], text[end : end + _AFTER]
    rest = after.partition("\n")[0]
    if _in_code_span(before, rest) or _CODE.match(before) or _is_quoted_by_a_frame(text, line):
        return True
    if _PASSED_OVER.search(before):
        return True
    if _TABLE.match(before) and "|" in rest:
        return True
    head = _HEAD.search(before)
    begins = start - len(head[0] if head else "")
    told = text[max(0, begins - _NEAR) : begins]
    quoting = before[: _opening(before, rest)]
    if _FOLLOWS.match(after) or _LEADS.search(told) or _LEADS.search(quoting) or _is_within(quoting):
        return True
    return bool(_BEGINS.match(text, begins)) and _is_within(told)


def _is_within(told: str) -> bool:
    """Whether what comes next stands in a sentence: behind a plain word, which is none that a program puts before an error."""
    return bool(_PLAIN_WORD.search(told)) and not _MET.search(told)


def _in_code_span(before: str, rest: str) -> bool:
    """Whether the words stand in Markdown's single backticks."""
    return before.replace("```", "").count("`") % 2 == 1 and "`" in rest


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
