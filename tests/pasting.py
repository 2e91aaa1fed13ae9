"""The line that was printed, as it stands, for tests that paste it."""

from __future__ import annotations

import re
from typing import Any

from jaxmem_callbacks.records.advice import ADVICE

_LONGEST = 400
_AFTER = r"(?=[.;,:)]?(?:\s|$))"  # what may follow a line within a sentence


def pasted(key: str, printed: object) -> str:
    """The text of one row of the table of advice within what was printed, as it stands there; a failure where it is not there.

    Args:
        key: The row.
        printed: An exception, a warning, or text of the library's.
    """
    for line in str(printed).splitlines():
        if line.startswith("    ") and re.fullmatch(ADVICE[key].pattern, line.strip()):
            return line.strip()
    text = str(printed)
    found = re.search(ADVICE[key].pattern + _AFTER, text, re.DOTALL)
    assert found is not None, f"{ADVICE[key].text!r} was not printed:\n{printed}"
    if _is_closed(found.group()):
        return found.group()
    for end in range(found.end(), min(len(text), found.end() + _LONGEST) + 1):  # a bracket is open: it goes on
        part = text[found.start() : end]
        if _is_closed(part) and re.match(_AFTER, text[end:]) and re.fullmatch(ADVICE[key].pattern, part, re.DOTALL):
            return part
    return found.group()


def _is_closed(text: str) -> bool:
    return all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]", "{}"))


def run(line: str, **names: Any) -> dict[str, Any]:
    """Run pasted lines where these names are known; the names afterwards.

    Args:
        line: Code as printed.
        names: What the script has.
    """
    scope = dict(names)
    exec(line, scope)  # noqa: S102 - it is what a user does with it
    return scope


def value(line: str, **names: Any) -> Any:
    """What a pasted expression is worth where these names are known.

    Args:
        line: Code as printed.
        names: What the script has.
    """
    return run(f"_ = {line}", **names)["_"]
