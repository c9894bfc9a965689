"""What a manager of recurrent states must do, as plainly as possible: `ReferenceGroups` with a live state a sequence.

Each page of a checkpoint is an attached block. Its content is the prefix of its node, followed by "state", its end and
its place. Which of the free slots a sequence gets isn't said: a slot is a number that two sequences never share.
"""

from dataclasses import dataclass, field

from kvblocks import Group, RecurrentState
from model.reference_groups import ReferenceGroups
from model.reference_model import ModelPin, ModelSequence, Prefix

STATE = "state"


@dataclass(eq=False)
class Copy:
    """A copy that the engine is to make. source: the slot whose state a fork takes.

    blocks: what the sequence owns for it: a checkpoint that it reads, or that a copy before it does. brings: the copy
    that brings the state which a fork takes, if that is to be made, too. is_own: whether the sequence still waits for
    it. slot: where it goes, once a fork has said so.
    """

    kind: str
    sequence: ModelSequence
    position: int
    blocks: list[int] = field(default_factory=list)
    source: int = -1
    brings: "Copy | None" = None
    is_own: bool = True
    slot: int = -1


@dataclass(eq=False)
class Live:
    """What is known of a sequence's live state. start: where it began; highest: the most tokens that it was after."""

    start: int
    wanted: set[int]
    before: Copy | None
    highest: int = 0
    save: int | None = None  # where the step that is put together ends, if a checkpoint is wanted there
    waiting: list[tuple[int, list[int], bool]] = field(default_factory=list)  # saved, and not cached yet
    # The checkpoints that it restored or saved: their first pages, their blocks, and which of all they were.
    made: list[tuple[Prefix, list[int], int]] = field(default_factory=list)


class ReferenceStates(ReferenceGroups):
    def __init__(
        self,
        num_blocks: int,
        specs: tuple[Group, ...],
        state: RecurrentState,
        enable_caching: bool = True,
        first_block: int = 0,
        keeping: frozenset[int] = frozenset(),
        uncached: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(num_blocks, specs, enable_caching, first_block, keeping, uncached)
        self.state = state
        self.alignment = max(self.alignment, state.block_size)
        self.live: dict[ModelSequence, Live] = {}
        self.marks: dict[ModelSequence, set[int]] = {}
        self.ending: ModelSequence | None = None  # the one that is being aborted or rewound
        self.scheduled: list[ModelSequence] = []  # who saves in this step, in the order of the calls
        self.before: list[Copy] = []
        self.landmark_pages: set[Prefix] = set()  # first pages of checkpoints where hits probably end, or have ended
        self.attached_as: dict[Prefix, int] = {}  # by first page: which of all checkpoints is there
        self.num_attached = 0
        self.num_saved = self.num_without_room = self.num_present = self.num_taken_back = self.num_passed = 0

    # Lookups.

    def pages(self, sequence: ModelSequence, end: int) -> list[Prefix]:
        """What the blocks of a checkpoint after a sequence's first `end` tokens hold."""
        prefix = sequence.prefix(end // self.block_size, self.block_size)
        return [(*prefix, STATE, end, place) for place in range(self.state.checkpoint_blocks)]

    def checkpoint(self, sequence: ModelSequence, end: int) -> list[int]:
        """Its blocks; none where there is no checkpoint."""
        pages = self.pages(sequence, end)
        return [self.cached[page][0] for page in pages] if end and pages[0] in self.cached else []

    def last_end(self, sequence: ModelSequence, max_tokens: int | None = None) -> int:
        """Where a hit would end if all groups had all that it needs: before the last token."""
        most = min(len(self.match(sequence, max_tokens)) * self.block_size, len(sequence.tokens) - 1)
        return most // self.alignment * self.alignment

    def hit(self, sequence: ModelSequence, max_tokens: int | None = None) -> list[int]:
        """The longest usable one: a checkpoint, where all groups have their blocks, before the last token."""
        matched = self.match(sequence, max_tokens)
        usable = [
            end
            for end in range(self.alignment, len(sequence.tokens), self.alignment)
            if end <= len(matched) * self.block_size
            and self.checkpoint(sequence, end)
            and self.missing_group(sequence, end) is None
        ]
        return matched[: max(usable, default=0) // self.block_size]

    def num_needed(self, sequence: ModelSequence, num_tokens: int, hit: list[int]) -> int:
        needed = super().num_needed(sequence, num_tokens, hit)
        if sequence.is_allocated:
            return needed
        return needed + sum(not self.owners[block] for block in self.checkpoint(sequence, len(hit) * self.block_size))

    # Making room.

    def grow(
        self,
        sequence: ModelSequence,
        end: int,
        hit: list[int],
        num_lookahead: int = 0,
        ends: frozenset[int] = frozenset(),
        is_whole: bool = False,
    ) -> bool:
        if sequence.is_allocated:
            start = sequence.num_computed
            done = super().grow(sequence, end, hit, num_lookahead)
        else:
            start = len(hit) * self.block_size
            if len(self.live) == self.state.num_slots:
                return False
            done = super().grow(sequence, end, hit, num_lookahead, ends, is_whole)
            if done:
                self.begin(sequence, start, max(ends, default=0))
        if done:
            self.advance(sequence, start)
        return done

    def also_touched(self, sequence: ModelSequence, end: int) -> list[int]:
        return self.checkpoint(sequence, end)

    def begin(self, sequence: ModelSequence, start: int, num_matched: int) -> None:
        """A sequence starts with a hit of `start` tokens: it gets a slot."""
        copy = Copy("restore" if start else "clear", sequence, start, self.checkpoint(sequence, start))
        live = Live(start, self.wanted_ends(sequence, num_matched), copy)
        if start:
            page = self.pages(sequence, start)[0]
            live.made.append((page, copy.blocks, self.attached_as[page]))
            self.landmark_pages.add(page)
        self.live[sequence] = live
        self.before.append(copy)

    def wanted_ends(self, sequence: ModelSequence, num_matched: int) -> set[int]:
        """The end of what is known, and where it parts from what is cached, both rounded down to a grid."""
        known = len(sequence.tokens)
        powers = [self.alignment << n for n in range(12) if self.alignment << n <= min(known // 32, 1024)]
        grid = max(powers, default=self.alignment)
        last = (known - 1) // grid * grid
        return {last, min(last, num_matched // grid * grid), *self.pin_ends(sequence)}

    def pin_ends(self, sequence: ModelSequence) -> list[int]:
        """Where pins end that lack something, of prefixes that a sequence begins with."""
        ends = []
        for pin in self.pins:
            end = self.end_of(pin)
            is_whole = len(pin.held) == len(pin.priorities) and self.attached_blocks[pin]
            num_blocks = end // self.block_size
            same = pin.prefix.prefix(num_blocks, self.block_size) == sequence.prefix(num_blocks, self.block_size)
            if end and not is_whole and same and len(sequence.tokens) >= end:
                ends.append(end)
        return ends

    def end_of(self, pin: ModelPin) -> int:
        return len(pin.priorities) * self.block_size // self.alignment * self.alignment

    def attached_homes(self, prefix: ModelSequence, num_blocks: int) -> list[Prefix]:
        """As in `ReferenceGroups`, with the checkpoint at a pin's end."""
        end = num_blocks * self.block_size // self.alignment * self.alignment
        return (self.pages(prefix, end) if end else []) + super().attached_homes(prefix, num_blocks)

    def is_wanted(self, sequence: ModelSequence, position: int) -> bool:
        live, every = self.live[sequence], self.state.every
        if not self.enable_caching or position % self.alignment or position <= live.start:
            return False
        at_every = every is not None and position % every == 0
        return at_every or self.is_landmark_end(sequence, position)

    def next_cut(self, sequence: ModelSequence, start: int, max_end: int, num_matched: int) -> int:
        """Where a chunk from `start` should end."""
        if sequence in self.live:
            ends = [end for end in range(start + 1, max_end) if self.is_wanted(sequence, end)]
        else:
            self.live[sequence] = Live(start, self.wanted_ends(sequence, num_matched), None)
            ends = [end for end in range(start + 1, max_end) if self.is_wanted(sequence, end)]
            del self.live[sequence]
        return min(ends, default=max_end)

    def advance(self, sequence: ModelSequence, start: int) -> None:
        """A call gave a sequence slots from `start` on. It saves where that ends."""
        end, live = sequence.num_computed, self.live[sequence]
        if end == start:
            return
        self.num_passed += sum(self.is_wanted(sequence, position) for position in range(start + 1, end))
        if self.is_wanted(sequence, end):
            live.save = end
            self.scheduled = [other for other in self.scheduled if other is not sequence] + [sequence]

    def group_step(self, sequences: list[ModelSequence], tokens: list[int]) -> list[tuple[int, int, int, int]] | None:
        changes = super().group_step(sequences, tokens)
        if changes is not None:
            for sequence in sequences:
                self.advance(sequence, sequence.num_computed - 1)
        return changes

    # Copies.

    def mark(self, sequence: ModelSequence, position: int) -> int:
        end = position // self.alignment * self.alignment
        self.marks.setdefault(sequence, set()).add(end)
        return end

    def take_copies(self) -> tuple[list[Copy], list[Copy]]:
        """The copies before and after the step. Its checkpoints are found from now on, unless they are delayed."""
        before, self.before = self.before, []
        for copy in before:
            if copy.is_own:
                self.live[copy.sequence].before = None
                self.drop(copy.blocks)
        after, new = [], []
        for sequence in self.scheduled:
            end, self.live[sequence].save = self.live[sequence].save, None
            assert end is not None
            blocks = self.save(sequence, end)
            if blocks:
                after.append(Copy("save", sequence, end, blocks))
                new += self.attach_waiting(sequence)
        self.scheduled = []
        self.queue_all(new)
        return before, after

    def queue_all(self, new: list[tuple[bool, list[int]]]) -> None:
        """Release new checkpoints, to where blocks go that left a window unless a hit probably ends there."""
        for is_likely_end, blocks in new:
            if is_likely_end:
                self.drop(blocks)
                continue
            for block in blocks:
                self.owners[block] -= 1
                if not self.owners[block]:
                    self.early.append(block)

    def save(self, sequence: ModelSequence, end: int) -> list[int]:
        """Take blocks for a checkpoint, without evicting what a pin holds; none if it is skipped."""
        if sequence.num_computed != end:
            self.num_passed += 1
            return []
        is_lost = sequence.lost is not None and sequence.lost < end
        waits = sequence.delayed is not None and sequence.delayed < end
        if not sequence.is_of_this_epoch or is_lost or not (waits or self.has_node(sequence, end)):
            self.num_taken_back += 1
            return []
        if not waits and self.checkpoint(sequence, end):
            self.num_present += 1
            return []
        if len(self.early) + len(self.late) < self.state.checkpoint_blocks:
            self.num_without_room += 1
            return []
        blocks = self.take(self.state.checkpoint_blocks)
        self.live[sequence].waiting.append((end, blocks, self.is_landmark_end(sequence, end)))
        return blocks

    def has_node(self, sequence: ModelSequence, end: int) -> bool:
        """Whether the block of its table that ends there is cached."""
        return sequence.table[end // self.block_size - 1] in self.content

    def attach_waiting(self, sequence: ModelSequence) -> list[tuple[bool, list[int]]]:
        """Cache the saved checkpoints whose tokens are written. Returns them, with whether hits probably end there."""
        live, new = self.live[sequence], []
        waiting, live.waiting = live.waiting, []
        for end, blocks, is_likely_end in waiting:
            if sequence.num_registered * self.block_size < end:
                live.waiting.append((end, blocks, is_likely_end))
            elif not self.has_node(sequence, end):
                self.num_taken_back += 1
                self.drop(blocks)
            elif self.checkpoint(sequence, end):
                self.num_present += 1
                self.drop(blocks)
            else:
                pages = self.pages(sequence, end)
                for page, block in zip(pages, blocks, strict=True):
                    self.cached[page] = [block]
                    self.content[block] = page
                self.num_attached += 1
                self.attached_as[pages[0]] = self.num_attached
                live.made.append((pages[0], blocks, self.num_attached))
                self.landmark_pages.discard(pages[0])
                if is_likely_end:
                    self.landmark_pages.add(pages[0])
                self.num_saved += 1
                self.extend_pins(sequence)
                new.append((is_likely_end, blocks))
        return new

    def is_landmark_end(self, sequence: ModelSequence, end: int) -> bool:
        return end in self.live[sequence].wanted or end in self.marks.get(sequence, set())

    def commit(self, sequence: ModelSequence, num_written: int) -> None:
        super().commit(sequence, num_written)
        if self.enable_caching and sequence.is_of_this_epoch:
            self.queue_all(self.attach_waiting(sequence))

    def renew(self, sequence: ModelSequence) -> None:
        super().renew(sequence)
        self.queue_all(self.attach_waiting(sequence))

    # What is cached.

    def forget(self, block: int, cause: str) -> None:
        prefix = self.content.get(block)
        if prefix is None or len(prefix) < 7:
            super().forget(block, cause)
            return
        for place in range(self.state.checkpoint_blocks):  # a checkpoint goes as a whole
            page = (*prefix[:6], place)
            for holder in self.cached.pop(page):
                del self.content[holder]
                if holder != block or cause != "evicted":
                    self.detached.add(holder)

    # What ends, parts and goes back.

    def abort(self, sequence: ModelSequence, num_computed: int) -> None:
        """What its copies own is given back behind its blocks."""
        self.ending = sequence
        super().abort(sequence, num_computed)
        self.ending = None

    def free(self, sequence: ModelSequence) -> None:
        """Checkpoints are queued anew behind the sequence's blocks: what it began with, then its own."""
        live = self.live[sequence]
        super().free(sequence)
        self.leave(sequence, live)
        del self.live[sequence]
        for page, blocks, number in live.made:
            is_there = page in self.cached and self.attached_as[page] == number  # and no later one at the same place
            if is_there and page in self.landmark_pages and not any(self.owners[block] for block in blocks):
                self.hold(blocks)
                self.drop(blocks)

    def leave(self, sequence: ModelSequence, live: Live) -> None:
        """Give back what is owned for copies that are made no more."""
        self.forget_copy(live)
        for _, blocks, _ in live.waiting:
            self.drop(blocks)
        live.waiting = []
        self.scheduled = [other for other in self.scheduled if other is not sequence]

    def forget_copy(self, live: Live) -> None:
        """A sequence's copy before the step is made no more, unless others need what it brings. They own its blocks."""
        if live.before is None:
            return
        live.before.is_own = False
        self.drop(live.before.blocks)
        live.before = None
        for copy in reversed(list(self.before)):  # the last one first: it may be all that another one is made for
            if not copy.is_own and not any(other.brings is copy for other in self.before):
                self.before.remove(copy)

    def all_tables(self, sequence: ModelSequence) -> list[list[int]]:
        """As in `ReferenceGroups`, and the blocks that copies of its state read or write."""
        live = self.live[sequence]
        restoring = [] if live.before is None else live.before.blocks
        return [*super().all_tables(sequence), [*restoring, *[b for _, blocks, _ in live.waiting for b in blocks]]]

    def lose(self, lost: dict[int, int], cause: str) -> None:
        """As in `ReferenceGroups`. Saves that wait in these blocks are lost, too."""
        is_shared = max((self.owners[block] for block in lost), default=0) > (cause == "aborted")  # by a pin, too
        super().lose(lost, cause)
        if not is_shared:
            return  # only the sequence has them that gives them back, and its saves
        for sequence in self.running:
            if sequence is self.ending:
                continue
            live = self.live[sequence]
            bad = [end for end, pages, _ in live.waiting if not lost.keys().isdisjoint(pages)]
            self.drop_waiting(live, min(bad, default=len(sequence.tokens) + 1) - 1)
            self.drop_waiting(live, len(sequence.tokens) if sequence.lost is None else sequence.lost)

    def first_lost_in(self, sequence: ModelSequence, lost: dict[int, int]) -> int | None:
        """As in `ReferenceGroups`. A state that is to come from these blocks lacks the token before it."""
        first, before = super().first_lost_in(sequence, lost), self.live[sequence].before
        if before is None or lost.keys().isdisjoint(before.blocks):
            return first
        return before.position - 1 if first is None else min(first, before.position - 1)

    def drop_waiting(self, live: Live, num_tokens: int) -> None:
        """Drop the saves that wait behind so many tokens."""
        for saved in [saved for saved in live.waiting if saved[0] > num_tokens]:
            live.waiting.remove(saved)
            self.drop(saved[1])

    def fork_state(self, sequence: ModelSequence, name: str, slot: int) -> ModelSequence:
        """Fork a sequence whose live state is in `slot`."""
        child = self.fork(sequence, name)
        live = self.live[sequence]
        copy = Copy("fork", child, child.num_computed, source=slot, brings=live.before)
        if live.before is not None:
            live.before.slot = slot
            copy.blocks = list(live.before.blocks)
            self.hold(copy.blocks)
        self.live[child] = Live(live.start, set(live.wanted), copy, live.highest)
        self.live[child].made = list(live.made)
        self.marks[child] = set(self.marks.get(sequence, set()))
        self.before.append(copy)
        return child

    def floor(self, sequence: ModelSequence, num_tokens: int) -> int:
        """Where a rewind to `num_tokens` ends: its last checkpoint up to there, 0 if there is none.

        A sequence from before a reset has none, even if another one's `renew` has cached their common blocks again.
        """
        if num_tokens == sequence.num_computed and not num_tokens % self.alignment:
            return num_tokens
        if not sequence.is_of_this_epoch:
            return 0
        cached = 0
        while cached < len(sequence.table) and sequence.table[cached] in self.content:
            cached += 1
        ends = [
            end
            for end in range(self.alignment, num_tokens + 1, self.alignment)
            if end <= min(cached, sequence.num_registered) * self.block_size and self.checkpoint(sequence, end)
        ]
        return max(ends, default=0)

    def least_kept(self, sequence: ModelSequence) -> int:
        """The fewest tokens that it may be truncated to: the engine keeps some states before the newest one."""
        live = self.live[sequence]
        return max(live.start, max(live.highest, sequence.num_computed) - self.state.num_kept)

    def truncate(self, sequence: ModelSequence, num_tokens: int, num_computed: int | None) -> None:
        live = self.live[sequence]
        live.highest = max(live.highest, sequence.num_computed)
        super().truncate(sequence, num_tokens, num_computed)
        self.drop_waiting(live, num_tokens)

    def rewind(self, sequence: ModelSequence, num_tokens: int) -> None:
        """Go back to a checkpoint, or to the beginning, and restore the state from there."""
        live, is_shorter = self.live[sequence], num_tokens < sequence.num_computed
        blocks = self.checkpoint(sequence, num_tokens)
        if is_shorter:
            self.hold(blocks)
        self.ending = sequence  # as in an abort: what its saves own is given back behind its blocks
        super().rewind(sequence, num_tokens)
        self.ending = None
        if is_shorter:
            self.forget_copy(live)
            live.before = Copy("restore" if num_tokens else "clear", sequence, num_tokens, blocks)
            self.before.append(live.before)
            if num_tokens:
                page = self.pages(sequence, num_tokens)[0]
                self.landmark_pages.add(page)
                if (page, blocks, self.attached_as[page]) not in live.made:
                    live.made.append((page, blocks, self.attached_as[page]))
            live.start = live.highest = num_tokens
            live.save = None
            self.scheduled = [other for other in self.scheduled if other is not sequence]
