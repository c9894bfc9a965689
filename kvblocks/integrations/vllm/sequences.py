"""A vLLM request as a kvblocks sequence: its tokens, and its salt, adapter, images and embeddings."""

from collections.abc import Sequence as Items
from hashlib import sha256
from itertools import count
from typing import Any

from kvblocks import Group, Sequence

_SEPARATOR = "\0"
_NUMBERS = count()


class LoraVersions:
    """Counts how often each adapter was loaded again, by name, so that KV of its former weights isn't hit.

    `EngineCore` reports what its callers load and remove. A request may also bring an adapter that no caller has
    loaded, with `load_inplace`. vLLM's workers then load it again in every step with such a request. So each lookup of
    such a request counts as a load, and the request shares nothing with others.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._ids: dict[str, int] = {}  # the last number of each adapter that a call loaded or a request had
        self._announced: set[str] = set()  # adapters loaded in place by a call: their requests ask for no new load

    def note_loaded(self, lora_request: Any) -> None:
        """Note an adapter that is loaded in place, or whose name had another number before."""
        name, number = lora_request.lora_name, lora_request.lora_int_id
        if lora_request.load_inplace or self._ids.get(name, number) != number:
            self._renew(name)
        self._ids[name] = number
        if lora_request.load_inplace:
            self._announced.add(name)

    def note_removed(self, lora_id: int) -> None:
        """Note that an adapter is removed. Its name may stand for another one later."""
        for name in [name for name, number in self._ids.items() if number == lora_id]:
            self._renew(name)
            self._announced.discard(name)

    def key(self, lora_request: Any) -> str | None:
        """Return what distinguishes an adapter's KV: name, path and version; None without an adapter."""
        if lora_request is None:
            return None
        name = lora_request.lora_name
        self._ids.setdefault(name, lora_request.lora_int_id)
        if lora_request.load_inplace and name not in self._announced:
            self._renew(name)
        return _SEPARATOR.join((name, lora_request.lora_path, str(self._versions.get(name, 0))))

    def _renew(self, name: str) -> None:
        self._versions[name] = self._versions.get(name, 0) + 1


LORA_VERSIONS = LoraVersions()


def make_sequence(request: Any, block_size: int, num_ahead: int, *, is_cached: bool) -> Sequence:
    """Make a sequence with all known tokens of a request, and everything else that its KV depends on.

    is_cached: if False, images and embeddings are left out (in encoder-decoder models they are no part of the tokens).
    num_ahead: 0, or 1 if a block also depends on the token after it, as the KV of EAGLE's draft model does. Then the
    sequence's token at each position is the request's next token, so a hit on a block also confirms the token after it.
    The request's first token becomes an extra key.
    """
    tokens = request._all_token_ids  # noqa: SLF001  # the list itself: `all_token_ids` is a view that copies slowly
    keys = image_keys(request.mm_features, num_ahead) if is_cached else []
    if request.prompt_embeds is not None and is_cached:
        keys += embedding_keys(request, block_size, num_ahead)
    if num_ahead:
        is_alone = _num_behind_first(request) < 1  # a sequence has a token, so this one gets a key that nobody has
        keys.append((0, 1, b"alone %d" % next(_NUMBERS)) if is_alone else _first_key(request))
        tokens = [0] if is_alone else tokens[1 : 1 + num_known(request, 1)]
    return Sequence(
        request.request_id,
        tokens,
        salt=request.cache_salt or None,
        lora=LORA_VERSIONS.key(request.lora_request),
        extra_keys=keys,
    )


def num_known(request: Any, num_ahead: int) -> int:
    """Return how many tokens a request's sequence has with all known tokens; see `make_sequence`.

    An answer's last token is left out if a later turn may replace it.
    """
    return max(1, _num_behind_first(request)) if num_ahead else len(request._all_token_ids)  # noqa: SLF001


def _num_behind_first(request: Any) -> int:
    is_open: bool = request.resumable and request.num_output_tokens > 0
    return len(request._all_token_ids) - 1 - is_open  # noqa: SLF001


def look_ahead(token_ids: Items[int]) -> tuple[Items[int], list[tuple[int, int, bytes]]]:
    """Return the tokens and the extra keys of a sequence whose blocks also depend on the token after them.

    token_ids: at least two tokens, without images.
    """
    return token_ids[1:], [(0, 1, _named(token_ids[0], []))]


def _first_key(request: Any) -> tuple[int, int, bytes]:
    """Return the key that a request's first token is, with the images that it stands for."""
    images = [feature.identifier for feature in request.mm_features if feature.mm_position.offset == 0]
    return 0, 1, _named(request._all_token_ids[0], images)  # noqa: SLF001


def _named(token_id: int, identifiers: list[str]) -> bytes:
    return _SEPARATOR.join(["first", str(token_id), *identifiers]).encode()


def image_keys(features: Items[Any], num_ahead: int = 0) -> list[tuple[int, int, str | bytes]]:
    """Return a key for each image or other feature, over its placeholders. num_ahead: as in `make_sequence`."""
    spans = [(f.mm_position.offset, f.mm_position.offset + f.mm_position.length) for f in features]
    return [
        (max(0, start - num_ahead), max(1, end - num_ahead), feature.identifier)
        for (start, end), feature in zip(spans, features, strict=True)
    ]


def embedding_keys(request: Any, block_size: int, num_ahead: int) -> list[tuple[int, int, bytes]]:
    """Return a key for each block that has prompt embeddings: a digest of the embeddings, and their dtype.

    num_ahead: as in `make_sequence`. If it is 1, the first embedding has a key of its own.

    The digest is vLLM's, and is in events (see `kvblocks.hashing.vllm`). Equal bytes of different dtypes have equal
    digests, so the key contains the dtype, too.
    """
    import torch  # vLLM has it; only prompts of embeddings need it here

    keys = []
    embeddings = request.prompt_embeds
    starts = [*range(num_ahead), *range(num_ahead, len(embeddings), block_size)]
    for start, end in zip(starts, [*starts[1:], len(embeddings)], strict=True):
        part = embeddings[start:end].detach().cpu().contiguous()
        name = f"{part.dtype} {tuple(part.shape)}".encode()
        digest = sha256(part.flatten().view(torch.uint8).numpy().tobytes()).digest()
        keys.append((max(0, start - num_ahead), max(1, end - num_ahead), digest + name))
    return keys


def num_cached_tokens(sequence: Sequence, groups: Items[Group]) -> int:
    """Return how many leading tokens of a sequence are cached in all of its groups that cache."""
    if not sequence.is_allocated:
        return 0
    numbers = []
    for group, kind in enumerate(groups):
        if kind.is_cached:
            blocks = sequence.group_blocks(group)
            ends = [index + 1 for index, block in enumerate(blocks) if block is not None and block.is_cached]
            numbers.append(max(ends, default=0) * kind.block_size)
    return min(numbers, default=0)


def num_common_blocks(sequence: Sequence, others: Items[Sequence], group: int) -> int:
    """Return how many leading blocks of a group all of these sequences share."""
    ids = sequence.group_block_ids(group)
    number = len(ids)
    for other in others:
        theirs = other.group_block_ids(group)
        number = min(number, len(theirs))
        while ids[:number] != theirs[:number]:
            number -= 1
    return number
