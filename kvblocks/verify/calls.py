"""The calls of a walk as values, which can be repeated, left out, and shown."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """A request is looked up and starts. At most `num_new_tokens` tokens after its hit get slots."""

    name: str
    tokens: tuple[int, ...]
    salt: str | None
    num_new_tokens: int

    def __str__(self) -> str:
        salt = "" if self.salt is None else f", salt {self.salt!r}"
        new = f"{self.num_new_tokens} tokens after its hit" if self.num_new_tokens < len(self.tokens) else "all"
        return f"start {self.name!r}: tokens {list(self.tokens)}{salt}; slots for {new}"


@dataclass(frozen=True)
class Grow:
    """A request gets slots for more of its tokens, after `tokens` are appended to it."""

    name: str
    tokens: tuple[int, ...]
    num_tokens: int

    def __str__(self) -> str:
        more = f"append {list(self.tokens)} to {self.name!r}; " if self.tokens else f"{self.name!r}: "
        return f"{more}slots for {self.num_tokens} more tokens"


@dataclass(frozen=True)
class Free:
    """A request ends, after the step."""

    name: str

    def __str__(self) -> str:
        return f"the step runs; free {self.name!r}"


@dataclass(frozen=True)
class EndStep:
    """The step runs."""

    def __str__(self) -> str:
        return "the step runs"


@dataclass(frozen=True)
class FailStep:
    """The step fails, which ends all requests in it."""

    def __str__(self) -> str:
        return "the step dies; its requests end"


@dataclass(frozen=True)
class Reset:
    """All requests end, and the weights change."""

    def __str__(self) -> str:
        return "all requests end; reset"


@dataclass(frozen=True)
class Finish:
    """All requests end, and a new one takes the whole pool."""

    def __str__(self) -> str:
        return "all requests end; a new one asks for the whole pool"


Call = Start | Grow | Free | EndStep | FailStep | Reset | Finish
