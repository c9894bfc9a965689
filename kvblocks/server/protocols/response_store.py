"""The answers of Responses that are kept, so that a later request may go on from them. All in memory, and bounded."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kvblocks.server.body.messages import num_chars

Json = dict[str, Any]

MAX_RESPONSES = 1000
MAX_CHARS = 32 * 2**20
"""The most characters of all kept conversations together."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the chat up to its end without instructions. tenant, salt: whose it is."""

    tenant: str | None
    salt: str | None
    body: Json
    chat: tuple[Json, ...]


class ResponseStore:
    """The kept answers, the last used last. Owned by the event loop; other threads may look answers up."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: StoredResponse) -> None:
        """Keep an answer, and drop the oldest ones beyond the bounds. O(chat)."""
        size = num_chars(response.body) + num_chars(list(response.chat))
        self._kept[response.body["id"]] = (response, size)
        self._num_chars += size
        while len(self._kept) > MAX_RESPONSES or (self._num_chars > MAX_CHARS and len(self._kept) > 1):
            _, (_, dropped) = self._kept.popitem(last=False)
            self._num_chars -= dropped

    def find(self, response_id: str, tenant: str | None) -> StoredResponse | None:
        """Return an answer; None if it isn't kept, or is another tenant's."""
        found, _ = self._kept.get(response_id, (None, 0))
        return found if found is not None and found.tenant == tenant else None

    def drop(self, response_id: str, tenant: str | None) -> bool:
        """Drop an answer. Returns whether there was one of this tenant."""
        if self.find(response_id, tenant) is None:
            return False
        _, size = self._kept.pop(response_id)
        self._num_chars -= size
        return True

    def forget(self, salt: str | None) -> None:
        """Drop all answers of a salt. O(answers)."""
        for response_id in [key for key, (one, _) in self._kept.items() if one.salt == salt]:
            _, size = self._kept.pop(response_id)
            self._num_chars -= size
