"""Any text enters, text that an HTML page shows as it is leaves: nothing in it is markup, a secret or invisible."""

from __future__ import annotations

import html

from jaxmem_callbacks.records.terminal import shown


def escape(text: str) -> str:
    r"""The text for an element or an attribute in double quotes; a character that shows nothing is written ``\u202e``."""
    return html.escape(shown(text))
