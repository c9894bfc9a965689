"""What the manager must do, said as plainly as possible: tuples of tokens, a dict and a list. No run, link or hash."""

from collections import Counter
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
    num_prompt: int = 0
    num_computed: int = 0
    num_readonly: int = 0
    num_registered: int = 0
    is_allocated: bool = False
    is_of_this_epoch: bool = False
    delayed: int | None = None  # the first token that isn't to be cached yet
    num_given: int = 0  # the first tokens that it was given by a hit or a fork, in part of a block, too
    lost: int | None = None  # the first token whose KV was never written, or is bad
    first_own: int = 0  # the first token that it computes or loads itself
    in_flight: int = 0  # how many of its last tokens the next call that makes room is told to be in flight
    session: object = None

    @property
    def written(self) -> int:
        """Tokens whose KV is there, as far as anybody said, so that they may be cached."""
        ends = [self.num_computed, self.delayed, self.lost]
        return min(end for end in ends if end is not None)

    def lose(self, first: int, block_size: int) -> None:
        """Its KV from token `first` on isn't there."""
        if first < (self.num_computed if self.lost is None else self.lost):
            self.lost = first
            self.num_registered = min(self.num_registered, first // block_size)

    def write(self, num_tokens: int) -> None:
        """It says that its first `num_tokens` tokens are written. Only others can say so of what it was given."""
        end = None if num_tokens >= self.num_computed else num_tokens
        if self.delayed is not None:
            self.delayed = end if end is None else max(end, self.delayed)
        if self.lost is not None and self.lost >= self.first_own:
            self.lost = end if end is None else max(end, self.lost)

    def settle(self) -> None:
        """What has no slots any more is neither delayed nor lost."""
        if self.delayed is not None and self.delayed >= self.num_computed:
            self.delayed = None
        if self.lost is not None and self.lost >= self.num_computed:
            self.lost = None

    def delay(self, first: int) -> None:
        if self.delayed is None:
            self.delayed = first

    def prefix(self, num_blocks: int, block_size: int) -> Prefix:
        """Everything that the KV of the first `num_blocks` blocks depends on."""
        end = num_blocks * block_size
        touching = sorted(key for key in self.keys if key[0] < end)
        return (self.salt, self.lora, tuple(self.tokens[:end]), tuple(touching))


@dataclass(eq=False)
class ModelPin:
    """A pinned prefix: the priority of each of its blocks, and those that it holds."""

    prefix: ModelSequence
    priorities: list[int]
    expires_at: float | None
    held: list[int] = field(default_factory=list)


class ReferenceModel:
    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True, first_block: int = 0) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.now = 0.0  # the caller's clock
        self.queue = list(range(first_block, first_block + num_blocks))
        self.detached: set[int] = set()  # cached no more, though nobody took them
        self.owners = dict.fromkeys(self.queue, 0)
        self.content: dict[int, Prefix] = {}
        self.cached: dict[Prefix, list[int]] = {}
        self.gone: dict[Prefix, str] = {}
        self.copies: list[tuple[int, int]] = []
        self.pins: list[ModelPin] = []
        self.quotas: dict[str | None, int] = {}
        self.default_quota: int | None = None
        self.over: list[str | None] = []
        self.running: list[ModelSequence] = []

    def hit(self, sequence: ModelSequence, max_tokens: int | None = None) -> list[int]:
        num_tokens = len(sequence.tokens) if max_tokens is None else min(max_tokens, len(sequence.tokens))
        blocks: list[int] = []
        if self.enable_caching:
            for n in range(1, num_tokens // self.block_size + 1):
                holders = self.cached.get(sequence.prefix(n, self.block_size))
                if not holders:
                    break
                blocks.append(holders[0])
        return blocks

    # Making room.

    def grow(self, sequence: ModelSequence, end: int, hit: list[int], num_lookahead: int = 0) -> bool:
        """Make room for the first `end` tokens. False, with nothing changed, when the pool can't serve it."""
        table = hit if not sequence.is_allocated else sequence.table
        num_missing = max(0, -(-(end + num_lookahead) // self.block_size) - len(table))
        if not self.can_take(num_missing + (sequence.is_allocated and self.must_copy(sequence)), hit):
            return False
        if not sequence.is_allocated:
            sequence.is_allocated = sequence.is_of_this_epoch = True
            self.running.append(sequence)
            self.hold(hit)
            sequence.table = list(hit)
            sequence.num_registered = len(hit)
            sequence.num_readonly = sequence.num_given = sequence.first_own = len(hit) * self.block_size
        self.add_blocks(sequence, num_missing, self.must_copy(sequence))
        sequence.num_computed = end
        self.register(sequence)
        return True

    def num_needed(self, sequence: ModelSequence, num_tokens: int, hit: list[int]) -> int:
        """Free blocks that room for the first `num_tokens` tokens takes."""
        table = sequence.table if sequence.is_allocated else hit
        num_missing = max(0, -(-num_tokens // self.block_size) - len(table))
        if sequence.is_allocated:
            return num_missing + (num_tokens > sequence.num_computed and self.must_copy(sequence))
        return num_missing + len([block for block in hit if block in self.queue])

    def step(self, sequences: list[ModelSequence], tokens: list[int]) -> list[tuple[int, int, int]] | None:
        """One token for each: what changed, (index in the step, index in its table, block); None: not served."""
        leaving: Counter[int] = Counter()
        changing: list[tuple[int, int]] = []
        for i, sequence in enumerate(sequences):
            position = len(sequence.tokens) // self.block_size
            if position == len(sequence.table):
                changing.append((i, position))
            elif len(sequence.tokens) % self.block_size:
                block = sequence.table[position]
                if block in self.content or self.owners[block] - leaving[block] > 1:
                    leaving[block] += 1
                    changing.append((i, position))
        if not self.can_take(len(changing), []):
            return None
        blocks = self.take(len(changing))
        changes = []
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
            sequence.num_computed += 1
        for (i, position), block in zip(changing, blocks, strict=True):
            self.put(sequences[i], position, block)
            changes.append((i, position, block))
        for sequence in sequences:
            self.register(sequence)
        return changes

    def must_copy(self, sequence: ModelSequence) -> bool:
        """Whether its next token would be written to a block that somebody else reads."""
        if sequence.num_computed % self.block_size == 0:
            return False
        block = sequence.table[sequence.num_computed // self.block_size]
        return self.owners[block] > 1 or block in self.content

    def add_blocks(self, sequence: ModelSequence, num_missing: int, must_copy: bool) -> list[int]:
        blocks = self.take(num_missing + must_copy)
        new = list(blocks)
        if must_copy:
            self.put(sequence, sequence.num_computed // self.block_size, blocks.pop(0))
        for block in blocks:
            self.put(sequence, len(sequence.table), block)
        return new

    def put(self, sequence: ModelSequence, position: int, block: int) -> None:
        if position < len(sequence.table):
            self.copies.append((sequence.table[position], block))
            self.extend_pins(sequence)
            self.drop([sequence.table[position]])
            sequence.table[position] = block
            sequence.num_readonly = min(sequence.num_readonly, position * self.block_size)
            sequence.num_given = min(sequence.num_given, position * self.block_size)
        else:
            sequence.table.append(block)

    def can_take(self, num_blocks: int, hit: list[int]) -> bool:
        free = [block for block in self.queue if block not in hit]
        soft = Counter(b for pin in self.pins for b, p in zip(pin.held, pin.priorities, strict=False) if p < 100)
        given = [block for block, count in soft.items() if self.owners[block] == count and block not in hit]
        return num_blocks <= len(free) + len(given)

    def take(self, num_blocks: int) -> list[int]:
        while len(self.queue) < num_blocks:
            pin = min((pin for pin in self.pins if pin.held), key=lambda pin: pin.priorities[len(pin.held) - 1])
            self.drop([pin.held.pop()])
        if self.over:
            return [self.take_fairly() for _ in range(num_blocks)]
        blocks = self.queue[:num_blocks]
        self.take_each(blocks)
        return blocks

    def take_fairly(self) -> int:
        block = self.queue[0]
        if block in self.content:
            for salt in self.over:
                theirs = [other for other in self.queue if other in self.content and self.content[other][0] == salt]
                if theirs:
                    block = theirs[0]
                    break
        self.take_each([block])
        return block

    def take_each(self, blocks: list[int]) -> None:
        for block in blocks:
            self.queue.remove(block)
            self.owners[block] = 1
        for block in blocks:
            self.forget(block, "evicted")
        self.requeue_detached()

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.queue:
                self.queue.remove(block)
            self.owners[block] += 1

    def drop(self, blocks: list[int]) -> list[int]:
        """What is cached joins the end of the queue, what holds nothing its front; the table's last one first.

        Returns the blocks, and behind a duplicate the block that was renewed for it.
        """
        empty = []
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                (self.queue if block in self.content else empty).append(block)
        self.queue[:0] = empty
        return self.drop_duplicates(blocks)

    def drop_duplicates(self, blocks: list[int]) -> list[int]:
        """A free block is no duplicate: the first block that holds its prefix takes its place, or has an owner."""
        released = []
        for block in blocks:
            released.append(block)
            holders = self.cached[self.content[block]] if block in self.content else [block]
            if not self.owners[block] and holders[0] != block:
                if not self.owners[holders[0]]:
                    self.renew_before(holders[0], block)
                    released.append(holders[0])
                holders.remove(block)
                del self.content[block]
                self.detached.add(block)
        self.requeue_detached()
        self.note_counts()
        return released

    def renew_before(self, block: int, other: int) -> None:
        self.queue.remove(block)
        self.queue.insert(self.queue.index(other), block)

    def requeue_detached(self) -> None:
        """What stopped being cached while it was queued is taken next."""
        for block in sorted(self.detached, reverse=True):
            if block in self.queue:
                self.queue.remove(block)
                self.queue.insert(0, block)
        self.detached.clear()

    # What is cached.

    def register(self, sequence: ModelSequence) -> None:
        sequence.settle()
        if not self.enable_caching or not sequence.is_of_this_epoch or sequence.written < sequence.num_computed:
            return
        for position in range(sequence.num_registered, sequence.written // self.block_size):
            assert not position or sequence.table[position - 1] in self.content, (
                f"{sequence.name}: block {position} is cached, and not the one before it"
            )
            if sequence.table[position] not in self.content:  # else somebody who shares it has cached it
                prefix = sequence.prefix(position + 1, self.block_size)
                self.content[sequence.table[position]] = prefix
                self.cached.setdefault(prefix, []).append(sequence.table[position])
            sequence.num_registered = position + 1
        self.note_counts()

    def commit(self, sequence: ModelSequence, num_written: int) -> None:
        """The first `num_written` tokens are written, as far as the sequence was to write them: what they fill is
        cached, unless it is already.
        """
        before = sequence.written
        sequence.write(num_written)
        if sequence.written > before and self.enable_caching and sequence.is_of_this_epoch:
            self.cache_from(sequence, sequence.num_registered)

    def cache_from(self, sequence: ModelSequence, first: int) -> None:
        sequence.num_registered = sequence.written // self.block_size
        for position, block in enumerate(sequence.table[: sequence.num_registered]):
            if position >= first and block not in self.content:
                prefix = sequence.prefix(position + 1, self.block_size)
                self.content[block] = prefix
                self.cached.setdefault(prefix, []).append(block)
        self.note_counts()

    def note_counts(self) -> None:
        """Keep who is over a quota, longest first."""
        quotas = self.all_quotas()
        now = [salt for salt, quota in quotas.items() if self.num_cached(salt) > quota]
        self.over = [salt for salt in self.over if salt in now]
        self.over += sorted((salt for salt in now if salt not in self.over), key=lambda salt: salt or "")

    def set_quota(self, salt: str | None, quota: int | None) -> None:
        self.quotas.pop(salt, None)
        if quota is not None:
            self.quotas[salt] = quota
        self.over = []
        self.note_counts()

    def set_default_quota(self, quota: int | None) -> None:
        self.default_quota = quota
        self.over = []
        self.note_counts()

    def forget(self, block: int, cause: str) -> None:
        prefix = self.content.pop(block, None)
        if prefix is None:
            return
        self.cached[prefix].remove(block)
        if cause in ("aborted", "dropped"):
            self.detached.add(block)
        if not self.cached[prefix]:
            for longer in [other for other in self.cached if self.hangs_from(other, prefix)]:
                self.gone[longer] = cause
                for holder in self.cached.pop(longer):
                    self.content.pop(holder, None)
                    self.detached.add(holder)
        self.note_counts()

    def hangs_from(self, longer: Prefix, prefix: Prefix) -> bool:
        salt, lora, tokens, keys = prefix
        end = len(tokens)  # type: ignore[arg-type]
        return (
            longer[:2] == (salt, lora)
            and longer[2][:end] == tokens  # type: ignore[index]
            and tuple(key for key in longer[3] if key[0] < end) == keys  # type: ignore[attr-defined]
        )

    def num_cached(self, salt: str | None) -> int:
        return sum(1 for prefix in self.content.values() if prefix[0] == salt)

    def all_quotas(self) -> dict[str | None, int]:
        salts = {prefix[0] for prefix in self.content.values()} - {None}
        default = {} if self.default_quota is None else dict.fromkeys(salts, self.default_quota)
        return default | self.quotas  # type: ignore[operator]

    # What ends, parts and goes back.

    def free(self, sequence: ModelSequence) -> None:
        self.extend_pins(sequence)
        self.drop(sequence.table)
        sequence.table = []
        sequence.num_computed = sequence.num_readonly = sequence.num_given = sequence.num_registered = 0
        sequence.first_own = 0
        sequence.is_allocated = sequence.is_of_this_epoch = False
        sequence.delayed = sequence.lost = None
        self.running.remove(sequence)

    def abort(self, sequence: ModelSequence, num_computed: int) -> None:
        self.lose_behind(sequence, num_computed)
        self.free(sequence)

    def lose_behind(self, sequence: ModelSequence, num_computed: int) -> None:
        """What a sequence was to write behind its first `num_computed` tokens was never written.

        That isn't what it awaits, such as tokens of a transfer. It is what it lost before: others may have it still.
        """
        blocks = self.own_blocks(sequence, num_computed)
        if blocks:
            self.lose(dict.fromkeys(blocks, max(sequence.num_given, num_computed)), "aborted")

    def own_blocks(self, sequence: ModelSequence, first: int) -> list[int]:
        """The blocks with what a sequence wrote behind its first `first` tokens, each table's last one first."""
        start, end = max(sequence.num_given, first), sequence.num_computed
        end = end if sequence.delayed is None else sequence.delayed
        if start >= end:
            return []
        tables = [table[start // size : -(-end // size)] for table, size in self.tables_of(sequence)]
        return [block for table in tables for block in reversed(table) if block is not None]

    def evict(self, blocks: list[int]) -> list[ModelSequence]:
        """These blocks are bad, and so is what was computed from them. Returns who must compute something again."""
        before = [(sequence, sequence.written) for sequence in self.running]
        bad, num_before = dict.fromkeys(blocks, 0), -1
        while len(bad) > num_before:
            num_before = len(bad)
            for sequence in self.running:
                first = self.first_lost_in(sequence, bad)
                if first is not None:
                    bad = dict.fromkeys(self.own_blocks(sequence, first), first) | bad
        self.lose(bad, "dropped")
        return [sequence for sequence, written in before if sequence.written < written]

    def first_lost_in(self, sequence: ModelSequence, lost: dict[int, int]) -> int | None:
        """The first token of a sequence that is in one of these blocks, and isn't written nevertheless."""
        held = [(block, i * size) for table, size in self.tables_of(sequence) for i, block in enumerate(table)]
        return min((max(start, lost[block]) for block, start in held if block in lost), default=None)

    def lose(self, lost: dict[int, int], cause: str) -> None:
        """The KV of these blocks isn't there, but for so many first tokens. Whoever has one loses all from there on.

        Whether they are cached changes nothing about that.
        """
        for block in lost:
            self.forget(block, cause)
        for sequence in self.running:
            first = self.first_lost_in(sequence, lost)
            if first is not None:
                sequence.lose(first, self.block_size)
        self.requeue_detached()
        self.shrink_pins()

    def tables_of(self, sequence: ModelSequence) -> list[tuple[list[int], int]]:
        """Its tables, with the block size of each. None: a dead entry."""
        return [(sequence.table, self.block_size)]

    def rewind(self, sequence: ModelSequence, num_tokens: int) -> None:
        """Keep the tokens, and slots for the first of them; what comes behind them was never written."""
        tokens = list(sequence.tokens)
        self.truncate(sequence, num_tokens, num_tokens)
        sequence.tokens = tokens

    # Holds: of each table a list.

    def full_tables(self, sequence: ModelSequence, num_tokens: int) -> list[list[int]]:
        return [sequence.table[: num_tokens // self.block_size]]

    def all_tables(self, sequence: ModelSequence) -> list[list[int]]:
        return [list(sequence.table)]

    def release(self, tables: list[list[int]]) -> None:
        for table in tables:
            self.drop([block for block in table if block is not None])

    def reset(self, sequences: list[ModelSequence]) -> None:
        self.gone |= dict.fromkeys(self.cached, "reset")
        self.content.clear()
        self.cached.clear()
        for sequence in sequences:
            sequence.is_of_this_epoch = False
        self.over = []
        self.shrink_pins()

    def forget_salt(self, salt: str | None, sequences: list[ModelSequence]) -> None:
        for block in [block for block, prefix in self.content.items() if prefix[0] == salt]:
            self.forget(block, "dropped")
        self.requeue_detached()
        self.shrink_pins()
        for sequence in sequences:
            if sequence.salt == salt:
                sequence.is_of_this_epoch = False

    def renew(self, sequence: ModelSequence) -> None:
        sequence.is_of_this_epoch = True
        self.cache_from(sequence, 0)

    def fork(self, sequence: ModelSequence, name: str) -> ModelSequence:
        table = sequence.table[: -(-sequence.num_computed // self.block_size)]
        self.hold(table)
        child = ModelSequence(
            name,
            list(sequence.tokens),
            sequence.salt,
            sequence.lora,
            sequence.keys,
            table,
            sequence.num_prompt,
            sequence.num_computed,
            max(sequence.num_readonly, sequence.num_computed // self.block_size * self.block_size),
            sequence.num_registered,
            is_allocated=True,
            is_of_this_epoch=sequence.is_of_this_epoch,
            delayed=sequence.delayed,
            lost=sequence.lost,
            num_given=sequence.num_computed,
            first_own=sequence.num_computed,
            session=sequence.session,
        )
        self.running.append(child)
        return child

    def truncate(self, sequence: ModelSequence, num_tokens: int, num_computed: int | None) -> None:
        if num_computed is not None:
            self.lose_behind(sequence, num_computed)
        self.extend_pins(sequence)
        num_kept = -(-num_tokens // self.block_size)
        self.drop(sequence.table[num_kept:])
        del sequence.table[num_kept:], sequence.tokens[num_tokens:]
        num_left = min(sequence.num_computed, num_tokens)
        sequence.num_computed = num_left
        sequence.settle()
        sequence.num_registered = min(sequence.num_registered, num_left // self.block_size)
        sequence.num_readonly = min(sequence.num_readonly, num_left // self.block_size * self.block_size)
        sequence.num_given = min(sequence.num_given, num_left)
        sequence.first_own = min(sequence.first_own, num_left)

    # Pins.

    def pin(self, pin: ModelPin) -> None:
        self.pins.append(pin)
        self.extend_pin(pin)

    def unpin(self, pin: ModelPin) -> None:
        self.pins.remove(pin)
        self.extend_pins(pin.prefix)
        self.drop(pin.held)

    def extend_pins(self, sequence: ModelSequence) -> None:
        """Pins hold what they lack when a sequence that begins like them is about to let go of blocks."""
        for pin in self.pins:
            if pin.prefix.tokens[: self.block_size] == sequence.tokens[: self.block_size]:
                self.extend_pin(pin)

    def extend_pin(self, pin: ModelPin) -> None:
        more = self.hit(pin.prefix)[len(pin.held) : len(pin.priorities)]
        self.hold(more)
        pin.held += more

    def shrink_pins(self) -> None:
        for pin in self.pins:
            num_kept = next((i for i, block in enumerate(pin.held) if block not in self.content), len(pin.held))
            gone = pin.held[num_kept:]
            del pin.held[num_kept:]
            self.drop(gone)
