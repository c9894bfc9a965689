"""Reads tool calls from the text of an answer while it is generated.

Invariants. The result doesn't depend on how the text is cut into pieces. A call is returned when it is complete. Text
that begins like calls but turns out to be something else remains text, including its marks. As in vLLM, text before
calls is returned unchanged, and text after them is dropped. tests/clients/test_vllm_parsers.py compares the two, and
lists the differences.
"""

from kvblocks.server.tools.calls import ToolCall, new_call_id
from kvblocks.server.tools.formats import ToolFormat


class CallReader:
    """Reads one answer. is_one: whether to return only the first call."""

    def __init__(self, tool_format: ToolFormat, *, is_one: bool = False) -> None:
        self._format = tool_format
        self._is_one = is_one
        self._held = ""
        self._mark: str | None = None  # of the calls that `_held` begins with
        self._looked = 0  # how much of `_held` certainly has no `end`
        self._has_begun = False
        self.num_calls = 0

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Take the next piece. Return the text and the calls that are now certain. is_last: the answer ends with it.

        O(piece), plus O(text of calls) when they end.
        """
        self._held += text
        texts: list[str] = []
        calls: list[ToolCall] = []
        while self._mark is not None or self._begin(texts, is_last=is_last):
            if not self._end(texts, calls, is_last=is_last):
                break
        return "".join(texts), calls

    def _begin(self, texts: list[str], *, is_last: bool) -> bool:
        """Move text before calls to `texts`. Return whether calls begin, which are left in `_held` with their mark."""
        held, opening = self._held, self._format.opening
        if opening and not self._has_begun:
            start = held.lstrip()
            if start.startswith(opening):
                self._has_begun, self._mark, self._looked = True, "", 0
                return True
            if not start and not is_last:
                return False
        found = [(at, mark) for mark in self._format.marks if (at := held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(held[:at], texts)
            self._held, self._mark, self._looked, self._has_begun = held[at:], mark, len(mark), True
            return True
        num_kept = 0 if is_last else max((_num_shared(held, mark) for mark in self._format.marks), default=0)
        self._say(held[: len(held) - num_kept], texts)
        self._held = held[len(held) - num_kept :]
        return False

    def _end(self, texts: list[str], calls: list[ToolCall], *, is_last: bool) -> bool:
        """Read the calls that `_held` begins with, if they are whole, and say whether they were."""
        mark, end = self._mark or "", self._format.end
        at = self._held.find(end, self._looked) if end else -1
        if at < 0 and not is_last:
            self._looked = max(len(mark), len(self._held) - len(end) + 1)
            return False
        at, behind = (len(self._held), len(self._held)) if at < 0 else (at, at + len(end))
        written = self._format.read(self._held[len(mark) : at])
        if written is None:
            self._say(self._held[:behind], texts, is_broken=True)
        for call in written or ():
            self.num_calls += 1
            if self.num_calls == 1 or not self._is_one:
                calls.append(ToolCall(new_call_id(self._format.id_length), call.name, call.arguments))
        self._held, self._mark, self._looked = self._held[behind:], None, 0
        return bool(self._held)

    def _say(self, text: str, texts: list[str], *, is_broken: bool = False) -> None:
        if text:
            self._has_begun = True
            if is_broken or not self.num_calls:
                texts.append(text)


def name_stop(tool_format: ToolFormat, text: str, stops: tuple[str, ...]) -> str:
    """Return why an answer that may call tools stopped: "tool_calls" if it has called one, else "stop".

    text: the text of all its tokens except the stop token. stops: strings, the first of which ends the text. O(text).
    """
    ends = [at for at in map(text.find, stops) if at >= 0]
    reader = CallReader(tool_format)
    reader.feed(text[: min(ends, default=len(text))], is_last=True)
    return "tool_calls" if reader.num_calls else "stop"


def _num_shared(text: str, mark: str) -> int:
    """How many characters at a text's end may be the beginning of a mark."""
    most = min(len(text), len(mark) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(mark[:length])), 0)
