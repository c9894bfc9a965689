"""Messages for templates that know no tools: a system text describes the tools, and calls and results become text.

The words are those that Hermes' and Qwen's templates write, which many models were trained on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.tools.calls import write_json
from kvblocks.server.tools.choice import ToolUse
from kvblocks.server.tools.formats import ToolFormat

Message = dict[str, Any]

_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments, written like this:
{example}"""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    values: Mapping[str, Any],
    tools: ToolUse | None,
    tool_format: ToolFormat,
    *,
    begins_answer: bool = True,
) -> list[int]:
    """Return a chat with its tools as tokens. values: values for the template. Raises what the tokenizer does.

    O(length). begins_answer: whether the prompt ends where an answer begins.
    """
    definitions = () if tools is None else tools.definitions
    variables = dict(values)
    if tool_format.is_taught and (definitions or any("tool_calls" in one or one["role"] == "tool" for one in messages)):
        messages = teach(messages, definitions, tool_format)
    elif definitions:
        variables["tools"] = list(definitions)
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=begins_answer, variables=variables)


def teach(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> list[Message]:
    """Rewrite messages for a template without tools: with a system text, and with calls and results as text.

    Consecutive results, and a user's message after them, become one user message, since some templates want turns to
    alternate. O(messages and tools).
    """
    found: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if message.get("tool_calls"):
            calls = _write_calls(message["tool_calls"], tool_format)
            content = f"{content}\n{calls}" if content else calls
        joins = role == "user" and found and found[-1].get("_is_result")
        if joins:
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{content}"}
        else:
            found.append({"role": role, "content": content})
        if message["role"] == "tool":
            found[-1]["_is_result"] = True
    plain = [{name: value for name, value in one.items() if name != "_is_result"} for one in found]
    if not tools:
        return plain
    text = _TEXT.format(tools="\n".join(map(write_json, tools)), example=_example(tool_format))
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _write_calls(calls: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """Calls as a required call is written, so that the next turn begins with the tokens of the answer."""
    texts = []
    for call in calls:
        before, after = tool_format.call_parts(call["function"]["name"])
        texts.append(f"{before}{write_json(call['function']['arguments'])}{after}")
    return surround(texts, tool_format)


def surround(texts: Sequence[str], tool_format: ToolFormat) -> str:
    """Return the texts of calls, joined and with the format's marks."""
    if tool_format.is_list:
        return tool_format.before + tool_format.between.join(texts) + tool_format.after
    return tool_format.between.join([tool_format.before + text + tool_format.after for text in texts])


def _example(tool_format: ToolFormat) -> str:
    before, after = tool_format.call_parts("<function-name>")
    return surround([f"{before}<args-json-object>{after}"], tool_format)
