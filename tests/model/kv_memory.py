"""An engine's KV memory in miniature: what every slot holds, as the context that it was computed in.

A manager promises: once the step has run for which slots were allocated, the slots of a block table hold the sequence's
own tokens, and the slots of a hit hold those of the sequence that hits. So there are two pictures of the memory: `now`,
what has been computed, and `then`, what the step that is being put together will leave. A step that runs makes the
copies and writes what it was scheduled to write. A step that dies writes nothing. Of the manager's state, this memory
uses only block tables, copies, and `num_readonly_tokens`, which says what must not be written.

The content of a slot is a number. It stands for the group, the salt, the adapter, all tokens and keys up to there, and
the weights that each of them was computed with. Equal numbers mean equal KV, and equal KV has equal numbers.

Beside its content a slot has a state, which the calls say: its KV is written, awaited or lost. `vouched` has the same
for sequences: how many of its first tokens are said to be written. What is cached must be written, and the manager may
count no token as written that this memory doesn't. None of this is read from the cache or from what it counts.
"""

from collections.abc import Iterable
from itertools import pairwise

import kvblocks
from kvblocks import Group, KVCacheBlock
from kvblocks.verify import Contexts
from model.sight import first_seen, sees_all

Spans = tuple[tuple[int, int, object], ...]
Slot = tuple[int, int]

GARBAGE = -1
ENDLESS = 1_000_000
MOST_SLOTS = 1000  # of a block that a sequence has for all of its tokens
AWAITED = "awaited"
LOST = "lost"


class KVMemory:
    """The memory of `num_blocks` blocks. groups: of the manager's layers, which share it. block_size: the manager's."""

    def __init__(self, num_blocks: int, groups: tuple[Group, ...], block_size: int) -> None:
        self.groups = groups
        self.block_size = block_size
        self.has_windows = not all(sees_all(group) for group in groups)
        size = max(min(group.block_size, MOST_SLOTS) for group in groups)
        self.now = [[GARBAGE] * size for _ in range(num_blocks)]
        self.then = [[GARBAGE] * size for _ in range(num_blocks)]
        self.weights = 0
        self.num_forgotten: dict[object, int] = {}  # by salt: how often what it had was forgotten
        self.copies: list[tuple[int, int]] = []
        self.computed_with: dict[kvblocks.Sequence, list[object]] = {}  # by position: the weights
        self.unwritten: dict[kvblocks.Sequence, list[int]] = {}  # positions that the next step writes, in order
        self.loading: dict[kvblocks.Sequence, list[int]] = {}  # where its transfers begin, which steps wait for
        self.first_own: dict[kvblocks.Sequence, int] = {}  # the first position that it wrote in its present table
        self.computed_from: dict[kvblocks.Sequence, dict[int, int]] = {}  # by group that isn't cached: the first token
        self.recomputing: dict[kvblocks.Sequence, int] = {}  # the end of its hit, which the next step computes in these
        self.vouched: dict[kvblocks.Sequence, int] = {}  # how many first tokens are said to be written
        self.lost_given: dict[kvblocks.Sequence, int] = {}  # the first token that it was given and has lost
        self.unknown: dict[Slot, str] = {}  # AWAITED or LOST; what isn't here is written
        self.num_uses = [0] * num_blocks  # how often each block was begun to be written
        self.awaited_from: dict[kvblocks.Sequence, int] = {}  # the first token that a call delayed
        self.delayed: set[kvblocks.Sequence] = set()  # whose new tokens, not seen by `schedule` yet, are delayed
        self.num_copied = self.num_operations = self.num_deaths = self.num_dead = 0
        self.contexts = Contexts()
        self._cached: dict[object, list[int]] = {}

    # What a step will do, and whether it does it.

    def schedule(self, copies: Iterable[tuple[int, int]], running: Iterable[kvblocks.Sequence]) -> None:
        """Note what the manager's last answers tell the next step to do."""
        for source, destination in copies:
            self.copies.append((source, destination))
            self.then[destination] = list(self.then[source])
            self._copy_states(source, destination)
        for sequence in running:
            weights = self.computed_with.setdefault(sequence, [])
            if len(weights) < sequence.num_computed_tokens:
                self._schedule(sequence, weights)

    def start(self, sequence: kvblocks.Sequence, position: int) -> None:
        """A sequence starts with a query at `position`: groups that aren't cached compute what it sees again."""
        seen = {
            group: first_seen(spec, position)
            for group, spec in enumerate(self.groups)
            if not sees_all(spec) and not spec.is_cached
        }
        if position and seen:
            self.computed_from[sequence] = seen
            self.recomputing[sequence] = sequence.num_readonly_tokens

    def _recompute(self, sequence: kvblocks.Sequence) -> None:
        """Do in `then` what the next step does for the hit of a sequence, in groups that aren't cached."""
        numbers = self.numbers(sequence)
        for group, first in self.computed_from[sequence].items():
            ids, size = sequence.group_block_ids(group), self.groups[group].block_size
            for position in range(first, min(self.recomputing[sequence], len(numbers))):
                if position // size >= sequence.first_live_block(group):
                    self.then[ids[position // size]][position % size] = self._in_group(group, numbers[position])
                    self.unknown.pop((ids[position // size], position % size), None)

    def _schedule(self, sequence: kvblocks.Sequence, weights: list[object]) -> None:
        first, end = len(weights), sequence.num_computed_tokens
        weights += [self.weights_of(sequence.salt)] * (end - first)
        numbers = self.numbers(sequence)
        start = max(first, sequence.num_readonly_tokens)
        vouched = self.vouched.setdefault(sequence, min(start, self.first_loading(sequence)))
        if sequence in self.delayed and start < end:
            self.awaited_from.setdefault(sequence, start)
        state = AWAITED if sequence in self.awaited_from else LOST if vouched < start else None
        self.delayed.discard(sequence)
        for position in range(start, end):
            self.unwritten.setdefault(sequence, []).append(position)
            self.first_own[sequence] = min(self.first_own.get(sequence, position), position)
            for group, (block_id, offset) in self.slots(sequence, position):
                self._set_state((block_id, offset), state)
                self.num_uses[block_id] += not offset
                if position < self.first_loading(sequence):
                    self.then[block_id][offset] = self._in_group(group, numbers[position])
        if state is None:
            self.vouched[sequence] = end
        if sequence in self.recomputing:
            self._recompute(sequence)

    def run_step(self) -> None:
        """Make the copies, then write all that was scheduled, and check what each query of the step sees."""
        self.num_operations += 1
        self.num_copied += len(self.copies)
        for sequence, positions in self.coming():
            self._check_visible(sequence, positions[0])
        self.project()
        self.now = self.then
        self.recomputing.clear()
        self._end_step()
        for sequence in self.computed_with:
            end = self._end_of(sequence)
            found = self.num_written(sequence)
            assert found >= end or sequence in self.loading, f"{sequence}: {found} tokens are written, of {end}"

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

    def in_step(self) -> list[kvblocks.Sequence]:
        """Who is in the next step."""
        return [sequence for sequence, _ in self.coming()]

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
        for sequence in self.recomputing:
            self._recompute(sequence)

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
            if self.unknown.get((block_id, offset)) == LOST:  # it may fill a gap before a hit's end
                del self.unknown[block_id, offset]
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

    def fork(self, sequence: kvblocks.Sequence, child: kvblocks.Sequence) -> None:
        self.computed_with[child] = self.computed_with[sequence][: child.num_computed_tokens]
        self.vouched[child] = min(self.vouched[sequence], child.num_computed_tokens)
        for noted in (self.computed_from, self.recomputing, self.awaited_from):
            if sequence in noted:
                noted[child] = noted[sequence]  # type: ignore[index]
        if sequence in self.loading:
            self.loading[child] = list(self.loading[sequence])
        lost = min(self.first_unknown(child, (LOST,)), self.lost_given.get(sequence, ENDLESS))
        if lost < child.num_computed_tokens:
            self.lost_given[child] = lost

    def forget(self, sequence: kvblocks.Sequence) -> None:
        """Note that a sequence gave its blocks back."""
        self.computed_with.pop(sequence, None)
        self.loading.pop(sequence, None)
        self.unwritten.pop(sequence, None)
        self.first_own.pop(sequence, None)
        self.vouched.pop(sequence, None)
        self.lost_given.pop(sequence, None)
        self.awaited_from.pop(sequence, None)
        self.computed_from.pop(sequence, None)
        self.recomputing.pop(sequence, None)
        self.delayed.discard(sequence)

    def truncate(self, sequence: kvblocks.Sequence) -> None:
        """Note that a sequence was truncated: what comes behind its remaining tokens is to be written again."""
        end = sequence.num_computed_tokens
        del self.computed_with[sequence][end:]
        self.vouched[sequence] = min(self.vouched[sequence], end)
        if self.lost_given.get(sequence, 0) >= end:
            self.lost_given.pop(sequence, None)
        if self.awaited_from.get(sequence, 0) >= end:
            self.awaited_from.pop(sequence, None)
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

    # What the calls say of the KV, whatever a step does.

    def delay(self, sequence: kvblocks.Sequence) -> None:
        """The tokens that a call has just made room for are delayed."""
        self.delayed.add(sequence)

    def vouch(self, sequence: kvblocks.Sequence, num_tokens: int) -> None:
        """`cache_blocks` says that what a sequence was to write of its first tokens is written.

        That isn't what it was given, unless it awaits it as a fork. Fewer tokens than before change nothing.
        """
        if num_tokens <= self.vouched[sequence]:
            return
        first_own = self.first_own.get(sequence, ENDLESS)
        if sequence in self.awaited_from:
            self.awaited_from[sequence] = max(self.awaited_from[sequence], num_tokens)
            if num_tokens >= len(self.computed_with[sequence]):
                del self.awaited_from[sequence]
        num_tokens = min(num_tokens, self.lost_given.get(sequence, num_tokens))
        self.vouched[sequence] = max(self.vouched[sequence], num_tokens)
        for position in range(num_tokens):
            for _, slot in self._live_slots(sequence, position):
                if position >= first_own or self.unknown.get(slot) == AWAITED:
                    self.unknown.pop(slot, None)

    def lose(self, block_ids: Iterable[int]) -> None:
        """These blocks are bad: nobody who has one of them knows his tokens from there on, nor what they computed."""
        lost, num_before = dict.fromkeys(block_ids, 0), -1
        for block_id in lost:
            self.unknown.update({(block_id, offset): LOST for offset in range(len(self.now[block_id]))})
        while len(lost) > num_before:
            num_before = len(lost)
            for sequence in self.computed_with:
                first = self._first_token_in(sequence, lost)
                computed = [slot for position, slot in self.own_slots(sequence) if position >= first]
                self.unknown.update(dict.fromkeys(computed, LOST))
                lost = {block_id: first for block_id, _ in computed} | lost
        self._lower(lost)

    def lose_behind(self, sequence: kvblocks.Sequence, num_tokens: int) -> list[int]:
        """A sequence's own tokens behind its first `num_tokens` were never written. Returns the blocks that hold them.

        Tokens that are awaited are awaited still, by others. Call it before the manager's call.
        """
        return self.lose_slots(self.own_slots(sequence), max(self.first_own.get(sequence, ENDLESS), num_tokens))

    def own_slots(self, sequence: kvblocks.Sequence) -> list[tuple[int, Slot]]:
        """The slots of a sequence's own tokens that nobody else is to write, each with its position."""
        first = self.first_own.get(sequence, ENDLESS)
        end = min(len(self.computed_with[sequence]), self.awaited_from.get(sequence, ENDLESS))
        return [(p, slot) for p in range(first, end) for _, slot in self._live_slots(sequence, p)]

    def lose_slots(self, slots: list[tuple[int, Slot]], first: int) -> list[int]:
        """Of these slots of a sequence, those of tokens from `first` on were never written. Returns their blocks."""
        lost = [slot for position, slot in slots if position >= first]
        self.unknown.update(dict.fromkeys(lost, LOST))
        self._lower({block_id: first for block_id, _ in lost})
        return [*dict.fromkeys(block_id for block_id, _ in lost)]

    def _lower(self, lost: dict[int, int]) -> None:
        """Whoever has one of the lost blocks knows nothing from there on, but for so many first tokens."""
        for sequence in self.computed_with if lost else ():
            position = self._first_token_in(sequence, lost)
            self.vouched[sequence] = min(self.vouched[sequence], position)
            if position < min(self.first_own.get(sequence, ENDLESS), len(self.computed_with[sequence])):
                self.lost_given[sequence] = min(position, self.lost_given.get(sequence, position))

    def _first_token_in(self, sequence: kvblocks.Sequence, lost: dict[int, int]) -> int:
        """The first token of a sequence that is lost with these blocks of its tables; ENDLESS without one."""
        first = ENDLESS
        for group, spec in enumerate(self.groups):
            ids, num_dead = sequence.group_block_ids(group), sequence.first_live_block(group)
            if not lost.keys().isdisjoint(ids):
                found = [index for index in range(num_dead, len(ids)) if ids[index] in lost]
                first = min([first, *(max(index * spec.block_size, lost[ids[index]]) for index in found)])
        return first

    def _live_slots(self, sequence: kvblocks.Sequence, position: int) -> list[tuple[int, Slot]]:
        """As `slots`, without the groups whose window has passed the position."""
        return [
            (group, (sequence.group_block_ids(group)[position // spec.block_size], position % spec.block_size))
            for group, spec in enumerate(self.groups)
            if position // spec.block_size >= sequence.first_live_block(group)
        ]

    def _set_state(self, slot: Slot, state: str | None) -> None:
        if state is None:
            self.unknown.pop(slot, None)
        else:
            self.unknown[slot] = state

    def _copy_states(self, source: int, destination: int) -> None:
        self.num_uses[destination] += 1
        for offset in range(len(self.now[source])):
            self._set_state((destination, offset), self.unknown.get((source, offset)))

    # Questions.

    def first_unknown(self, sequence: kvblocks.Sequence, states: tuple[str, ...] = (AWAITED, LOST)) -> int:
        """The first of its tokens in a live block whose KV is in one of these states; ENDLESS if there is none."""
        if not self.unknown:
            return ENDLESS
        first, num_tokens = ENDLESS, len(self.computed_with[sequence])
        for group, spec in enumerate(self.groups):
            ids, size = sequence.group_block_ids(group), spec.block_size
            for position in range(self._first_there(sequence, group), min(num_tokens, first)):
                if self.unknown.get((ids[position // size], position % size)) in states:
                    first = position
                    break
        return first

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
        is_in_step = sequence in self.unwritten or sequence in self.recomputing
        return (self.has_windows and is_in_step) or self.would_copy_unwritten(sequence)

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
            self._check_known(sequence)
            end, num_readonly = self._end_of(sequence), sequence.num_readonly_tokens
            # One that waits for a load is in no step. It may wait with a hit that it has lost.
            num_right = min(end, self.vouched[sequence]) if sequence in self.loading else end
            for group in range(len(self.groups)):
                found = self._num_right(sequence, group, self.then)
                assert found >= num_right, f"{sequence}: wrong KV at {found} in group {group}"
            self._check_visible(sequence, end)
            first_own = self.first_own.get(sequence, sequence.num_computed_tokens)
            first_own = first_own // self.block_size * self.block_size
            assert num_readonly <= first_own, f"{sequence}: {num_readonly} are read-only, {first_own} is its own"

    def _check_known(self, sequence: kvblocks.Sequence) -> None:
        """Check that nobody takes for written what isn't: neither the manager, nor this memory for another sequence."""
        vouched, counted, unknown = self.vouched[sequence], sequence.num_written_tokens, self.first_unknown(sequence)
        assert counted <= vouched, f"{sequence}: the manager counts {counted} tokens as written, of {vouched}"
        assert vouched <= unknown, f"{sequence}: token {unknown} isn't written, and {vouched} are said to be"

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
                self._check_written(block_id, size, f"at {index} in a table of group {group}")

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
        self._check_written(block_id, size, f"of group {group}, is cached for {prefix}")

    def _check_written(self, block_id: int, size: int, what: str) -> None:
        """Check that nothing in a block that can be hit is awaited or lost."""
        if self.unknown:
            states = [self.unknown.get((block_id, offset), "written") for offset in range(size)]
            assert states == ["written"] * size, f"block {block_id}, {what}: its slots are {states}"

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
        parts: list[object] = []
        for position, token in enumerate(tokens):
            used = self.weights_of(salt) if weights is None else weights[position]
            parts.append((token, tuple(starting.get(position, ())), used))
        return self.contexts.chain(self.contexts.root(salt, lora), parts)

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
        ids, first = sequence.group_block_ids(group), self._first_there(sequence, group)
        num_scale = len(self.groups)
        for start, end in pairwise([*range(first // size * size, len(numbers), size), len(numbers)]):
            held = memory[ids[start // size]]
            for position in range(max(start, first), end):
                if held[position - start] != numbers[position] * num_scale + group:
                    return position
        return len(numbers)

    def _check_visible(self, sequence: kvblocks.Sequence, position: int) -> None:
        """What a query at `position` sees isn't dead."""
        for group, spec in enumerate(self.groups):
            if not sees_all(spec):
                self.num_dead += sequence.first_live_block(group)
                first, there = first_seen(spec, position), self._first_there(sequence, group)
                assert there <= first, f"{sequence}: {position} sees {first}, and group {group} begins at {there}"

    def _first_there(self, sequence: kvblocks.Sequence, group: int) -> int:
        """The first token that a sequence has in a group: of its first live block, or the first that it computed."""
        first = sequence.first_live_block(group) * self.groups[group].block_size
        return max(first, self.computed_from[sequence].get(group, 0)) if sequence in self.computed_from else first
