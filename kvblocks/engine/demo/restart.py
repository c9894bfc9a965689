"""The demo's last act: an engine is killed and started again, and its first answer comes from the disk.

The engine runs in a process of its own, this module as a script, so that it can be killed for real. It gets one line of
JSON, says what its first answer cost, and, when that is on the disk, says so and waits for its end.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.text import Text

from kvblocks.engine.completion import Completion
from kvblocks.engine.demo.demo import BLOCK_SIZE
from kvblocks.engine.demo.script import SUPPORT_DESK, DemoScript
from kvblocks.engine.engine import Engine
from kvblocks.engine.errors import ModelError
from kvblocks.errors import KVBlocksError

MAX_TOKENS = 16
DISK_CACHE_SIZE = "512MiB"

_QUIET_S = 1.5  # a sync comes a second after what it is for
_PATIENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The first answer of an engine: what it says and what it cost. num_disk_tokens: of those cached, from the disk."""

    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_disk_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class RestartReport:
    """The first answer of an engine, and that of the next one on the same folder, after the first was killed."""

    before: FirstAnswer
    after: FirstAnswer

    @property
    def is_identical(self) -> bool:
        """Whether both said the same, token for token."""
        return (self.before.token_ids, self.before.text) == (self.after.token_ids, self.after.text)

    def to_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {
            "prompt_tokens": self.after.num_prompt_tokens,
            "cached_tokens_before": self.before.num_cached_tokens,
            "cached_tokens_after": self.after.num_cached_tokens,
            "disk_tokens_after": self.after.num_disk_tokens,
            "ttft_s_before": round(self.before.ttft_s, 4),
            "ttft_s_after": round(self.after.ttft_s, 4),
            "identical_output": self.is_identical,
        }


def run_restart(model: str, console: Console, *, script: DemoScript = SUPPORT_DESK) -> RestartReport:
    """Run the act with a model by name or folder, and show it on `console`. Leaves nothing behind.

    Raises KVBlocksError if an engine ends without an answer; it has said why on stderr.
    """
    console.rule("Killed and started again")
    question = script.questions[0]
    with tempfile.TemporaryDirectory(prefix="kvblocks-demo-") as folder:
        order = {
            "model": model,
            "folder": folder,
            "threads": torch.get_num_threads(),
            "chat": [{"role": "system", "content": script.system_prompt}, {"role": "user", "content": question}],
        }
        console.print(Text(f"> {question}", style="bold"))
        before = _answer_and_die(order, stores=True)
        _show(before, console)
        console.print("The engine is killed (SIGKILL). Another one starts on the same folder.")
        console.print(Text(f"> {question}", style="bold"))
        after = _answer_and_die(order, stores=False)
        _show(after, console)
    report = RestartReport(before, after)
    console.print(f"Both answers are identical: {'yes' if report.is_identical else 'NO'}")
    return report


def _answer_and_die(order: dict[str, Any], *, stores: bool) -> FirstAnswer:
    """Start an engine, wait for its first answer, and until that is on the disk if it `stores`; then kill it."""
    command = [sys.executable, "-m", "kvblocks.engine.demo.restart"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # ours
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            is_done = bool(process.stdout.readline() if stores else answer)
        except BrokenPipeError:  # it ended before it read
            is_done = False
        finally:
            process.kill()
    if not is_done:
        raise KVBlocksError(f"expected an answer from the demo's engine, got its end with status {process.returncode}")
    return FirstAnswer(**json.loads(answer))


def _show(answer: FirstAnswer, console: Console) -> None:
    note = (
        f" ...  [{answer.num_cached_tokens} of {answer.num_prompt_tokens} tokens cached, {answer.num_disk_tokens} of"
        f" them from the disk, first token after {answer.ttft_s:.2f} s]"
    )
    console.print(Text(answer.text), Text(note, style="dim"), sep="", soft_wrap=True)


def serve_once(lines: TextIO, output: TextIO) -> None:
    """Answer what the first line asks, say so, say when it is stored, and wait until the lines end."""
    order = json.loads(lines.readline())
    torch.set_num_threads(order["threads"])
    engine = Engine(
        order["model"],
        block_size=BLOCK_SIZE,
        deterministic=True,
        disk_cache=order["folder"],
        disk_cache_size=DISK_CACHE_SIZE,
    )
    tokenizer = engine.model.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ModelError("expected a model with a tokenizer and a chat template, got one without: the demo is a chat")
    # The first pass of a process also sets up the libraries.
    engine.generate([[0] * 2 * BLOCK_SIZE], max_tokens=2, ignore_eos=True, salt="shared with nobody")
    (completion,) = engine.generate([tokenizer.apply_chat_template(order["chat"])], max_tokens=MAX_TOKENS)
    print(json.dumps(asdict(_first_answer(completion))), file=output, flush=True)
    _store(engine)
    print("stored", file=output, flush=True)
    lines.read()


def _first_answer(completion: Completion) -> FirstAnswer:
    return FirstAnswer(
        completion.text,
        completion.token_ids,
        completion.num_prompt_tokens,
        completion.num_cached_tokens,
        completion.num_loaded_tokens.get("disk", 0),
        completion.ttft_s,
    )


def _store(engine: Engine) -> None:
    """Step until all is stored, and wait until the disk's syncs have ended: a kill loses nothing then."""
    while engine.has_work:
        engine.step()
    num_syncs, since_s = -1, time.monotonic()
    end_s = since_s + _PATIENCE_S
    while time.monotonic() < min(end_s, since_s + _QUIET_S):
        now = sum(tier.disk.num_syncs for tier in engine.offload.traffic() if tier.disk) if engine.offload else 0
        if now != num_syncs:
            num_syncs, since_s = now, time.monotonic()
        time.sleep(0.05)


if __name__ == "__main__":
    serve_once(sys.stdin, sys.stdout)
