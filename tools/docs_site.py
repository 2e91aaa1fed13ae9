"""Hooks of the documentation site: links that leave docs/ stay links, and `::: jm.NAME` is a public name's docstring.

    mkdocs build --strict          # as `make docs` does

A page in docs/ may link to files beside docs/, such as `../results/x.json`, which is right in the repository. Each such file
becomes a page of the site, or a file beside its pages. No link leads to a server of the project, so the site is whole wherever
it is put. A link whose words are a page's file name gets the page's title from the navigation.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jaxmem_callbacks  # noqa: E402 - the checkout is put on the path first

LINK = re.compile(r"(\]\()([^)#\s]+)")
FILE_NAME = re.compile(r"\[([\w./]+\.md)\]\(([^)#\s]+\.md)(#[\w-]+)?\)")
DOCUMENT = re.compile(r"\bdocs/([\w/]+\.md)")
NAME = re.compile(r"^::: jm\.(\w+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "examples/README.md")  # which the navigation names


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside of docs/, and what those link to in turn."""
    waiting = list(ALWAYS)
    for file in files.documentation_pages():
        waiting += _outside(file.content_string, f"docs/{file.src_uri}")
    seen = set[str]()
    while waiting:
        origin = waiting.pop()
        if origin in seen:
            continue
        seen.add(origin)
        path = ROOT / origin
        if path.suffix == ".md":
            text = path.read_text("utf-8")
            waiting += _outside(text, origin)
        elif path.suffix in LANGUAGES:
            text = f"# {path.name}\n\n```{LANGUAGES[path.suffix]}\n{path.read_text('utf-8')}```\n"
        else:
            files.append(File.generated(config, _uri(origin), abs_src_path=str(path)))
            continue
        files.append(File.generated(config, _uri(origin), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and the files beside it; put full names behind `:::`."""
    del files
    here = page.file.src_uri
    origin, titles = _origin(here), dict(_titles(config["nav"]))

    def to_site(link: re.Match[str]) -> str:
        target = _target(link[2], origin)
        if target is None:
            return link[0]
        return link[1] + posixpath.relpath(_uri(target), posixpath.dirname(here) or ".")

    def titled(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link[2]))
        return f"[{titles.get(target, link[1])}]({link[2]}{link[3] or ''})"

    return NAME.sub(_docstring, FILE_NAME.sub(titled, LINK.sub(to_site, markdown)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the pages that docstrings name, as in `docs/events.md`."""
    del files
    titles = dict(_titles(config["nav"]))

    def linked(named: re.Match[str]) -> str:
        title = titles.get(named[1])
        address = posixpath.relpath(named[1], posixpath.dirname(page.file.src_uri) or ".").removesuffix(".md")
        return f'<a href="{address}.html">{title}</a>' if title else named[0]

    return DOCUMENT.sub(linked, html) if page.file.src_uri == "api.md" else html


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """Each page of the navigation with its title there."""
    for entry in nav:
        for title, below in entry.items():
            if isinstance(below, str):
                yield below, title
            else:
                yield from _titles(below)


def _docstring(name: re.Match[str]) -> str:
    """The directive of mkdocstrings for a public name."""
    module, attribute = jaxmem_callbacks._EXPORTS[name[1]]  # noqa: SLF001 - the one table of public names
    full = ".".join(("jaxmem_callbacks", module, *([attribute] if attribute else [])))
    members = "" if attribute else f"\n      members: {list(__import__(full, fromlist=['x']).__all__)}"
    return f"::: {full}\n    options:\n      heading: jm.{name[1]}\n      toc_label: {name[1]}{members}"


def _outside(text: str, origin: str) -> list[str]:
    """Files beside docs/ that a text links to."""
    targets = (_target(link, origin) for _, link in LINK.findall(text))
    return [target for target in targets if target is not None and not target.startswith("docs/")]


def _target(link: str, origin: str) -> str | None:
    """The file of the repository behind a link, from its root; None for what is no such file."""
    if re.match(r"[a-z]+:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def _uri(origin: str) -> str:
    """Where a file of the repository is on the site."""
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    page = Path(origin)
    if page.name == "README.md":  # which the site would take for the index of its folder
        return f"repository/{page.parent.as_posix()}.md"
    return f"repository/{origin}.md" if page.suffix in LANGUAGES else f"repository/{origin}"


def _origin(uri: str) -> str:
    """The file of the repository behind a page of the site."""
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    origin = uri.removeprefix("repository/")
    for name in (origin, origin.removesuffix(".md"), f"{origin.removesuffix('.md')}/README.md"):
        if (ROOT / name).is_file():
            return name
    return origin
