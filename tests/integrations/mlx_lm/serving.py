"""mlx-lm's own server as a process, over a folder with a tiny random model."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from bench.ports import free_ports
from integrations.mlx_lm.models import CONFIGS, VOCABULARY, make_model

ROOT = Path(__file__).resolve().parents[3]
_WORDS = [f"w{number}" for number in range(VOCABULARY - 6)]
_SPECIAL = ["<eos>", "<unk>", "system", "user", "assistant", "end"]
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
_START_SECONDS = 60


def make_folder(folder: Path, name: str) -> Path:
    """Write a model and a tokenizer whose words are w0, w1, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    model = make_model(name)
    config = {"model_type": name, **CONFIGS[name], "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    model.save_weights(str(folder / "model.safetensors"))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate([*_SPECIAL, *_WORDS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    return folder


class Server:
    """A server process. arguments: behind `python`, such as -m mlx_lm.server; the model and the port are added."""

    def __init__(self, model: Path, log: Path, *arguments: str, **environment: str) -> None:
        (self.port,) = free_ports(1)
        self.log = log
        command = [sys.executable, *arguments, "--model", str(model), "--port", str(self.port)]
        values = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=values)
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_up():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def chat(self, messages: list[dict[str, str]], **options: Any) -> tuple[str, int, int]:
        """Return the answer, the number of its prompt's tokens, and how many of these were cached."""
        answer = self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, **options})
        usage = answer["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
