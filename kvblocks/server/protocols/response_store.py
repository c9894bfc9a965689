"""The stored answers of Responses, which later requests may continue. They are in memory, within bounds."""

from dataclasses import dataclass

from kvblocks.server.kept import BoundedStore

MAX_RESPONSES = 1000
MAX_BYTES = 16 * 2**20
"""The most bytes of all stored answers together."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the chat up to its end (without instructions), both in JSON. tenant, salt: whose it is."""

    tenant: str | None
    salt: str | None
    response_id: str
    body: bytes
    chat: bytes


class ResponseStore:
    """The stored answers, the oldest first. Owned by the event loop; other threads may look up answers."""

    def __init__(self) -> None:
        self._kept: BoundedStore[StoredResponse] = BoundedStore(MAX_RESPONSES, MAX_BYTES)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: StoredResponse) -> None:
        """Store an answer, and drop the oldest ones that exceed the bounds. O(answers dropped)."""
        self._kept.keep(response.response_id, response)

    def find(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """Return an answer; None if it isn't stored or belongs to another tenant."""
        found = self._kept.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def drop(self, response_id: str, tenant: str | None) -> bool:
        """Drop an answer. Returns whether this tenant had it."""
        if self.find(response_id, tenant) is None:
            return False
        self._kept.drop(response_id)
        return True

    def forget(self, salt: str | None) -> None:
        """Drop all answers of a salt. O(answers)."""
        self._kept.forget(lambda one: one.salt == salt)
