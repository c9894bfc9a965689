# ruff: noqa: E501  # a line of a picture is a line here
"""Draw the pictures of docs/pictures: `python tools/draw_pictures.py` writes them all.

Each function of PICTURES draws one picture, and is named like its file. A picture is light or dark like the page around
it. README.md also has a dark file, since GitHub's theme chooses between files. A test compares the files with what is
drawn.
"""

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]

from layers import layers  # noqa: E402  # tools/ is no package
from picture import Picture  # noqa: E402
from ten_blocks import worked_example  # noqa: E402


def why() -> Picture:
    """What prefix caching saves: the measured demo of docs/engine.md."""
    picture = Picture("Four questions that share a long prompt, without and with prefix caching", 250)
    picture.text(20, 28, "Four requests with the same 1,024 tokens in front: time to first token", "bold")
    rows = [
        ("customer 1", 2.86, 2.85),
        ("customer 2", 2.92, 0.15),
        ("customer 3", 2.93, 0.16),
        ("customer 4", 2.83, 0.16),
    ]
    for number, (name, without, with_caching) in enumerate(rows):
        y = 46 + 46 * number
        picture.text(20, y + 20, name)
        for offset, seconds, fill in ((0, without, "gone"), (17, with_caching, "shared")):
            length = round(seconds * 190)
            picture.box(110, y + offset, length, "", fill, 15)
            picture.text(118 + length, y + offset + 12, f"{seconds:.2f} s", "small")
    picture.box(110, 229, 14, "", "gone", 12)
    picture.text(130, 240, "without", "small")
    picture.box(190, 229, 14, "", "shared", 12)
    picture.text(210, 240, "with caching. SmolLM2-135M, 2 CPU cores, float32; make demo shows your machine's", "small")
    return picture


def claim() -> Picture:
    """The first screen's chart: the kept comparison of docs/performance.md, plain build, and the demo of docs/engine.md."""
    picture = Picture("A hit, a decode step and a first token, with kvblocks and without", 306)
    groups = [
        (
            "finding a cached prompt of 32,768 tokens, in microseconds",
            [("kvblocks", 4.76, "4.8"), ("SGLang 0.5.23", 26.8, "27"), ("vLLM 0.33", 5008, "5,008")],
        ),
        (
            "one decode step of 1,024 sequences, in microseconds for each of them",
            [("kvblocks", 0.217, "0.22"), ("SGLang 0.5.23", 0.107, "0.11"), ("vLLM 0.33", 6.062, "6.1")],
        ),
        (
            "first token of an answer after a shared prompt of 1,024 tokens, in seconds",
            [("cached", 0.15, "0.15"), ("computed", 2.92, "2.92")],
        ),
    ]
    y = 0
    for title, rows in groups:
        y += 30
        picture.text(20, y, title, "bold")
        longest = max(value for _, value, _ in rows)
        for number, (name, value, shown) in enumerate(rows):
            y += 22
            length = max(2, round(value / longest * 520))
            picture.text(20, y + 2, name, "small dark")
            picture.box(120, y - 9, length, "", "gone" if number else "shared", 15)
            picture.text(128 + length, y + 3, shown, "small")
    picture.text(
        20,
        298,
        "One core of an AMD EPYC, plain Python; minimum of 36 samples in one process. SmolLM2-135M on 2 cores.",
        "small",
    )
    return picture


def shared_prefix() -> Picture:
    """Three requests whose prompts begin alike: their block tables, and the pool."""
    picture = Picture("Requests whose prompts begin alike have the same blocks in front", 314)
    picture.text(20, 28, "Prompts that begin alike share the blocks of their beginning", "bold")
    tables = [("request 1", (7, 3)), ("request 2", (5,)), ("request 3", (9, 8))]
    for row, (name, own) in enumerate(tables):
        y = 46 + 42 * row
        picture.text(20, y + 20, name)
        for place, number in enumerate((0, 1, 2)):
            picture.box(110 + 62 * place, y, 62, str(number), "shared")
        for place, number in enumerate(own):
            picture.box(296 + 62 * place, y, 62, str(number), "own")
    picture.text(440, 66, "block tables: which block has the next 16 tokens", "small")
    picture.text(440, 108, "computed once, by whoever came first", "small")
    picture.text(440, 124, "computed by the request itself", "small")
    picture.box(420, 99, 12, "", "shared", 10)
    picture.box(420, 115, 12, "", "own", 10)
    picture.text(20, 226, "pool")
    fills = ["shared"] * 3 + ["own", "gone", "own", "gone", "own", "own", "own"]
    for number, fill in enumerate(fills):
        picture.box(110 + 62 * number, 206, 62, f"block {number}", fill, 30)
    for place in range(3):
        x = 141 + 62 * place
        picture.arrow((x, 162), (x, 204))
        picture.text(x, 254, "3 owners", "small", "middle")
    for number in (4, 6):
        picture.text(141 + 62 * number, 254, "free, cached", "small", "middle")
    picture.text(
        20,
        282,
        "The three tables name the same memory, so its K and V are computed and kept once. Blocks 4 and 6 have no owner now;",
        "small",
    )
    picture.text(
        20, 298, "they keep what they hold until something else needs their memory, and a prompt may hit them.", "small"
    )
    return picture


def checkpoint_way() -> Picture:
    """From one sequence's slot to another's: saved, evicted to a tier, loaded, restored."""
    picture = Picture(
        "A checkpoint is saved after a step, kept in the pool and in tiers, and restored before a step", 342
    )
    picture.text(20, 28, "The way of a checkpoint, from one sequence to the next", "bold")
    for y, name, what in ((60, "slots", "live states"), (150, "pool", "blocks"), (240, "tier", "host, disk, store")):
        picture.text(20, y + 14, name)
        picture.text(20, y + 30, what, "small")
    picture.box(130, 60, 170, "state of the first", "own", 36)
    picture.box(570, 60, 170, "state of the second", "own", 36)
    for left in (130, 570):
        for number, name in enumerate(("KV", "S1", "S2", "S3")):
            picture.box(left + 44 * number, 150, 38, name, "new" if number else "shared", 36)
    for number, name in enumerate(("KV", "S1", "S2", "S3")):
        picture.box(350 + 44 * number, 240, 38, name, "new" if number else "shared", 36)
    picture.arrow((215, 98), (215, 148))
    picture.text(225, 128, "1. save, after the step", "small")
    picture.arrow((215, 188), (215, 258), (346, 258))
    picture.text(130, 282, "2. store, when its request ends", "small")
    picture.arrow((524, 258), (655, 258), (655, 190))
    picture.text(590, 282, "3. load, for a hit", "small")
    picture.arrow((655, 148), (655, 98))
    picture.text(645, 128, "4. restore, before the step", "small", "end")
    picture.arrow((302, 168), (566, 168), dash=True)
    picture.text(434, 160, "while it is still in the pool: no tier", "small", "middle")
    picture.text(
        20,
        312,
        "S1 to S3 are the parts of one state. They are found, moved and evicted together, never in part.",
        "small",
    )
    picture.text(20, 328, "The second sequence goes on after the last token that the state has seen.", "small")
    return picture


def gate() -> Picture:
    """Sessions inside and outside of the session gate."""
    picture = Picture("The session gate admits as many sessions as the cache can remember", 280)
    picture.text(20, 28, "The gate: members take many turns in a row, the others wait for room", "bold")
    picture.text(20, 58, "waiting sessions", "small dark")
    for number, (name, width) in enumerate((("E", 120), ("F", 70), ("G", 90))):
        picture.box(20, 70 + 38 * number, width, name, "gone")
    picture.arrow((150, 85), (222, 85))
    picture.text(186, 78, "room?", "small", "middle")
    picture.arrow((230, 52), (230, 180), dash=True, tip=False)
    picture.text(
        250, 58, "members: the room in the cache, and what each one's prompt and answer take of it", "small dark"
    )
    x = 250
    members = (("A", 130, "own"), ("B", 90, "own"), ("C", 80, "own"), ("D", 110, "shared"), ("free", 75, "empty"))
    for name, width, fill in members:
        picture.box(x, 70, width, name, fill)
        x += width
    picture.box(250, 116, 22, "", "own", 16)
    picture.text(280, 128, "runs: each turn hits the prefix of the last one", "small")
    picture.box(250, 140, 22, "", "shared", 16)
    picture.text(280, 152, "pauses for a tool: keeps its place for a time that the gate learns", "small")
    picture.arrow((648, 102), (648, 196), (80, 196), (80, 180))
    picture.text(
        364,
        212,
        "after too long a pause, or at the end of its turn, a member leaves and waits again",
        "small",
        "middle",
    )
    picture.text(
        20,
        246,
        "Without a gate all seven take turns: each throws out the prefix that another one needs next, and every prompt is",
        "small",
    )
    picture.text(
        20,
        262,
        "computed from its beginning. With it E waits until it fits, or until nothing has been busy for a while.",
        "small",
    )
    return picture


def hash_chain() -> Picture:
    """Why equal blocks after different beginnings are different."""
    picture = Picture("A block's key is its parent, its tokens and its extra keys", 250)
    picture.text(20, 28, "A block is found by what it has, and by what stands before it", "bold")
    words = [("You are a", "shared"), ("kind robot .", "shared"), ("Tell me of", "own"), ("the sea .", "own")]
    picture.text(20, 68, "prompt 1")
    for number, (text, fill) in enumerate(words):
        x = 100 + 160 * number
        picture.box(x, 48, 120, text, fill)
        picture.text(x + 60, 96, f"block {number}", "small", "middle")
        if number:
            picture.arrow((x, 63), (x - 40, 63))
    picture.text(20, 178, "prompt 2")
    for number, (text, fill) in enumerate([("Sing me of", "new"), ("the sea .", "new")]):
        x = 420 + 160 * number
        picture.box(x, 158, 120, text, fill)
        picture.text(x + 60, 206, f"block {number + 4}", "small", "middle")
    picture.arrow((420, 173), (364, 173), (364, 80))
    picture.arrow((580, 173), (540, 173))
    picture.text(100, 150, "found: blocks 0 and 1", "small")
    picture.text(100, 166, "computed: the rest", "small")
    picture.text(
        20,
        234,
        'An arrow leads to the parent. "the sea ." is there twice: its KV depends on all that stands before it.',
        "small",
    )
    return picture


def free_queue() -> Picture:
    """In which order blocks are taken."""
    picture = Picture("The free queue: which block is taken next", 200)
    picture.text(20, 28, "Free blocks wait in one doubly linked list", "bold")
    blocks = list(zip("9472065", ["empty"] * 2 + ["gone"] + ["shared"] * 4, strict=True))
    picture.text(20, 86, "taken")
    picture.arrow((92, 81), (64, 81))
    for number, (name, fill) in enumerate(blocks):
        x = 100 + 84 * number
        picture.box(x, 66, 56, name, fill)
        if number:
            picture.arrow((x - 26, 81), (x - 2, 81), both=True)
    picture.arrow((716, 81), (664, 81))
    picture.text(690, 62, "freed", "", "middle")
    picture.text(100, 122, "hold nothing", "small")
    picture.text(268, 122, "left a window", "small")
    picture.text(380, 122, "cached: the least recently used first", "small")
    picture.text(
        20,
        160,
        "A hit takes a block out of the middle in constant time, because each block knows both neighbours.",
        "small",
    )
    picture.text(
        20,
        180,
        "A sequence gives its last block back first. So the end of a prompt goes before its beginning.",
        "small",
    )
    return picture


def runs() -> Picture:
    """What the index keeps: runs of blocks that were cached together."""
    picture = Picture("Blocks that were cached together are one run: one lookup and one comparison", 230)
    picture.text(20, 28, "Blocks that were cached together are one run: one lookup, one comparison of memory", "bold")
    for number in range(6):
        picture.box(100 + 70 * number, 60, 70, f"block {number}", "shared" if number < 3 else "own")
    picture.text(20, 80, "run A")
    for number in range(3):
        picture.box(310 + 70 * number, 140, 70, f"block {number + 6}", "new")
    picture.text(20, 160, "run B")
    picture.arrow((310, 155), (290, 155), (290, 92))
    picture.text(540, 80, "tokens of 6 blocks in one piece", "small")
    picture.text(540, 160, "attached after block 2", "small")
    picture.text(
        20, 200, "A prompt that begins like A and goes on like B is found in two steps, however long it is.", "small"
    )
    picture.text(
        20,
        218,
        "A radix tree would cut run A in two when B comes. Here A stays as it is, and B is attached to a place inside it.",
        "small",
    )
    return picture


def copy_on_write() -> Picture:
    """A fork, and the first token that one of the two adds."""
    picture = Picture("A fork shares all blocks; the first that adds a token gets a copy of the last one", 250)
    for x, title in ((20, "After the fork"), (400, "One token later")):
        picture.text(x, 28, title, "bold")
    for x in (20, 400):
        picture.text(x, 78, "first")
        picture.text(x, 198, "child")
        picture.box(x + 90, 118, 90, "a b c d", "shared")
        picture.text(x + 135, 166, "block 0", "small", "middle")
        picture.arrow((x + 45, 78), (x + 88, 122))
        picture.arrow((x + 45, 190), (x + 88, 148))
    picture.box(215, 118, 90, "e f _ _", "shared")
    picture.text(311, 137, "block 1", "small")
    picture.arrow((65, 73), (260, 73), (260, 116))
    picture.arrow((65, 195), (260, 195), (260, 150))
    picture.box(595, 58, 90, "e f x _", "new")
    picture.text(640, 50, "block 2, copied", "small", "middle")
    picture.box(595, 178, 90, "e f y _", "own")
    picture.text(640, 226, "block 1", "small", "middle")
    picture.arrow((445, 73), (593, 73))
    picture.arrow((445, 195), (593, 195))
    picture.arrow((640, 176), (640, 92), dash=True)
    picture.text(648, 138, "copy e f", "small")
    return picture


def cascade() -> Picture:
    """Attention over a shared prefix, once for all who share it."""
    picture = Picture("Cascade attention: the shared blocks are read once for all sequences", 260)
    picture.text(20, 28, "Cascade attention reads shared blocks once for all who share them", "bold")
    for number in range(4):
        picture.box(100 + 60 * number, 60, 60, f"block {number}", "shared")
    picture.text(20, 80, "shared")
    for row, numbers in enumerate([(4, 5), (6,), (7, 8)]):
        y = 118 + 42 * row
        picture.text(20, y + 20, f"sequence {row + 1}")
        for index, number in enumerate(numbers):
            picture.box(340 + 60 * index, y, 60, f"block {number}", "own")
        picture.arrow((350 + 60 * len(numbers), y + 15), (560, y + 15))
    picture.arrow((345, 75), (620, 75), (620, 112))
    picture.text(356, 68, "3 queries at once", "small")
    picture.box(562, 114, 116, "merge", "new", 118)
    picture.arrow((682, 173), (740, 173))
    picture.text(
        20,
        250,
        "Merging weighs each part by its sum of exponentials, so the result is that of attention over all blocks.",
        "small",
    )
    return picture


def windows() -> Picture:
    """Two groups of layers, one with a sliding window."""
    picture = Picture("A group of layers with a sliding window holds the blocks that its window sees", 230)
    picture.text(20, 28, "Two groups of layers, two block tables, one pool", "bold")
    picture.text(20, 46, "blocks of 4 tokens", "small")
    for y, name in ((58, "full attention"), (118, "window of 12")):
        picture.text(20, y + 20, name)
    for number in range(7):
        picture.box(130 + 80 * number, 58, 80, f"block {number}", "own")
        inside = number >= 4
        picture.box(
            130 + 80 * number, 118, 80, f"block {number + 3}" if inside else "dead", "own" if inside else "gone"
        )
    picture.arrow((700, 40), (700, 64))
    picture.text(700, 34, "next token", "small", "middle")
    picture.arrow((450, 166), (688, 166), both=True)
    picture.text(490, 184, "what the next token sees", "small")
    picture.text(
        20,
        204,
        "Blocks that leave the window are reused before other cached ones. A hit of n tokens needs all blocks before n",
        "small",
    )
    picture.text(
        20, 220, "in the first group, and in the second the blocks in front of n that the window sees.", "small"
    )
    return picture


def states() -> Picture:
    """Live states in slots, a checkpoint in scattered blocks, and the copies between them."""
    picture = Picture("Live states lie in slots; a checkpoint is a copy in ordinary blocks of the pool", 250)
    picture.text(20, 28, "A state at work has a slot; a state at rest is blocks of the pool", "bold")
    picture.text(20, 70, "slots")
    for number, name in enumerate(("state of a", "state of b", "free")):
        picture.box(110 + 170 * number, 50, 170, name, "gone" if number == 2 else "own")
    picture.text(20, 170, "pool")
    blocks = ["KV", "S1", "KV", "KV", "S2", "S3", "KV", "free", "T1", "KV", "T2", "T3"]
    for number, name in enumerate(blocks):
        fill = {"KV": "shared", "free": "empty"}.get(name, "new")
        picture.box(110 + 52 * number, 150, 52, name, fill)
    for x in (188, 344, 396):
        picture.arrow((170, 82), (x, 148))
    picture.text(40, 118, "save, after a step", "small")
    for x in (552, 656, 708):
        picture.arrow((x, 148), (365, 82))
    picture.text(570, 108, "restore or clear, before a step", "small")
    picture.text(
        20,
        212,
        "S1 to S3 are one checkpoint: a copy of the state after some tokens. It is found where the block that ends there is",
        "small",
    )
    picture.text(20, 230, "found, it is evicted as a whole, and it is in the same order of reuse as K and V.", "small")
    return picture


def state_hit() -> Picture:
    """Where a hit ends when K and V are cached further than the last checkpoint."""
    picture = Picture("A hit ends at the last checkpoint, however far K and V are cached", 250)
    picture.text(20, 28, "Where a hit ends", "bold")
    picture.text(20, 78, "prompt")
    for number in range(8):
        fill = "shared" if number < 4 else "gone" if number < 6 else "new"
        picture.box(110 + 78 * number, 58, 78, f"block {number}", fill)
    for end, name in ((2, "checkpoint"), (4, "checkpoint")):
        picture.box(110 + 78 * end - 50, 118, 100, name, "new")
        picture.arrow((110 + 78 * end, 116), (110 + 78 * end, 92))
    picture.arrow((112, 172), (420, 172), both=True)
    picture.text(266, 190, "hit.num_tokens", "small", "middle")
    picture.arrow((112, 206), (576, 206), both=True)
    picture.text(500, 200, "hit.num_matched_tokens", "small", "middle")
    picture.arrow((578, 48), (578, 62), tip=False)
    picture.text(578, 44, "two prompts part: this one saves here", "small", "middle")
    picture.text(
        20,
        236,
        "Blocks 4 and 5 have K and V, but no state from which anybody could go on: they are computed again, once.",
        "small",
    )
    return picture


def block_way() -> Picture:
    """The states that a block goes through, again and again."""
    picture = Picture("A block is free, owned, cached, free and cached, and evicted", 230)
    picture.text(20, 28, "A block goes round", "bold")
    for x, name, fill in (
        (20, "free, empty", "empty"),
        (220, "owned", "own"),
        (420, "owned, cached", "shared"),
        (620, "free, cached", "gone"),
    ):
        picture.box(x, 80, 120, name, fill)
    for x, what in ((140, "taken"), (340, "full")):
        picture.arrow((x + 2, 95), (x + 78, 95))
        picture.text(x + 40, 87, what, "small", "middle")
    picture.arrow((542, 88), (618, 88))
    picture.text(580, 80, "let go", "small", "middle")
    picture.arrow((618, 102), (542, 102))
    picture.text(580, 116, "hit", "small", "middle")
    picture.arrow((240, 110), (240, 140), (80, 140), (80, 112))
    picture.text(160, 134, "let go before it is full", "small", "middle")
    picture.arrow((680, 110), (680, 170), (300, 170), (300, 112))
    picture.text(490, 164, "evicted: taken for something else", "small", "middle")
    picture.text(
        20,
        200,
        "A hit adds an owner, whether the block has one or is free. The last owner that lets go frees it.",
        "small",
    )
    picture.text(
        20,
        218,
        "Only full blocks are cached. Empty blocks are taken first, then those that were used longest ago.",
        "small",
    )
    return picture


PICTURES: tuple[Callable[[], Picture], ...] = (
    claim,
    why,
    shared_prefix,
    hash_chain,
    free_queue,
    runs,
    copy_on_write,
    cascade,
    windows,
    states,
    state_hit,
    checkpoint_way,
    gate,
    block_way,
    worked_example,
    layers,
)


def files() -> dict[str, str]:
    """Return the files of docs/pictures by name. What README.md shows is there as a dark file, too."""
    drawn = {f"{draw.__name__.replace('_', '-')}.svg": draw().svg() for draw in PICTURES}
    return drawn | {"claim-dark.svg": claim().svg(always_dark=True)}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, svg in files().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
