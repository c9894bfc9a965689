"""The item `engine`: whole steps at the shapes of Llama 3 8B, whose weights are random and made on the device.

Times are those of `Engine.step`, with scheduling and sampling: wall time, host time (wall time minus the wait for the
device's tokens), and this thread's CPU time, which may include waiting. They come from tens of steps of one run, and
say nothing about requests that come and go. Decode steps are timed with and without overlap. The host's work is hidden
as far as a step with overlap takes less than the wait plus the host time of a step without. Steps that wait for the
host, such as those without graphs, took 1.6 times as long in one process as in the next one on the same machine.

`parts` has what a step consists of.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu_session import parts
from bench.gpu_session.cases import Case, Facts

if TYPE_CHECKING:
    from kvblocks.engine import Engine, LoadedModel
    from kvblocks.engine.model.config import ModelConfig

BLOCK_SIZE = 16
TOP_P = {"temperature": 0.8, "top_p": 0.9}
DECODES: tuple[tuple[int, int, dict[str, float]], ...] = (
    *((32, 1024, {}), (256, 1024, {}), (1, 1024, {}), (32, 1024, TOP_P), (256, 1024, TOP_P), (64, 4096, {})),
)
"""(requests, tokens of each prompt, how tokens are drawn)"""

NUM_UNTIMED = 4
"""Steps before those that are timed."""
NUM_PROFILED = 8
"""Steps after those that are timed, whose kernels are."""


@dataclass(frozen=True)
class Scale:
    """The sizes of everything. num_steps: how many steps are timed. chunk: the most tokens of a step."""

    device: torch.device
    dtype: torch.dtype
    num_steps: int
    chunk: int
    shrink: int


GPU = Scale(torch.device("cuda"), torch.bfloat16, 40, 8192, 1)
REHEARSAL = Scale(torch.device("cpu"), torch.float32, 2, 64, 64)


def config(scale: Scale) -> "ModelConfig":
    """Llama 3 8B's, or a tiny one."""
    from kvblocks.engine.model.config import ModelConfig

    if scale.shrink == 1:
        sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "num_heads": 32}
        sizes |= {"num_kv_heads": 8, "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 8192}
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 2}
        sizes |= {"num_kv_heads": 1, "head_dim": 64, "vocab_size": 128, "max_position_embeddings": 512}
    return ModelConfig(**sizes, tie_word_embeddings=False)


def random_model(shape: "ModelConfig", device: torch.device, dtype: torch.dtype) -> "LoadedModel":
    """A model whose weights are made on the device, without a folder and without copies."""
    from kvblocks.engine import LoadedModel
    from kvblocks.engine.model.weights import LayerWeights, ModelWeights

    def matrix(num_rows: int, num_columns: int) -> torch.Tensor:
        return torch.randn(num_rows, num_columns, device=device, dtype=dtype) * num_columns**-0.5

    hidden, width, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    norm = torch.ones(hidden, device=device, dtype=dtype)
    layers = tuple(
        LayerWeights(
            input_norm=norm,
            qkv=matrix((shape.num_heads + 2 * shape.num_kv_heads) * head_dim, hidden),
            output=matrix(hidden, shape.num_heads * head_dim),
            mlp_norm=norm,
            gate_up=matrix(2 * width, hidden),
            down=matrix(hidden, width),
        )
        for _ in range(shape.num_layers)
    )
    head = matrix(shape.vocab_size, hidden)
    return LoadedModel(shape, ModelWeights(matrix(shape.vocab_size, hidden), layers, norm, head))


def cases(*, is_rehearsal: bool) -> Iterator[Case]:
    """Yield the cases, decode steps first."""
    runs = Runs(REHEARSAL if is_rehearsal else GPU)
    yield "model", runs.load
    for batch, context, options in DECODES[:2] if is_rehearsal else DECODES:
        how = "top_p" if options else "greedy"
        yield f"decode {batch} x {context}, {how}", partial(runs.decode, batch, context, options)
    yield "memory of the largest steps", runs.memory
    yield "prefill 2 x 8000", runs.prefill
    if not is_rehearsal and find_spec("flashinfer") is not None:
        yield "prefill 2 x 8000, flashinfer", partial(runs.prefill, "flashinfer")
    yield "prefixes of 1024 cached, 32 suffixes of 16", runs.suffixes
    yield "mixed: 32 decodes, prompts of 512 beside them", runs.mixed
    yield "graphs give the tokens of steps without", runs.graphs
    yield "overlap gives the tokens of steps without", runs.overlap
    yield "copies to host memory and back", runs.copies
    for number in (2,) if is_rehearsal else (256, 32):
        yield f"draws of {number} rows", partial(runs.draws, number)
    if not is_rehearsal:  # the deterministic ones take minutes in the interpreter
        yield "products, packed and apart", partial(parts.products, runs.device)
        yield "decode 32 x 1024, without graphs", partial(runs.decode, 32, 1024, {}, has_graphs=False)
        yield "decode 32 x 1024, deterministic", partial(runs.decode, 32, 1024, {}, is_deterministic=True)
        yield "prefill 2 x 8000, deterministic", partial(runs.prefill, is_deterministic=True)


class Runs:
    """The cases, which share one model."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._model: LoadedModel | None = None

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self._scale.device

    def load(self) -> Facts:
        """Make the model."""
        start = time.perf_counter()
        model = self._loaded()
        self._wait()
        return {"seconds": time.perf_counter() - start, "config": str(model.config)[:300]}

    def decode(
        self,
        batch: int,
        context: int,
        options: dict[str, Any],
        *,
        has_graphs: bool = True,
        is_deterministic: bool = False,
    ) -> Facts:
        """Prefill prompts, then time decode steps of all of them, with overlap and without, and their kernels."""
        batch, context = self._small(batch), self._small(context, least=8)
        steps = self._scale.num_steps
        num_tokens = self._count_tokens(batch, context)
        chosen = {"deterministic": True} if is_deterministic else None
        engine, facts = self._engine(batch, context + num_tokens, has_graphs=has_graphs, options=chosen)
        start = time.perf_counter()
        self._submit(engine, batch, context, num_tokens, options)
        num_prefill_steps = self._until_all_decode(engine)
        facts["prefill_tokens_per_s"] = batch * context / (time.perf_counter() - start)
        facts["prefill_steps"] = num_prefill_steps
        for overlaps in (True, False):
            engine.stepper.overlaps = overlaps
            for _ in range(NUM_UNTIMED - 1):
                engine.step()
            self._wait()
            engine.step()
            found = self._time_steps(engine, steps, batch)
            facts |= found if overlaps else {f"{name}, no overlap": value for name, value in found.items()}
        facts["tokens_per_s"] = batch / (facts["step_ms"] * 1e-3)
        return facts | (parts.kernel_times(engine.step, NUM_PROFILED) if self._scale.device.type == "cuda" else {})

    def draws(self, num_rows: int) -> Facts:
        """Time the kernel that draws, alone."""
        most = len(parts.STEEPNESS) if self._scale.shrink == 1 else 1
        return parts.draws(self.device, num_rows, self._small(parts.VOCABULARY), parts.STEEPNESS[:most])

    def _count_tokens(self, batch: int, context: int) -> int:
        """How many tokens each request asks for, so that none ends while steps are timed.

        The first one decodes beside the prompts of the others, in all steps that prefill.
        """
        num_prefill_steps = -(-batch * context // (max(batch + 1, self._scale.chunk) - batch))
        return num_prefill_steps + 2 * (NUM_UNTIMED + self._scale.num_steps) + 20

    def memory(self) -> Facts:
        """What the largest steps take beside the cache, as an engine measures it that gets a share of the memory."""
        from kvblocks.engine import StepLimits
        from kvblocks.engine.run.backends import Backend
        from kvblocks.engine.worst_steps import WorstSteps

        model = self._loaded()
        limits = StepLimits.default_on("cuda") if self._scale.shrink == 1 else StepLimits(self._scale.chunk, 4)
        start = time.perf_counter()
        backend = Backend(attention="triton").prepared(model, BLOCK_SIZE)
        num_bytes = WorstSteps(model, backend, BLOCK_SIZE, limits).measure()
        return {"bytes": num_bytes, "seconds": time.perf_counter() - start, "limits": str(limits)}

    def prefill(self, attention: str = "triton", *, is_deterministic: bool = False) -> Facts:
        """Whole prompts, a token of each."""
        context = self._small(8000, least=8)
        options: dict[str, Any] = {"attention": attention, "deterministic": is_deterministic}
        engine, facts = self._engine(2, context + 16, warms_up=False, options=options)
        rates = []
        for number in range(4 if self._scale.shrink == 1 else 1):  # the first one compiles
            start = time.perf_counter()
            engine.generate(self._prompts(2, context, seed=number), max_tokens=1, ignore_eos=True)
            rates.append(2 * context / (time.perf_counter() - start))
        return facts | {"tokens_per_s": statistics.median(rates[1:] or rates), "all": rates}

    def suffixes(self) -> Facts:
        """The main case of a prefix cache: a long cached prefix, and few new tokens."""
        shared, own, batch = self._small(1024, least=32), self._small(16, least=2), self._small(32)
        facts: Facts = {}
        for how, has_graphs in (("without graphs", False), ("with graphs", True)):
            engine, _ = self._engine(batch, shared + own + 16, warms_up=False, has_graphs=has_graphs)
            engine.stepper.overlaps = False  # a step is timed alone
            facts[how] = self._time_suffixes(engine, shared, own, batch)
        return facts

    def _time_suffixes(self, engine: "Engine", shared: int, own: int, batch: int) -> Facts:
        prefix = self._prompts(1, shared, seed=99)[0]
        engine.generate([prefix], max_tokens=1, ignore_eos=True)
        samples = []
        for number in range(5):
            prompts = [prefix + tail for tail in self._prompts(batch, own, seed=number)]
            for prompt in prompts:
                engine.submit(prompt, max_tokens=2, ignore_eos=True)
            samples.append(self._time_steps(engine, 1, batch))
            while engine.has_work:
                engine.step()
        facts: Facts = {"all": samples, "replays": getattr(engine.runner, "num_ragged_replays", 0)}
        for name in ("step_ms", "host_ms", "host_cpu_ms"):
            facts[name] = statistics.median(sample[name] for sample in samples[1:])
        return facts

    def mixed(self) -> Facts:
        """Steps with decodes of some requests, and a chunk of another one's prompt."""
        batch, context, prompt = self._small(32), self._small(1024, least=8), self._small(512, least=8)
        steps = self._scale.num_steps // 2
        engine, facts = self._engine(batch + 1, context + 2 * steps + 64, warms_up=False)
        engine.stepper.overlaps = False  # else a prompt comes into every other step
        self._submit(engine, batch, context, 2 * steps + 40, {})
        self._until_all_decode(engine)
        samples = []
        for number in range(steps):
            engine.submit(self._prompts(1, prompt, seed=1000 + number)[0], max_tokens=1, ignore_eos=True)
            samples.append(self._time_steps(engine, 1, batch + 1))
        for name in ("step_ms", "host_ms", "host_cpu_ms"):
            facts[name] = statistics.median(sample[name] for sample in samples[2:] or samples)
        return facts

    def graphs(self) -> Facts:
        """The same tokens with CUDA graphs and without: full buckets of equal prompts, so that all shapes agree."""
        from kvblocks.engine import Engine

        prompts = self._prompts(8 if self._scale.shrink == 1 else 2, self._small(200, least=20), seed=5)
        answers = []
        for has_graphs in (True, False):
            engine = Engine(self._loaded(), num_blocks=400, attention="triton", cuda_graphs=has_graphs)
            completions = engine.generate(prompts, max_tokens=self._small(32, least=2), ignore_eos=True)
            answers.append([completion.token_ids for completion in completions])
            num_replays = getattr(engine.runner, "num_replays", 0)
            if has_graphs:
                replayed = num_replays
        same = sum(one == other for one, other in zip(*answers, strict=True))
        needs_graphs = self._scale.device.type == "cuda"
        is_right = same == len(prompts) and (replayed > 0 or not needs_graphs)
        return {"is_right": is_right, "answers": len(prompts), "same": same, "replays": replayed}

    def overlap(self) -> Facts:
        """The same tokens with overlap and without, greedy and drawn. All requests decode together, so shapes agree."""
        from kvblocks.engine import Engine

        prompts = self._prompts(32 if self._scale.shrink == 1 else 2, self._small(100, least=20), seed=6)
        engine = Engine(self._loaded(), num_blocks=400, attention="triton", overlap=True, enable_prefix_caching=False)
        facts: Facts = {"is_right": True, "answers": len(prompts)}
        for how, options in (("greedy", {}), ("top_p", TOP_P | {"seed": 1})):
            answers = []
            for engine.stepper.overlaps in (False, True):
                completions = engine.generate(prompts, max_tokens=self._small(40, least=3), ignore_eos=True, **options)
                answers.append([completion.token_ids for completion in completions])
            facts[f"same, {how}"] = same = sum(one == other for one, other in zip(*answers, strict=True))
            facts["is_right"] = facts["is_right"] and same == len(prompts)
        return facts

    def copies(self) -> Facts:
        """Blocks to pinned host memory and back, as tiers copy them. The bytes must come back."""
        from kvblocks.engine.attention.attention import KVCache
        from kvblocks.engine.tiers.block_bytes import BlockBytes

        shape, num_blocks = config(self._scale), self._small(512, least=4)
        cache = KVCache.allocate(shape, 2 * num_blocks, BLOCK_SIZE, dtype=self._scale.dtype, device=self._scale.device)
        for part in cache.parts:
            part.normal_()
        expected = [part[:num_blocks].clone() for part in cache.parts]
        blocks = BlockBytes(cache)
        rows = list(blocks.new_rows(num_blocks))
        facts: Facts = {"block_bytes": blocks.num_block_bytes}
        source, target = list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks))
        for name, call in (("read", partial(blocks.read, source)), ("write", partial(blocks.write, target))):
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                call(rows, blocks.mark())
                seconds.append(time.perf_counter() - start)
            facts[f"{name}_bytes_per_s"] = num_blocks * blocks.num_block_bytes / min(seconds)
        pairs = zip(cache.parts, expected, strict=True)
        return facts | {"is_right": all(torch.equal(part[num_blocks:], old) for part, old in pairs)}

    def _loaded(self) -> "LoadedModel":
        if self._model is None:
            self._model = random_model(config(self._scale), self._scale.device, self._scale.dtype)
        return self._model

    def _engine(
        self,
        batch: int,
        num_tokens: int,
        *,
        warms_up: bool = True,
        has_graphs: bool = True,
        options: dict[str, Any] | None = None,
    ) -> "tuple[Engine, Facts]":
        """An engine with room for so many requests of so many tokens, and what its warm-up took."""
        from kvblocks.engine import Engine, StepLimits

        self._forget_engines()
        num_blocks = (batch + 1) * -(-num_tokens // BLOCK_SIZE)
        sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
        chosen = {"attention": "triton"} | (options or {})
        engine = Engine(self._loaded(), **sizes, **chosen, cuda_graphs=has_graphs)
        most = max(batch, self._scale.chunk)
        engine.limits = StepLimits(max_num_batched_tokens=most, max_num_seqs=batch + 1)
        facts: Facts = {"num_blocks": num_blocks}
        if warms_up and self._scale.device.type == "cuda":
            start = time.perf_counter()
            compiled = engine.warm_up()
            self._wait()
            facts |= {"warm_up_s": time.perf_counter() - start, "compile_s": sum(compiled.values())}
        return engine, facts

    def _forget_engines(self) -> None:
        gc.collect()
        with suppress(AssertionError, RuntimeError):  # torch without CUDA
            torch.cuda.empty_cache()

    def _submit(self, engine: "Engine", batch: int, context: int, num_tokens: int, options: dict[str, Any]) -> None:
        for prompt in self._prompts(batch, context):
            engine.submit(prompt, max_tokens=num_tokens, ignore_eos=True, seed=1, **options)

    def _prompts(self, number: int, length: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        vocabulary = config(self._scale).vocab_size
        tokens: list[list[int]] = torch.randint(vocabulary, (number, length), generator=generator).tolist()
        return tokens

    def _until_all_decode(self, engine: "Engine") -> int:
        """Step until every request has its first token. Returns the number of steps."""
        scheduler = engine.scheduler
        number = 0
        while scheduler.waiting or any(request.num_output_tokens == 0 for request in scheduler.running):
            engine.step()
            number += 1
        self._wait()
        return number

    def _time_steps(self, engine: "Engine", number: int, batch: int) -> Facts:
        """Milliseconds of steps: the wall's median, least and most; the host's, without waiting; and its CPU time.

        Raises RuntimeError if a step gives tokens to other than `batch` requests, since it is another one then.
        """
        given: list[int] = []
        wall: list[float] = []
        host: list[float] = []
        used: list[float] = []
        for _ in range(number):
            start, waited, thread = time.perf_counter(), engine.stepper.waited_s, time.thread_time()
            told = engine.step()
            used.append((time.thread_time() - thread) * 1e3)
            wall.append((time.perf_counter() - start) * 1e3)
            host.append(wall[-1] - (engine.stepper.waited_s - waited) * 1e3)
            given.append(len(told))
        if set(given) != {batch}:
            raise RuntimeError(f"expected a token for each of {batch} requests in every timed step, got {given}")
        spread = {"step_min_ms": min(wall), "step_max_ms": max(wall)} if number > 1 else {}
        times = {"host_ms": statistics.median(host), "host_cpu_ms": statistics.median(used)}
        return {"step_ms": statistics.median(wall), **spread, **times}

    def _small(self, number: int, *, least: int = 1) -> int:
        return max(least, number // self._scale.shrink)

    def _wait(self) -> None:
        if self._scale.device.type == "cuda":
            torch.cuda.synchronize()
