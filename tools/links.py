"""Finds and rewrites the links of Markdown pages, for the site."""

import re
from collections.abc import Callable

LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*\]\()([^()\s]+)(\))")
"""A link or an image. Its text may contain an image, but no image in that one's text."""

INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


def relink(text: str, change: Callable[[str], str]) -> str:
    """Return `text` with `change(target)` for the target of each link and image outside of code."""
    lines, fence = [], ""
    for line in text.splitlines(keepends=True):
        mark = line.lstrip()[:3]
        if mark in {"```", "~~~"} and fence in {"", mark}:
            fence = "" if fence else mark
        lines.append(line if fence or line.startswith("    ") else _relinked(line, change))
    return "".join(lines)


def _relinked(line: str, change: Callable[[str], str]) -> str:
    code = [match.span() for match in INLINE_CODE.finditer(line)]

    def replaced(match: re.Match[str]) -> str:
        if any(start <= match.start(2) < end for start, end in code):
            return match[0]
        return match[1] + change(match[2]) + match[3]

    return LINK.sub(replaced, line)
