"""What is wrong, in a form that can be repeated."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One fault of a case. what: in a sentence. expected, got: the two answers, side by side. difference: how far apart
    they are, in units of what is normal (1.0 is the tolerance), None where that means nothing. num_seen of num_tries:
    how often it was there when the case was repeated. repeat: what to run to see it again.
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
        """A few words."""
        seen = f"seen in {self.num_seen} of {self.num_tries} tries"
        return seen if self.difference is None else f"{seen}, {self.difference:.1f} times the tolerance"
