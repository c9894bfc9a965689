"""Text to ids and back: users can't write markup, streams join to the text, chats equal those of `transformers`."""

import json
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, processors
from transformers import AutoTokenizer

from kvblocks import KVBlocksError
from kvblocks.engine.errors import ModelError
from kvblocks.engine.text.tokenizer import StreamDecoder, Tokenizer
from kvblocks.errors import InvalidArgumentError, InvalidTokensError


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture(scope="module")
def reference(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def byte_fallback_folder(tmp_path_factory):
    """A tokenizer like those of Llama 2 and Gemma: words with ▁ for spaces, single bytes for the rest, and a BOS."""
    folder = tmp_path_factory.mktemp("byte-fallback")
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab", "é"]
    library = Library(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts)},
            merges=[("▁", "a"), ("a", "b"), ("▁a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"})
    )
    return folder


# --- text ------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_text_comes_back_and_its_ids_are_those_of_transformers(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference(text).input_ids
    assert tokenizer.decode(ids) == text


MARKUP = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "a", "\n", "é"])


@given(st.lists(MARKUP).map("".join))
def test_text_never_becomes_a_special_token_unless_asked(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, parse_special=True) == reference(text).input_ids


def test_special_tokens_are_kept_or_skipped_when_decoding(tokenizer):
    ids = tokenizer.encode("<|im_start|>a<|im_end|>", parse_special=True)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_what_the_file_adds_to_every_prompt_is_added_unless_refused(byte_fallback_folder):
    tokenizer = Tokenizer.from_folder(byte_fallback_folder)
    assert tokenizer.encode("ab ab")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("ab ab", add_special_tokens=False) == tokenizer.encode("ab ab")[1:]


def test_truncation_and_padding_left_in_the_file_are_ignored(byte_fallback_folder):
    tokenizer = Tokenizer.from_folder(byte_fallback_folder)
    assert len(tokenizer.encode("ab")) == 2
    assert tokenizer.decode(tokenizer.encode("ab " * 20)) == "ab " * 20


def test_ids_beyond_the_vocabulary_are_nothing_and_other_values_are_refused(tokenizer):
    assert tokenizer.decode([tokenizer.num_tokens, 2**32 - 1]) == ""
    for wrong in ([-1], [2**32], ["a"], [1.5], [None]):
        with pytest.raises(InvalidTokensError, match="expected ids from 0"):
            tokenizer.decode(wrong)


def test_text_that_is_not_unicode_is_refused(tokenizer):
    with pytest.raises(InvalidArgumentError, match="valid Unicode"):
        tokenizer.encode("a\ud800")


def test_ids_are_exposed(tokenizer, tiny_folder):
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.byte_token_ids == frozenset()
    assert tokenizer.num_tokens == len(AutoTokenizer.from_pretrained(tiny_folder))
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.id_to_token(tokenizer.num_tokens) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 7}}, {5, 6}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": None}}, {2}),
    ],
)
def test_eos_comes_from_the_generation_config_then_the_config_then_the_tokenizer(
    tiny_folder, tmp_path, files, expected
):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == expected


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def any_tokenizer(request, tokenizer, byte_fallback_folder):
    return tokenizer if request.param == "byte level" else Tokenizer.from_folder(byte_fallback_folder)


def feed_in_pieces(decoder, ids, sizes):
    position = 0
    for size in sizes:
        yield decoder.feed(ids[position : position + size])
        position += size
    yield decoder.feed(ids[position:])
    yield decoder.finish()


@settings(max_examples=300)
@given(
    choices=st.lists(st.integers(0, 10**6), max_size=40),
    sizes=st.lists(st.integers(0, 3), max_size=20),
    skip=st.booleans(),
)
def test_the_pieces_of_any_ids_are_the_text_of_all_ids(any_tokenizer, choices, sizes, skip):
    ids = [choice % (any_tokenizer.num_tokens + 2) for choice in choices]  # some of them no tokens at all
    decoder = StreamDecoder(any_tokenizer, skip_special_tokens=skip)
    assert "".join(feed_in_pieces(decoder, ids, sizes)) == any_tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.sampled_from("ab é日😀\u0301\n\ufffd"), max_size=30), sizes=st.lists(st.integers(0, 3)))
def test_no_piece_of_a_text_ends_inside_a_character(any_tokenizer, text, sizes):
    decoder = StreamDecoder(any_tokenizer)
    *pieces, last = feed_in_pieces(decoder, any_tokenizer.encode(text), sizes)
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown)
    assert shown + last == text


def test_text_is_shown_as_soon_as_it_is_certain(tokenizer):
    decoder = StreamDecoder(tokenizer)
    assert [decoder.feed([token_id]) for token_id in tokenizer.encode("a😀b")] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_is_shown_at_the_end_and_the_decoder_is_new_again(tokenizer):
    decoder = StreamDecoder(tokenizer)
    first, second, *_ = tokenizer.encode("😀")
    assert decoder.feed([first, second]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""
    assert decoder.feed(tokenizer.encode("é")) == "é"


def test_skipped_and_unknown_ids_between_words_do_not_cost_a_space(byte_fallback_folder):
    tokenizer = Tokenizer.from_folder(byte_fallback_folder)
    first, second = tokenizer.encode("ab ab", add_special_tokens=False)
    for between in (1, tokenizer.num_tokens):
        decoder = StreamDecoder(tokenizer)
        assert [decoder.feed([token_id]) for token_id in (first, between, second)] == ["ab", "", " ab"]


def test_a_refused_feed_changes_nothing(tokenizer):
    decoder = StreamDecoder(tokenizer)
    head, *tail = tokenizer.encode("日")
    decoder.feed([head])
    with pytest.raises(InvalidTokensError):
        decoder.feed([tail[0], -1])
    assert decoder.feed(tail) == "日"


# --- chats -----------------------------------------------------------------------------------------------------------

ROLES = st.sampled_from(["system", "user", "assistant"])


@given(st.lists(st.tuples(ROLES, st.text()), min_size=1, max_size=4), st.booleans())
def test_chats_are_encoded_as_transformers_does(tokenizer, reference, turns, prompted):
    messages = [{"role": role, "content": content} for role, content in turns]
    expected = reference.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompted) == expected


@given(st.lists(MARKUP).map("".join))
def test_a_message_cannot_contain_markup(tokenizer, reference, content):
    messages = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert sum(token_id in tokenizer.special_token_ids for token_id in ids) == 5  # system, user, and one more opening


def test_a_role_cannot_contain_markup(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user<|im_end|>", "content": "a"}])
    assert sum(token_id in tokenizer.special_token_ids for token_id in ids) == 5


@pytest.fixture
def with_template(tiny_folder, tmp_path):
    """A tokenizer with another template, in a file of its own."""

    def make(template):
        folder = shutil.copytree(tiny_folder, tmp_path / "folder")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return Tokenizer.from_folder(folder)

    return make


def render(tokenizer, messages=(), **variables):
    ids = tokenizer.apply_chat_template(list(messages), variables=variables)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}a{{ eos_token }}{{ sep_token }}", "<|im_start|>a<|im_end|>"),
        ("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "01"),
        ("{{ {'k': '<é>'} | tojson }}", '{"k": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% if tools is none and documents is none %}\n  {% set x = 1 %}\nyes\n{% endif %}\n", "yes\n"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ flag }}", "True"),
    ],
)
def test_templates_find_what_transformers_gives_them(with_template, template, expected):
    assert render(with_template(template), flag=True) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(ensure_ascii=true) }}",
        "{{ messages[0].calls[0].keys() | list }}",
        "{{ messages[0].content[:15] }}",
        "{{ messages[0].content | replace('<|im_', '') }}",
        "{{ messages[0].content | reverse }}",
        "{{ tools }}",
        "{{ messages[0].content | upper | lower }}",
    ],
)
def test_no_template_turns_what_users_wrote_into_markup(with_template, template):
    tokenizer = with_template("{{ bos_token }}" + template)
    text = "a<|im_end|>\U000f0000<|im_<|im_end|>end|>"
    messages = [{"role": "user", "content": text, "calls": [{text: [text]}]}]
    ids = tokenizer.apply_chat_template(messages, variables={"tools": [text]})
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.special_token_ids.isdisjoint(ids[1:])


def test_a_template_may_use_what_users_wrote_as_text(with_template):
    text = "a<|im_end|>b\U000f0000"
    assert render(with_template("{{ messages | tojson }}"), [{"role": text}]) == json.dumps(
        [{"role": text}], ensure_ascii=False
    )


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", [], "roles must alternate"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user"}], "no attribute 'content'"),
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}], "does not accept these messages"),
        ("{{ ''.__class__.__mro__ }}", [], "unsafe"),
        ("{{ messages.append(1) }}", [], "'append' of 'list' object is unsafe"),
        ("", ["hello"], "'role', got 'hello'"),
        ("", [{"content": "x"}], "'role', got {'content': 'x'}"),
        ("", [{"role": "user", "content": b"x"}], "JSON values"),
    ],
)
def test_messages_that_a_template_cannot_take_are_refused(with_template, template, messages, message):
    with pytest.raises(InvalidArgumentError) as raised:
        with_template(template).apply_chat_template(messages)
    assert message in str(raised.value)


def test_of_several_templates_the_default_is_taken(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "folder")
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert render(Tokenizer.from_folder(folder)) == "default"


def test_a_base_model_says_that_it_has_no_template(byte_fallback_folder, tokenizer):
    base = Tokenizer.from_folder(byte_fallback_folder)
    assert tokenizer.has_chat_template
    assert not base.has_chat_template
    with pytest.raises(ModelError, match=r"expected a chat template .* base model"):
        base.apply_chat_template([{"role": "user", "content": "a"}])


# --- folders that are wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "with tokenizer.json, got .* without one"),
        ("tokenizer.json", "{}", "expected the definition of a tokenizer"),
        ("tokenizer.json", "[1]", "expected the definition of a tokenizer"),
        ("tokenizer.json", "not json", "expected the definition of a tokenizer"),
        ("tokenizer_config.json", "not json", "tokenizer_config.json to be JSON"),
        ("config.json", "[1]", "config.json to be a JSON object, got list"),
        ("tokenizer_config.json", '{"chat_template": "{% if"}', "does not compile: line 1"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat template of .* to be text, got int"),
    ],
)
def test_a_broken_folder_is_refused_with_the_reason(tiny_folder, tmp_path, name, content, message):
    folder = shutil.copytree(tiny_folder, tmp_path / "folder")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message) as raised:
        Tokenizer.from_folder(folder)
    assert isinstance(raised.value, KVBlocksError)


# --- the real model --------------------------------------------------------------------------------------------------


def make_varied_texts(num_texts):
    choose = random.Random(0)
    pools = [
        "abc def\n\t ",
        "0123456789.,",
        "éüß日本語한국 العربية",
        "😀👩‍👩‍👧‍👦🇫🇷\u200d",
        "{}[]();:=<>|_'\"\\/#@!",
        "'s 're 'LL",
    ]
    for _ in range(num_texts):
        yield "".join(choose.choice(choose.choice(pools)) for _ in range(choose.randrange(60)))


@pytest.mark.slow
@pytest.mark.model
def test_the_real_tokenizer_is_that_of_transformers(smollm2_folder):
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    reference = AutoTokenizer.from_pretrained(smollm2_folder)
    for text in make_varied_texts(500):
        marked = text.replace("a", "<|im_end|>").replace("b", "<|endoftext|>")
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(marked, parse_special=True) == reference.encode(marked)
        assert tokenizer.special_token_ids.isdisjoint(tokenizer.encode(marked))
        assert tokenizer.decode(tokenizer.encode(marked)) == marked
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        assert tokenizer.apply_chat_template(messages) == reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.feed([token_id]) for token_id in tokenizer.encode(text)]
        assert "".join(pieces) == text


@pytest.mark.slow
@pytest.mark.model
def test_the_real_tokenizer_gives_the_pinned_ids(smollm2_folder):
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(messages) == [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
        1,
        4093,
        198,
        1780,
        314,
        260,
        3575,
        282,
        4649,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
    ]
