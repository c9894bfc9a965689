"""Prompts of a `PrefixCache`, which are sequences without blocks and perhaps without tokens, and payloads to insert."""

from array import array
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

from kvblocks.arguments import Text, check_count, is_a, listed, wrong
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import TokenIds
from kvblocks.errors import InvalidArgumentError, NoTokensError
from kvblocks.hashing.extra_keys import PositionKeys, check_keys
from kvblocks.prefix_cache.payloads import NewPayload

_NAME = "prefix"


def make_prompt(
    token_ids: TokenIds, salt: Text | None, lora: Text | None, extra_keys: PositionKeys, *, copy: bool
) -> Sequence:
    """Return a prompt as a sequence, with its tokens and keys.

    Unlike a sequence of a manager, a prompt may have no tokens; a lookup then finds nothing. copy: False only for a
    call that forgets the prompt at its end; see `Sequence`. Raises InvalidTokensError and InvalidArgumentError. Costs
    what making a sequence costs.
    """
    try:
        return Sequence(_NAME, token_ids, salt=salt, lora=lora, extra_keys=extra_keys, copy=copy)
    except NoTokensError:
        keys = listed("extra_keys", "an iterable of (start, end, key)", extra_keys)
        if keys:
            raise InvalidArgumentError(
                f"extra_keys: expected none for a prompt without tokens, got {len(keys)}"
            ) from None
        empty = Sequence(_NAME, (0,))
        empty.tokens = array("I")
        empty.num_prompt_tokens = 0
        empty.keys = check_keys(salt, lora, (), 0)
        return empty


def check_payloads(
    payloads: Iterable[tuple[SupportsIndex, Any, SupportsIndex]],
    num_tokens: int,
    check_bytes: Callable[[str, SupportsIndex, int], int],
) -> list[NewPayload]:
    """Return the payloads of an insertion of `num_tokens` tokens, at most one for each number of tokens. O(payloads).

    check_bytes: checks the bytes of one. Raises InvalidArgumentError.
    """
    checked: list[NewPayload] = []
    for item in listed("payloads", "an iterable of (number of tokens, payload, bytes)", payloads):
        parts: list[Any] = [*item] if is_a(item, tuple) or is_a(item, list) else []
        if len(parts) != 3 or parts[1] is None:
            raise wrong("payloads", "(number of tokens, payload that isn't None, bytes)", item)
        number = check_count("payloads: number of tokens", parts[0], 0, num_tokens)
        checked.append(NewPayload(number, parts[1], check_bytes("payloads: bytes", parts[2], 1)))
    if len({new.num_tokens for new in checked}) < len(checked):
        raise wrong("payloads", "one of each number of tokens", [new.num_tokens for new in checked])
    return checked
