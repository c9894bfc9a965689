"""Finds and rewrites the links of Markdown pages, for the site."""

import re
from collections.abc import Callable

LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*\]\()([^()\s]+)(\))")
"""A link or an image. Its text may contain an image, but the text of that image may not contain another one."""

INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)


def relink(text: str, change: Callable[[str], str]) -> str:
    """Return `text` with `change(target)` for the target of each link and image outside of code.

    A link's text may continue on the next line of its paragraph.
    """
    done, paragraph, fence = [], [], ""

    def end_paragraph() -> None:
        done.append(_relinked("".join(paragraph), change))
        paragraph.clear()

    for line in text.splitlines(keepends=True):
        mark = line.lstrip()[:3]
        is_fence = mark in {"```", "~~~"} and fence in {"", mark}
        if is_fence:
            fence = "" if fence else mark
        if is_fence or fence or line.startswith("    ") or not line.strip():
            end_paragraph()
            done.append(line)
        else:
            paragraph.append(line)
    end_paragraph()
    return "".join(done)


def _relinked(paragraph: str, change: Callable[[str], str]) -> str:
    code = [match.span() for match in INLINE_CODE.finditer(paragraph)]

    def replaced(match: re.Match[str]) -> str:
        if any(start <= match.start(2) < end for start, end in code):
            return match[0]
        return match[1] + change(match[2]) + match[3]

    return LINK.sub(replaced, paragraph)
