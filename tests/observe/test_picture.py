"""The picture of the cache: rows have every cached block once, and the dot document says the same as the rows."""

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from model.history import History, RandomChooser, walk

from kvblocks import InvalidArgumentError, KVCacheManager, PrefixRow, Sequence
from kvblocks.observe.picture import describe_key, prefix_rows, to_dot

# A parser of the part of the dot language that is used here, strict about all of it.

ATTRIBUTES = r'\[(\w+=(?:\w+|"(?:[^"\\\n]|\\.)*")(?:, \w+=(?:\w+|"(?:[^"\\\n]|\\.)*"))*)\]'
STATEMENT = re.compile(rf"  (?:(\w+)=(\w+)|(\w+) {ATTRIBUTES}|(\w+) -> (\w+)(?: {ATTRIBUTES})?);")


@dataclass
class Drawing:
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)


def unquoted(value: str) -> str:
    """The text that Graphviz shows for a value, its lines ended by newlines."""
    if not value.startswith('"'):
        return value
    text = value[1:-1]
    assert not re.search(r'\\[^"\\l]', text.replace("\\\\", "")), f"{value}: an escape that means something else"
    assert text.isprintable(), f"{value}: what nobody can see"
    text = re.sub(r'\\(["\\l])', lambda match: "\n" if match[1] == "l" else match[1], text)
    assert not re.search(r"&(?!amp;)", text), f"{value}: an entity"
    return text.replace("&amp;", "&")


def parse(dot: str) -> Drawing:
    lines = dot.split("\n")
    assert lines[0] == "digraph prefix_cache {"
    assert lines[-2:] == ["}", ""]
    drawing = Drawing()
    for line in lines[1:-2]:
        match = STATEMENT.fullmatch(line)
        assert match, line
        name, attributes, tail, head = match[3], match[4], match[5], match[6]
        if name is not None and name != "node":
            assert name not in drawing.nodes
            pairs = re.findall(r'(\w+)=(\w+|"(?:[^"\\]|\\.)*")', attributes)
            drawing.nodes[name] = {key: unquoted(value) for key, value in pairs}
        elif tail is not None:
            drawing.edges.append((tail, head))
    for edge in drawing.edges:
        assert set(edge) <= set(drawing.nodes), edge
    return drawing


def num_of(noun: str, label: str) -> int:
    match = re.search(rf"(\d+) {noun}s?\b", label)
    return int(match[1]) if match else 0


def check_dot(rows: list[PrefixRow], max_nodes: int | None) -> None:
    """Check that each row has a node, in order, and that the last node counts all rows that are left out."""
    drawing = parse(to_dot(rows, max_nodes))
    labels = {name: attributes["label"] for name, attributes in drawing.nodes.items()}
    whole, left_out = labels.pop("cache"), labels.pop("left_out", "")
    assert len(labels) == min(len(rows), len(rows) if max_nodes is None else max_nodes)
    assert bool(left_out) == (len(labels) < len(rows))
    assert len(labels) + num_of("node", left_out) == len(rows)
    for noun in ("block", "owned", "free", "duplicate"):
        total = num_of(noun, whole)
        assert sum(num_of(noun, label) for label in labels.values()) + num_of(noun, left_out) == total
    assert num_of("block", whole) == sum(row.num_blocks + row.num_duplicates for row in rows)
    edges = [edge for edge in drawing.edges if edge[1] != "left_out"]
    assert [head for _, head in edges] == list(labels)
    for tail, head in edges:
        row = rows[int(head[3:])]
        assert tail == ("cache" if row.parent is None else f"row{row.parent}")
        assert labels[head].startswith(f"tokens {row.start_token}-{row.start_token + row.num_tokens - 1}\n")
        assert labels[head].endswith("".join(f"{line}\n" for line in [*row.describe_keys(), row.describe_tokens()]))
        assert ("fillcolor" in drawing.nodes[head]) == (row.num_owned > 0)
    drawn = [rows[int(name[3:])].depth for name in labels]
    hidden = [row.depth for i, row in enumerate(rows) if f"row{i}" not in labels]
    assert not hidden or max(drawn) <= min(hidden)


def make_rows(history: History) -> list[PrefixRow]:
    rows = history.manager.inspect.prefix_rows()
    for i, row in enumerate(rows):
        assert row.num_tokens == row.num_blocks * history.model.block_size > 0
        assert len(row.first_tokens) == min(row.num_tokens, 8)
        if row.parent is None:
            assert (row.depth, row.start_token) == (0, 0)
        else:
            above = rows[row.parent]
            assert row.parent < i
            assert (row.depth, row.start_token) == (above.depth + 1, above.start_token + above.num_tokens)
    return rows


def check_against_model(history: History, rows: list[PrefixRow]) -> int:
    """The rows have the model's cached prefixes, each block once. Returns how many prefixes could be compared whole."""
    model, size = history.model, history.model.block_size
    assert sum(row.num_blocks for row in rows) == len(model.cached)
    assert sum(row.num_blocks + row.num_duplicates for row in rows) == len(model.content)
    assert sum(row.num_owned for row in rows) == sum(model.owners[block] > 0 for block in model.content)
    assert sum(row.num_free for row in rows) == sum(model.owners[block] == 0 for block in model.content)
    num_compared = 0
    for row in rows:
        chain = [row]
        while chain[0].parent is not None:
            chain.insert(0, rows[chain[0].parent])
        tokens = [token for part in chain for token in part.first_tokens]
        keys = {key for part in chain for key in part.extra_keys}
        names = {kind: payload for kind, span, payload in keys if span is None}
        spans = sorted((span[0], sum(span), payload) for _, span, payload in keys if span is not None)
        if len(tokens) < row.start_token + row.num_tokens:
            continue  # of a long row only the first tokens are told
        holders = []
        for end in range(row.start_token + size, len(tokens) + 1, size):
            touching = tuple(span for span in spans if span[0] < end)
            holders.append(model.cached[names.get("salt"), names.get("lora"), tuple(tokens[:end]), touching])
        assert len(holders) == row.num_blocks
        assert sum(len(blocks) - 1 for blocks in holders) == row.num_duplicates
        assert sum(model.owners[block] > 0 for blocks in holders for block in blocks) == row.num_owned
        num_compared += row.num_blocks
    return num_compared


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "has_events"), [(12, 1, True), (30, 1, False), (30, 2, False), (12, 3, True)]
)
def test_walks_lose_no_block(num_blocks: int, block_size: int, has_events: bool, met: Any) -> None:
    history, chooser = History(num_blocks, block_size, enable_events=has_events), RandomChooser(num_blocks + block_size)
    counts: Counter[str] = Counter()
    for number in range(900):
        walk(history, chooser, num_operations=2)
        if number % 100 == 99:
            history.reset(chooser)
            assert history.manager.inspect.prefix_rows() == []
        with history.unchanged():
            rows = make_rows(history)
            check_dot(rows, chooser.choose([None, 1, 2, 5, 200]))
        counts["compared"] += check_against_model(history, rows)
        counts["deep"] += sum(row.depth >= 2 for row in rows)
        counts["duplicates"] += sum(row.num_duplicates for row in rows)
        counts["keys"] += sum(len(row.extra_keys) for row in rows)
    met["walks"].add(history.met() | counts)


def test_the_walks_met_all_cases(met: Any) -> None:
    met["walks"].check(
        4, {"compared": 10_000, "deep": 400, "duplicates": 800, "keys": 5000, "detached": 12, "evicted": 130}
    )


def start(manager: KVCacheManager, name: str, tokens: list[int], **options: Any) -> Sequence:
    sequence = Sequence(name, tokens, **options)
    assert manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is not None
    return sequence


def test_a_run_is_cut_where_others_hang_from_it() -> None:
    manager = KVCacheManager(64, 4)
    system = list(range(16))
    first = start(manager, "first", [*system, *[7] * 8])
    start(manager, "second", [*system, *[8] * 8, 1])
    start(manager, "third", [*system[:8], *[9] * 8])
    manager.free(first)
    no_keys: tuple[()] = ()
    assert manager.inspect.prefix_rows() == [
        PrefixRow(None, 0, 0, 8, 2, 0, 2, tuple(range(8)), no_keys),
        PrefixRow(0, 1, 8, 8, 2, 0, 2, tuple(range(8, 16)), no_keys),
        PrefixRow(1, 2, 16, 8, 2, 0, 0, (7,) * 8, no_keys, num_ahead=54),
        PrefixRow(1, 2, 16, 8, 2, 0, 2, (8,) * 8, no_keys),
        PrefixRow(0, 1, 8, 8, 2, 0, 2, (9,) * 8, no_keys),
    ]
    assert [row.num_free for row in manager.inspect.prefix_rows()] == [0, 0, 2, 0, 0]


def test_last_accesses_and_pins_are_told() -> None:
    manager = KVCacheManager(16, 4)
    for name, token in (("old", 1), ("new", 2), ("pinned", 3)):
        manager.free(start(manager, name, [token] * 8))
    pin = manager.pins.pin([3] * 4)

    def told() -> dict[int, tuple[int, int | None]]:
        return {row.first_tokens[0]: (row.num_pinned, row.num_ahead) for row in manager.inspect.prefix_rows()}

    # Ten blocks hold nothing, and are reused before all others. Of each prefix the last block goes first.
    assert told() == {1: (0, 11), 2: (0, 13), 3: (1, None)}
    lines = parse(manager.inspect.to_dot()).nodes
    assert "1 pinned" in lines["row2"]["label"] and "reused after 11 blocks" in lines["row0"]["label"]
    manager.free(start(manager, "old again", [1] * 8))
    manager.pins.unpin(pin)
    assert told() == {2: (0, 11), 1: (0, 14), 3: (0, 15)}
    assert "pinned" not in manager.inspect.to_dot()


def test_duplicates_evictions_and_aborts_are_seen() -> None:
    manager = KVCacheManager(8, 4)
    first = start(manager, "first", [1] * 16)
    child = Sequence("child", [1] * 8)
    manager.allocate_slots(child)  # without a hit: duplicates
    assert [(row.num_blocks, row.num_duplicates, row.num_owned) for row in manager.inspect.prefix_rows()] == [(4, 2, 6)]
    manager.free(first)
    assert [(row.num_blocks, row.num_duplicates, row.num_owned) for row in manager.inspect.prefix_rows()] == [(4, 2, 2)]
    start(manager, "other", [2] * 12)  # takes the two that are not cached, then the first one's last block
    assert [row[3:7] for row in manager.inspect.prefix_rows()] == [(12, 3, 2, 2), (12, 3, 0, 3)]
    manager.abort(child, 4)  # its first block is a duplicate, which nobody needs now that it is free
    assert [row[3:7] for row in manager.inspect.prefix_rows()] == [(12, 3, 0, 0), (12, 3, 0, 3)]
    manager.reset_prefix_cache()
    assert manager.inspect.prefix_rows() == []
    assert list(parse(manager.inspect.to_dot()).nodes.values()) == [
        {"label": "nothing is cached\n", "style": "rounded"}
    ]


def test_keys_are_told_once_by_their_position_in_the_prefix() -> None:
    manager = KVCacheManager(64, 4)
    spans = [(2, 11, "cat.png"), (12, 14, b"\x00\xff")]
    options: dict[str, Any] = {"salt": "tenant-a", "lora": "french", "extra_keys": spans}
    start(manager, "first", list(range(20)), **options)
    start(manager, "second", [*range(8), 50, 51, 52, 53], salt="tenant-a", lora="french", extra_keys=spans[:1])
    rows = manager.inspect.prefix_rows()
    assert [row.extra_keys for row in rows] == [
        (("salt", None, "tenant-a"), ("lora", None, "french"), ("key", (2, 9), "cat.png")),
        (("key", (2, 9), "cat.png"), ("key", (12, 2), b"\x00\xff")),
        (("key", (2, 9), "cat.png"),),
    ]
    assert rows[0].describe_keys() == ["salt 'tenant-a'", "lora 'french'", "key 'cat.png' at 2-10"]
    assert rows[1].describe_keys()[1] == "key b'\\x00\\xff' at 12-13"


def test_long_keys_and_many_keys_are_abbreviated_and_say_so() -> None:
    assert describe_key(("salt", None, "x" * 24)) == f"salt '{'x' * 24}'"
    assert describe_key(("salt", None, "x" * 25)) == f"salt '{'x' * 24}'… (25 characters)"
    assert describe_key(("key", (0, 3), bytes(100))) == f"key {bytes(24)!r}… (100 bytes) at 0-2"
    row = PrefixRow(None, 0, 0, 9, 9, 0, 0, tuple(range(8)), tuple(("key", (i, 1), "k") for i in range(7)))
    assert row.describe_keys() == [*[f"key 'k' at {i}-{i}" for i in range(4)], "and 3 more keys"]
    assert row.describe_tokens() == "0 1 2 3 4 5 6 7 …"
    assert row._replace(num_tokens=8).describe_tokens() == "0 1 2 3 4 5 6 7"


TEXTS = st.one_of(st.text(min_size=1, max_size=24), st.text('\\"&;<>{}|\nlrnN\x00\u202eamp', min_size=1, max_size=24))


@given(TEXTS, st.one_of(TEXTS, st.binary(min_size=1, max_size=24)))
def test_any_key_is_shown_as_it_is(salt: str, key: str | bytes) -> None:
    manager = KVCacheManager(8, 2)
    start(manager, "first", [1, 2, 3], salt=salt, extra_keys=[(0, 1, key)])
    label = parse(manager.inspect.to_dot()).nodes["row0"]["label"]
    lines = label.split("\n")
    assert lines[:2] == ["tokens 0-1", "1 block (1 owned, 0 free)"]
    assert ast.literal_eval(lines[2].removeprefix("salt ")) == salt
    assert ast.literal_eval(lines[3].removeprefix("key ").removesuffix(" at 0-0")) == key
    assert lines[4:] == ["1 2", ""]


def test_what_is_left_out_is_counted() -> None:
    manager = KVCacheManager(64, 2)
    for name in range(5):
        start(manager, str(name), [9, 9, *[name] * (2 * name + 2)])
    rows = manager.inspect.prefix_rows()
    assert len(rows) == 6
    drawing = parse(manager.inspect.to_dot(max_nodes=3))
    assert list(drawing.nodes) == ["cache", "row0", "row1", "row2", "left_out"]
    assert drawing.nodes["left_out"]["label"] == "left out: 3 nodes\n12 blocks (12 owned, 0 free)\n"
    assert drawing.edges == [("cache", "row0"), ("row0", "row1"), ("row0", "row2"), ("cache", "left_out")]
    assert (
        parse(manager.inspect.to_dot(max_nodes=6))
        == parse(manager.inspect.to_dot())
        == parse(manager.inspect.to_dot(max_nodes=None))
    )
    assert "left_out" not in manager.inspect.to_dot(max_nodes=6)


@pytest.mark.parametrize("max_nodes", [0, -1, "3", 1.5, True])
def test_bad_limits_are_refused(max_nodes: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_nodes: expected an int of at least 1, got"):
        KVCacheManager(8).inspect.to_dot(max_nodes=max_nodes)


def test_equal_histories_give_equal_pictures() -> None:
    dots = []
    for _ in range(2):
        history = History(40, 1)
        walk(history, RandomChooser(5), num_operations=290)
        dots.append(history.manager.inspect.to_dot())
    assert dots[0] == dots[1]
    assert len(dots[0]) > 500


def test_prefixes_may_be_thousands_deep() -> None:
    manager = KVCacheManager(4000, 1)
    main = [1] * 1500
    start(manager, "main", main)
    for length in range(1, 1500):
        start(manager, str(length), [*main[:length], 2])
    rows = manager.inspect.prefix_rows()
    assert len(rows) == 2999
    assert max(row.depth for row in rows) == 1499
    assert sum(row.num_blocks for row in rows) == manager.stats.num_cached_blocks == 2999
    check_dot(rows, 100)
    check_dot(rows, None)


def test_rows_are_the_indexes() -> None:
    """`to_dot` draws any rows, such as a part of them."""
    manager = KVCacheManager(8, 2)
    start(manager, "first", [1, 2, 3, 4, 5])
    assert prefix_rows(manager._index) == manager.inspect.prefix_rows()  # noqa: SLF001
    assert to_dot(manager.inspect.prefix_rows()) == manager.inspect.to_dot()
