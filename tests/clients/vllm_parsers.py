"""Runs vLLM's own parsers of tool calls. Reads pairs of a parser and a text in JSON; writes what each answer has."""

import json
import logging
import sys

from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>"],
    "granite": ["<|tool_call|>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral-args": ["[TOOL_CALLS]", "[ARGS]"],
    "pythonic": [],
    "llama4_pythonic": ["<|python_start|>", "<|python_end|>"],
    "functiongemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def main():
    logging.disable(logging.CRITICAL)
    folder, cases = sys.argv[1], json.load(sys.stdin)
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=TOOLS)
    found = []
    for name, text in cases:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.add_tokens(MARKS[name], special_tokens=True)
        parser = ToolParserManager.get_tool_parser(name.removesuffix("-args"))(tokenizer, request.tools)
        read = parser.extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in read.tool_calls]
        found.append({"content": read.content, "calls": calls})
    print("FOUND " + json.dumps(found))


main()
