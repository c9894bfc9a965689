"""An engine's KV memory in miniature: what every slot holds, as the context that it was computed in.

A manager promises: once the step has run for which slots were allocated, the slots of a block table hold the sequence's
own tokens, and the slots of a hit hold those of the sequence that hits. So there are two pictures of the memory: `now`,
what has been computed, and `then`, what the step that is being put together will leave. A step that runs makes the
copies and writes what it was scheduled to write. A step that dies writes nothing. Of the manager's state, this memory
uses only block tables, copies, and `num_readonly_tokens`, which says what must not be written.

The content of a slot is a number. It stands for the group, the salt, the adapter, all tokens and keys up to there, and
the weights that each of them was computed with. Equal numbers mean equal KV, and equal KV has equal numbers.
"""

from collections.abc import Iterable
from itertools import pairwise

import kvblocks
from kvblocks import Group, KVCacheBlock

Spans = tuple[tuple[int, int, object], ...]
Slot = tuple[int, int]

GARBAGE = -1
ENDLESS = 1_000_000


class KVMemory:
    """The memory of `num_blocks` blocks. groups: of the manager's layers, which share it. block_size: the manager's."""

    def __init__(self, num_blocks: int, groups: tuple[Group, ...], block_size: int) -> None:
        self.groups = groups
        self.block_size = block_size
        self.has_windows = any(group.window is not None for group in groups)
        size = max(group.block_size for group in groups)
        self.now = [[GARBAGE] * size for _ in range(num_blocks)]
        self.then = [[GARBAGE] * size for _ in range(num_blocks)]
        self.weights = 0
        self.num_forgotten: dict[object, int] = {}  # by salt: how often what it had was forgotten
        self.copies: list[tuple[int, int]] = []
        self.computed_with: dict[kvblocks.Sequence, list[object]] = {}  # by position: the weights
        self.unwritten: dict[kvblocks.Sequence, list[int]] = {}  # positions that the next step writes, in order
        self.loading: dict[kvblocks.Sequence, list[int]] = {}  # where its transfers begin, which steps wait for
        self.first_own: dict[kvblocks.Sequence, int] = {}  # the first position that it wrote in its present table
        self.num_copied = self.num_operations = self.num_deaths = self.num_dead = 0
        self._numbers: dict[object, int] = {}
        self._cached: dict[object, list[int]] = {}

    # What a step will do, and whether it does it.

    def schedule(self, copies: Iterable[tuple[int, int]], running: Iterable[kvblocks.Sequence]) -> None:
        """Note what the manager's last answers tell the next step to do."""
        for source, destination in copies:
            self.copies.append((source, destination))
            self.then[destination] = list(self.then[source])
        for sequence in running:
            weights = self.computed_with.setdefault(sequence, [])
            if len(weights) < sequence.num_computed_tokens:
                self._schedule(sequence, weights)

    def _schedule(self, sequence: kvblocks.Sequence, weights: list[object]) -> None:
        first = len(weights)
        weights += [self.weights_of(sequence.salt)] * (sequence.num_computed_tokens - first)
        numbers = self.numbers(sequence)
        for position in range(max(first, sequence.num_readonly_tokens), sequence.num_computed_tokens):
            self.unwritten.setdefault(sequence, []).append(position)
            self.first_own[sequence] = min(self.first_own.get(sequence, position), position)
            if position < self.first_loading(sequence):
                for group, (block_id, offset) in self.slots(sequence, position):
                    self.then[block_id][offset] = self._in_group(group, numbers[position])

    def run_step(self) -> None:
        """Make the copies, then write all that was scheduled, and check what each query of the step sees."""
        self.num_operations += 1
        self.num_copied += len(self.copies)
        for sequence, positions in self.coming():
            self._check_visible(sequence, positions[0])
        self.project()
        self.now = self.then
        self._end_step()
        for sequence in self.computed_with:
            assert self.num_written(sequence) >= self._end_of(sequence), f"{sequence}: not all of it is written"

    def die(self, num_copies: int) -> None:
        """End a step that wrote nothing, after the first `num_copies` of its copies. Who was in it must be aborted."""
        self.num_deaths += 1
        for source, destination in self.copies[:num_copies]:
            self.now[destination] = list(self.now[source])
        self._end_step()

    def _end_step(self) -> None:
        self.copies = []
        waiting = {s: [p for p in positions if p >= self.first_loading(s)] for s, positions in self.unwritten.items()}
        self.unwritten = {sequence: positions for sequence, positions in waiting.items() if positions}
        self.project()

    def coming(self) -> list[tuple[kvblocks.Sequence, list[int]]]:
        """The positions that the next step writes: not those of sequences that wait for a transfer."""
        coming = [(s, [p for p in positions if p < self.first_loading(s)]) for s, positions in self.unwritten.items()]
        return [(sequence, positions) for sequence, positions in coming if positions]

    def _end_of(self, sequence: kvblocks.Sequence) -> int:
        """How many of its tokens are written after the next step."""
        return min(sequence.num_computed_tokens, self.first_loading(sequence))

    def project(self) -> None:
        """Find out what the step will leave: all copies in order, then all that is written."""
        self.then = [list(block) for block in self.now]
        for source, destination in self.copies:
            self.then[destination] = list(self.then[source])
        for sequence, positions in self.coming():
            numbers = self.numbers(sequence)
            for position in positions:
                for group, (block_id, offset) in self.slots(sequence, position):
                    self.then[block_id][offset] = self._in_group(group, numbers[position])

    # Transfers: what something else than a step writes, and when it likes.

    def begin_load(self, sequence: kvblocks.Sequence, first: int, end: int) -> list[tuple[int, Slot, int]]:
        """Have a sequence wait for positions first to end - 1; returns (position, slot, what it will hold) of each."""
        self._make_copies()
        numbers = self.numbers(sequence)
        self.loading.setdefault(sequence, []).append(first)
        self.project()
        return [
            (position, slot, self._in_group(group, numbers[position]))
            for position in range(first, end)
            for group, slot in self.slots(sequence, position)
        ]

    def _make_copies(self) -> None:
        """Carry out the copies at once: a transfer may write to a block that one of them reads or writes."""
        for source, destination in self.copies:
            self.now[destination] = list(self.now[source])
        self.num_copied += len(self.copies)
        self.copies = []

    def first_loading(self, sequence: kvblocks.Sequence) -> int:
        """The first position that a transfer is to write, and no step."""
        return min(self.loading.get(sequence, [ENDLESS]))

    def end_load(
        self, sequences: Iterable[kvblocks.Sequence], first: int, arrived: list[tuple[int, Slot, int]]
    ) -> None:
        """Write what arrived. The sequences that waited for it do so no longer, and write the rest themselves."""
        for _, (block_id, offset), value in arrived:
            self.now[block_id][offset] = value
        positions = {position for position, _, _ in arrived}
        for sequence in sequences:
            self.loading[sequence].remove(first)
            if not self.loading[sequence]:
                del self.loading[sequence]
            left = [position for position in self.unwritten.pop(sequence, []) if position not in positions]
            if left:
                self.unwritten[sequence] = left
        self.project()

    # What becomes of sequences.

    def fork(self, sequence: kvblocks.Sequence, twin: kvblocks.Sequence) -> None:
        self.computed_with[twin] = self.computed_with[sequence][: twin.num_computed_tokens]
        if sequence in self.loading:
            self.loading[twin] = list(self.loading[sequence])

    def forget(self, sequence: kvblocks.Sequence) -> None:
        """Note that a sequence gave its blocks back."""
        self.computed_with.pop(sequence, None)
        self.loading.pop(sequence, None)
        self.unwritten.pop(sequence, None)
        self.first_own.pop(sequence, None)

    def truncate(self, sequence: kvblocks.Sequence) -> None:
        """Note that a sequence was truncated: what comes behind its remaining tokens is to be written again."""
        end = sequence.num_computed_tokens
        del self.computed_with[sequence][end:]
        if self.first_own.get(sequence, 0) >= end:
            self.first_own.pop(sequence, None)

    def cancel(self, sequence: kvblocks.Sequence, first: int = 0) -> None:
        """The next step doesn't write a sequence's positions from `first` on."""
        if sequence in self.unwritten:
            self.unwritten[sequence] = [position for position in self.unwritten[sequence] if position < first]
            if not self.unwritten[sequence]:
                del self.unwritten[sequence]
            self.project()

    def cut(self, sequences: Iterable[kvblocks.Sequence]) -> None:
        """Note that sequences lost slots: the next step writes nothing behind those that they have now."""
        for sequence in sequences:
            end = sequence.num_computed_tokens
            left = [position for position in self.unwritten.pop(sequence, []) if position < end]
            if left:
                self.unwritten[sequence] = left
            self.truncate(sequence)
        self.project()

    def change_weights(self) -> None:
        self.weights += 1
        self._cached.clear()

    def forget_salt(self, salt: object) -> None:
        """Nothing that was computed with this salt may be found any more, as if it had other weights from now on."""
        self.num_forgotten[salt] = self.num_forgotten.get(salt, 0) + 1
        self._cached.clear()

    def weights_of(self, salt: object) -> object:
        return self.weights, self.num_forgotten.get(salt, 0)

    # Questions.

    def is_of_these_weights(self, sequence: kvblocks.Sequence) -> bool:
        return all(weights == self.weights_of(sequence.salt) for weights in self.computed_with[sequence])

    def start_of_step(self, sequence: kvblocks.Sequence) -> int:
        """How many tokens an engine would say that the sequence had before this step."""
        return min(self.unwritten.get(sequence, [sequence.num_computed_tokens]))

    def num_written(self, sequence: kvblocks.Sequence) -> int:
        """How many of a sequence's first tokens are computed, in each group's live blocks."""
        coming = self._coming_slots()
        num_written = min(self._num_right(sequence, group, self.now) for group in range(len(self.groups)))
        for group, spec in enumerate(self.groups):
            ids, first = sequence.group_block_ids(group), sequence.first_live_block(group)
            for position in range(first * spec.block_size, num_written):
                if (ids[position // spec.block_size], position % spec.block_size) in coming:
                    num_written = position
                    break
        return num_written

    def _coming_slots(self) -> set[Slot]:
        """The slots that the next step copies or writes to."""
        coming = {(copied, offset) for _, copied in self.copies for offset in range(len(self.now[copied]))}
        for sequence, positions in self.unwritten.items():  # those of transfers, too
            coming |= {slot for position in positions for _, slot in self.slots(sequence, position)}
        return coming

    def is_lost(self, sequence: kvblocks.Sequence) -> bool:
        """Whether the next step will not write what the sequence's table needs."""
        end = self._end_of(sequence)
        return any(self._num_right(sequence, group, self.then) < end for group in range(len(self.groups)))

    def must_run_before(self, sequence: kvblocks.Sequence) -> bool:
        """Whether an engine must run the step before it makes room for more of a sequence.

        A shared block that isn't computed yet would be copied, or a window would pass over what the step still sees.
        """
        return (self.has_windows and sequence in self.unwritten) or self.would_copy_unwritten(sequence)

    def would_copy_unwritten(self, sequence: kvblocks.Sequence) -> bool:
        """Whether room for more would copy a shared block that isn't computed yet."""
        end = sequence.num_computed_tokens
        coming = {block_id for block_id, _ in self._coming_slots()}
        for group, spec in enumerate(self.groups):
            index = end // spec.block_size
            if end % spec.block_size and sequence.group_block_ids(group)[index] in coming:
                block = sequence.group_blocks(group)[index]
                if block is not None and block.ref_cnt > 1:
                    return True
        return False

    def check(self) -> None:
        """Check that every table leads to what its sequence needs, and that read-only positions aren't written."""
        for sequence in self.computed_with:
            end, num_readonly = self._end_of(sequence), sequence.num_readonly_tokens
            for group in range(len(self.groups)):
                found = self._num_right(sequence, group, self.then)
                assert found >= end, f"{sequence}: wrong KV at {found} in group {group}"
            self._check_visible(sequence, end)
            first_own = self.first_own.get(sequence, sequence.num_computed_tokens)
            first_own = first_own // self.block_size * self.block_size
            assert num_readonly <= first_own, f"{sequence}: {num_readonly} are read-only, {first_own} is its own"

    def check_hit(self, sequence: kvblocks.Sequence, hit: kvblocks.CacheHit) -> None:
        """A hit's blocks hold what the sequence needs."""
        numbers = self.chain(sequence.salt, sequence.lora, sequence.token_ids(), sequence.extra_keys)
        for group in range(len(self.groups)):
            self.check_blocks(self._ids(hit.group_blocks(group)), numbers, group)

    def check_blocks(self, block_ids: Iterable[int | None], numbers: list[int], group: int = 0) -> None:
        """Blocks, the first ones of a table, hold what stands in `numbers`; None: what is there doesn't matter."""
        size = self.groups[group].block_size
        for index, block_id in enumerate(block_ids):
            if block_id is not None:
                expected = [self._in_group(group, n) for n in numbers[index * size : (index + 1) * size]]
                found = self.then[block_id][:size]
                assert found == expected, f"wrong KV in block {block_id}, at {index} in a table of group {group}"

    def store(self, block_ids: Iterable[int | None], numbers: list[int]) -> None:
        """An engine that owns its blocks writes them; None: the block there is written already."""
        for index, block_id in enumerate(block_ids):
            if block_id is not None:
                self.then[block_id] = numbers[index * self.block_size : (index + 1) * self.block_size]

    def spoil(self, block_ids: Iterable[int]) -> None:
        """An engine that owns its blocks uses them for something else."""
        for block_id in block_ids:
            self.then[block_id] = [GARBAGE] * self.block_size

    def check_cached(self, block_id: int, group: int, prefix: tuple[object, ...], end: int) -> None:
        """A cached block holds the last tokens before `end` of the prefix that it is cached for."""
        if prefix not in self._cached:
            salt, lora, tokens, spans = prefix
            self._cached[prefix] = self.chain(salt, lora, tokens, spans)  # type: ignore[arg-type]
        size = self.groups[group].block_size
        expected = [self._in_group(group, number) for number in self._cached[prefix][end - size : end]]
        assert self.then[block_id][:size] == expected, f"block {block_id} of group {group} is cached for {prefix}"

    # Contexts.

    def numbers(self, sequence: kvblocks.Sequence) -> list[int]:
        """What the slots of its tokens must hold, by position."""
        weights = self.computed_with[sequence]
        tokens = sequence.token_ids(0, len(weights))
        return self.chain(sequence.salt, sequence.lora, tokens, sequence.extra_keys, weights)

    def chain(
        self,
        salt: object,
        lora: object,
        tokens: Iterable[int],
        spans: Iterable[tuple[int, int, object]],
        weights: list[object] | None = None,
    ) -> list[int]:
        starting: dict[int, list[object]] = {}
        for span in sorted(spans, key=repr):
            starting.setdefault(span[0], []).append(span)
        number = self._number((salt, lora))
        numbers = []
        for position, token in enumerate(tokens):
            used = self.weights_of(salt) if weights is None else weights[position]
            number = self._number((number, token, tuple(starting.get(position, ())), used))
            numbers.append(number)
        return numbers

    def _number(self, context: object) -> int:
        return self._numbers.setdefault(context, len(self._numbers))

    def _in_group(self, group: int, number: int) -> int:
        return number * len(self.groups) + group

    # Slots.

    def _ids(self, blocks: Iterable[KVCacheBlock | None]) -> list[int | None]:
        """Ids of blocks, None for those that have no memory."""
        return [None if block is None or block.block_id >= len(self.then) else block.block_id for block in blocks]

    def slots(self, sequence: kvblocks.Sequence, position: int) -> list[tuple[int, Slot]]:
        found = []
        for group, spec in enumerate(self.groups):
            index, offset = divmod(position, spec.block_size)
            assert index >= sequence.first_live_block(group), f"{sequence}: no slot for {position} in group {group}"
            found.append((group, (sequence.group_block_ids(group)[index], offset)))
        return found

    def _num_right(self, sequence: kvblocks.Sequence, group: int, memory: list[list[int]]) -> int:
        """How many of its first tokens stand in `memory` as they should; dead entries count as right."""
        numbers, size = self.numbers(sequence), self.groups[group].block_size
        ids, first = sequence.group_block_ids(group), sequence.first_live_block(group)
        num_scale = len(self.groups)
        for start, end in pairwise([*range(first * size, len(numbers), size), len(numbers)]):
            held = memory[ids[start // size]]
            for position in range(start, end):
                if held[position - start] != numbers[position] * num_scale + group:
                    return position
        return len(numbers)

    def _check_visible(self, sequence: kvblocks.Sequence, position: int) -> None:
        """What a query at `position` sees isn't dead."""
        for group, spec in enumerate(self.groups):
            if spec.window is not None:
                num_dead = sequence.first_live_block(group)
                self.num_dead += num_dead
                first = max(0, position - spec.window + 1)
                assert num_dead * spec.block_size <= first, (
                    f"{sequence}: {position} sees {first}, dead in group {group}"
                )
