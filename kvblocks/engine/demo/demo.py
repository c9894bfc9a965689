"""The demo: a support desk whose conversations share a long system prompt, without and with prefix caching.

Two engines share one model; one of them caches. Each answers the same requests one after another, so a request's time
to first token includes no other request. Both are deterministic, so answers can be compared exactly. Each engine first
runs a few tokens that share nothing with the requests, because the first pass of a process also sets up the libraries.
"""

import statistics
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvblocks.engine.completion import Completion
from kvblocks.engine.demo.script import SUPPORT_DESK, DemoScript
from kvblocks.engine.engine import Engine
from kvblocks.engine.errors import ModelError
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.text.chat_template import Message
from kvblocks.engine.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class DemoCache:
    """The KV cache options that the demo passes to its engines. prefix_caching: whether the second engine caches."""

    num_blocks: int | None = None
    prefix_caching: bool = True
    eviction: str | None = None


@dataclass(frozen=True)
class DemoRequest:
    """One request of the demo, computed without caching (cold) and with it (warm)."""

    name: str
    cold: Completion
    warm: Completion

    @property
    def speedup(self) -> float:
        """How many times faster the first token came with caching."""
        return self.cold.ttft_s / self.warm.ttft_s

    @property
    def is_identical(self) -> bool:
        """Whether both answers are the same, token for token."""
        return (self.cold.token_ids, self.cold.text) == (self.warm.token_ids, self.warm.text)


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured. The first request finds nothing cached; the others share its system prompt."""

    requests: tuple[DemoRequest, ...]

    @property
    def ttft_speedup(self) -> float:
        """The median speedup of the requests that share the prefix."""
        return statistics.median(request.speedup for request in self.requests[1:])

    @property
    def is_identical(self) -> bool:
        """Whether caching changed no answer."""
        return all(request.is_identical for request in self.requests)

    def to_json(self, model: str) -> dict[str, object]:
        """The report as plain values."""
        return {
            "model": model,
            "block_size": BLOCK_SIZE,
            "requests": [
                {
                    "prompt_tokens": request.warm.num_prompt_tokens,
                    "cached_tokens": request.warm.num_cached_tokens,
                    "computed_tokens": request.warm.num_computed_tokens,
                    "ttft_s_cold": round(request.cold.ttft_s, 4),
                    "ttft_s_warm": round(request.warm.ttft_s, 4),
                }
                for request in self.requests
            ],
            "ttft_speedup": round(self.ttft_speedup, 2),
            "identical_output": self.is_identical,
        }


def run_demo(
    model: LoadedModel,
    console: Console,
    *,
    script: DemoScript = SUPPORT_DESK,
    max_tokens: int = MAX_TOKENS,
    cache: DemoCache | None = None,
) -> DemoReport:
    """Run the demo and show it on `console`.

    Raises ModelError if the model has no chat template, and the errors of `Engine` and `generate` about the cache.
    """
    cache = cache or DemoCache()
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise ModelError("expected a model with a tokenizer and a chat template, got one without: the demo is a chat")
    num_shared = len(model.tokenizer.encode(script.system_prompt))
    console.print(
        f"{len(script.questions)} customers ask, and the first one asks again. All prompts begin with one handbook,"
        f" {num_shared} tokens. Answers are cut after {max_tokens} tokens. Torch threads: {torch.get_num_threads()}."
    )
    passes = []
    second = "With prefix caching" if cache.prefix_caching else "Without prefix caching, again"
    for title, caching in (("Without prefix caching", False), (second, cache.prefix_caching)):
        console.rule(title)
        engine = Engine(
            model,
            num_blocks=cache.num_blocks,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            deterministic=True,
            eviction=cache.eviction,
        )
        engine.generate([[0] * 2 * BLOCK_SIZE], max_tokens=2, ignore_eos=True)
        engine.manager.reset_prefix_cache()
        passes.append(_answer_all(engine, model.tokenizer, script, console, max_tokens))
    names = [*(f"customer {number}" for number in range(1, len(script.questions) + 1)), "customer 1 again"]
    report = DemoReport(tuple(map(DemoRequest, names, *passes)))
    _show(report, console, f"Without -> {second[0].lower()}{second[1:]}")
    return report


def _answer_all(
    engine: Engine, tokenizer: Tokenizer, script: DemoScript, console: Console, max_tokens: int
) -> list[Completion]:
    """Answer every customer's question, then the first customer's next one, one after another."""
    chats: list[list[Message]] = [
        [{"role": "system", "content": script.system_prompt}, {"role": "user", "content": question}]
        for question in script.questions
    ]
    completions = [_answer(engine, tokenizer.apply_chat_template(chat), chat, console, max_tokens) for chat in chats]
    chat = [
        *chats[0],
        {"role": "assistant", "content": completions[0].text},
        {"role": "user", "content": script.follow_up},
    ]
    completions.append(_answer(engine, tokenizer.apply_chat_template(chat), chat, console, max_tokens))
    return completions


def _answer(engine: Engine, prompt: list[int], chat: list[Message], console: Console, max_tokens: int) -> Completion:
    """Answer one prompt, showing the question, and the answer while it is made."""
    console.print(Text(f"> {chat[-1]['content']}", style="bold"))
    completion = None
    for piece in engine.stream([prompt], max_tokens=max_tokens):
        console.print(Text(piece.text), end="", soft_wrap=True)
        completion = piece.completion
    assert completion is not None, "the last piece has the completion"
    ending = "" if completion.finish_reason == "stop" else " ..."
    note = f"{ending}  [{completion.num_cached_tokens} tokens cached, first token after {completion.ttft_s:.2f} s]"
    console.print(Text(note, style="dim"), soft_wrap=True)
    return completion


def _show(report: DemoReport, console: Console, title: str) -> None:
    """Print the table and the conclusion."""
    table = Table(title=title)
    table.add_column("request")
    for heading in ("prompt\ntokens", "cached\ntokens", "computed\ntokens", "time to first\ntoken, s", "ratio"):
        table.add_column(heading, justify="right")
    for request in report.requests:
        cold, warm = request.cold, request.warm
        table.add_row(
            request.name,
            str(warm.num_prompt_tokens),
            f"{cold.num_cached_tokens} -> {warm.num_cached_tokens}",
            f"{cold.num_computed_tokens} -> {warm.num_computed_tokens}",
            f"{cold.ttft_s:.2f} -> {warm.ttft_s:.2f}",
            f"x{request.speedup:.1f}",
        )
    console.print(table)
    shared = "Time to first token of all but the first request, which share its prefix"
    console.print(Text(f"{shared}: median x{report.ttft_speedup:.1f}"), soft_wrap=True)
    console.print(f"Answers with and without caching are identical: {'yes' if report.is_identical else 'NO'}")
