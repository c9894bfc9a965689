"""Texts that models write, read by vLLM's own parsers and by ours: the same, or a difference that is listed here."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from clients.clients_help import VLLM, python

from kvblocks.server.tools.formats import FORMATS
from kvblocks.server.tools.reader import CallReader

HERE = Path(__file__).resolve().parent
OURS = {"llama3_json": "llama3", "llama4_pythonic": "pythonic", "functiongemma": "gemma"}

ARGUMENTS = '{"at": "hat"}'
CALL = f'{{"name": "look", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "look", "parameters": {ARGUMENTS}}}'
NOBODY = CALL.replace("look", "nobody")
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
GEMMA = "<start_function_call>call:look{at:<escape>hat<escape>}<end_function_call>"

# vLLM's name of a parser, and a text of which both have the same content and calls.
SAME = [
    ("hermes", "Hello."),
    ("hermes", HERMES),
    ("hermes", f"I look.\n{HERMES}"),
    ("hermes", f"{HERMES} That was it."),
    ("hermes", f"a {HERMES} b {HERMES} c"),
    ("hermes", f"<tool_call>\n{NOBODY}\n</tool_call>"),
    ("hermes", "<tool_call>{broken}</tool_call> so"),
    ("hermes", HERMES.removesuffix("</tool_call>")),
    ("hermes", '<tool_call>{"name": "look", "argum'),
    ("hermes", f"<tool_call>{CALL} and more</tool_call>"),
    ("hermes", '<tool_call>{"name": "look"}</tool_call>'),
    ("llama3_json", "plain"),
    ("llama3_json", LLAMA),
    ("llama3_json", CALL),
    ("llama3_json", f"{LLAMA}; {LLAMA}"),
    ("llama3_json", f"{LLAMA}\n{LLAMA}"),
    ("llama3_json", f"{LLAMA}, {LLAMA}"),
    ("llama3_json", f"<|python_tag|>{LLAMA}"),
    ("llama3_json", f"{LLAMA} is it."),
    ("llama3_json", "{} is a set"),
    ("llama3_json", '{"name": "look", "parameters": {"at"'),
    ("llama3_json", '{"name": "look"}'),
    ("llama3_json", '{"name": "Bob", "age": 5}'),
    ("llama3_json", LLAMA.replace("look", "nobody")),
    ("llama3_json", f"{LLAMA}; {{broken"),
    ("llama3_json", f"{{broken}} {LLAMA}"),
    ("granite", f"<|tool_call|>[{CALL}]"),
    ("granite", f"<tool_call>[{CALL}, {CALL}]"),
    ("granite", f"I look.<|tool_call|>[{CALL}]"),
    ("granite", f"<|tool_call|>[{CALL}] so"),
    ("granite", f"<|tool_call|>[{NOBODY}]"),
    ("granite", '<|tool_call|>[{"name": "look"}]'),
    ("mistral", f"[TOOL_CALLS][{CALL}]"),
    ("mistral", f"Yes.[TOOL_CALLS][{CALL}, {CALL}]"),
    ("mistral", f"[TOOL_CALLS][{CALL}] so"),
    ("mistral", f"[TOOL_CALLS]{CALL}"),
    ("mistral", f"[TOOL_CALLS][{NOBODY}]"),
    ("mistral", '[TOOL_CALLS][{"name": "look"}]'),
    ("mistral-args", f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}"),
    ("mistral-args", f"[TOOL_CALLS]look{ARGUMENTS}"),
    ("mistral-args", f"Yes.[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]look[ARGS]{ARGUMENTS}"),
    ("mistral-args", f"[TOOL_CALLS]look[ARGS]{ARGUMENTS} so"),
    ("mistral-args", f"[TOOL_CALLS]nobody[ARGS]{ARGUMENTS}"),
    ("pythonic", "[look(at='hat')]"),
    ("pythonic", "[look(at='hat'), look()]"),
    ("pythonic", "Yes. [look(at='hat')]"),
    ("pythonic", "[look(at='hat')] so"),
    ("pythonic", "[look('hat')]"),
    ("pythonic", "[1, 2] is a list"),
    ("pythonic", "[nobody(at='hat')]"),
    ("pythonic", "[look(at='ha"),
    ("llama4_pythonic", "<|python_start|>[look(at='hat')]<|python_end|>"),
    ("llama4_pythonic", "[look(at='hat')]"),
    ("functiongemma", GEMMA),
    ("functiongemma", f"{GEMMA} so"),
    ("functiongemma", "<start_function_call>look<end_function_call>"),
]

TEXT, NAN = '"text"', '{"at": NaN}'
TEXT_IN_TEXT = json.dumps({"name": "look", "arguments": ARGUMENTS})


def call_with(arguments):
    return f'{{"name": "look", "arguments": {arguments}}}'


# What both give where they differ: content and calls, vLLM's and ours. docs/design/server.md has it in words.
DIFFERENT = [
    # Of several calls one is broken: vLLM makes all of the answer text, ours that call.
    ("hermes", f"{HERMES}<tool_call>{{</tool_call>", ("*", []), ("<tool_call>{</tool_call>", [ARGUMENTS])),
    ("hermes", f"<tool_call>{{</tool_call>{HERMES}", ("*", []), ("<tool_call>{</tool_call>", [ARGUMENTS])),
    # Arguments that are no JSON object: vLLM hands them on, ours are text.
    ("hermes", f"<tool_call>{call_with('[1]')}</tool_call>", ("", ["[1]"]), ("*", [])),
    ("hermes", f"<tool_call>{call_with(TEXT)}</tool_call>", ("", [TEXT]), ("*", [])),
    ("hermes", f"<tool_call>{call_with(NAN)}</tool_call>", ("", [NAN]), ("*", [])),
    ("mistral", f"[TOOL_CALLS][{call_with(TEXT)}]", ("", ["text"]), ("*", [])),
    ("mistral-args", "[TOOL_CALLS]look[ARGS]{broken", ("", ["{broken"]), ("*", [])),
    ("functiongemma", "<start_function_call>call:look{at:", ("", ["{}"]), ("*", [])),
    # What other models than the parser's write: ours read more.
    ("hermes", f"<tool_call>{TEXT_IN_TEXT}</tool_call>", ("", [json.dumps(ARGUMENTS)]), ("", [ARGUMENTS])),
    ("hermes", f"<tool_call>{LLAMA}</tool_call>", ("*", []), ("", [ARGUMENTS])),
    ("hermes", f"<tool_call>[{CALL}]</tool_call>", ("*", []), ("", [ARGUMENTS])),
    ("hermes", f"<tool_call>{CALL}{CALL}</tool_call>", ("*", []), ("", [ARGUMENTS, ARGUMENTS])),
    ("granite", f"<|tool_call|>{CALL}", (CALL, []), ("", [ARGUMENTS])),
    ("mistral", f"[TOOL_CALLS]look{ARGUMENTS}", (f"look{ARGUMENTS}", []), ("", [ARGUMENTS])),
    (
        *("functiongemma", GEMMA.replace("}<end", ",n:2,b:true}<end")),
        *(("", [ARGUMENTS]), ("", ['{"at": "hat", "n": 2, "b": true}'])),
    ),
    # Text before calls: vLLM's Llama parser drops it, and reads a call behind it only where the answer isn't streamed.
    ("llama3_json", f"Look: {LLAMA}", ("", [ARGUMENTS]), ("*", [])),
    ("llama3_json", f"Look: <|python_tag|>{LLAMA}", ("", [ARGUMENTS]), ("Look: ", [ARGUMENTS])),
    ("granite", f"I look. <|tool_call|>[{CALL}]", ("I look.", [ARGUMENTS]), ("I look. ", [ARGUMENTS])),
    # A list that is cut off or broken is text of ours, with its mark.
    ("granite", "<|tool_call|>[{broken}]", ("", []), ("*", [])),
    ("granite", f"<|tool_call|>[{CALL}", ("", [ARGUMENTS]), ("*", [])),
    ("granite", f"<|tool_call|>[{CALL}, {{]", ("", [ARGUMENTS]), ("*", [])),
    ("mistral", "[TOOL_CALLS][{broken}]", ("[{broken}]", []), ("*", [])),
    ("mistral", '[TOOL_CALLS][{"name": "look', ('[{"name": "look', []), ("*", [])),
]


def ours(name, text):
    said, calls = CallReader(FORMATS[OURS.get(name, name)]).feed(text, is_last=True)
    return said, [[call.name, call.arguments] for call in calls]


def wanted(text, said, arguments):
    return text if said == "*" else said, [["look", one] for one in arguments]


@pytest.mark.parametrize(("name", "text", "theirs", "own"), DIFFERENT)
def test_ours_differ_as_listed(name, text, theirs, own):
    assert ours(name, text) == wanted(text, *own)
    assert theirs != own


@pytest.mark.exhaustive
def test_vllms_own_parsers(roomy_folder):
    """In a process of its own, with the tiny model's tokenizer and each family's marks as special tokens."""
    cases = [*SAME, *((name, text) for name, text, _, _ in DIFFERENT)]
    command = [python(VLLM), str(HERE / "vllm_parsers.py"), str(roomy_folder)]
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, check=False, timeout=360, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    theirs = [(found["content"] or "", found["calls"]) for found in json.loads(line.removeprefix("FOUND "))]
    assert len(theirs) == len(cases)
    for (name, text), found in zip(SAME, theirs[: len(SAME)], strict=True):
        assert ours(name, text) == found, (name, text)
    for (name, text, their, _), found in zip(DIFFERENT, theirs[len(SAME) :], strict=True):
        assert wanted(text, *their) == found, (name, text)
