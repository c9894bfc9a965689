"""What a manager of several groups must do, as plainly as possible: `ReferenceModel` with a list for each table.

An attached block's content is the prefix of its node, followed by its group and its end. So it is below all prefixes
that the node is below. Anchors have numbers behind those of the pool's blocks.
"""

from collections import Counter

from kvblocks import Group
from kvblocks.core import virtual_blocks
from model.reference_model import ModelPin, ModelSequence, Prefix, ReferenceModel
from model.sight import first_seen, sees, sees_all


class ReferenceGroups(ReferenceModel):
    def __init__(
        self,
        num_blocks: int,
        specs: tuple[Group, ...],
        enable_caching: bool = True,
        first_block: int = 0,
        keeping: frozenset[int] = frozenset(),
        uncached: frozenset[int] = frozenset(),
    ) -> None:
        """keeping: the groups whose blocks that left a window are reused like others. uncached: those without hits."""
        self.keeping, self.uncached = keeping, uncached
        self.computed_from: dict[ModelSequence, dict[int, int]] = {}  # by uncached group: its first token
        full = [group for group, spec in enumerate(specs) if sees_all(spec)]
        self.primary = full[0] if full else None
        self.alignment = max(spec.block_size for spec in specs if spec.has_tokens)
        size = self.alignment if self.primary is None else specs[self.primary].block_size
        super().__init__(num_blocks, size, enable_caching, first_block)
        self.specs = specs
        self.others = [group for group in range(len(specs)) if group != self.primary]
        self.num_real = self.num_ids = first_block + num_blocks
        self.early, self.late = self.queue, []  # what holds nothing or left a window; what was freed at an end
        self.virtual: list[int] = []
        self.max_virtual = virtual_blocks.KEPT_PER_BLOCK * num_blocks
        self.tables: dict[ModelSequence, dict[int, list[int | None]]] = {}
        self.likely_ends: dict[ModelSequence, set[int]] = {}
        self.unsure: set[ModelSequence] = set()
        self.attached_blocks: dict[ModelPin, list[int]] = {}
        self.copy_groups: list[int] = []
        self.num_kept_in_flight = 0
        self.new: list[list[int]] = []

    @property
    def has_virtual(self) -> bool:
        return self.primary is None

    def order(self) -> list[int]:
        """The free blocks as they would be taken."""
        return self.early + self.late

    # Lookups.

    def numbers(self, group: int, position: int, end: int) -> set[int]:
        """The numbers of the blocks before `end` with a token that a query at `position` sees."""
        spec = self.specs[group]
        return {i // spec.block_size for i in range(end) if sees(spec, position, i)}

    def needed(self, group: int, end: int, num_tokens: int) -> list[int]:
        return sorted(self.numbers(group, end - 1 if end == num_tokens else end, end)) if end else []

    def home(self, sequence: ModelSequence, group: int, number: int) -> Prefix:
        end = (number + 1) * self.specs[group].block_size
        return (*sequence.prefix(-(-end // self.block_size), self.block_size), group, end)

    def match(self, sequence: ModelSequence, max_tokens: int | None = None) -> list[int]:
        return super().hit(sequence, max_tokens)

    def missing_group(self, sequence: ModelSequence, end: int) -> int | None:
        """A group that can't serve a hit of `end` tokens."""
        for group in self.others:
            for number in [] if group in self.uncached else self.needed(group, end, len(sequence.tokens)):
                if self.home(sequence, group, number) not in self.cached:
                    return group
        return None

    def hit(self, sequence: ModelSequence, max_tokens: int | None = None) -> list[int]:
        matched = self.match(sequence, max_tokens)
        end = len(matched) * self.block_size // self.alignment * self.alignment
        while end and self.missing_group(sequence, end) is not None:
            end -= self.alignment
        return matched[: end // self.block_size]

    def hit_tables(self, sequence: ModelSequence, hit: list[int], num_tokens: int) -> dict[int, list[int | None]]:
        """The tables that a hit gives, of a sequence that had `num_tokens` when it was looked up."""
        tables: dict[int, list[int | None]] = {}
        for group in self.others:
            end = len(hit) * self.block_size
            numbers = self.needed(group, end, num_tokens)
            if group in self.uncached:
                tables[group] = [None] * min([end // self.specs[group].block_size, *numbers])
                continue
            tables[group] = [None] * (end // self.specs[group].block_size)
            for number in numbers:
                tables[group][number] = self.cached.get(self.home(sequence, group, number), [None])[0]
        return tables

    # Making room. Tables are by group; None is the primary one.

    def grow(
        self,
        sequence: ModelSequence,
        end: int,
        hit: list[int],
        num_lookahead: int = 0,
        ends: frozenset[int] = frozenset(),
        is_whole: bool = False,
    ) -> bool:
        """Grow with a hit. ends: where it and what it matched end. is_whole: whether it was of all known tokens."""
        if sequence.is_allocated:
            served = self.serve([(sequence, sequence.num_computed, end + num_lookahead, end)]) is not None
            sequence.in_flight = 0
            return served
        hit_end = len(hit) * self.block_size
        self.tables[sequence] = self.hit_tables(sequence, hit, hit_end if is_whole else hit_end + 1)
        self.unsure.discard(sequence)
        sequence.table = list(hit)
        touched = [block for table in self.tables[sequence].values() for block in table if block is not None]
        touched += self.also_touched(sequence, hit_end)
        indices = self.wanted(sequence, None, end + num_lookahead)
        if not self.can_take(self.num_taken(indices), touched if self.has_virtual else hit + touched):
            sequence.table = []
            return False
        position = 0 if not hit else hit_end - 1 if is_whole else hit_end
        self.computed_from[sequence] = {
            group: first_seen(self.specs[group], position) if hit else 0 for group in self.uncached
        }
        self.likely_ends[sequence] = {e // self.alignment * self.alignment for e in (*ends, sequence.num_prompt)} - {0}
        sequence.is_allocated = sequence.is_of_this_epoch = True
        self.running.append(sequence)
        self.hold(hit)
        self.hold(touched)
        sequence.num_registered = len(hit)
        sequence.num_readonly = sequence.num_given = sequence.first_own = hit_end
        self.fill(sequence, indices, self.take(self.num_taken(indices)))
        sequence.num_computed = end
        self.register(sequence)
        return True

    def also_touched(self, sequence: ModelSequence, end: int) -> list[int]:
        """What a start with a hit of `end` tokens owns beside its tables."""
        return []

    def serve(self, wishes: list[tuple[ModelSequence, int, int, int]]) -> list[tuple[int, int, int, int]] | None:
        """Room for each (sequence, first token to write, slots, tokens then computed); what changed in their tables."""
        dead = Counter(block for s, start, _, _ in wishes for _, _, block in self.passed(s, start))
        num_freed = sum(count == self.owners[block] for block, count in dead.items())
        leaving: Counter[int] = Counter()
        indices = [self.wanted(sequence, start, slots, leaving) for sequence, start, slots, _ in wishes]
        if not self.can_take(sum(map(self.num_taken, indices)) - num_freed, []):
            return None
        for sequence, start, _, _ in wishes:
            self.let_pass(sequence, start)
        changes = []
        taken = [self.take(self.num_taken(found)) for found in indices]
        for i, (sequence, _, _, _) in enumerate(wishes):
            changes += [(i, *change) for change in self.fill(sequence, indices[i], taken[i])]
        for sequence, _, _, end in wishes:
            sequence.num_computed = end
            self.register(sequence)
        return changes

    def group_step(self, sequences: list[ModelSequence], tokens: list[int]) -> list[tuple[int, int, int, int]] | None:
        """Add a token to each sequence. Windows matter only where a block begins or ends, or may be shared."""
        at_boundary = [i for i, sequence in enumerate(sequences) if self.is_edge(sequence)]
        starts = [len(sequences[i].tokens) for i in at_boundary]
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
        wishes = [(sequences[i], n, n + 1, n + 1) for i, n in zip(at_boundary, starts, strict=True)]
        changes = self.serve(wishes)
        if changes is None:
            for sequence in sequences:
                sequence.tokens.pop()
            return None
        for sequence in sequences:
            sequence.num_computed = len(sequence.tokens)
        return [(at_boundary[i], group, index, block) for i, group, index, block in changes]

    def is_edge(self, sequence: ModelSequence) -> bool:
        """Whether its next token may change a table."""
        edge = min(spec.block_size for spec in self.specs)
        return not 0 < len(sequence.tokens) % edge < edge - 1 or sequence in self.unsure

    def passed(self, sequence: ModelSequence, start: int) -> list[tuple[int, int, int]]:
        """(group, index, block) of blocks that no query of a token from `start` on, or of an unwritten one, sees."""
        found = []
        seen = min(start - sequence.in_flight, start if sequence.delayed is None else sequence.delayed)
        for group in self.others:
            for index, block in enumerate(self.tables[sequence][group]):
                if block is not None and self.has_passed(group, index, seen):
                    found.append((group, index, block))
                elif block is not None and self.has_passed(group, index, start):
                    self.num_kept_in_flight += sequence.in_flight > 0
        return found

    def has_passed(self, group: int, index: int, position: int) -> bool:
        """Whether all tokens of a block come before `position`, and a query there sees none of them."""
        size = self.specs[group].block_size
        tokens = range(index * size, (index + 1) * size)
        return not any(i >= position or sees(self.specs[group], position, i) for i in tokens)

    def wanted(
        self, sequence: ModelSequence, start: int | None, slots: int, leaving: Counter[int] | None = None
    ) -> dict[int | None, list[int]]:
        """By group, the indices of the table that get a new block: all behind its end, and a shared block's to copy.

        The latter is the block of the token at `start`, if that must not be written to. leaving: how many of the step's
        sequences leave each block; the last one may keep it.
        """
        indices: dict[int | None, list[int]] = {}
        leaving = Counter() if leaving is None else leaving
        for group in [*self.others, None]:
            size = self.block_size if group is None else self.specs[group].block_size
            table = sequence.table if group is None else self.tables[sequence][group]
            indices[group] = list(range(len(table), -(-slots // size)))
            if start is not None and start % size:
                block = table[start // size]
                assert block is not None
                if block in self.content or self.owners[block] - leaving[block] > 1:
                    leaving[block] += 1
                    indices[group].insert(0, start // size)
        return indices

    def num_taken(self, indices: dict[int | None, list[int]]) -> int:
        return sum(len(found) for group, found in indices.items() if group is not None or not self.has_virtual)

    def let_pass(self, sequence: ModelSequence, start: int) -> None:
        passed = self.passed(sequence, start)
        for group in self.others:
            blocks = [(index, block) for g, index, block in passed if g == group]
            stays = [i for i, _ in blocks if group in self.keeping or self.is_likely_end(sequence, group, i)]
            kept = [block for index, block in blocks if block in self.content and index in stays]
            for index, _ in blocks:
                self.tables[sequence][group][index] = None
            self.drop([block for _, block in blocks if block not in self.content])
            for block in [block for _, block in blocks if block in self.content and block not in kept]:
                self.owners[block] -= 1
                if not self.owners[block]:
                    self.early.append(block)
            self.drop(kept)

    def is_likely_end(self, sequence: ModelSequence, group: int, index: int) -> bool:
        return any(index in self.numbers(group, end - 1, end) for end in self.likely_ends[sequence])

    def fill(
        self, sequence: ModelSequence, indices: dict[int | None, list[int]], blocks: list[int]
    ) -> list[tuple[int, int, int]]:
        """Put the blocks that were taken where they are wanted, by group; (group, index, block) of each."""
        if self.has_virtual:
            virtual_taken = [self.take_virtual() for _ in indices[None]]
            self.requeue_detached()
            for index, virtual in zip(indices[None], virtual_taken, strict=True):
                self.put_in(sequence, None, index, virtual)
        changes = []
        self.new = []
        for group in range(len(self.specs)):
            table = None if group == self.primary else group
            self.new.append(blocks[: len(indices[table])])
            for index in indices[table]:
                changes.append((group, index, blocks[0]))
                self.put_in(sequence, table, index, blocks.pop(0))
        self.unsure.discard(sequence)
        return changes

    def put_in(self, sequence: ModelSequence, group: int | None, index: int, block: int) -> None:
        table: list[int | None] = sequence.table if group is None else self.tables[sequence][group]  # type: ignore[assignment]
        if index == len(table):
            table.append(block)
            return
        source = table[index]
        assert source is not None
        self.extend_pins(sequence)
        self.drop([source])
        table[index] = block
        if source < self.num_real:
            self.copies.append((source, block))
            self.copy_groups.append(self.primary if group is None else group)  # type: ignore[arg-type]
        if group is None:
            sequence.num_readonly = min(sequence.num_readonly, index * self.block_size)
            sequence.num_given = min(sequence.num_given, index * self.block_size)

    def can_take(self, num_blocks: int, hit: list[int]) -> bool:
        free = [block for block in self.early + self.late if block not in hit]
        soft: Counter[int] = Counter()
        for pin in self.pins:
            soft.update(b for b, p in zip(pin.held, pin.priorities, strict=False) if p < 100 and b < self.num_real)
            soft.update(b for b in self.attached_blocks[pin] if pin.priorities[-1] < 100)
        given = [block for block, count in soft.items() if self.owners[block] == count and block not in hit]
        return num_blocks <= len(free) + len(given)

    def take(self, num_blocks: int) -> list[int]:
        if not num_blocks:
            return []
        while len(self.early) + len(self.late) < num_blocks:
            pin = min((pin for pin in self.pins if pin.held), key=lambda pin: pin.priorities[len(pin.held) - 1])
            if self.attached_blocks[pin]:
                self.drop_attached(pin)
            else:
                self.drop([pin.held.pop()])
        return [self.take_one() for _ in range(num_blocks)]

    def take_one(self) -> int:
        block = self.order()[0]
        self.hold([block])
        self.forget(block, "evicted")
        self.requeue_detached()
        return block

    def take_virtual(self) -> int:
        if self.virtual and (self.virtual[0] not in self.content or len(self.virtual) >= self.max_virtual):
            virtual = self.virtual.pop(0)
            self.owners[virtual] = 1
            self.forget(virtual, "evicted")
            return virtual
        self.num_ids += 1
        self.owners[self.num_ids - 1] = 1
        return self.num_ids - 1

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            for queue in (self.early, self.late, self.virtual):
                if block in queue:
                    queue.remove(block)
            self.owners[block] += 1

    def drop(self, blocks: list[int]) -> list[int]:
        empty: dict[bool, list[int]] = {False: [], True: []}
        for block in reversed(blocks):
            is_virtual = block >= self.num_real
            self.owners[block] -= 1
            if not self.owners[block]:
                queue = self.virtual if is_virtual else self.late
                (queue if block in self.content else empty[is_virtual]).append(block)
        self.early[:0], self.virtual[:0] = empty[False], empty[True]
        return self.drop_duplicates(blocks)

    def renew_before(self, block: int, other: int) -> None:
        queue = self.virtual if block >= self.num_real else self.late
        queue.remove(block)
        queue.insert(queue.index(other), block)

    def requeue_detached(self) -> None:
        for block in sorted(self.detached, reverse=True):
            for queue in (self.early, self.late, self.virtual):
                if block in queue:
                    queue.remove(block)
                    (self.virtual if queue is self.virtual else self.early).insert(0, block)
                    break
        self.detached.clear()

    # What is cached.

    def register(self, sequence: ModelSequence) -> None:
        first = sequence.num_registered
        super().register(sequence)
        if sequence.num_registered > first:
            self.attach(sequence, first)
            self.extend_pins(sequence)

    def attach(self, sequence: ModelSequence, first: int) -> None:
        for group in self.others:
            size = self.specs[group].block_size
            for number, block in enumerate(self.tables[sequence][group]):
                end = (number + 1) * size
                if not first * self.block_size < end <= sequence.num_registered * self.block_size:
                    continue
                if block is None or block in self.content or not self.is_useful(group, number):
                    continue
                if group in self.uncached:
                    continue
                home = self.home(sequence, group, number)
                older = self.cached.get(home, [])
                if older and self.owners[older[0]]:
                    continue
                for block_before in older:
                    del self.content[block_before]
                    self.detached.add(block_before)
                self.cached[home] = [block]
                self.content[block] = home
        self.requeue_detached()

    def is_useful(self, group: int, number: int) -> bool:
        """Whether any hit can need it."""
        spec = self.specs[group]
        tokens = range(number * spec.block_size, (number + 1) * spec.block_size)
        ends = [end for end in range(0, tokens.stop + 64, self.alignment) if end >= tokens.stop]
        return any(sees(spec, end - 1, i) for end in ends for i in tokens)

    def forget(self, block: int, cause: str) -> None:
        prefix = self.content.pop(block, None)
        if prefix is None:
            return
        self.cached[prefix].remove(block)
        if cause != "evicted":
            self.detached.add(block)
        if len(prefix) > 4:
            del self.cached[prefix]
            return
        is_gone = not self.cached[prefix]
        for longer in [other for other in self.cached if self.hangs_from(other, prefix)]:
            if is_gone or (cause != "evicted" and len(longer) > 4 and longer[:4] == prefix):
                for holder in self.cached.pop(longer):
                    self.content.pop(holder, None)
                    self.detached.add(holder)

    def hangs_from(self, longer: Prefix, prefix: Prefix) -> bool:
        return super().hangs_from(longer[:4], prefix)

    def renew(self, sequence: ModelSequence) -> None:
        super().renew(sequence)
        self.attach(sequence, 0)

    def commit(self, sequence: ModelSequence, num_written: int) -> None:
        first = sequence.num_registered
        super().commit(sequence, num_written)
        if self.enable_caching and sequence.is_of_this_epoch and sequence.num_registered > first:
            self.attach(sequence, first)
        self.extend_pins(sequence)

    # What ends, parts and goes back.

    def tables_of(self, sequence: ModelSequence) -> list[tuple[list[int], int]]:
        side = [(self.tables[sequence][group], self.specs[group].block_size) for group in self.others]
        return [(sequence.table, self.block_size), *side]  # type: ignore[list-item]

    def free(self, sequence: ModelSequence) -> None:
        tables = self.tables.pop(sequence)
        super().free(sequence)
        for group in self.others:
            self.drop([block for block in tables[group] if block is not None])

    def fork(self, sequence: ModelSequence, name: str) -> ModelSequence:
        child = super().fork(sequence, name)
        if child.num_computed % self.alignment or not all(spec.has_tokens for spec in self.specs):
            self.unsure |= {sequence, child}
        self.likely_ends[child] = self.likely_ends[sequence]
        self.computed_from[child] = self.computed_from[sequence]
        self.tables[child] = {
            group: self.tables[sequence][group][: -(-child.num_computed // self.specs[group].block_size)]
            for group in self.others
        }
        for table in self.tables[child].values():
            self.hold([block for block in table if block is not None])
        return child

    def can_truncate(self, sequence: ModelSequence, num_tokens: int) -> bool:
        """Whether the blocks that the next token sees are held, and the block of the sequence's own end.

        And whether groups that aren't cached have computed what it sees.
        """
        position = min(sequence.num_computed, num_tokens)
        for group, first in self.computed_from[sequence].items():
            if first_seen(self.specs[group], position) < first:
                return False
        for group in self.others:
            table = self.tables[sequence][group]
            numbers = self.numbers(group, position, position + 1)
            if any(number < len(table) and table[number] is None for number in numbers):
                return False
        return True

    def num_needed(self, sequence: ModelSequence, num_tokens: int, hit: list[int]) -> int:
        if sequence.is_allocated:
            if num_tokens <= sequence.num_computed:
                return 0
            start = sequence.num_computed
            num_freed = len([block for _, _, block in self.passed(sequence, start) if self.owners[block] == 1])
            return max(0, self.num_taken(self.wanted(sequence, start, num_tokens)) - num_freed)
        tables = self.hit_tables(sequence, hit, len(sequence.tokens))
        num_missing = sum(
            max(0, -(-num_tokens // self.specs[g].block_size) - len(table)) for g, table in tables.items()
        )
        held = [block for table in tables.values() for block in table if block is not None]
        if not self.has_virtual:
            num_missing += max(0, -(-num_tokens // self.block_size) - len(hit))
            held += hit
        return num_missing + len([block for block in held if not self.owners[block]])

    def full_tables(self, sequence: ModelSequence, num_tokens: int) -> list[list[int]]:
        return [table[: num_tokens // size] for table, size in self.real_tables(sequence)]

    def all_tables(self, sequence: ModelSequence) -> list[list[int]]:
        return [list(table) for table, _ in self.real_tables(sequence)]

    def real_tables(self, sequence: ModelSequence) -> list[tuple[list[int], int]]:
        """The tables of all groups, with None where they are dead."""
        tables = self.tables[sequence]
        return [
            (sequence.table if group == self.primary else tables[group], spec.block_size)  # type: ignore[misc]
            for group, spec in enumerate(self.specs)
        ]

    def truncate(self, sequence: ModelSequence, num_tokens: int, num_computed: int | None) -> None:
        super().truncate(sequence, num_tokens, num_computed)
        self.unsure.add(sequence)
        for group in self.others:
            table, num_kept = self.tables[sequence][group], -(-num_tokens // self.specs[group].block_size)
            rest = table[num_kept:]
            del table[num_kept:]
            self.drop([block for block in rest if block is not None])

    # Pins.

    def attached_homes(self, prefix: ModelSequence, num_blocks: int) -> list[Prefix]:
        end = num_blocks * self.block_size // self.alignment * self.alignment
        groups = [group for group in self.others if group not in self.uncached]
        return [self.home(prefix, group, number) for group in groups for number in self.needed(group, end, end)]

    def num_wanted(self, prefix: ModelSequence, num_blocks: int) -> int:
        return (0 if self.has_virtual else num_blocks) + len(self.attached_homes(prefix, num_blocks))

    def pin(self, pin: ModelPin) -> None:
        self.attached_blocks[pin] = []
        super().pin(pin)

    def unpin(self, pin: ModelPin) -> None:
        super().unpin(pin)
        self.drop(self.attached_blocks.pop(pin))

    def drop_attached(self, pin: ModelPin) -> None:
        attached, self.attached_blocks[pin] = self.attached_blocks[pin], []
        self.drop(attached)

    def extend_pin(self, pin: ModelPin) -> None:
        more = self.match(pin.prefix)[len(pin.held) : len(pin.priorities)]
        self.hold(more)
        pin.held += more
        homes = self.attached_homes(pin.prefix, len(pin.priorities))
        if (
            len(pin.held) == len(pin.priorities)
            and not self.attached_blocks[pin]
            and all(h in self.cached for h in homes)
        ):
            self.attached_blocks[pin] = [self.cached[home][0] for home in homes]
            self.hold(self.attached_blocks[pin])

    def shrink_pins(self) -> None:
        for pin in self.pins:
            if not all(block in self.content for block in [*self.attached_blocks[pin], *pin.held]):
                self.drop_attached(pin)
        super().shrink_pins()
