"""One thing that `kvblocks verify` tries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.patient import Patient


@dataclass(frozen=True)
class Case:
    """run: asks, and yields what it finds. needs: whether a server has what the case is about; None: each has."""

    run: Callable[[Patient, str], Iterator[Finding]]
    needs: Callable[[Patient], bool] | None = None

    @property
    def shows(self) -> str:
        """What should hold, in a sentence."""
        return (self.run.__doc__ or "").strip()

    def applies_to(self, patient: Patient) -> bool:
        """Whether this server has what the case is about. It may ask the server."""
        return self.needs is None or self.needs(patient)

    def find(self, patient: Patient, seed: str) -> Finding | None:
        """Return the first thing that is wrong, or None. It asks for no more than it needs to find that."""
        return next(self.run(patient, seed), None)
