"""Reads the project's Markdown pages the way GitHub does."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# What GitHub's style sheet does to a page that matters for its width
STYLE = """
body { margin: 0 auto; max-width: 980px; padding: 16px; box-sizing: border-box;
  font: 16px/1.5 sans-serif; overflow-wrap: break-word; color: #1f2328 }
pre { overflow: auto; padding: 16px; background: #f6f8fa; font: 13.6px/1.45 monospace }
:not(pre) > code { background: #eff1f3; padding: .2em .4em; font: 13.6px monospace;
  white-space: break-spaces }
table { display: block; width: max-content; max-width: 100%; overflow: auto;
  border-collapse: collapse }
th, td { border: 1px solid #d1d9e0; padding: 6px 13px }
img { max-width: 100% }
h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: .3em }
"""


def parser() -> MarkdownIt:
    """Markdown with GitHub's tables."""
    return MarkdownIt("commonmark", {"html": True}).enable("table")


def tokens(page: Path) -> Iterator[Token]:
    """All tokens of a page, those inside of lines, too."""
    for token in parser().parse(page.read_text()):
        yield token
        yield from token.children or ()


def fences(page: Path, *languages: str) -> list[str]:
    """Contents of the fenced blocks in these languages."""
    return [
        token.content
        for token in tokens(page)
        if token.type == "fence" and token.info in languages
    ]


def anchors(page: Path) -> list[str]:
    """What GitHub calls the headings of a page, in their order."""
    found: list[str] = []
    headings = [
        token for token in tokens(page) if token.type in ("heading_open", "inline")
    ]
    for opening, inline in zip(headings, headings[1:], strict=False):
        if opening.type != "heading_open":
            continue
        text = "".join(
            child.content
            for child in inline.children
            if child.type in ("text", "code_inline")
        )
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = 0
        while (f"{name}-{number}" if number else name) in found:
            number += 1
        found.append(f"{name}-{number}" if number else name)
    return found


def links(page: Path) -> list[str]:
    """Where the links and pictures of a page lead."""
    return [
        str(token.attrs[name])
        for token in tokens(page)
        for name in ("href", "src")
        if name in token.attrs
    ]


def commands(page: Path) -> list[list[str]]:
    """Command lines of the bash blocks, and those in the middle of a sentence."""
    blocks = "\n".join(fences(page, "bash")).replace("\\\n", " ").splitlines()
    started = re.compile(r"(bash|python|torchrun|horovodrun) \S+")
    inline = [
        token.content
        for token in tokens(page)
        if token.type == "code_inline" and started.match(token.content)
    ]
    found = (shlex.split(line, comments=True) for line in [*blocks, *inline])
    return [words for words in found if words]


def html(page: Path) -> str:
    """A page as GitHub shows it, near enough."""
    return (
        f"<!doctype html><meta charset=utf-8><base href='{page.parent.as_uri()}/'>"
        f"<style>{STYLE}</style><body>{parser().render(page.read_text())}</body>"
    )
