"""Any text enters, text that an HTML page shows as it is leaves: nothing in it is markup, and nothing in it is invisible."""

from __future__ import annotations

import html

# Characters that show nothing: controls, and those by which a name in a log could turn around the words behind it.
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = (*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0))
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in (*_CONTROLS, *_DIRECTIONS)}  # noqa: PLR2004


def escape(text: str) -> str:
    r"""The text for an element or an attribute in double quotes; a character that shows nothing is written ``\u202e``."""
    return html.escape(text.translate(_SHOWN))
