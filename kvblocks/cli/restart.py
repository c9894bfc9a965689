"""The last part of the demo: a server is killed and started again, and its first answer comes from the disk.

It runs `kvblocks serve --disk-cache` in its own process, and asks it as any client does.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from kvblocks.cli.client import ServerClient
from kvblocks.engine.demo.demo import BLOCK_SIZE
from kvblocks.engine.demo.script import SUPPORT_DESK, DemoScript
from kvblocks.errors import KVBlocksError

MAX_TOKENS = 16
DISK_CACHE_SIZE = "512MiB"

_START_S = 600.0  # reading the model from a slow disk takes long
_STORED_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """The first answer of a server and its cost. num_disk_tokens: the cached tokens that came from the disk."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_disk_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class RestartReport:
    """The first answers of two servers on the same folder, of which the first was killed."""

    before: FirstAnswer
    after: FirstAnswer

    @property
    def is_identical(self) -> bool:
        """Whether both answers are equal."""
        return self.before.text == self.after.text

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
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
    """Run this part with a model by name or folder, and show it on `console`. Leaves nothing behind.

    Raises KVBlocksError if a server doesn't start, answer or store. The message has the server's output.
    """
    console.rule("Killed and started again")
    question = script.questions[0]
    chat = [{"role": "system", "content": script.system_prompt}, {"role": "user", "content": question}]
    with tempfile.TemporaryDirectory(prefix="kvblocks-demo-") as name:
        folder = Path(name)
        console.print(Text(f"> {question}", style="bold"))
        with _serving(model, folder) as client:
            before = _ask(client, chat)
            _show(before, console)
            _wait_until_stored(client, before.num_prompt_tokens // BLOCK_SIZE)
        console.print("The server is killed (SIGKILL). Another one starts on the same folder.")
        console.print(Text(f"> {question}", style="bold"))
        with _serving(model, folder) as client:
            after = _ask(client, chat)
        _show(after, console)
    report = RestartReport(before, after)
    console.print(f"Both answers are identical: {'yes' if report.is_identical else 'NO'}")
    return report


@contextmanager
def _serving(model: str, folder: Path) -> Iterator[ServerClient]:
    """Run a server with its disk cache in the folder, and yield a client. The server is killed at the end."""
    command = [
        *(sys.executable, "-m", "kvblocks", "serve", "--model", model, "--port", "0", "--deterministic"),
        *("--block-size", str(BLOCK_SIZE), "--threads", str(torch.get_num_threads())),
        *("--disk-cache", str(folder / "disk"), "--disk-cache-size", DISK_CACHE_SIZE),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVBLOCKS_")}
    log = folder / "log"
    with (
        log.open("wb") as lines,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=lines, env=environment) as process,  # noqa: S603  # ours
    ):
        try:
            with ServerClient(_find_url(process, log)) as client:
                # The first pass of a process also initializes the libraries.
                _ask(client, [{"role": "user", "content": "Hello"}], cache_salt="shared with nobody")
                yield client
        finally:
            process.kill()


def _find_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait until the server reports its URL, and return it."""
    end_s = time.monotonic() + _START_S
    while True:
        has_ended = process.poll() is not None  # asked before its last lines are read
        said = log.read_text(errors="replace")
        found = re.search(r"serving \S+ at (http://\S+)\n", said)
        if found is not None:
            return found[1]
        if has_ended or time.monotonic() > end_s:
            status = f"its end with status {process.returncode}" if has_ended else f"none in {_START_S:g} s"
            raise KVBlocksError(f"expected the demo's server to start, got {status}. It said: {said.strip()}")
        time.sleep(_POLL_S)


def _ask(client: ServerClient, chat: list[dict[str, str]], **more: object) -> FirstAnswer:
    options = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    start_s, first_s, text = time.perf_counter(), None, ""
    usage: dict[str, Any] = {}
    for event in client.stream("/v1/chat/completions", {"messages": chat, **options, **more}):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece and first_s is None:
                first_s = time.perf_counter()
            text += piece
        usage = event.get("usage") or usage
    details = usage["prompt_tokens_details"]
    from_disk = (details.get("cached_tokens_by_tier") or {}).get("disk", 0)
    ttft_s = (first_s or time.perf_counter()) - start_s
    return FirstAnswer(text, usage["prompt_tokens"], details["cached_tokens"], from_disk, ttft_s)


def _wait_until_stored(client: ServerClient, num_blocks: int) -> None:
    """Wait until at least this many blocks are stored, and all that are have been synced, so that a kill loses none."""
    end_s = time.monotonic() + _STORED_S
    while True:
        (tier,) = client.ask("GET", "/v1/cache/stats")["tiers"]
        if num_blocks <= tier["num_stored_blocks"] <= tier["place"]["num_synced_blocks"]:
            return
        if time.monotonic() > end_s:
            raise KVBlocksError(f"expected {num_blocks} blocks on the disk within {_STORED_S:g} s, got {tier}")
        time.sleep(_POLL_S)


def _show(answer: FirstAnswer, console: Console) -> None:
    note = (
        f" ...  [{answer.num_cached_tokens} of {answer.num_prompt_tokens} tokens cached, {answer.num_disk_tokens} of"
        f" them from the disk, first token after {answer.ttft_s:.2f} s]"
    )
    console.print(Text(answer.text), Text(note, style="dim"), sep="", soft_wrap=True)
