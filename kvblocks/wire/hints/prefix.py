"""How a hint's payload names a prefix: by its tokens, or by the hashes of its blocks.

By tokens: "token_ids" and, if the KV depends on more, "cache_salt", "lora_name" and "extra_keys", a list of [start,
end, key]. By hashes: "block_hashes" of blocks that are cached on the device, either those of a whole prefix or its last
ones. A hash is the digest in events, as hexadecimal text or bytes, or its low 64 bits as an integer, signed or not, as
in events of vLLM and SGLang. The prefix ends with the last of these blocks that is cached.

Only full blocks count. Nothing here finds what another salt has: names of its prefixes get the same answer as unknown
ones.
"""

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any

from kvblocks import KVCacheManager, Sequence
from kvblocks.arguments import check_name, is_a, listed, wrong
from kvblocks.core.block import Node
from kvblocks.errors import InvalidArgumentError
from kvblocks.hashing import PositionKey, decode_extra_keys
from kvblocks.retention.quotas import salt_in
from kvblocks.tiers.prefix import prefix_of

NAMING_FIELDS = frozenset({"token_ids", "cache_salt", "lora_name", "extra_keys", "block_hashes"})
"""The fields of a payload that name a prefix."""

_BY_TOKENS = ("cache_salt", "lora_name", "extra_keys")

_FREE_CHARACTERS = 256  # of a span's key: the hash of an image is much shorter


class UnknownPrefixError(Exception):
    """No prefix of this tenant has this name: there never was one, it is gone, or it belongs to somebody else."""


class NamedPrefix:
    """A prefix's tokens and what else its KV depends on.

    num_blocks: how many of its full blocks are kept here. num_named_blocks: how many the hint named; some may be
    unknown, or there may be more than the pool has. key: equal if the named full blocks are equal.
    """

    def __init__(
        self, tokens: bytes, salt: str | None, lora: str | None, extra_keys: tuple[PositionKey, ...], block_size: int
    ) -> None:
        """tokens: packed, as by `pack_tokens`."""
        self.salt = salt
        self.lora = lora
        self._tokens = tokens
        self._extra_keys = extra_keys
        self._block_bytes = 4 * block_size
        self.num_blocks = self.num_named_blocks = number = len(tokens) // self._block_bytes
        own_keys = sorted([(start, end, repr(key)) for start, end, key in extra_keys if start < number * block_size])
        said = repr((lora, own_keys)).encode()
        self.key = hashlib.sha256(tokens[: number * self._block_bytes] + said).digest()

    def keep(self, num_blocks: int) -> None:
        """Keep only the first blocks, if there are more. O(tokens)."""
        if num_blocks < self.num_blocks:
            tokens, keys = self.packed(num_blocks)
            self._tokens, self._extra_keys = tokens.tobytes(), tuple(keys)
            self.num_blocks = num_blocks

    def packed(self, num_blocks: int) -> "tuple[memoryview[int], list[PositionKey]]":
        """Return the tokens of the first blocks, and at least one more, with the keys that touch those blocks.

        The additional tokens let a lookup find all of these blocks, and keep spans whole. They are made up, so a lookup
        almost never finds more than these blocks.
        """
        end = num_blocks * self._block_bytes // 4
        keys = [key for key in self._extra_keys if key[0] < end]
        num_more = max([1, *[key[1] - end for key in keys]])
        following = self._tokens[4 * end : 4 * end + 1] or b"\0"
        other = bytes([following[0] ^ 1, 0, 0, 0])
        return memoryview(self._tokens[: 4 * end] + other * num_more).cast("I"), keys

    def sequence(self, sequence_id: Hashable, num_blocks: int) -> Sequence:
        """Return a sequence of the first blocks and at least one more token."""
        tokens, keys = self.packed(num_blocks)
        return Sequence(sequence_id, tokens, copy=False, salt=self.salt, lora=self.lora, extra_keys=keys)


class PrefixNames:
    """Reads the names of prefixes in the payloads of one envelope, for one tenant.

    num_tokens_left: how many tokens and hashes the envelope may still name. A span of extra_keys counts as the tokens
    of the blocks that it touches, since its key is written to each of them. A long key counts more, see `HintLimits`.
    """

    def __init__(self, manager: KVCacheManager, tenant: str | None, max_tokens: int) -> None:
        self._manager = manager
        self._tenant = tenant
        self.num_tokens_left = max_tokens
        self._by_digest: dict[bytes, Node] = {}
        self._ambiguous: set[bytes] = set()
        self._by_number: dict[int, list[bytes]] | None = None  # made when needed
        self._has_looked = False

    def find(self, payload: Mapping[str, Any]) -> NamedPrefix:
        """Return the prefix that a payload names.

        Raises UnknownPrefixError, and InvalidArgumentError for a payload that names none. O(tokens). If hashes are
        named, also O(pool) for the first time and after `forget_hashes`.
        """
        by_tokens, by_hashes = "token_ids" in payload, "block_hashes" in payload
        if by_tokens == by_hashes:
            raise InvalidArgumentError(f"expected either token_ids or block_hashes, got {sorted(payload)}")
        if by_hashes:
            others = [name for name in _BY_TOKENS if name in payload]
            if others:
                raise InvalidArgumentError(f"expected block_hashes without {others}: hashes cover those")
            return self._find_by_hashes(payload["block_hashes"])
        return self._find_by_tokens(payload)

    def forget_hashes(self) -> None:
        """Have the next lookup of hashes look at all cached blocks again, since those may have changed. O(1)."""
        self._by_digest, self._ambiguous, self._by_number, self._has_looked = {}, set(), None, False

    def _find_by_tokens(self, payload: Mapping[str, Any]) -> NamedPrefix:
        tokens = self._take(payload["token_ids"], "token_ids", "a list of token ids")
        salt = check_name("cache_salt", payload.get("cache_salt", self._tenant))
        lora, keys = check_name("lora_name", payload.get("lora_name")), payload.get("extra_keys")
        given = listed("extra_keys", "a list of [start, end, key]", [] if keys is None else keys)
        checked = Sequence("named", tokens, salt=salt, lora=lora, extra_keys=given)
        if salt != self._tenant:
            raise UnknownPrefixError
        packed, size = bytes(checked.packed_tokens()), self._manager.block_size
        self._take_spans(checked.extra_keys)
        prefix = NamedPrefix(packed, salt, lora, checked.extra_keys, size)
        if not prefix.num_blocks:
            raise InvalidArgumentError(f"expected at least one full block of {size} tokens, got {len(tokens)} tokens")
        return prefix

    def _find_by_hashes(self, hashes: object) -> NamedPrefix:
        named = self._take(hashes, "block_hashes", "a list of hashes")
        if not named:
            raise InvalidArgumentError("block_hashes: expected at least one, got none")
        digests = [self._digest_of(name) for name in named]
        last = max([position for position, digest in enumerate(digests) if digest is not None], default=None)
        if last is None:
            raise UnknownPrefixError
        run, position = self._by_digest[digests[last] or b""]
        assert run is not None, "a cached block is in a run"
        found = prefix_of(run, position + 1)
        chain = {block.block_hash for block in found.blocks}
        if not chain.issuperset([digest for digest in digests if digest is not None]):
            raise InvalidArgumentError("block_hashes: expected blocks of one prefix, the deepest one last")
        size, keys, lora = self._manager.block_size, set[PositionKey](), None
        for block, encoded in (found.extra_keys or {}).items():
            for kind, span, payload in decode_extra_keys(encoded):
                if span is not None:
                    start = block * size + span[0]
                    keys.add((start, start + span[1], payload))
                elif kind == "lora":
                    lora = str(payload)
        ordered = tuple(sorted(keys, key=lambda key: (key[0], key[1], repr(key[2]))))
        prefix = NamedPrefix(bytes(found.tokens), self._tenant, lora, ordered, size)
        prefix.num_named_blocks += len(digests) - 1 - last
        return prefix

    def _take(self, value: object, name: str, expected: str) -> list[Any]:
        """Return a list of names, and count them."""
        if not is_a(value, list) and not is_a(value, tuple):
            raise wrong(name, expected, value)
        given: list[Any] = [*value]  # type: ignore[misc]  # checked above
        if len(given) > self.num_tokens_left:
            raise InvalidArgumentError(f"{name}: expected at most {self.num_tokens_left} more, got {len(given)}")
        self.num_tokens_left -= len(given)
        return given

    def _take_spans(self, keys: tuple[PositionKey, ...]) -> None:
        """Count the blocks that spans touch, before keys are written to each of them. O(spans)."""
        size, number = self._manager.block_size, 0
        for start, end, key in keys:
            num_blocks = (end - 1) // size - start // size + 1
            number += num_blocks * size * (1 + len(key) // _FREE_CHARACTERS)
        if number > self.num_tokens_left:
            raise InvalidArgumentError(
                f"extra_keys: expected spans whose blocks have at most {self.num_tokens_left} more tokens, got {number}"
            )
        self.num_tokens_left -= number

    def _digest_of(self, name: object) -> bytes | None:
        """Return the digest of the cached block that a hash names; None if there is none."""
        given: Any = name
        if not self._has_looked:
            self._look()
        if is_a(given, bytes):
            digests = [bytes(given)]
        elif is_a(given, str):
            try:
                digests = [bytes.fromhex(given)]
            except ValueError:
                raise wrong("block_hashes", "hexadecimal digits", given) from None
        elif type(given) is int and -(2**63) <= given < 2**64:
            digests = self._numbers().get(given % 2**64, [])
        else:
            raise wrong("block_hashes", "an integer of 64 bits, hexadecimal text or bytes", given)
        found = [digest for digest in digests if digest in self._by_digest]
        if len(found) > 1 or not self._ambiguous.isdisjoint(found):
            raise InvalidArgumentError("block_hashes: expected hashes of one prefix each, got one that two share")
        return found[0] if found else None

    def _look(self) -> None:
        """Name all cached blocks of the tenant. O(pool), and O(blocks whose digest was not asked for before)."""
        self._has_looked = True
        for run in {block.run for block in self._manager.blocks if block.run is not None}:
            if not run.epoch.is_current or salt_in(run.first_keys) != self._tenant:
                continue
            run.digest(len(run.blocks) - 1)  # computes those before it, too
            digests, size = bytes(run.digests), run.epoch.num_digest_bytes
            for position in range(len(run.blocks)):
                digest = digests[position * size : (position + 1) * size]
                if digest in self._by_digest:
                    self._ambiguous.add(digest)
                self._by_digest[digest] = run, position

    def _numbers(self) -> dict[int, list[bytes]]:
        """Return the digests by their low 64 bits. O(the tenant's cached blocks) once."""
        if self._by_number is None:
            self._by_number = {}
            for digest in self._by_digest:
                self._by_number.setdefault(int.from_bytes(digest[-8:], "big"), []).append(digest)
        return self._by_number
