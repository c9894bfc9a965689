"""What a vLLM request's KV depends on, as a kvblocks sequence: its tokens, salt, adapter, images and embeddings."""

from hashlib import sha256
from typing import Any

from kvblocks import Sequence

_SEPARATOR = "\0"


class LoraVersions:
    """How often each adapter was loaded anew in its place, by name, so that the old one's KV isn't hit again."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}

    def note_loaded(self, lora_request: Any) -> None:
        """Take note of an adapter that is being loaded."""
        if lora_request.load_inplace:
            self._versions[lora_request.lora_name] = self._versions.get(lora_request.lora_name, 0) + 1

    def key(self, lora_request: Any) -> str | None:
        """Return what tells an adapter's KV from all others': name, path and version; None without an adapter."""
        if lora_request is None:
            return None
        version = self._versions.get(lora_request.lora_name, 0)
        return _SEPARATOR.join((lora_request.lora_name, lora_request.lora_path, str(version)))


LORA_VERSIONS = LoraVersions()


def lora_name(key: str | None) -> str | None:
    """Return the adapter's name in a key of `LoraVersions`."""
    return None if key is None else key.split(_SEPARATOR, 1)[0]


def make_sequence(request: Any, block_size: int) -> Sequence:
    """Return a sequence with all known tokens of a request, and what else its KV depends on."""
    keys: list[tuple[int, int, str | bytes]] = []
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        keys.append((start, start + length, feature.identifier))
    if request.prompt_embeds is not None:
        keys += embedding_keys(request, block_size)
    return Sequence(
        request.request_id,
        request._all_token_ids,  # noqa: SLF001  # the list itself: `all_token_ids` is a view that copies slowly
        salt=request.cache_salt or None,
        lora=LORA_VERSIONS.key(request.lora_request),
        extra_keys=keys,
    )


def embedding_keys(request: Any, block_size: int) -> list[tuple[int, int, bytes]]:
    """Return a key for each block that prompt embeddings reach into: the digest of what they are there."""
    import torch  # vLLM has it; only prompts of embeddings need it here

    keys = []
    embeddings = request.prompt_embeds
    for start in range(0, len(embeddings), block_size):
        part = embeddings[start : start + block_size].detach().cpu().contiguous()
        name = f"{part.dtype} {tuple(part.shape)}".encode()
        content = part.flatten().view(torch.uint8).numpy().tobytes()
        keys.append((start, start + len(part), sha256(name + b"\0" + content).digest()))
    return keys
