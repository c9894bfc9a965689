"""The error that a walk raises."""

from kvblocks.errors import KVBlocksError


class VerificationError(KVBlocksError):
    """A manager has a fault. kind: its category. calls: the shortest list of calls found that shows it, one line each.

    kind is one of "wrong KV", "unwritten KV", "shared slot", "missing slots", "lost blocks", "missed hit", "bad answer"
    and "raised". The message contains all of this.
    """

    def __init__(self, kind: str, what: str, calls: tuple[str, ...] = ()) -> None:
        lines = [f"{kind}: {what}", *(f"  {number}. {call}" for number, call in enumerate(calls, 1))]
        super().__init__("\n".join(lines))
        self.kind = kind
        self.what = what
        self.calls = calls
