"""The engine: prompts in, completions out. It puts manager, scheduler, model runner and samplers together.

A step schedules, runs the model, samples, and records. If the model or the sampler raises, the step is aborted: its
requests wait again, the cache holds nothing that wasn't written, and the next step goes on.

An engine is single-threaded, as its manager is. Several streams may be open at once in one thread: each of them
advances all.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from kvblocks.arguments import check_count
from kvblocks.engine.backends import Backend
from kvblocks.engine.cache_plan import plan_cache
from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.dtypes import parse_dtype
from kvblocks.engine.errors import ModelError
from kvblocks.engine.generation import Generation
from kvblocks.engine.layer_attention import LayerPlace
from kvblocks.engine.memory import read_memory
from kvblocks.engine.request import Request
from kvblocks.engine.runner import LoadedModel
from kvblocks.engine.sampler import make_samplers, sample_step
from kvblocks.engine.scheduler import Scheduler
from kvblocks.engine.step import StepLimits
from kvblocks.engine.tokenizer import StreamDecoder
from kvblocks.errors import InvalidArgumentError, InvalidTokensError, KVBlocksError
from kvblocks.manager import KVCacheManager
from kvblocks.metrics import CacheMetrics
from kvblocks.pool_plan import Plan
from kvblocks.sequence import Sequence as KVSequence

DEFAULT_KV_CACHE_BYTES = 512 * 2**20

Prompt = str | Sequence[int]


class Engine:
    """A model that answers prompts, many at once, computing what they share once.

    model: "smollm2", a Hugging Face folder, or a `LoadedModel`, such as another engine's `model`: they share it then.
    num_blocks, block_size: the KV cache, in blocks and tokens a block. A block holds the KV of one of the groups that
    the model's layers form (`plan`): of all layers, where all of them see everything.
    kv_cache_memory: in place of num_blocks, what they may take together: bytes, a text such as "2GiB", or a share of
    the memory that is free once the model is loaded (a float, up to 1.0). Neither: DEFAULT_KV_CACHE_BYTES.
    enable_prefix_caching: whether prompts reuse the KV of earlier ones.
    deterministic: logits have the same bits however prompts are cached, batched, chunked or preempted; slower, and on a
    CPU for the number of torch threads at this moment.
    device: "cpu", "cuda", "cuda:1", or "auto": cuda if there is one, or where a `LoadedModel` is.
    attention: "triton" (our kernels: CUDA devices, head_dim 64, 128 or 256, block_size 16, 32, 64 or 128), "torch"
    (plain torch, anything anywhere), "flash-attn" (that package: CUDA, float16 or bfloat16, block_size in multiples of
    256), or "auto": triton on cuda, torch on a CPU.
    dtype: "float32", "float16", "bfloat16" or torch's own, of weights, KV cache and computing; None: float32 on a CPU,
    the model's own on cuda, or what a `LoadedModel` has.
    cuda_graphs: whether decode steps are captured and replayed, where there is CUDA and attention is triton.

    Attributes to read: model, plan, manager, metrics, scheduler, runner. `limits` may be replaced.
    Raises InvalidArgumentError, ModelError and FetchError. Loads the model.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2",
        *,
        num_blocks: int | None = None,
        kv_cache_memory: float | str | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        deterministic: bool = False,
        device: str = "auto",
        attention: str = "auto",
        dtype: str | torch.dtype | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        chosen = _choose_device(device, model.device if isinstance(model, LoadedModel) else None)
        check_count("block_size", block_size, 1)
        self.model = model if isinstance(model, LoadedModel) else LoadedModel.load(model, chosen, dtype)
        if parse_dtype(dtype) not in {None, self.model.dtype}:
            raise InvalidArgumentError(f"dtype: expected {self.model.dtype}, the loaded model's, got {dtype!r}")
        backend = Backend(attention, deterministic, cuda_graphs)
        backend.choose_attention(self.model, block_size)  # before anything large is made
        self.plan = _plan(self.model, num_blocks, kv_cache_memory, block_size)
        self.manager = KVCacheManager(
            self.plan.num_blocks, groups=self.plan.groups, enable_caching=enable_prefix_caching
        )
        self.metrics = CacheMetrics(self.manager, clock=time.monotonic)
        self.scheduler = Scheduler(self.manager, self.model.config.max_position_embeddings)
        places = [LayerPlace(*place) for place in self.plan.layer_groups]
        self.runner = backend.make_runner(self.model, self.manager, places)
        self._generations: dict[Request, Generation] = {}
        self._sequence_ids = count()

    @property
    def limits(self) -> StepLimits:
        """How much one step computes at most. Assign another `StepLimits` at any time."""
        return self.scheduler.limits

    @limits.setter
    def limits(self, limits: StepLimits) -> None:
        if not isinstance(limits, StepLimits):
            raise InvalidArgumentError(f"limits: expected StepLimits, got {limits!r}")
        self.scheduler.limits = limits

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Answer all prompts, each `n` times, and return the completions in order: all of the first prompt, and so on.

        prompts: texts, encoded as they are (see `engine.model.tokenizer.apply_chat_template` for chats), or token ids.
        n: the prompt is computed once for all its samples, and its KV is there once; the first sample's completion
        counts what it cost. temperature: 0 is greedy, and all samples are equal. seed: every prompt gets random numbers
        of its own from it, so the same prompt with the same seed has the same samples, whatever else is in the batch;
        sample k is that of a call with n=1 and `sampler.sample_seed(seed, k)`. None: others each time. ignore_eos: go
        on until max_tokens.

        Raises, before anything is computed, InvalidArgumentError (a prompt that is empty or unreadable, or could never
        fit, and options out of range), PoolExhaustedError (it can't fit while the present pins stand) and ModelError
        (text without a tokenizer); and what `step` raises, having dropped all of these prompts; the engine can be used
        again.
        """
        completions = [
            (piece.prompt_index, piece.sample_index, piece.completion)
            for piece in self.stream(
                prompts, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
            )
            if piece.completion is not None
        ]
        return [completion for _, _, completion in sorted(completions, key=lambda item: item[:2])]

    def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Piece]:
        """Answer all prompts, giving every token as it comes; the last piece of an answer has its completion.

        As `generate`. Prompts are checked at once, and start with the first piece asked for; closing the iterator drops
        those that are unfinished.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidArgumentError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        num_samples = check_count("n", n, 1)
        stop_token_ids = frozenset[int]() if ignore_eos else self.model.stop_token_ids
        tokenizer = self.model.tokenizer
        generations = []
        for index, prompt in enumerate(prompts):
            samplers = make_samplers(num_samples, temperature, seed)
            request = self._new_request(index, prompt, max_tokens, stop_token_ids)
            requests = [request, *(request.add_sample(next(self._sequence_ids)) for _ in samplers[1:])]
            for number, (sample, sampler) in enumerate(zip(requests, samplers, strict=True)):
                decoder = None if tokenizer is None else StreamDecoder(tokenizer)
                generations.append(Generation(index, number, sample, sampler, decoder))
        return self._run(generations)

    def step(self) -> None:
        """Compute one step of all unfinished requests. `stream` and `generate` call this; so may you, to go ahead.

        Raises what the model or the sampler raises, and PoolExhaustedError if pins keep so much of the pool that
        nothing can go on; nothing is lost then, and the next step tries again.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            return
        sampling = [
            [self._generations[request] for request in chunk.sampled_requests] for chunk in chunks if chunk.samples
        ]
        try:
            logits = self.runner.run(chunks)
            token_ids = sample_step(logits, [[generation.sampler for generation in row] for row in sampling])
        except BaseException:
            self.scheduler.abort(chunks)
            raise
        self.scheduler.complete(chunks, token_ids)
        self.metrics.observe()
        for generation, token_id in zip(chain.from_iterable(sampling), token_ids, strict=True):
            generation.record(token_id, time.perf_counter())

    def _run(self, generations: list[Generation]) -> Iterator[Piece]:
        """Queue the requests, step until they are finished, and give their pieces out."""
        try:
            for generation in generations:
                self._generations[generation.request] = generation
                if generation.sample_index == 0:
                    self.scheduler.add(generation.request)
                generation.start_s = time.perf_counter()
            while True:
                for generation in generations:
                    while generation.pieces:
                        yield generation.pieces.popleft()
                if all(generation.request.finish_reason is not None for generation in generations):
                    return
                self.step()
        finally:
            for generation in reversed(generations):  # the samples of a prompt before the one that computes it for them
                if generation.request.finish_reason is None:
                    self.scheduler.cancel(generation.request)
                self._generations.pop(generation.request, None)

    def _new_request(self, index: int, prompt: Prompt, max_tokens: int, stop_token_ids: frozenset[int]) -> Request:
        """Check a prompt and make its request. Raises InvalidArgumentError and ModelError, saying which it is."""
        try:
            token_ids = self._encode(prompt)
            request = Request(KVSequence(next(self._sequence_ids), token_ids), max_tokens, stop_token_ids)
            vocab_size = self.model.config.vocab_size
            largest = max(request.sequence.token_ids())
            if largest >= vocab_size:
                raise InvalidTokensError(f"expected token ids below {vocab_size}, the vocabulary's size, got {largest}")
            self.scheduler.check_fits(request)
        except KVBlocksError as error:
            raise type(error)(f"prompts[{index}]: {error}") from error
        return request

    def _encode(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        if self.model.tokenizer is None:
            raise ModelError("expected token ids, since the model's folder has no tokenizer.json; got text")
        return self.model.tokenizer.encode(prompt)


def _plan(model: LoadedModel, num_blocks: int | None, kv_cache_memory: float | str | None, block_size: int) -> Plan:
    """The KV cache's layout and its number of blocks, as the caller asks for them. Raises InvalidArgumentError."""
    layout = plan_cache(model.config, block_size, model.weights.embedding.dtype)
    if num_blocks is not None:
        if kv_cache_memory is not None:
            raise InvalidArgumentError(
                f"expected num_blocks or kv_cache_memory, got both: {num_blocks} and {kv_cache_memory!r}"
            )
        budget = check_count("num_blocks", num_blocks, 1) * layout.block_bytes
    else:
        budget = DEFAULT_KV_CACHE_BYTES if kv_cache_memory is None else read_memory(kv_cache_memory, model.device)
        least = layout.block_bytes * len(layout.groups)
        if budget < least:
            raise InvalidArgumentError(
                f"kv_cache_memory: expected at least {least} bytes, a block for each of {len(layout.groups)} groups of"
                f" layers, got {budget}"
            )
    return replace(layout, num_blocks=budget // layout.block_bytes, num_bytes=budget)


def _choose_device(device: str, loaded: torch.device | None) -> torch.device:
    """The device that `device` names; `loaded` is where the model already is. Raises InvalidArgumentError."""
    if device == "auto":
        return loaded or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = torch.device("meta")
    if chosen.type not in {"cpu", "cuda"}:
        raise InvalidArgumentError(f"device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, got {device!r}")
    if loaded is not None and (chosen.type, chosen.index or 0) != (loaded.type, loaded.index or 0):
        raise InvalidArgumentError(f"device: expected {str(loaded)!r}, where the loaded model is, got {device!r}")
    return chosen
