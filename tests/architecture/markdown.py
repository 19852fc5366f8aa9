"""What the tests need to know of a Markdown file: its fenced blocks, links and headings."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    return [Block(match[1], match[2]) for match in _FENCE.finditer(path.read_text())]


def links(path: Path) -> list[str]:
    return _LINK.findall(_FENCE.sub("", path.read_text()))


def anchors(path: Path) -> set[str]:
    """Return the anchors that a forge makes of the headings."""
    headings = _HEADING.findall(_FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(block: Block) -> list[str]:
    """Return a shell block's commands: continued lines joined, comments cut."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    lines = (re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines())
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]
