"""The stored answers of Responses, which later requests may continue. They are in memory, within bounds."""

from collections import OrderedDict
from dataclasses import dataclass

MAX_RESPONSES = 1000
MAX_BYTES = 32 * 2**20
"""The most bytes of JSON of all stored conversations together."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the chat up to its end (without instructions), both in JSON. tenant, salt: whose it is."""

    tenant: str | None
    salt: str | None
    response_id: str
    body: bytes
    chat: bytes

    @property
    def num_bytes(self) -> int:
        """Its size, which counts for MAX_BYTES."""
        return len(self.body) + len(self.chat)


class ResponseStore:
    """The stored answers, the oldest first. Owned by the event loop; other threads may look up answers."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: StoredResponse) -> None:
        """Store an answer, and drop the oldest ones that exceed the bounds. O(answers dropped)."""
        self._kept[response.response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._kept) > MAX_RESPONSES or (self._num_bytes > MAX_BYTES and len(self._kept) > 1):
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def find(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """Return an answer; None if it isn't stored or belongs to another tenant."""
        found = self._kept.get(response_id)
        return found if found is not None and found.tenant == tenant else None

    def drop(self, response_id: str, tenant: str | None) -> bool:
        """Drop an answer. Returns whether this tenant had it."""
        if self.find(response_id, tenant) is None:
            return False
        self._num_bytes -= self._kept.pop(response_id).num_bytes
        return True

    def forget(self, salt: str | None) -> None:
        """Drop all answers of a salt. O(answers)."""
        for response_id in [key for key, one in self._kept.items() if one.salt == salt]:
            self._num_bytes -= self._kept.pop(response_id).num_bytes
