"""What a vLLM request's KV depends on, as a kvblocks sequence: its tokens, salt, adapter, images and embeddings."""

from collections.abc import Sequence as Items
from hashlib import sha256
from typing import Any

from kvblocks import Sequence

_SEPARATOR = "\0"


class LoraVersions:
    """How often each adapter was loaded anew, by name, so that KV of its former weights isn't hit again.

    `EngineCore` tells what its callers load and remove. A request may also bring an adapter that nobody announced, and
    ask itself that it be loaded in place: vLLM's workers then load it again in every step that such a request is in. So
    each lookup of such a request is a load, and it shares nothing with any other.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._ids: dict[str, int] = {}  # of adapters that were announced or asked for, as numbered last
        self._announced: set[str] = set()  # in which requests carry on the flag of their announcement, as the server's

    def note_loaded(self, lora_request: Any) -> None:
        """Take note of an adapter that is being loaded: in place, or under a name that had another number before."""
        name, number = lora_request.lora_name, lora_request.lora_int_id
        if lora_request.load_inplace or self._ids.get(name, number) != number:
            self._renew(name)
        self._ids[name] = number
        if lora_request.load_inplace:
            self._announced.add(name)

    def note_removed(self, lora_id: int) -> None:
        """Take note of an adapter that is being removed: what is loaded under its name later may be another one."""
        for name in [name for name, number in self._ids.items() if number == lora_id]:
            self._renew(name)
            self._announced.discard(name)

    def key(self, lora_request: Any) -> str | None:
        """Return what tells an adapter's KV from all others': name, path and version; None without an adapter."""
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
    """Return a sequence with all known tokens of a request, and what else its KV depends on."""
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
    """Return a key for each image, or whatever the features are of, over its placeholders."""
    positions = [feature.mm_position for feature in features]
    return [
        (position.offset, position.offset + position.length, feature.identifier)
        for position, feature in zip(positions, features, strict=True)
    ]


def embedding_keys(request: Any, block_size: int) -> list[tuple[int, int, bytes]]:
    """Return a key for each block that prompt embeddings reach into: the digest of what they are there, and their type.

    The digest is vLLM's, and events say it (see `kvblocks.wire.extra_keys`). It takes equal bytes of other types for
    the same.
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
