"""A report's page as a browser would take it."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path


class Page(html.parser.HTMLParser):
    """A page's tags, attributes and texts, as a browser would take them, and the model that its script shows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.model = json.loads(next(text for text in self.texts if text.startswith('{"format"')))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data)

    @property
    def text(self) -> str:
        """Every text of the model."""
        return "\n".join(leaves(self.model))


def leaves(value):
    if isinstance(value, dict):
        value = [each for pair in value.items() for each in pair]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value] if isinstance(value, str) else []
