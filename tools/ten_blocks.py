"""The picture of the worked example: what its ten blocks hold at each time."""

from picture import Picture

from kvblocks import KVCacheBlock, KVCacheManager, Sequence

# What the queue is at each time if all freed blocks go to its end, as in the document.
DOCUMENTS_QUEUE = ("4 5 6 7 8 9", "5 6 7 8 9", "7 8 9", "7 8 9 4 3 2", "7 8 9 4 3 2 6 5 1 0", "6 5")


class TenBlocks:
    """Ten blocks of a real manager, drawn again and again. sequences: those that may own blocks."""

    def __init__(self, picture: Picture, manager: KVCacheManager, sequences: tuple[Sequence, ...]) -> None:
        self.picture, self.manager, self.sequences = picture, manager, sequences
        self.num_drawn = 0
        self.seen: dict[int, tuple[KVCacheBlock, str]] = {}  # by id: each block with the tokens that it got last

    def draw(self, what: str) -> None:
        """Draw what every block holds now, and the queue of free blocks."""
        owned: list[int] = []
        for sequence in self.sequences:
            owned += sequence.block_ids if sequence.is_allocated else []
            for number, block in enumerate(sequence.blocks):
                self.seen[block.block_id] = block, spelled(sequence.token_ids()[4 * number : 4 * number + 4])
        y = 96 + 104 * self.num_drawn
        self.picture.text(20, y, f"{self.num_drawn + 1}. {what}", "small dark")
        for number in range(10):
            block, tokens = self.seen.get(number, (None, ""))
            is_cached = block is not None and block.is_cached
            fill = ("gone" if is_cached else "empty", "own", "shared")[owned.count(number)]
            self.picture.box(20 + 72 * number, y + 8, 68, "" if fill == "empty" else tokens, fill, 28)
            self.picture.text(54 + 72 * number, y + 48, str(number), "small", "middle")
        queue = " ".join(map(str, self.manager.inspect.free_block_ids()))
        self.picture.text(20, y + 68, f"free, next first: {queue}", "small")
        self.picture.text(390, y + 68, f"in the document's order: {DOCUMENTS_QUEUE[self.num_drawn]}", "small")
        self.num_drawn += 1


def spelled(tokens: list[int]) -> str:
    """Return tokens in a short form: 8 to 10, 100."""
    last = next((i for i, token in enumerate(tokens) if token != tokens[0] + i), len(tokens))
    rest = spelled(tokens[last:]) if last < len(tokens) else ""
    first = f"{tokens[0]}" if last == 1 else f"{tokens[0]}-{tokens[last - 1]}"
    return f"{first}, {rest}" if rest else first


def worked_example() -> Picture:
    """The example of vLLM's design document, by time, as a real manager does it."""
    manager = KVCacheManager(num_blocks=10, block_size=4)
    first, second = Sequence("0", range(14)), Sequence("1", [*range(11), 100, 101, 102])
    third = Sequence("2", [*range(12), *range(200, 217)])
    picture = Picture("Ten blocks by time, with the queue of free blocks, here and in the document", 704)
    picture.text(20, 28, "Ten blocks of four tokens, by time", "bold")
    names = (("own", "one owner"), ("shared", "two owners"), ("gone", "free, cached"), ("empty", "free, holds nothing"))
    for number, (fill, name) in enumerate(names):
        picture.box(20 + 140 * number, 44, 22, "", fill, 18)
        picture.text(48 + 140 * number, 57, name, "small")
    blocks = TenBlocks(picture, manager, (first, second, third))
    manager.allocate_slots(first)
    blocks.draw("Request 0 comes with 14 tokens. Its three full blocks are cached.")
    for token in (14, 15, 16):
        manager.append_slots(first, [token])
    blocks.draw("Request 0 has three more tokens: block 3 is full and cached, and a new block begins.")
    manager.allocate_slots(second, hit=manager.get_computed_blocks(second))
    blocks.draw("Request 1 comes with 14 tokens, of which 11 are the same: two full blocks are hit.")
    manager.free(first)
    blocks.draw("Request 0 ends. Blocks 0 and 1 still have an owner. Block 4 was not full, so it holds nothing.")
    manager.free(second)
    blocks.draw("Request 1 ends.")
    manager.allocate_slots(third, hit=manager.get_computed_blocks(third))
    blocks.draw("Request 2 comes with 29 tokens, of which 12 are the same: three blocks are hit, five are taken.")
    return picture
