"""Prompts of a `PrefixCache`: sequences without blocks, and perhaps without tokens."""

from array import array

from kvblocks.arguments import Text, listed
from kvblocks.core.sequence import Sequence
from kvblocks.core.tokens import TokenIds
from kvblocks.errors import InvalidArgumentError, NoTokensError
from kvblocks.hashing.extra_keys import PositionKeys, check_keys

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
