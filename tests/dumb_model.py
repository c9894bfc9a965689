"""What the manager must do, said as plainly as possible: tuples of tokens, a dict and a list. No run, link or hash."""

from dataclasses import dataclass, field

Prefix = tuple[object, ...]


@dataclass(eq=False)
class ModelSequence:
    """A sequence as the model sees it. `keys`: (start, end, key) spans."""

    name: str
    tokens: list[int]
    salt: str | None = None
    lora: str | None = None
    keys: tuple[tuple[int, int, str], ...] = ()
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_readonly_blocks: int = 0
    num_registered: int = 0
    is_allocated: bool = False
    is_of_this_epoch: bool = False

    def prefix(self, num_blocks: int, block_size: int) -> Prefix:
        """Everything that the KV of the first `num_blocks` blocks depends on."""
        end = num_blocks * block_size
        touching = sorted(key for key in self.keys if key[0] < end)
        return (self.salt, self.lora, tuple(self.tokens[:end]), tuple(touching))


class DumbModel:
    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.queue = list(range(num_blocks))
        self.owners = dict.fromkeys(range(num_blocks), 0)
        self.content: dict[int, Prefix] = {}
        self.cached: dict[Prefix, list[int]] = {}

    def hit(self, sequence: ModelSequence) -> list[int]:
        blocks: list[int] = []
        if self.enable_caching:
            for n in range(1, len(sequence.tokens) // self.block_size + 1):
                holders = self.cached.get(sequence.prefix(n, self.block_size))
                if not holders:
                    break
                blocks.append(holders[0])
        return blocks

    def grow(self, sequence: ModelSequence, end: int, hit: list[int]) -> bool:
        """Make room for the first `end` tokens. False, with nothing changed, when the pool can't serve it."""
        table = hit if not sequence.is_allocated else sequence.table
        num_missing = max(0, -(-end // self.block_size) - len(table))
        if num_missing > len(self.queue) - sum(1 for block in hit if block in self.queue):
            return False
        if not sequence.is_allocated:
            sequence.is_allocated = sequence.is_of_this_epoch = True
            for block in hit:
                if block in self.queue:
                    self.queue.remove(block)
                self.owners[block] += 1
            sequence.table = list(hit)
            sequence.num_readonly_blocks = sequence.num_registered = len(hit)
        self.take(sequence, num_missing)
        sequence.num_computed = end
        self.register(sequence)
        return True

    def take(self, sequence: ModelSequence, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block = self.queue.pop(0)
            self.forget(block)
            self.owners[block] = 1
            sequence.table.append(block)

    def register(self, sequence: ModelSequence) -> None:
        if not self.enable_caching or not sequence.is_of_this_epoch:
            return
        for position in range(sequence.num_registered, sequence.num_computed // self.block_size):
            if position and sequence.table[position - 1] not in self.content:
                return
            prefix = sequence.prefix(position + 1, self.block_size)
            self.content[sequence.table[position]] = prefix
            self.cached.setdefault(prefix, []).append(sequence.table[position])
            sequence.num_registered = position + 1

    def forget(self, block: int) -> None:
        prefix = self.content.pop(block, None)
        if prefix is None:
            return
        self.cached[prefix].remove(block)
        if not self.cached[prefix]:
            for longer in [other for other in self.cached if self.hangs_from(other, prefix)]:
                for holder in self.cached.pop(longer):
                    self.content.pop(holder, None)

    def hangs_from(self, longer: Prefix, prefix: Prefix) -> bool:
        salt, lora, tokens, keys = prefix
        end = len(tokens)  # type: ignore[arg-type]
        return (
            longer[:2] == (salt, lora)
            and longer[2][:end] == tokens  # type: ignore[index]
            and tuple(key for key in longer[3] if key[0] < end) == keys  # type: ignore[attr-defined]
        )

    def free(self, sequence: ModelSequence) -> None:
        for block in reversed(sequence.table):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.queue.append(block)
        sequence.table = []
        sequence.num_computed = sequence.num_readonly_blocks = sequence.num_registered = 0
        sequence.is_allocated = sequence.is_of_this_epoch = False

    def abort(self, sequence: ModelSequence, num_computed: int) -> None:
        first = max(sequence.num_readonly_blocks, num_computed // self.block_size)
        for block in reversed(sequence.table[first:]):
            self.forget(block)
        self.free(sequence)

    def reset(self, sequences: list[ModelSequence]) -> None:
        self.content.clear()
        self.cached.clear()
        for sequence in sequences:
            sequence.is_of_this_epoch = False
