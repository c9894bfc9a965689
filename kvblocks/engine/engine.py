"""The engine: prompts in, completions out. It puts manager, scheduler, model runner and samplers together.

There are two ways to use it. `generate` and `stream` answer prompts and return. They call `step` themselves, and raise
errors. A server submits prompts as they arrive, calls `step` as long as there is work, and passes on the pieces of the
generations. There, an error ends only the generation that it concerns (see `engine.stepper`).

An engine is single-threaded, as its manager is. Several streams may be open at once in one thread: a step of one
advances all of them.

An interrupt (KeyboardInterrupt) may come at any point of a call. The next call repairs what it has left: requests that
ran wait again, and lose neither tokens nor pieces. What an interrupted `generate` or iterator of `stream` was to answer
is dropped. If the interrupt comes in the middle of a call of the manager, later steps raise CorruptStateError: make
another engine.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack

import torch

from kvblocks import CacheMetrics, KVCacheManager, PolicyFactory
from kvblocks.arguments import Flag, check_count, check_flag, is_number, wrong
from kvblocks.engine.completion import Completion, Piece
from kvblocks.engine.generation import Generation
from kvblocks.engine.intake import Intake, Prompt
from kvblocks.engine.model.fields import parse_dtype
from kvblocks.engine.model.layer_attention import LayerLocation
from kvblocks.engine.options import GenerationOptions, OptionValues
from kvblocks.engine.run.backends import Backend, choose_device, watch_compiling
from kvblocks.engine.run.runner import LoadedModel, ModelRunner
from kvblocks.engine.sampling.batch_sampler import BatchSampler, SamplingCounts
from kvblocks.engine.schedule.entrance import Entrance, make_gate
from kvblocks.engine.schedule.order import Order
from kvblocks.engine.schedule.remembered import RememberedPrompts
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits
from kvblocks.engine.schedules import make_order
from kvblocks.engine.stepper import Stepper
from kvblocks.engine.tiers.building import build_tiers
from kvblocks.engine.tiers.forgetting import FORGET_S, Forgetting
from kvblocks.engine.tiers.offload import Offload
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.registry import read_tiers
from kvblocks.engine.worst_steps import WorstSteps
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.events import CacheEvent, EventOptions
from kvblocks.retention.policies import find_factory

REMEMBERED_SHARE = 0.25
"""The largest share of the blocks that prompts with a remembered next token may hold."""

_WAIT_S = 0.005
"""How many seconds a step with nothing to compute waits for a transfer. The caller is blocked for as long."""


class Engine:
    """A model that answers prompts, many at once, and computes what they share once.

    model: "smollm2", a Hugging Face folder, a GGUF file, or a `LoadedModel` that engines share.
    num_blocks, block_size: the KV cache, in blocks and tokens a block. A block holds the KV of one group of layers
    (`plan`); if all layers have full attention, there is one group.
    kv_cache_memory: instead of num_blocks, the memory of all blocks: bytes, a text such as "2GiB", or a share of the
    memory that is free once the model is loaded (a float, up to 1.0). On a GPU, a share also has to cover what steps
    take beside the cache, which is measured first. If both are None: DEFAULT_KV_CACHE_BYTES on a CPU, DEFAULT_GPU_SHARE
    on a GPU.
    num_state_slots: how many sequences can run at once, in a model with recurrent states. None: MAX_STATE_SLOTS, or
    fewer if these would take more memory than the blocks. kv_cache_memory includes the slots; num_blocks doesn't.
    enable_prefix_caching: whether prompts reuse the KV of earlier ones.
    deterministic: whether logits have the same bits however prompts are cached, batched, chunked or preempted, which is
    slower. On a CPU this requires that the number of torch threads stays as it was when the engine was made.
    device: "cpu", "cuda", "cuda:1", or "auto": the device of a `LoadedModel`, else cuda if there is one, else the CPU.
    attention: "triton" (our kernels: CUDA devices, head_dim 64, 128 or 256, block_size 16, 32, 64 or 128), "torch"
    (plain torch, anything anywhere), "flash-attn" (that package: CUDA, float16 or bfloat16, block_size in multiples of
    256), "flashinfer" (as "triton", but that package computes long prompts; float16 or bfloat16), or "auto": torch on a
    CPU, and on cuda triton, or torch, with a warning, for what triton doesn't support.
    dtype: "float32", "float16", "bfloat16" or a torch.dtype, for weights, KV cache and computation. None: that of a
    `LoadedModel`, else float32 on a CPU and the model's own on cuda.
    kv_cache_dtype: "auto": K and V are kept in dtype. "fp8_e4m3" (or "fp8"): they are kept in 8 bits, with scales that
    are determined now and never change. A pool of the same bytes then has two or four times as many blocks
    (bench/README.md says what that costs).
    cuda_graphs: whether decode steps are captured and replayed, on CUDA with attention by triton.
    overlap: whether a step is launched, where possible, before the tokens of the previous one are read. The tokens are
    the same. None: True on CUDA, False elsewhere.
    schedule: the order in which waiting prompts begin: "fcfs", first come first served; "longest-prefix", the longest
    cached prefix first; "grouped", prompts that share a prefix together. See `engine.schedule.order`.
    eviction: the pool's eviction policy, as for `KVCacheManager`, with `time.monotonic` as its clock. "sessions" uses
    the option `session` of prompts.
    remember_next_token: whether the next token of a greedy prompt is kept with its KV, so that an equal prompt gets its
    first token without a forward pass. At most REMEMBERED_SHARE of the blocks hold such prompts, and only while nobody
    else needs the blocks (docs/design/engine/remembered.md). `close` frees these blocks.
    session_gate: whether sessions take turns, so that the prompts of the admitted ones fit into the pool
    (docs/gate.md). Others wait in front of the queue. The option `session` says which session a prompt belongs to.
    limits: how much one step computes at most. None: what `StepLimits.default_on` returns for the device.
    num_history_blocks: how many evicted blocks `manager.inspect.explain` remembers.
    tiers: where blocks are kept that don't fit into the pool, the fastest first: URLs such as "host:2GiB",
    "disk:FOLDER" and "valkey://HOST:6379", or `TierOptions`, which also have a size and a secret (docs/tiers.md). Close
    an engine with tiers (`close`, or `with`): the next one finds only blocks stored by then.
    on_events: called after each step with the events of blocks that were cached or removed, on the device and in tiers.
    It must neither block nor raise; `EventPublisher.publish` is such a function. An interrupt may lose the events of
    its step. None: no events are recorded.

    On CUDA, use an engine under the stream that was current when it was made, since only a stream's order keeps a step
    behind the ones before it. Under another stream, `step` and other calls that use the device raise
    InvalidArgumentError.

    Attributes to read: model, plan, manager, metrics, scheduler, runner, sampling, num_steps, and stepper with its
    `waited_s` and `overlaps`. You may assign `limits` and `stepper.overlaps`.
    Loads the model. Raises InvalidArgumentError, ModelError and FetchError, and DiskError for a disk folder that can't
    be used.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2",
        *,
        num_blocks: int | None = None,
        kv_cache_memory: float | str | None = None,
        num_state_slots: int | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        deterministic: bool = False,
        device: str = "auto",
        attention: str = "auto",
        dtype: str | torch.dtype | None = None,
        kv_cache_dtype: str = "auto",
        cuda_graphs: bool = True,
        overlap: bool | None = None,
        schedule: str = "fcfs",
        eviction: str | PolicyFactory | None = None,
        limits: StepLimits | None = None,
        num_history_blocks: int = 0,
        remember_next_token: bool = False,
        session_gate: bool = False,
        tiers: Iterable[str | TierOptions] = (),
        on_events: Callable[[list[CacheEvent]], object] | None = None,
    ) -> None:
        flags = {"remember_next_token": remember_next_token, "session_gate": session_gate}
        _check_options(on_events, eviction, enable_prefix_caching, flags, overlap)
        below = read_tiers(tiers)
        order = make_order(schedule)
        check_count("block_size", block_size, 1)
        backend = Backend(attention, deterministic, cuda_graphs, kv_cache_dtype)
        self.model = _load(model, device, dtype, lambda chosen: backend.check_place(chosen, block_size))
        if self.model.config.has_states:
            _check_states(self.model, below, remembers=remember_next_token)
        backend = backend.prepared(self.model, block_size)  # called before anything large is allocated
        limits = StepLimits.default_on(self.model.device.type) if limits is None else _check_limits(limits)
        steps = WorstSteps(self.model, backend, block_size, limits)
        self.plan = steps.plan_cache(num_blocks, kv_cache_memory, num_state_slots)
        built = build_tiers(below, self.model, self.plan, backend)
        with built:  # closes what it has opened if this fails
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
            located = [LayerLocation(*location) for location in self.plan.layer_groups]
            self.runner = backend.make_runner(self.model, self.manager, located)
            how = {"remembers": remember_next_token, "has_gate": session_gate}
            self.scheduler = _make_scheduler(self.manager, self.runner, order, limits, **how)
            self.offload = built.begin(self.manager, self.runner)
        self._intake = Intake(self.model, self.scheduler)
        overlaps = bool(self.model.device.type == "cuda" if overlap is None else overlap)
        self.stepper = Stepper(self.scheduler, BatchSampler(self.runner.draw_tokens), overlaps=overlaps)
        self._on_events = on_events
        self._tell_events()  # of the blocks that a disk has

    @property
    def limits(self) -> StepLimits:
        """How much one step computes at most. Assign another `StepLimits` at any time."""
        return self.scheduler.limits

    @limits.setter
    def limits(self, limits: StepLimits) -> None:
        self.scheduler.limits = _check_limits(limits)

    @property
    def sampling(self) -> SamplingCounts:
        """How many tokens were drawn so far, and how many of them needed the whole vocabulary sorted. O(1)."""
        return self.stepper.sampler.counts

    @property
    def num_steps(self) -> int:
        """How many steps have gone through the model since the engine was made, without those that failed. O(1)."""
        return self.stepper.num_steps

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do now: a prompt is unfinished, or a transfer to or from a tier. O(1).

        Prompts that wait for the session gate count only from `wake_at` on.
        """
        wake_at = self.wake_at
        if not self.stepper.is_settled or (wake_at is not None and wake_at <= time.monotonic()):
            return True
        return self.scheduler.has_work or (self.offload is not None and self.offload.has_work)

    @property
    def wake_at(self) -> float | None:
        """When the session gate may let a prompt in, by `time.monotonic`; None if time alone changes nothing. O(1)."""
        return self.scheduler.entrance.wake_at

    def generate(self, prompts: Sequence[Prompt], **options: Unpack[OptionValues]) -> list[Completion]:
        """Answer all prompts, each `n` times. Return the completions in order, first all those of the first prompt.

        prompts: texts, or lists of token ids. Texts are encoded as they are; for chats see
        `engine.text.tokenizer.Tokenizer.apply_chat_template`.
        options: the fields of `GenerationOptions`, such as n=1, max_tokens=64 and temperature=0.0. The first sample's
        completion includes what the prompt cost.

        Raises, before anything is computed, InvalidArgumentError (a prompt is empty or unreadable, or could never fit;
        options out of range), PoolExhaustedError (a prompt can't fit until a pin ends) and ModelError (text or `stop`
        without a tokenizer). Also raises what `step` raises; all of these prompts are dropped then, and the engine can
        still be used.
        """
        generations = self._read(prompts, GenerationOptions(**options))
        for _ in self._begin(generations):
            pass
        return [generation.completion for generation in generations if generation.completion is not None]

    def warm(self, prompts: Sequence[Prompt], *, salt: str | None = None) -> list[Completion]:
        """Load or compute prompts, so that later prompts hit them. Generates nothing. Returns what each prompt cost.

        All full blocks of each prompt are cached, and are stored in tiers like any others. At least one token of each
        prompt is computed. Takes prompts and salt as `generate` does, and raises the same errors.
        """
        return self.generate(prompts, max_tokens=0, salt=salt)

    def warm_up(self, on_step: Callable[[str, int, int], object] | None = None) -> dict[str, float]:
        """Compile all kernels and capture decode steps now, so that the first requests don't wait for it.

        This covers all steps within `limits`. Call it before anything is submitted. on_step: called with the next
        step's name, the number of steps done, and their total. Returns the seconds that compiling took by kernel name:
        0 for kernels in Triton's cache on disk, and nothing for attention without Triton kernels. Raises
        InvalidArgumentError if the engine has unfinished work, and what a step raises. Cached blocks are unchanged.
        """
        self._check_usable()
        if on_step is not None and not callable(on_step):
            raise wrong("on_step", "a callable or None", on_step)
        if self.has_work or self.scheduler.entrance.held:
            raise InvalidArgumentError("warm_up: expected an engine with nothing to do, got unfinished work")
        steps = self.runner.warm_up_steps(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        with watch_compiling(self.runner.model.attention) as seconds:
            for done, (name, run) in enumerate(steps):
                if on_step is not None:
                    on_step(name, done, len(steps))
                run()
        return seconds

    def stream(self, prompts: Sequence[Prompt], **options: Unpack[OptionValues]) -> Iterator[Piece]:
        """Answer all prompts, and yield every token as it comes. The last piece of an answer has its completion.

        Arguments and errors are those of `generate`. Prompts are checked at once, and begin when the first piece is
        taken. Closing the iterator drops unfinished prompts.
        """
        return self._begin(self._read(prompts, GenerationOptions(**options)))

    def submit(
        self,
        prompt: Prompt,
        *,
        prompt_index: int = 0,
        timeout_s: float | None = None,
        **options: Unpack[OptionValues],
    ) -> list[Generation]:
        """Queue a prompt and return its generations, one for each sample. `step` computes them.

        prompt, options: as for `generate`. prompt_index: the number that its pieces carry, for callers with several
        prompts. timeout_s: seconds from now, waiting included, after which the next step ends the prompt with
        finish_reason "timeout". Raises what `generate` raises before anything is computed, and then queues nothing. A
        later failure ends the generation with finish_reason "error"; the exception is its attribute `error`. An
        interrupted call queues nothing, unless the interrupt comes as it returns: then nobody can cancel the prompt.
        """
        if timeout_s is not None and (not is_number(timeout_s) or timeout_s <= 0):
            raise InvalidArgumentError(f"timeout_s: expected None or a number above 0, got {timeout_s!r}")
        generations = self._intake.read(prompt, GenerationOptions(**options), "prompt", prompt_index)
        for generation in generations:
            generation.is_submitted = True
        self.stepper.add(generations, timeout_s=timeout_s)
        return generations

    def cancel(self, generation: Generation) -> None:
        """End a submitted generation between two steps, and free its blocks. Does nothing if it has ended."""
        self.stepper.cancel(generation)

    def step(self) -> list[Generation]:
        """Compute one step of the unfinished generations. Return those that got a piece or ended, perhaps none.

        With `overlap` it may return the results of the previous step, and leave its own to the next call. What an
        interrupted call was to return, the next one returns, unless the interrupt came as it returned.

        `stream` and `generate` call this, and you may call it too. For submitted generations it never raises: if a step
        fails, its generations end with finish_reason "error". For the generations of a stream it raises the errors of
        the model and the sampler, and PoolExhaustedError if pins hold so many blocks that no request can go on. Nothing
        is lost then, and the next step tries again.
        """
        self._check_usable()
        self.manager.now = time.monotonic()
        self.stepper.recover()  # before anybody looks at the queue
        if self.offload is not None:
            self.offload.seek(self.scheduler)
        self.stepper.step(self.runner)
        if self.offload is not None:
            self._move(self.offload)
        self.metrics.observe()
        self._tell_events()
        return self.stepper.take_told()

    def forget_salt(self, salt: str | None) -> int:
        """Delete the cached blocks of a salt (None: those of prompts without a salt), on the device and in all tiers.

        Running requests go on, as with `manager.forget_salt`. When this returns, the bytes of these blocks are
        overwritten on a disk, and a shared store has none of them. Call it between two steps. Returns the number of
        blocks.

        Raises InvalidArgumentError, and ForgetError if bytes are left in a tier, because FORGET_S seconds have passed
        or the tier has failed. Even then no lookup finds these blocks, and the next call tries again.
        """
        forgetting = self.begin_forgetting(salt)
        end_s = time.monotonic() + FORGET_S
        while not forgetting.wait(_WAIT_S) and time.monotonic() < end_s:
            self._note_transfers()
        forgetting.check()
        return forgetting.num_blocks

    def begin_forgetting(self, salt: str | None) -> Forgetting:
        """Do what `forget_salt` does, without waiting for the tiers. From now on no lookup finds the salt's blocks.

        The result says when the tiers' bytes are gone. Keep calling `step` until then: what is being transferred now is
        deleted by the step that sees the transfer end.
        """
        self._check_usable()
        self._note_transfers()
        number = self.manager.forget_salt(salt)
        if self.scheduler.remembered is not None:
            self.scheduler.remembered.drop_stale()
        self._tell_events()
        return Forgetting(salt, number, (), ()) if self.offload is None else self.offload.forget(salt, number)

    def close(self, timeout_s: float = 30.0) -> None:
        """Close the engine. One with tiers first stores what still waits, for at most `timeout_s`, and closes its disk.

        It doesn't wait for unfinished generations. An engine with tiers can't be used afterwards: its calls raise
        KVBlocksError. Any engine gives back the blocks of remembered prompts. A second call does nothing.
        """
        if self.scheduler.remembered is not None:
            self.scheduler.remembered.clear()
        if self.offload is not None:
            self.offload.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        """Raise KVBlocksError if the engine was closed, since nobody would carry out its loads, and for its stream."""
        if self.offload is not None and self.offload.is_closed:
            raise KVBlocksError("expected an engine that is open, got one that was closed: make another one")
        self.runner.check_stream()

    def _tell_events(self) -> None:
        """Report the events since the last call."""
        if self._on_events is not None:
            events = self.manager.take_events()
            if events:
                self._on_events(events)

    def _note_transfers(self) -> None:
        """Begin transfers behind the last step, and note those that have ended."""
        if self.offload is not None:
            for loaded in self.offload.advance():
                self.scheduler.note_loaded(loaded)

    def _move(self, offload: Offload) -> None:
        """Begin and note transfers. If there is nothing to compute before one of them ends, wait a little."""
        self._note_transfers()
        if self.scheduler.is_waiting_for_loads or (offload.is_seeking and not self.scheduler.running):
            offload.wait(_WAIT_S)

    def _wait_for_gate(self) -> None:
        """Wait a little if nothing is to be done before the session gate lets somebody in."""
        if not self.has_work and self.wake_at is not None:
            time.sleep(max(0.0, min(_WAIT_S, self.wake_at - time.monotonic())))

    def _read(self, prompts: Sequence[Prompt], options: GenerationOptions) -> list[Generation]:
        """Check prompts, and return their generations in order. Queues nothing."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidArgumentError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        return [
            generation
            for index, prompt in enumerate(prompts)
            for generation in self._intake.read(prompt, options, f"prompts[{index}]", index)
        ]

    def _begin(self, generations: list[Generation]) -> Iterator[Piece]:
        """The stream of these generations, which ends them however it ends."""
        stream = self._run(generations)
        self.stepper.watch(stream, generations)
        return stream

    def _run(self, generations: list[Generation]) -> Generator[Piece]:
        """Queue the requests, step until they are finished, and yield their pieces."""
        try:
            self.stepper.add(generations)
            while True:
                for generation in generations:
                    yield from generation.take_pieces()
                if all(one.finish_reason is not None and not one.pieces for one in generations):
                    return  # others may have taken steps, and pieces have come, since the last look
                self.step()
                self._wait_for_gate()
        finally:
            self.stepper.end(generations)


def _check_limits(limits: object) -> StepLimits:
    if not isinstance(limits, StepLimits):
        raise InvalidArgumentError(f"limits: expected StepLimits, got {limits!r}")
    return limits


def _check_options(
    on_events: object,
    eviction: object,
    enable_prefix_caching: object,
    flags: Mapping[str, Flag],
    overlap: Flag | None,
) -> None:
    """Raise InvalidArgumentError for options that no other module checks before the weights are loaded.

    flags: by name, those that go by what is cached.
    """
    if eviction is not None:
        find_factory(eviction)
    if on_events is not None and not callable(on_events):
        raise wrong("on_events", "a callable or None", on_events)
    if overlap is not None:
        check_flag("overlap", overlap)
    for name, flag in flags.items():
        if check_flag(name, flag) and not enable_prefix_caching:
            raise wrong(name, "False with enable_prefix_caching=False", flag)


def _check_states(model: LoadedModel, tiers: Sequence[TierOptions], *, remembers: bool) -> None:
    """Raise InvalidArgumentError for options that don't go with recurrent states."""
    name = model.config.architecture.name
    shared = [one.scheme for one in tiers if one.scheme not in ("host", "disk")]
    if shared:
        raise InvalidArgumentError(
            f"tiers: expected host or disk for {name}, since a store would be asked for each part of a state at each"
            f" block, got {shared[0]}"
        )
    if remembers:
        raise InvalidArgumentError(
            f"remember_next_token: expected False for {name}, since each remembered prompt would keep a state's slot,"
            " got True"
        )


def _make_scheduler(
    manager: KVCacheManager, runner: ModelRunner, order: Order, limits: StepLimits, *, remembers: bool, has_gate: bool
) -> Scheduler:
    """The scheduler of an engine. remembers: whether it keeps next tokens. has_gate: whether sessions take turns."""
    kept = RememberedPrompts(manager, int(REMEMBERED_SHARE * manager.num_blocks)) if remembers else None
    most = runner.model.config.max_position_embeddings
    scheduler = Scheduler(manager, most, limits, order=order, remembered=kept, num_layers=runner.num_slice_layers)
    if has_gate:
        gate = make_gate(manager, scheduler.limits.num_step_tokens)
        scheduler.entrance = Entrance(gate, manager, scheduler.lookups)
    return scheduler


def _load(
    model: str | Path | LoadedModel,
    device: str,
    dtype: str | torch.dtype | None,
    check_device: Callable[[torch.device], None],
) -> LoadedModel:
    """The model, loaded if needed, once its device is checked.

    Raises InvalidArgumentError for a loaded model on another device, or of another dtype.
    """
    chosen = choose_device(device, model.device if isinstance(model, LoadedModel) else None)
    check_device(chosen)
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.load(model, chosen, dtype)
    if parse_dtype(dtype) not in {None, loaded.dtype}:
        raise InvalidArgumentError(f"dtype: expected {loaded.dtype}, the loaded model's, got {dtype!r}")
    return loaded
