"""`Disk`: the disk tier of a `BlockPromptCache`, in a `kvblocks.tiers.disk.DiskStore`.

Blocks are stored under their `BlockIdentity`. A piece takes as many slots as it needs. Their identities have the digest
of the last block before the piece's end, and a hash of the tail after that block. A piece is found while all its slots
are there, and begins with a checksum of the whole, so slots that were written at different times are no piece. A store
serves one model and layout at a time; the folder keeps what was stored for others as long as there is room.
`layout.txt` has the layout of the model that was stored last, so that a new process can read blocks before it has
computed any.

A separate thread writes. If the process is killed, only what isn't synced yet is lost.
"""

import ast
import hashlib
import json
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from struct import calcsize, pack, unpack_from
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as theirs

from kvblocks import BlockIdentity, InvalidArgumentError
from kvblocks.integrations.mlx_lm.cache_layout import CacheLayout
from kvblocks.integrations.mlx_lm.layers import NAME, Layer, Stack
from kvblocks.tiers.disk import DiskError, DiskStore

_LOG = logging.getLogger(NAME)
_FORMAT = "kvblocks below mlx-lm 2"
_PIECE = b"piece"
_HEAD = "<5sIII"  # the mark, tokens of the tail, chunk, chunks
_MOST_JOBS = 4  # insertions whose bytes may wait to be written
_WEIGHTS = ("*.safetensors", "*.npz", "*.gguf", "*.json")


class DiskOptions(NamedTuple):
    """Where to keep cached prompts. folder: a folder that nothing else uses.

    max_bytes: the most bytes of all files together. fingerprint: identifies the weights, for callers whose name of the
    model isn't the path that mlx-lm loaded. None: it is made of the names, sizes and times of the files at the paths in
    the name. secret: at least 16 bytes; nobody without it can plant KV in the folder.
    """

    folder: str | os.PathLike[str]
    max_bytes: int = 20 << 30
    fingerprint: bytes | None = None
    secret: bytes | None = None


class StoredPiece(NamedTuple):
    """A piece as it is stored. states: None if none were kept."""

    num_tokens: int
    rows: list[mx.array]
    windows: dict[int, tuple[int, mx.array]]
    states: list[tuple[list[mx.array], tuple[int, ...]]] | None


Placed = tuple[int, BlockIdentity, bytes]
"""A slot, and the block that is to be written there."""


class _Chunk(NamedTuple):
    """Which piece a chunk is of: the digest of the block above, the tail's length and hash, and how many chunks."""

    above: bytes
    tail: tuple[int, bytes]
    total: int


class Disk:
    """A folder with the blocks and pieces of one model. After construction nothing is raised: a failure is a miss."""

    def __init__(self, options: DiskOptions, block_size: int) -> None:
        if options.max_bytes < 1:
            raise InvalidArgumentError(f"disk: max_bytes: expected at least 1, got {options.max_bytes}")
        self._options = options
        self._folder = Path(options.folder)
        self._block_size = block_size
        self._store: DiskStore | None = None
        self._opened: tuple[bytes, Any] | None = None
        self._model: tuple[Hashable, bytes | None] | None = None
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest of the identity, the least recently used first
        self._free: list[int] = []
        self._tails: dict[bytes, dict[tuple[int, bytes], int]] = {}  # by block: of pieces, how many chunks
        self._chunks: dict[int, _Chunk] = {}  # by slot: what a chunk of a piece belongs to
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvblocks_mlx_disk")
        self._jobs: deque[Future[list[Placed]]] = deque()
        self._folder.mkdir(parents=True, exist_ok=True)

    # Opening.

    def known_layout(self, model: Hashable) -> CacheLayout | None:
        """Return the layout of what is stored for a model, and open its store; None if nothing is stored."""
        fingerprint = self._fingerprint(model)
        if fingerprint is None:
            return None
        try:
            name, digest, text = (self._folder / "layout.txt").read_text(encoding="utf-8").split("\n")
            if name != fingerprint.hex() or digest != hashlib.sha256(text.encode()).hexdigest():
                return None
            shape, found = ast.literal_eval(text)
            layers = [
                Layer(kind, getattr(theirs, class_name).__name__, options, tuple([Stack(*stack) for stack in stacks]))
                for kind, class_name, options, stacks in found
            ]
            layout = CacheLayout(shape, layers, self._block_size)
        except (OSError, ValueError, SyntaxError, TypeError, AttributeError):  # or it is of other versions
            return None
        return layout if self.open(model, layout) else None

    def open(self, model: Hashable, layout: CacheLayout) -> bool:
        """Open the store of this model and layout, unless it is open. Returns whether there is one."""
        fingerprint = self._fingerprint(model)
        if fingerprint is None:
            return False
        if self._opened == (fingerprint, layout.key):
            return self._store is not None
        self.close()
        self._opened = fingerprint, layout.key
        text = repr(_plain(layout.key))
        whole = hashlib.sha256(fingerprint + text.encode() + _FORMAT.encode()).digest()
        try:
            self._store = DiskStore(
                self._folder / "store",
                fingerprint=whole,
                num_block_bytes=layout.block_bytes if layout.num_rows else 1 << 16,
                block_size=self._block_size,
                max_bytes=self._options.max_bytes,
                secret=self._options.secret,
            )
            scratch = self._folder / "layout.new"
            digest = hashlib.sha256(text.encode()).hexdigest()
            scratch.write_text(f"{fingerprint.hex()}\n{digest}\n{text}", encoding="utf-8")
            scratch.replace(self._folder / "layout.txt")
            remembered = self._store.remembered()
        except (DiskError, OSError, InvalidArgumentError) as error:
            _LOG.warning("nothing is kept on the disk: %s", error)
            self.close()
            self._opened = fingerprint, layout.key
            return False
        self._slot_bytes = layout.block_bytes if layout.num_rows else 1 << 16
        self._free = sorted(set(range(self._store.num_slots)) - {slot for slot, _ in remembered}, reverse=True)
        for slot, identity in remembered:
            self._drop(identity)  # an older slot for the same
            if not identity.extra_keys or self._chunk_of(identity) is not None:
                self._note(slot, identity)
            else:
                self._free.append(slot)
        return True

    def close(self) -> None:
        """Write what is waiting, and close the store. The next `open` opens it again."""
        while self._jobs:
            self._end_job()
        if self._store is not None:
            try:
                self._store.close()
            except DiskError as error:
                _LOG.warning("%s", error)
        self._store = self._opened = None
        for kept in (self._slots, self._tails, self._chunks):
            kept.clear()

    def _fingerprint(self, model: Hashable) -> bytes | None:
        if self._model is None or self._model[0] != model:
            self._model = model, _fingerprint_of(model, self._options.fingerprint)
            if self._model[1] is None:
                _LOG.warning("nothing is kept on the disk: %r names no files of a model that can be read", model)
        return self._model[1]

    # What is stored.

    def _note(self, slot: int, identity: BlockIdentity) -> None:
        self._slots[identity.digest()] = slot
        chunk = self._chunk_of(identity)
        if chunk is not None:
            self._chunks[slot] = chunk
            self._tails.setdefault(chunk.above, {})[chunk.tail] = chunk.total

    def _drop(self, identity: BlockIdentity, slot: int | None = None) -> None:
        """Forget a block, if it is there. slot: only if it is in this one."""
        digest = identity.digest()
        if digest in self._slots and slot in (None, self._slots[digest]):
            own = self._slots.pop(digest)
            self._free.append(own)
            self._leave(own)

    def _leave(self, slot: int) -> None:
        """Forget the piece that has a chunk in this slot, since it isn't whole any more."""
        chunk = self._chunks.pop(slot, None)
        tails = {} if chunk is None else self._tails.get(chunk.above, {})
        if chunk is not None and tails.get(chunk.tail) == chunk.total:
            del tails[chunk.tail]
            if not tails:
                del self._tails[chunk.above]

    def _chunk_of(self, identity: BlockIdentity) -> "_Chunk | None":
        """Return what a chunk belongs to. None if there can be no such chunk, since the index is not verified."""
        keys = identity.extra_keys
        if self._store is None or len(keys) != calcsize(_HEAD) + 32:
            return None
        mark, length, index, total = unpack_from(_HEAD, keys)
        if mark != _PIECE or length >= self._block_size or not index < total <= self._store.num_slots // 2:
            return None
        return _Chunk(identity.parent, (length, keys[-32:]), total)

    # Finding and reading.

    def identities(self, packed: Any, num_blocks: int) -> Iterator[BlockIdentity]:
        """Yield the identities of a prompt's first `num_blocks` blocks. packed: u32 tokens."""
        above, raw, size = b"", packed.tobytes(), 4 * self._block_size
        for number in range(num_blocks):
            identity = BlockIdentity(above, b"", raw[number * size : (number + 1) * size])
            yield identity
            above = identity.digest()

    def path(self, packed: Any) -> list[BlockIdentity]:
        """Return the identities of a prompt's stored blocks, up to the first that is missing."""
        found = []
        for identity in self.identities(packed, len(packed) // self._block_size):
            if identity.digest() not in self._slots:
                break
            found.append(identity)
        return found

    def ends(self, packed: Any, path: Sequence[BlockIdentity]) -> list[int]:
        """Return where the stored pieces of this prompt end, as numbers of tokens, ascending."""
        raw, found = packed.tobytes(), []
        for number in range(len(path) + 1):
            start = number * self._block_size
            for length, tail in self._tails.get(path[number - 1].digest() if number else b"", {}):
                own = raw[4 * start : 4 * (start + length)]
                if start + length <= len(packed) and hashlib.sha256(own).digest() == tail:
                    found.append(start + length)
        return sorted(found)

    def read_blocks(self, layout: CacheLayout, identities: Sequence[BlockIdentity]) -> list[list[mx.array]]:
        """Return the rows of stored blocks, up to the first that can't be read or verified."""
        found = []
        for identity in identities:
            raw = self._read(identity, self._slot_bytes)
            if raw is None:
                break
            found.append(layout.block_of_bytes(raw, self._block_size))
        return found

    def read_piece(self, packed: Any, path: Sequence[BlockIdentity], num_tokens: int) -> StoredPiece | None:
        """Return the piece that ends after `num_tokens` tokens; None if it is missing or can't be verified."""
        number = num_tokens // self._block_size
        above = path[number - 1].digest() if number else b""
        tail = packed[number * self._block_size : num_tokens].tobytes()
        total = self._tails.get(above, {}).get((len(tail) // 4, hashlib.sha256(tail).digest()))
        parts = [] if total is None else [self._chunk(above, tail, index, total) for index in range(total)]
        chunks = [self._read(part, self._slot_bytes) for part in parts]
        if not chunks or any(chunk is None for chunk in chunks):
            return None
        return _unpack(b"".join([chunk for chunk in chunks if chunk is not None]), tail, num_tokens)

    def _read(self, identity: BlockIdentity, num_bytes: int) -> bytes | None:
        slot = self._slots.get(identity.digest())
        if slot is None or self._store is None:
            return None
        out = bytearray(num_bytes)
        while self._jobs:  # what was placed is there when it is written
            self._end_job()
        try:
            if self._store.read([slot], [identity], out) == 1:
                self._slots.move_to_end(identity.digest())
                self._store.note_used([slot])
                return bytes(out)
        except DiskError as error:
            _LOG.warning("%s", error)
        self._drop(identity, slot)  # so that it is stored again
        return None

    def _chunk(self, above: bytes, tail: bytes, index: int, total: int) -> BlockIdentity:
        keys = pack(_HEAD, _PIECE, len(tail) // 4, index, total) + hashlib.sha256(tail).digest()
        return BlockIdentity(above, keys, b"\0" * (4 * self._block_size))

    # Writing.

    def store(self, packed: Any, blocks: Sequence[tuple[int, list[mx.array]]], pieces: Sequence[StoredPiece]) -> None:
        """Queue the writing of a prompt's blocks and pieces that aren't stored yet. blocks: all of them, by number."""
        if self._store is None:
            return
        while self._jobs and self._jobs[0].done():
            self._end_job()
        identities = list(self.identities(packed, len(packed) // self._block_size))
        items: list[tuple[BlockIdentity, bytes]] = []
        for number, rows in blocks:
            if identities[number].digest() not in self._slots:
                raw = b"".join([_bytes_of(array) for array in rows])
                items.append((identities[number], raw.ljust(self._slot_bytes, b"\0")))
        for piece in pieces:
            number = piece.num_tokens // self._block_size
            above = identities[number - 1].digest() if number else b""
            tail = packed[number * self._block_size : piece.num_tokens].tobytes()
            if self._has_piece(above, tail):
                continue
            raw = _packed(piece, tail)
            total = -(-len(raw) // self._slot_bytes)
            if total <= self._store.num_slots // 2:
                for index in range(total):
                    part = raw[index * self._slot_bytes : (index + 1) * self._slot_bytes]
                    items.append((self._chunk(above, tail, index, total), part.ljust(self._slot_bytes, b"\0")))
        for identity in reversed(identities):  # the first blocks become the most recently used
            if identity.digest() in self._slots:
                self._slots.move_to_end(identity.digest())
        placed = [(self._place(identity), identity, raw) for identity, raw in items[: self._store.num_slots // 2]]
        while len(self._jobs) >= _MOST_JOBS:
            self._end_job()
        self._jobs.append(self._writer.submit(_write, self._store, placed))

    def _has_piece(self, above: bytes, tail: bytes) -> bool:
        total = self._tails.get(above, {}).get((len(tail) // 4, hashlib.sha256(tail).digest()), 0)
        chunks = [self._chunk(above, tail, index, total).digest() for index in range(total)]
        return bool(chunks) and all(digest in self._slots for digest in chunks)

    def _place(self, identity: BlockIdentity) -> int:
        """Return the slot for a block: its own, a free one, or that of the least recently used."""
        digest = identity.digest()
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._leave(slot)
        self._note(slot, identity)
        return slot

    def _end_job(self) -> None:
        """Wait for the oldest job, and forget what it couldn't write, so that it is stored again."""
        for slot, identity, _ in self._jobs.popleft().result():
            self._drop(identity, slot)


def _write(store: DiskStore, placed: Sequence[Placed]) -> list[Placed]:
    """Write blocks. Return those from the first on that couldn't be written."""
    number = 0
    try:
        for slot, identity, raw in placed:
            store.write([slot], [identity], raw)
            number += 1
    except DiskError as error:
        _LOG.warning("%s", error)
    try:
        store.remember({slot: identity for slot, identity, _ in placed[:number]})
        store.remember(dict.fromkeys([slot for slot, _, _ in placed[number:]]))
        store.sync()
    except DiskError as error:  # the next sync tries it again
        _LOG.warning("%s", error)
    return [*placed[number:]]


def _plain(key: Any) -> Any:
    """Return nested plain tuples, whose repr `ast.literal_eval` reads."""
    return tuple([_plain(part) for part in key]) if isinstance(key, tuple) else key


def _fingerprint_of(model: Hashable, given: bytes | None) -> bytes | None:
    """Return 32 bytes that name the weights of a model; None if nothing is known of them."""
    digest = hashlib.sha256(repr(model).encode())
    if given is not None:
        digest.update(given)
        return digest.digest()
    folders = [_folder_of(part) for part in (model if isinstance(model, tuple) else (model,)) if part is not None]
    if not folders or None in folders:
        return None
    try:
        for folder in folders:
            files = {file for pattern in _WEIGHTS for file in Path(str(folder)).glob(pattern)}
            for file in sorted(files):
                found = file.resolve().stat()
                digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    except OSError:  # such as a link to a file that is gone
        return None
    return digest.digest()


def _folder_of(part: object) -> Path | None:
    """Return the folder of a model: the path itself, or where the hub's files of that name are."""
    if not isinstance(part, str):
        return None
    if Path(part).is_dir():
        return Path(part)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(part, local_files_only=True))
    except (OSError, ValueError):
        return None


def _bytes_of(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array).view(mx.uint8))) if array.size else b""


def _array_of(raw: bytes, shape: Sequence[int], dtype: str) -> mx.array:
    kind: Any = getattr(mx, dtype.rpartition(".")[2])
    return mx.array(np.frombuffer(raw, np.uint8)).view(kind).reshape(shape) if raw else mx.zeros(shape, kind)


def _packed(piece: StoredPiece, tail: bytes) -> bytes:
    """Return a piece as bytes: their checksum and number, then the lengths of a description and of the tail's tokens,
    these two, and the arrays.
    """
    states = piece.states or []
    arrays = [*piece.rows, *[rows for _, rows in piece.windows.values()]]
    arrays += [array for own, _ in states for array in own]
    head = {
        "rows": len(piece.rows),
        "windows": [(stack, first) for stack, (first, _) in piece.windows.items()],
        "states": None if piece.states is None else [(len(own), list(options)) for own, options in states],
        "arrays": [(list(array.shape), str(array.dtype)) for array in arrays],
    }
    text = json.dumps(head).encode()
    body = pack("<II", len(text), len(tail)) + text + tail + b"".join([_bytes_of(array) for array in arrays])
    return hashlib.sha256(body).digest() + pack("<Q", len(body)) + body


def _unpack(whole: bytes, tail: bytes, num_tokens: int) -> StoredPiece | None:
    raw = whole[40 : 40 + unpack_from("<Q", whole, 32)[0]]
    if hashlib.sha256(raw).digest() != whole[:32]:
        return None  # of chunks that were written at different times
    num_text, num_tail = unpack_from("<II", raw)
    head = json.loads(raw[8 : 8 + num_text])
    place = 8 + num_text + num_tail
    if raw[8 + num_text : place] != tail:
        return None
    arrays = []
    for shape, dtype in head["arrays"]:
        end = place + int(np.prod(shape)) * int(getattr(mx, dtype.rpartition(".")[2]).size)
        arrays.append(_array_of(raw[place:end], shape, dtype))
        place = end
    left = iter(arrays)
    rows = [next(left) for _ in range(head["rows"])]
    windows = {stack: (first, next(left)) for stack, first in head["windows"]}
    states = None
    if head["states"] is not None:
        states = [([next(left) for _ in range(number)], tuple(options)) for number, options in head["states"]]
    return StoredPiece(num_tokens, rows, windows, states)
