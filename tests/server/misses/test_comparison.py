"""Where two prompts of a conversation part, and the words for the commonest reasons."""

from array import array

import pytest

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.observe.explanation import Explanation
from kvblocks.observe.removal_history import Removal
from kvblocks.server.misses.comparison import compare
from kvblocks.server.misses.prompts import MAX_BYTES, MAX_KEPT, KeptMessage, KeptPrompt, KeptPrompts, KeptTool
from kvblocks.server.misses.reasons import Loss, Surroundings, TakenTimes, reason_of
from kvblocks.server.misses.record import anthropics, cache_json, openais


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.from_folder(tiny_folder)


def tool(name, digest=b""):
    return KeptTool(name, digest)


@pytest.fixture
def kept(tokenizer):
    """Makes a prompt of messages as a template might: tools, then roles and texts."""
    number = iter(range(10**6))

    def make(*messages, tools=(), answer="", tenant=None, salt=None, session=None, key=None):
        text = "".join(f"[{one.name} {one.digest}]" for one in tools)
        text += "".join(f"<{role}>{said}" for role, said in messages) + "<assistant>"
        tokens, output = (array("I", tokenizer.encode(one) if one else []) for one in (text, answer))
        name = f"chatcmpl-{next(number)}" if key is None else key
        turns = tuple(KeptMessage(role, said) for role, said in messages)
        return KeptPrompt(name, tenant, salt, session, tokens, turns, tuple(tools), output)

    return make


SYSTEM, HELLO = ("system", "You help."), ("user", "Hello, who is there?")
TURNS = (SYSTEM, HELLO, ("assistant", "It is me."), ("user", "Who?"))


def test_a_conversation_that_goes_on_parts_nowhere(kept, tokenizer):
    before, after = kept(SYSTEM, HELLO, answer="It is me."), kept(*TURNS)
    found = compare(before, after, tokenizer)
    assert (found.part, found.item, found.num_common) == (None, None, found.num_before)
    assert anthropics(found, before.key, 99) is None
    assert openais(found, before.key, 99, 16) == {"type": "cache_hit"}


CHANGES = [
    # before, after, what differs, the item, words
    (
        {"messages": [("system", "It is 2026-11-25 20:10:11."), HELLO]},
        {"messages": [("system", "It is 2026-11-25 20:10:59."), HELLO]},
        *("system", "system", "a time or date has changed: '2026-11-25 20:10:11' is now '2026-11-25 20:10:59'"),
    ),
    (
        {"messages": [("system", "Today is Wednesday. Be brief."), HELLO]},
        {"messages": [("system", "Today is Thursday. Be brief."), HELLO]},
        *("system", "system", "a time or date has changed: 'Wednesday' is now 'Thursday'"),
    ),
    (
        {"messages": [("system", "Session 0123456789abcdef0."), HELLO]},
        {"messages": [("system", "Session fedcba98765432100."), HELLO]},
        *("system", "system", "an id has changed: '0123456789abcdef0' is now 'fedcba98765432100'"),
    ),
    (
        {"messages": [SYSTEM, HELLO]},
        {"messages": [("system", "You don't help."), HELLO]},
        *("system", "system", "the system text has changed"),
    ),
    (
        {"messages": [HELLO], "tools": [tool("a"), tool("b")]},
        {"messages": [HELLO], "tools": [tool("b"), tool("a")]},
        *("tools", "tools[0] (b)", "the tools are the same, but in another order"),
    ),
    (
        {"messages": [HELLO], "tools": [tool("a"), tool("b")]},
        {"messages": [HELLO], "tools": [tool("a"), tool("c")]},
        *("tools", "tools[1] (c)", "tools were added: c; removed: b"),
    ),
    (
        {"messages": [HELLO], "tools": [tool("a"), tool("b")]},
        {"messages": [HELLO], "tools": [tool("a"), tool("b", b"more")]},
        *("tools", "tools[1] (b)", "the definition of the tool b has changed"),
    ),
    (
        {"messages": [*TURNS[:2], ("assistant", "<think>Hm.</think>\n\nIt is me."), TURNS[3]]},
        {"messages": [*TURNS, ("assistant", "I."), ("user", "Ah.")]},
        *("messages", "messages[2] (assistant)", "a thinking block was stripped"),
    ),
    (
        {"messages": TURNS},
        {"messages": [SYSTEM, ("user", "Hello, who is here?"), *TURNS[2:]]},
        *("messages", "messages[1] (user)", "an earlier message was edited"),
    ),
    (
        {"messages": TURNS},
        {"messages": [SYSTEM, TURNS[3]]},
        *("messages", "messages[1] (user)", "an earlier message was edited"),
    ),
    (
        {"messages": [SYSTEM, HELLO], "answer": "<think>Hm.</think>It is me."},
        {"messages": TURNS},
        *("answer", "messages[2] (assistant)", "the answer came back with other tokens than were generated"),
    ),
]


@pytest.mark.parametrize(("before", "after", "part", "item", "words"), CHANGES)
def test_the_commonest_changes_are_said_in_words(kept, tokenizer, before, after, part, item, words):
    one, other = (kept(*of.pop("messages"), **of) for of in (dict(before), dict(after)))
    found = compare(one, other, tokenizer)
    assert (found.part, found.item, found.words) == (part, item, words)
    first = one.tokens + one.output
    assert first[: found.num_common] == other.tokens[: found.num_common]
    assert (found.before.token_id, found.after.token_id) == (first[found.num_common], other.tokens[found.num_common])
    assert found.before.token_id != found.after.token_id
    assert found.after.text == tokenizer.decode([found.after.token_id], skip_special_tokens=False)
    assert found.context in tokenizer.decode(list(other.tokens), skip_special_tokens=False)


def test_equal_messages_with_other_tokens_are_the_templates_doing(kept, tokenizer):
    one, other = kept(HELLO), kept(HELLO)
    other.tokens[3] += 1
    assert compare(one, other, tokenizer).part == "settings"


def test_the_prompt_before_is_found_with_a_session_and_without(kept):
    prompts = KeptPrompts()
    first = kept(SYSTEM, HELLO)
    other = kept(SYSTEM, ("user", "Something else, quite long. " * 5))
    moved = kept(("system", "Now with another system text"), *TURNS[1:])
    alien = kept(SYSTEM, HELLO, tenant="a", salt="kvblocks/tenant/a")
    salted = kept(SYSTEM, HELLO, salt="b")
    for prompt in (first, other, alien, salted, moved):
        prompts.keep(prompt)
    assert prompts.before(moved) is first  # has most messages in common, though the system text has changed
    assert prompts.before(first) is None
    assert prompts.before(alien) is prompts.before(salted) is None
    chats = [kept(HELLO, session="chat"), kept(("user", "quite other"), session="chat")]
    for chat in chats:
        prompts.keep(chat)
    assert prompts.before(chats[1]) is chats[0]
    assert prompts.last(None, None, "chat") is chats[1]
    assert prompts.last(None, None) is chats[1]
    assert prompts.last("a", "kvblocks/tenant/a") is alien
    assert prompts.last("a", None) is prompts.last("c", None) is None
    assert prompts.find(alien.key, None, None) is None
    assert prompts.find(alien.key, "a", "kvblocks/tenant/a") is alien
    prompts.forget("kvblocks/tenant/a")
    assert prompts.find(alien.key, "a", "kvblocks/tenant/a") is None


def test_kept_prompts_are_bounded_in_number_and_bytes(kept):
    prompts = KeptPrompts()
    for number in range(MAX_KEPT + 5):
        prompts.keep(kept(HELLO, key=f"key-{number}"))
    assert len(prompts) == MAX_KEPT
    assert prompts.find("key-4", None, None) is None
    large = kept(HELLO, key="large")
    large.messages = (KeptMessage("user", "x" * (MAX_BYTES - 4000)),)
    prompts.keep(large)
    assert 1 <= len(prompts) < 10 and prompts.get("large") is large
    prompts.finish("large", [1] * 1000)  # it has grown beyond the bound
    prompts.keep(kept(HELLO, key="last"))
    assert [prompts.find(key, None, None) is None for key in ("large", "last")] == [True, False]


EVICTED = Explanation("evicted", 1, 4, Removal("evicted", 70, "seq"), 30)


@pytest.mark.parametrize(
    ("explanation", "around", "reason"),
    [
        (EVICTED, Surroundings(num_pinned_blocks=30), "evicted"),
        (EVICTED, Surroundings(num_pinned_blocks=31), "pinned_out"),
        (EVICTED, Surroundings(is_over_quota=True), "over_quota"),
        (Explanation("aborted", 1, 4, Removal("aborted", 70, None), 30), Surroundings(), "never_written"),
        (Explanation("group", 1, 4, kind="window"), Surroundings(), "window_missing"),
        (Explanation("state", 1, 4, kind="state"), Surroundings(), "state_missing"),
        (Explanation("no miss", 4, 4), Surroundings(), "hit"),
        (Explanation("partly equal", 1, 4), Surroundings(), "never_cached"),
        (Explanation("other keys", 1, 4), Surroundings(), "salt_differs"),
    ],
)
def test_the_caches_reasons(explanation, around, reason):
    assert reason_of(explanation, around, sees_others=True) == reason
    hidden = reason_of(explanation, around, sees_others=False)
    assert hidden == ("never_cached" if reason == "salt_differs" else reason)


def test_who_may_not_know_others_is_told_own_or_another():
    for is_own, name, whose in ((True, "a", "own"), (False, "b", "another"), (None, None, None)):
        around = Surroundings(loss=Loss(None, name, is_own), num_pinned_blocks=5)
        assert cache_json(EVICTED, around, sees_others=False)["evicted_for"] == whose
        assert cache_json(EVICTED, around, sees_others=False)["num_pinned_blocks"] is None
        assert cache_json(EVICTED, around, sees_others=True)["evicted_for"] == name


def test_when_blocks_were_taken_is_known_to_a_second():
    times = TakenTimes()
    assert times.when(0) is None
    for second in range(5000):
        times.note(float(second), second * 10)
        times.note(second + 0.5, second * 10 + 5)
    assert times.when(49_000) == 4900.0
    assert times.when(49_001) == 4901.0
    assert times.when(10) is None
    assert times.when(10**9) == 4999.0


def test_a_hostile_text_costs_its_length_and_no_more(kept, tokenizer):
    """Half a million thoughts that never end: a search from each would take hours."""
    one, other = kept(HELLO), kept(HELLO)
    other.tokens[3] += 1
    one.messages = (KeptMessage("user", "<think>" * 500_000),)
    other.messages = (KeptMessage("user", "<think>" * 500_001),)
    assert compare(one, other, tokenizer).words == "an earlier message was edited"


def test_a_forgotten_prompt_is_held_by_nobody(kept):
    prompts = KeptPrompts()
    prompt = kept(HELLO, salt="a", key="k")
    prompts.keep(prompt)
    prompts.forget("a")
    assert prompts.get("k") is None
    assert len(prompts) == 0
