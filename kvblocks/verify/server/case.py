"""A case: one thing that `kvblocks verify` tries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.patient import Patient


@dataclass(frozen=True)
class Case:
    """A case. run: asks the server, and yields what it finds.

    needs: whether a server has what the case is about; None: every server has it.
    """

    run: Callable[[Patient, str], Iterator[Finding]]
    needs: Callable[[Patient], bool] | None = None

    @property
    def shows(self) -> str:
        """A sentence that says what should hold."""
        return (self.run.__doc__ or "").strip()

    def applies_to(self, patient: Patient) -> bool:
        """Whether this server has what the case is about. It may ask the server."""
        return self.needs is None or self.needs(patient)

    def find(self, patient: Patient, seed: str) -> Finding | None:
        """Return the first fault, or None. Asks the server for no more than it needs to find that."""
        return next(self.run(patient, seed), None)
