"""The engine: prompts in, completions out. It puts manager, scheduler, model runner and samplers together.

There are two ways to use it. `generate` and `stream` answer prompts and return; they step by themselves, and raise what
goes wrong. A server submits prompts as they come, calls `step` as long as there is work, and hands out the pieces of
the generations; what goes wrong for one of them is found there, and the others go on (see `engine.stepper`).

An engine is single-threaded, as its manager is. Several streams may be open at once in one thread: each of them
advances all.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, Unpack

import torch

from kvblocks.arguments import Flag, check_count, check_flag, is_a, is_number, wrong
from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.generation import Generation
from kvblocks.engine.intake import Intake, Prompt
from kvblocks.engine.model.dtypes import parse_dtype
from kvblocks.engine.model.layer_attention import LayerLocation
from kvblocks.engine.options import GenerationOptions, OptionValues
from kvblocks.engine.run.backends import Backend, watch_compiling
from kvblocks.engine.run.memory import check_memory, read_memory
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.sampling.batch_sampler import SamplingCounts
from kvblocks.engine.schedule.order import Order
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.schedules import make_order
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.stepper import Stepper
from kvblocks.engine.tiers.building import build_tiers
from kvblocks.engine.tiers.offload import Offload
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.events import CacheEvent, EventOptions
from kvblocks.groups.plan import Plan
from kvblocks.manager import KVCacheManager
from kvblocks.observe.metrics import CacheMetrics
from kvblocks.retention.policies.policy import PolicyFactory

DEFAULT_KV_CACHE_BYTES = 512 * 2**20

REMEMBERED_SHARE = 0.25
"""The share of the blocks that prompts with a remembered next token may hold."""

_PATIENCE_S = 5.0
"""How long `forget_salt` waits for transfers under way, whose bytes are then to be overwritten, too."""

_ERASE_S = 60.0
"""How long it waits for the disk."""

_WAIT_S = 0.005
"""How long a step without anything to compute waits for a transfer: what else its caller has to do waits as long."""


class Engine:
    """A model that answers prompts, many at once, computing what they share once.

    model: "smollm2", a Hugging Face folder, or a `LoadedModel`, such as another engine's `model`: they share it then.
    num_blocks, block_size: the KV cache, in blocks and tokens a block. A block holds the KV of one of the groups that
    the model's layers form (`plan`): of all layers, where all of them see everything.
    kv_cache_memory: instead of num_blocks, what they may take together: bytes, a text such as "2GiB", or a share of
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
    kv_cache_dtype: "auto": K and V are kept in dtype; "fp8_e4m3" (or "fp8"): in 8 bits, with scales that are found now
    and then stay, so that a pool of the same bytes has two or four times as many blocks (docs/performance.md says what
    that costs).
    cuda_graphs: whether decode steps are captured and replayed, where there is CUDA and attention is triton.
    schedule: in which order prompts that wait are begun: "fcfs", first come first served; "longest-prefix", those first
    of which most is cached; "grouped", those together that share a prefix. See `engine.order`.
    eviction: which cached block goes first when the pool needs one, as of a `KVCacheManager`; its clock is
    `time.monotonic`. "sessions" goes by the option `session` of prompts.
    remember_next_token: whether a greedy prompt's next token is kept with its KV, so that the same prompt again gets
    its first token without a forward pass; at most REMEMBERED_SHARE of the blocks hold such prompts, and only as long
    as nobody needs them (docs/design/engine/remembered.md). `close` gives them back.
    num_history_blocks: how many evicted blocks `manager.explain` remembers.
    host_cache: host memory for blocks that don't fit the pool: bytes, a text such as "2GiB", or a share of what is
    free. disk_cache: a folder for blocks, which the next engine finds again. disk_cache_size: what it may take in all,
    "8GiB" by default. disk_cache_secret: at least 16 bytes, so that nobody who can write there can plant KV. store: the
    URL of a Valkey or Redis that servers share, such as "valkey://host:6379" (docs/store.md). store_secret: as
    disk_cache_secret, the same for all of them. An engine with tiers is to be closed (`close`, or `with`): what isn't
    stored by then isn't there for the next one.
    on_events: is given what became cached and what is cached no more, on the device and in tiers, after the step that
    did it: an `EventPublisher`'s `publish`, say. It must neither wait nor raise. None: nothing is recorded.

    Attributes to read: model, plan, manager, metrics, scheduler, runner, sampling. `limits` may be replaced.
    Raises InvalidArgumentError, ModelError and FetchError, and DiskError for a disk_cache that can't be used. Loads the
    model.
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
        kv_cache_dtype: str = "auto",
        cuda_graphs: bool = True,
        schedule: str = "fcfs",
        eviction: str | PolicyFactory | None = None,
        num_history_blocks: int = 0,
        remember_next_token: bool = False,
        host_cache: float | str | None = None,
        disk_cache: str | Path | None = None,
        disk_cache_size: int | str | None = None,
        disk_cache_secret: bytes | None = None,
        store: str | None = None,
        store_secret: bytes | None = None,
        on_events: Callable[[list[CacheEvent]], object] | None = None,
    ) -> None:
        _check_options(on_events, enable_prefix_caching, remember_next_token)
        below = TierOptions(
            host_cache=host_cache,
            disk_cache=disk_cache,
            disk_cache_size=disk_cache_size,
            disk_cache_secret=disk_cache_secret,
            store=store,
            store_secret=store_secret,
        )
        order = make_order(schedule)
        check_count("block_size", block_size, 1)
        backend = Backend(attention, deterministic, cuda_graphs, kv_cache_dtype)
        self.model = _load(model, device, dtype)
        backend = backend.prepared(self.model, block_size)  # before anything large is made
        self.plan = _plan(backend.plan_cache(self.model, block_size), num_blocks, kv_cache_memory, self.model.device)
        built = build_tiers(below, self.model, self.plan, backend)
        with built:  # which closes what it has opened if this fails
            self.manager = KVCacheManager(
                self.plan.num_blocks,
                groups=self.plan.groups,
                enable_caching=enable_prefix_caching,
                eviction=eviction,
                enable_events=False if on_events is None else EventOptions(tiers=True),
                num_history_blocks=num_history_blocks,
                tiers=built.tiers,
            )
            self.metrics = CacheMetrics(self.manager, clock=time.monotonic)
            self.scheduler = _make_scheduler(self.manager, self.model, order, remembers=remember_next_token)
            located = [LayerLocation(*location) for location in self.plan.layer_groups]
            self.runner = backend.make_runner(self.model, self.manager, located)
            self.offload = built.begin(self.manager, self.runner)
        self._intake, self._stepper = Intake(self.model, self.scheduler), Stepper(self.scheduler)
        self._on_events = on_events
        self._tell_events()  # of what a disk has

    @property
    def limits(self) -> StepLimits:
        """How much one step computes at most. Assign another `StepLimits` at any time."""
        return self.scheduler.limits

    @limits.setter
    def limits(self, limits: StepLimits) -> None:
        if not isinstance(limits, StepLimits):
            raise InvalidArgumentError(f"limits: expected StepLimits, got {limits!r}")
        self.scheduler.limits = limits

    @property
    def sampling(self) -> SamplingCounts:
        """How many tokens were drawn so far, and how many of them took a slow way. O(1)."""
        return self._stepper.sampler.counts

    @property
    def has_work(self) -> bool:
        """Whether anything is unfinished, storing included, so that `step` has something to do. O(1)."""
        return self.scheduler.has_work or (self.offload is not None and self.offload.has_work)

    def generate(self, prompts: Sequence[Prompt], **options: Unpack[OptionValues]) -> list[Completion]:
        """Answer all prompts, each `n` times, and return the completions in order: all of the first prompt, and so on.

        prompts: texts, encoded as they are (see `engine.model.tokenizer.apply_chat_template` for chats), or token ids.
        options: n=1, max_tokens=64, temperature=0.0, top_p, top_k, min_p, presence_penalty, frequency_penalty,
        repetition_penalty, logprobs, seed, stop, ignore_eos, min_tokens, stop_token_ids, skip_special_tokens, salt; see
        `GenerationOptions`. The first sample's completion counts what the prompt cost.

        Raises, before anything is computed, InvalidArgumentError (a prompt that is empty or unreadable, or could never
        fit, and options out of range), PoolExhaustedError (it can't fit while the present pins stand) and ModelError
        (text or `stop` without a tokenizer); and what `step` raises, having dropped all of these prompts; the engine
        can be used again.
        """
        generations = self._read(prompts, GenerationOptions(**options))
        for _ in self._run(generations):
            pass
        return [generation.completion for generation in generations if generation.completion is not None]

    def warm(self, prompts: Sequence[Prompt], *, salt: str | None = None) -> list[Completion]:
        """Have prompts cached, to be hit later: load or compute them, and generate nothing. Returns what each cost.

        All full blocks of a prompt are cached then, and stored below as any others. At least one token of each is
        computed. prompts, salt and what is raised: as of `generate`.
        """
        return self.generate(prompts, max_tokens=0, salt=salt)

    def warm_up(self, on_step: Callable[[str, int, int], object] | None = None) -> dict[str, float]:
        """Have all kernels compiled and decode steps captured now, rather than when the first requests need them.

        For steps of `limits.max_num_seqs` sequences, before anything is submitted. on_step: is given what comes next,
        how many steps are done, and how many there are. Returns the seconds that each kernel took to be compiled, by
        name; 0 for what Triton's cache on disk has. Nothing where attention isn't triton. Raises InvalidArgumentError
        if anything is running, and what a step does. Changes nothing that counts.
        """
        self._check_open()
        if on_step is not None and not callable(on_step):
            raise wrong("on_step", "a callable or None", on_step)
        if self.has_work:
            raise InvalidArgumentError("warm_up: expected an engine with nothing to do, got unfinished work")
        steps = self.runner.warm_up_steps(self.limits.max_num_seqs)
        with watch_compiling(self.runner.model.attention) as seconds:
            for done, (name, run) in enumerate(steps):
                if on_step is not None:
                    on_step(name, done, len(steps))
                run()
        return seconds

    def stream(self, prompts: Sequence[Prompt], **options: Unpack[OptionValues]) -> Iterator[Piece]:
        """Answer all prompts, giving every token as it comes; the last piece of an answer has its completion.

        As `generate`. Prompts are checked at once, and start with the first piece asked for; closing the iterator drops
        those that are unfinished.
        """
        return self._run(self._read(prompts, GenerationOptions(**options)))

    def submit(
        self,
        prompt: Prompt,
        *,
        prompt_index: int = 0,
        timeout_s: float | None = None,
        **options: Unpack[OptionValues],
    ) -> list[Generation]:
        """Queue a prompt and return its generations, one for each sample, for `step` to take on.

        prompt, options: as of `generate`. prompt_index: what its pieces are to say, where it is one of the caller's
        several. timeout_s: seconds from now, waiting included, after which the next step ends
        it with finish_reason "timeout". Raises, with nothing queued, what `generate` does before anything is computed.
        What goes wrong later ends the generation with finish_reason "error", and is its `error`.
        """
        if timeout_s is not None and (not is_number(timeout_s) or timeout_s <= 0):
            raise InvalidArgumentError(f"timeout_s: expected None or a number above 0, got {timeout_s!r}")
        generations = self._intake.read(prompt, GenerationOptions(**options), "prompt", prompt_index)
        for generation in generations:
            generation.is_submitted = True
        self._stepper.add(generations, timeout_s=timeout_s)
        return generations

    def cancel(self, generation: Generation) -> None:
        """End a submitted generation between two steps; its blocks are free at once. Nothing if it has ended."""
        self._stepper.cancel(generation)

    def step(self) -> list[Generation]:
        """Compute one step of what is unfinished; return the generations that got a piece or ended, perhaps none.

        `stream` and `generate` call this; so may you, to go ahead. Never raises for submitted generations: those of a
        step that dies end with finish_reason "error". For a stream's it raises what the model or the sampler does, and
        PoolExhaustedError if pins keep so much of the pool that nothing can go on; nothing is lost then, and the next
        step tries again.
        """
        self._check_open()
        self.manager.now = time.monotonic()
        if self.offload is not None:
            self.offload.seek(self.scheduler)
        changed = self._stepper.step(self.runner)
        if self.offload is not None:
            self._move(self.offload)
        self.metrics.observe()
        self._tell_events()
        return changed

    def forget_salt(self, salt: str | None) -> int:
        """Delete what is cached of a salt (None: of prompts without one), on the device and in all tiers.

        As `manager.forget_salt`, whose running requests go on; and what a disk has of it is overwritten when this
        returns. Waits, some seconds at most, for transfers under way; what of it a transfer still holds then stays
        until the next call. Call it between two steps. Returns how many blocks that were.

        Raises InvalidArgumentError, and DiskError if the disk couldn't be overwritten: nothing of it is found any more,
        and the next call tries again.
        """
        self._check_open()
        end_s = time.monotonic() + _PATIENCE_S
        while self.offload is not None and self.offload.has_work and time.monotonic() < end_s:
            self._move(self.offload)
            self.offload.wait(_WAIT_S)  # others than loads aren't waited for there
        number = self.manager.forget_salt(salt)
        if self.scheduler.remembered is not None:
            self.scheduler.remembered.drop_stale()
        self._tell_events()
        if self.offload is not None:
            self.offload.erase_forgotten(salt, _ERASE_S)
        return number

    def close(self, timeout_s: float = 30.0) -> None:
        """End an engine that has tiers: store what waits for that, for so many seconds at most, and close the disk.

        Unfinished generations are not waited for. Such an engine can't be used afterwards. Any engine gives back the
        blocks of remembered prompts. Nothing the second time.
        """
        if self.scheduler.remembered is not None:
            self.scheduler.remembered.clear()
        if self.offload is not None:
            self.offload.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        """Raise KVBlocksError if the engine was closed: nobody would carry out its loads."""
        if self.offload is not None and self.offload.is_closed:
            raise KVBlocksError("expected an engine that is open, got one that was closed: make another one")

    def _tell_events(self) -> None:
        """Say what has changed since the last time."""
        if self._on_events is not None:
            events = self.manager.take_events()
            if events:
                self._on_events(events)

    def _move(self, offload: Offload) -> None:
        """Begin transfers behind the step, and take note of those that have ended."""
        for loaded in offload.advance():
            self.scheduler.note_loaded(loaded)
        if self.scheduler.is_waiting_for_loads or (offload.is_seeking and not self.scheduler.running):
            offload.wait(_WAIT_S)

    def _read(self, prompts: Sequence[Prompt], options: GenerationOptions) -> list[Generation]:
        """Check prompts, and return their generations in order. Queues nothing."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidArgumentError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        return [
            generation
            for index, prompt in enumerate(prompts)
            for generation in self._intake.read(prompt, options, f"prompts[{index}]", index)
        ]

    def _run(self, generations: list[Generation]) -> Iterator[Piece]:
        """Queue the requests, step until they are finished, and give their pieces out."""
        try:
            self._stepper.add(generations)
            while True:
                for generation in generations:
                    while generation.pieces:
                        yield generation.pieces.popleft()
                if all(generation.finish_reason is not None for generation in generations):
                    return
                self.step()
        finally:
            for generation in reversed(generations):  # the samples of a prompt before the one that computes it for them
                self._stepper.cancel(generation)


def _check_options(on_events: object, enable_prefix_caching: object, remember_next_token: Flag) -> None:
    """Raise InvalidArgumentError for what nobody else would refuse."""
    if on_events is not None and not callable(on_events):
        raise wrong("on_events", "a callable or None", on_events)
    if check_flag("remember_next_token", remember_next_token) and not enable_prefix_caching:
        raise wrong("remember_next_token", "False with enable_prefix_caching=False", remember_next_token)


def _make_scheduler(manager: KVCacheManager, model: LoadedModel, order: Order, *, remembers: bool) -> Scheduler:
    """The scheduler of an engine, which keeps next tokens if it `remembers`."""
    kept = RememberedPrompts(manager, int(REMEMBERED_SHARE * manager.num_blocks)) if remembers else None
    return Scheduler(manager, model.config.max_position_embeddings, order=order, remembered=kept)


def _plan(layout: Plan, num_blocks: int | None, kv_cache_memory: float | str | None, device: torch.device) -> Plan:
    """The KV cache's layout with its number of blocks, as the caller asks for them.

    Raises InvalidArgumentError, also if they are more than the memory that is free.
    """
    if num_blocks is not None:
        if kv_cache_memory is not None:
            raise InvalidArgumentError(
                f"expected num_blocks or kv_cache_memory, got both: {num_blocks} and {kv_cache_memory!r}"
            )
        budget = check_count("num_blocks", num_blocks, 1) * layout.block_bytes
    else:
        budget = DEFAULT_KV_CACHE_BYTES if kv_cache_memory is None else read_memory(kv_cache_memory, device)
        least = layout.block_bytes * len(layout.groups)
        if budget < least:
            raise InvalidArgumentError(
                f"kv_cache_memory: expected at least {least} bytes, a block for each of {len(layout.groups)} groups of"
                f" layers, got {budget}"
            )
    chosen = replace(layout, num_blocks=budget // layout.block_bytes, num_bytes=budget)
    if not is_a(kv_cache_memory, float):  # a share of what is free is not more than that
        name = "kv_cache_memory" if num_blocks is None else "num_blocks"
        check_memory(name, chosen.num_bytes, chosen.num_blocks, device)
    return chosen


def _load(model: str | Path | LoadedModel, device: str, dtype: str | torch.dtype | None) -> LoadedModel:
    """The model, loaded if it isn't. Raises InvalidArgumentError for one that is elsewhere, or of another dtype."""
    chosen = choose_device(device, model.device if isinstance(model, LoadedModel) else None)
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.load(model, chosen, dtype)
    if parse_dtype(dtype) not in {None, loaded.dtype}:
        raise InvalidArgumentError(f"dtype: expected {loaded.dtype}, the loaded model's, got {dtype!r}")
    return loaded


def choose_device(device: str, loaded: torch.device | None = None) -> torch.device:
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
