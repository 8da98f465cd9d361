"""The pages of the documentation, with their fenced blocks and the commands in them."""

import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "examples" / "generic-devices"
PAGES = (*sorted(DOCS.glob("*.md")), EXAMPLE / "README.md", ROOT / "deploy" / "README.md", ROOT / "README.md")


class Block(msgspec.Struct, frozen=True):
    """One fenced block: its language, the rest of its info string, its text and its first line number."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path, language: str) -> list[Block]:
    found = re.finditer(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    every = [Block(m[1], m[2], m[3], m.string.count("\n", 0, m.start()) + 2) for m in found]
    return [block for block in every if block.language == language]


def command_lines(programs: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """The command lines of these programs in blocks `sh`, each with its page and text."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words and words[0] in programs:
                    yield f"{page.name}: {' '.join(words)}", words
