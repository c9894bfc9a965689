"""What a walk raises."""

from kvblocks.errors import KVBlocksError


class VerificationError(KVBlocksError):
    """A manager did what it must not. kind: a word for it. calls: the shortest list that shows it, one line each.

    kind is one of "wrong KV", "unwritten KV", "shared slot", "missing slots", "lost blocks", "missed hit", "bad answer"
    and "raised". The message has all of it.
    """

    def __init__(self, kind: str, what: str, calls: tuple[str, ...] = ()) -> None:
        lines = [f"{kind}: {what}", *(f"  {number}. {call}" for number, call in enumerate(calls, 1))]
        super().__init__("\n".join(lines))
        self.kind = kind
        self.what = what
        self.calls = calls
