"""How families of models write calls: each format reads its own, and refuses what isn't any."""

import json

import pytest

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.tools.calls import Written
from kvblocks.server.tools.formats import FORMATS, format_of
from kvblocks.server.tools.teaching import surround, teach

WEATHER = Written("weather", '{"town": "Bergen", "days": 2}')
ARGUMENTS = '{"town": "Bergen", "days": 2}'

# What models of each family write between the marks.
READ = [
    ("hermes", f'\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n'),
    ("hermes", '{"arguments": {"town": "Bergen", "days": 2}, "name": "weather"}'),
    ("hermes", json.dumps({"name": "weather", "arguments": ARGUMENTS})),  # as a text in a text
    ("llama3", f'{{"name": "weather", "parameters": {ARGUMENTS}}}'),
    ("llama3", f' {{"name": "weather", "parameters": {ARGUMENTS}}}; '),
    ("mistral", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
    ("mistral", f"weather{ARGUMENTS}"),
    ("mistral-args", f"weather[ARGS]{ARGUMENTS}"),
    ("granite", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
    ("pythonic", "[weather(town='Bergen', days=2)]"),
    ("pythonic", "weather(town='Bergen', days=2)<|python_end|>"),
    ("pythonic", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
    ("gemma", "call:weather{town:<escape>Bergen<escape>,days:2}"),
    ("gemma", f'{{"name": "weather", "arguments": {ARGUMENTS}}}'),
]


@pytest.mark.parametrize(("name", "text"), READ)
def test_a_format_reads_what_its_models_write(name, text):
    assert FORMATS[name].read(text) == [WEATHER]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weather",
        "{",
        '{"name": "weather", "arguments": {"town": "Ber',
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "Bergen"}',
        '{"name": "weather", "arguments": {"a": NaN}}',
        '{"name": "weather", "arguments": {}} {and more',
        "[" * 100_000,
        '{"a":' * 100_000,
        "[__import__('os').system('true')]",
        "[weather(town=open('/etc/passwd'))]",
        "[weather('Bergen')]",
        "[weather(**{'town': 'Bergen'})]",
        "[weather(town=1j)]",
        "call:weather{town:<escape>Bergen}",
        "call:weather{town:" + "[" * 10_000,
        "call:weather{a:1} more",
        '{"name": "weather", "arguments": {"a": -1e999}}',  # Python reads infinity, which JSON can't have
        'weather[ARGS]{"a": 1e999}',
        "[weather(days=1e999)]",
        "call:weather{days:1e999}",
        "call:weather{" + "\v" * 20_000 + "}",  # in a time that doesn't grow with its cube
        # Deeper than a later request could send back.
        '{"name": "weather", "arguments": {"a": ' + "[" * 65 + "]" * 65 + "}}",
        "[weather(a=" + "[" * 65 + "]" * 65 + ")]",
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_call_is_none_for_any_format(name, text):
    assert FORMATS[name].read(text) is None


def test_no_depth_of_a_call_is_an_error():
    """Python could just read some depths, and not write them: an error there would end the engine's thread."""
    for depth in range(900, 1000):
        inner = "[" * depth + "]" * depth
        assert FORMATS["hermes"].read(f'{{"name": "weather", "arguments": {{"a": {inner}}}}}') is None


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_what_a_required_call_writes(name):
    """The grammar writes these, and templates that know no tools are taught them."""
    one = FORMATS[name]
    before, after = one.call_parts("weather")
    for number in (1, 3):
        text = surround([before + ARGUMENTS + after] * number, one)
        if one.end:
            parts = [part.split(one.end)[0] for part in text.split(one.marks[0])[1:]]
            found = [call for part in parts for call in one.read(part)]
        else:
            mark = next((mark for mark in one.marks if text.startswith(mark)), "")
            found = one.read(text[len(mark) :])
        assert found == [WEATHER] * number


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", f'{{"name": "weather", "parameters": {ARGUMENTS}}}'),
        ("granite", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
        ("mistral", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
        ("mistral-args", f"weather[ARGS]{ARGUMENTS}"),
    ],
)
def test_text_behind_calls_that_have_no_end_mark_is_dropped(name, text):
    assert FORMATS[name].read(f"{text}\nThat was it {{all}}.") == [WEATHER]
    assert FORMATS["hermes"].read(f"{text} and more") is None


def test_values_of_all_kinds_are_read():
    python = FORMATS["pythonic"].read('[f(a=True, b=None, c=-1.5, d=[1, "x"], e={"k": false}, g=(null,))]')
    expected = {"a": True, "b": None, "c": -1.5, "d": [1, "x"], "e": {"k": False}, "g": [None]}
    assert json.loads(python[0].arguments) == expected
    text = "call:f{a:true,b:null,c:-1.5,d:[1,<escape>x, {y}:<escape>],e:{k:false},g:[],h:word}"
    gemma = FORMATS["gemma"].read(text)
    expected = {"a": True, "b": None, "c": -1.5, "d": [1, "x, {y}:"], "e": {"k": False}, "g": [], "h": "word"}
    assert json.loads(gemma[0].arguments) == expected


TEMPLATES = [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "hermes", True),
    ("{{ tools }}<tool_call>", "hermes", False),
    ("{{ tools }}[TOOL_CALLS]", "mistral", False),
    ("{{ tools }}[TOOL_CALLS]x[ARGS]", "mistral-args", False),
    ("{{ tools }}<|tool_call|>", "granite", False),
    ("{{ tools }}<|python_tag|>", "llama3", False),
    ("{{ tools }}<|python_start|><|python_tag|>", "pythonic", False),
    ("{{ tools }}<start_function_call>", "gemma", False),
    ("{{ tools }}", "hermes", False),
]


@pytest.mark.parametrize(("template", "name", "is_taught"), TEMPLATES)
def test_a_template_says_its_format(tiny_folder, tmp_path, template, name, is_taught):
    for path in tiny_folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    found = format_of(tokenizer)
    assert (found.name, found.is_taught) == (name, is_taught)
    assert (format_of(tokenizer, "granite").name, format_of(tokenizer, "granite").is_taught) == ("granite", is_taught)


def test_a_template_without_tools_gets_them_as_text():
    one, tool = FORMATS["hermes"], {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": "c", "function": {"name": "look", "arguments": {"at": "æ"}}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "a cat", "tool_call_id": "c"},
        {"role": "tool", "content": "a hat", "tool_call_id": "d"},
        {"role": "user", "content": "And?"},
    ]
    system, *rest = teach(messages, [tool], one)
    assert json.dumps(tool) in system["content"]
    written = '<tool_call>\n{"name": "look", "arguments": {"at": "æ"}}\n</tool_call>'
    results = "<tool_response>\na cat\n</tool_response>\n<tool_response>\na hat\n</tool_response>\nAnd?"
    assert rest == [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": f"{written}\n{written}"},
        {"role": "user", "content": results},
    ]
    said = [{"role": "system", "content": "Be brief."}, *messages]
    assert teach(said, [tool], one)[0]["content"] == f"Be brief.\n\n{system['content']}"
    assert teach(messages, [], one) == rest
