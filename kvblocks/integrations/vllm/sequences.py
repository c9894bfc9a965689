"""A vLLM request as a kvblocks sequence: its tokens, and its salt, adapter, images and embeddings."""

from collections.abc import Sequence as Items
from hashlib import sha256
from typing import Any

from kvblocks import Sequence

_SEPARATOR = "\0"


class LoraVersions:
    """How often each adapter was loaded again, by name, so that KV of its former weights isn't hit.

    `EngineCore` reports what its callers load and remove. A request may also bring an adapter that no caller has
    loaded, with `load_inplace`. vLLM's workers then load it again in every step that has such a request. So each lookup
    of such a request counts as a load, and the request shares nothing with others.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._ids: dict[str, int] = {}  # the last number of each adapter that a call loaded or a request had
        self._announced: set[str] = set()  # adapters loaded in place by a call: their requests ask for no new load

    def note_loaded(self, lora_request: Any) -> None:
        """Take note of an adapter that is being loaded in place, or whose name had another number before."""
        name, number = lora_request.lora_name, lora_request.lora_int_id
        if lora_request.load_inplace or self._ids.get(name, number) != number:
            self._renew(name)
        self._ids[name] = number
        if lora_request.load_inplace:
            self._announced.add(name)

    def note_removed(self, lora_id: int) -> None:
        """Take note of an adapter that is being removed. Its name may stand for another one later."""
        for name in [name for name, number in self._ids.items() if number == lora_id]:
            self._renew(name)
            self._announced.discard(name)

    def key(self, lora_request: Any) -> str | None:
        """Return what tells an adapter's KV from that of others: name, path and version; None without an adapter."""
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


def make_sequence(request: Any, block_size: int) -> Sequence:
    """Return a sequence with all known tokens of a request, and everything else that its KV depends on."""
    keys = image_keys(request.mm_features)
    if request.prompt_embeds is not None:
        keys += embedding_keys(request, block_size)
    return Sequence(
        request.request_id,
        request._all_token_ids,  # noqa: SLF001  # the list itself: `all_token_ids` is a view that copies slowly
        salt=request.cache_salt or None,
        lora=LORA_VERSIONS.key(request.lora_request),
        extra_keys=keys,
    )


def image_keys(features: Items[Any]) -> list[tuple[int, int, str | bytes]]:
    """Return a key for each image, or other feature, over its placeholders."""
    positions = [feature.mm_position for feature in features]
    return [
        (position.offset, position.offset + position.length, feature.identifier)
        for position, feature in zip(positions, features, strict=True)
    ]


def embedding_keys(request: Any, block_size: int) -> list[tuple[int, int, bytes]]:
    """Return a key for each block that has prompt embeddings: a digest of the embeddings, and their dtype.

    The digest is vLLM's, and is in events (see `kvblocks.wire.extra_keys`). Equal bytes of different dtypes have equal
    digests, so the key has the dtype too.
    """
    import torch  # vLLM has it; only prompts of embeddings need it here

    keys = []
    embeddings = request.prompt_embeds
    for start in range(0, len(embeddings), block_size):
        part = embeddings[start : start + block_size].detach().cpu().contiguous()
        name = f"{part.dtype} {tuple(part.shape)}".encode()
        digest = sha256(part.flatten().view(torch.uint8).numpy().tobytes()).digest()
        keys.append((start, start + len(part), digest + name))
    return keys
