"""A fault that was found, and how to repeat it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One fault of a case.

    what: a sentence about it. expected, got: the two answers, side by side. difference: how far apart they are, in
    units of the tolerance; None if that doesn't apply. num_seen of num_tries: how often it appeared when the case was
    repeated. repeat: the command to see it again.
    """

    case: str
    what: str
    expected: str
    got: str
    difference: float | None = None
    num_seen: int = 1
    num_tries: int = 1
    repeat: str = ""
    prompts: tuple[str, ...] = field(default=(), repr=False)

    @property
    def how_sure(self) -> str:
        """A few words about how certain the fault is."""
        seen = f"seen in {self.num_seen} of {self.num_tries} tries"
        return seen if self.difference is None else f"{seen}, {self.difference:.1f} times the tolerance"
