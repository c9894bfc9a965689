"""The model: one forward pass over a ragged batch, reading and writing a paged KV cache.

The pass has two kinds of work: row-wise work (`layers`), which the row strategy cuts into chunks, and attention, which
the backend computes. In float32 with the natural strategy on a CPU, the logits are meant to equal those of
`transformers`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvblocks.engine.attention.attention import (
    AttentionBackend,
    HeadAngles,
    KVCache,
    LatentStep,
    PlacingStep,
    StepAttention,
    TiledTorchAttention,
    TorchAttention,
)
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.attention.kv_scales import E4M3, KVScales
from kvblocks.engine.attention.state_memory import StateMemory
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.hybrid.mixer import StateMixer, StateRows, advance
from kvblocks.engine.model.layer_attention import LayerAttention, LayerLocation
from kvblocks.engine.model.layers import DecoderLayers, Linear
from kvblocks.engine.model.products import product
from kvblocks.engine.model.rope import RopeTable
from kvblocks.engine.model.rope_config import RopeConfig
from kvblocks.engine.model.weights import LayerWeights, ModelWeights
from kvblocks.engine.run.rows import NATURAL, RowLayout, RowStrategy, chunks, pad_rows
from kvblocks.errors import InvalidArgumentError

Score = Callable[[Tensor, Callable[[Tensor], Tensor]], None]
"""Called with the last layer's output for all rows, [num_tokens, hidden], and a function from rows to logits."""


_StepStates = tuple[StateMemory, StateRows | None]
"""The state slots of a cache, and which rows of a step advance which slot."""


@dataclass(frozen=True)
class _Part:
    """Rows of a step that are computed together. hidden: their hidden states, which the layers change.

    angles: by frequencies, as `rope.rotate` takes them; empty for a `PlacingStep`.
    """

    rows: slice
    hidden: Tensor
    positions: Tensor
    angles: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    slot_mappings: Sequence[Tensor]


@dataclass(frozen=True)
class _Layer:
    """One layer of a model. next_norm: the next layer's input norm; None for the last layer."""

    weights: LayerWeights
    next_norm: Tensor | None


@dataclass(frozen=True)
class _AttendingLayer(_Layer):
    """A layer that attends, with its number among those that do."""

    index: int
    how: LayerAttention
    rope: RopeConfig


@dataclass(frozen=True)
class _MixingLayer(_Layer):
    """A layer that keeps a state, with its number among all layers."""

    index: int
    mixer: StateMixer


class DecoderModel:
    """A model ready to run. It owns its weights and RoPE tables; caches belong to the caller.

    `strategy` is NATURAL or the result of `determinism.choose_determinism`. `attention` defaults to the torch backend
    that fits the strategy; a deterministic strategy needs a tiled backend. `linear` is the matrix product to use.
    `layer_locations` says which KV-cache group each layer that attends belongs to; by default all are in one group.

    Attributes: its arguments; `layer_attention`, how each of these layers attends; `num_groups`, of the KV cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        strategy: RowStrategy = NATURAL,
        attention: AttentionBackend | None = None,
        linear: Linear = product,
        layer_locations: Sequence[LayerLocation] | None = None,
    ) -> None:
        if attention is None:
            attention = TiledTorchAttention() if strategy.is_deterministic else TorchAttention()
        if strategy.is_deterministic and not attention.is_tiled:
            raise InvalidArgumentError(f"expected a tiled attention backend for {strategy.name}, got {attention!r}")
        self.config = config
        self.weights = weights
        self.strategy = strategy
        self.attention = attention
        attending = range(len(config.attending))
        self.layer_locations = tuple(layer_locations or [LayerLocation(0, slot) for slot in attending])
        kinds = zip(config.attention, self.layer_locations, strict=True)
        self.layer_attention = tuple(replace(how, group=location.group) for how, location in kinds)
        self.num_groups = 1 + max(location.group for location in self.layer_locations)
        self._layers = DecoderLayers(config, linear, attention.row_ops(config), keeps_rows=strategy.is_deterministic)
        norms = [*(layer.input_norm for layer in weights.layers[1:]), None]
        attend = enumerate(zip(self.layer_attention, config.ropes, strict=True))
        self._stack: list[_AttendingLayer | _MixingLayer] = []
        for number, parts in enumerate(zip(weights.layers, norms, strict=True)):
            mixer = config.mixers[number] if config.mixers else None
            if mixer is not None:
                self._stack.append(_MixingLayer(*parts, number, mixer))
            else:
                index, how = next(attend)
                self._stack.append(_AttendingLayer(*parts, index, *how))
        # A tensor rounds the factor to the model's dtype, as in these models' training. It is made here, since making a
        # tensor waits for a GPU.
        scale = config.hidden_size**0.5 if config.architecture.scales_embedding else config.embedding_scale
        self._embedding_scale = None if scale == 1.0 else weights.embedding.new_tensor(scale)
        ropes = () if config.latent is not None else config.ropes  # latents aren't rotated
        self._ropes = {
            rope: RopeTable.build(rope, config.max_position_embeddings, config.head_dim, weights.embedding)
            for rope in dict.fromkeys(ropes)
        }
        self._temperature: Tensor | None = None
        if config.temperature is not None:
            self._temperature = config.temperature.table(config.max_position_embeddings).to(weights.embedding.device)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, scales: KVScales | None = None, num_slots: int = 1
    ) -> KVCache:
        """A zeroed cache on the model's device, in its dtype, or in e4m3 with these scales.

        num_slots: the number of state slots, in models whose layers keep states.
        """
        like, locations = self.weights.embedding, self.layer_locations
        dtype = like.dtype if scales is None else E4M3
        cache = KVCache.allocate(
            self.config, num_blocks, block_size, layer_locations=locations, dtype=dtype, device=like.device
        )
        if self.config.has_states:
            memory = StateMemory.allocate(self.config.mixers, num_slots, like.dtype, like.device)
            cache = replace(cache, states=memory)
        return cache if scales is None else replace(cache, scales=scales)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv_cache: KVCache, score: Score | None = None) -> Tensor:
        """Run one step: float32 [num_logits, vocab], a row for each of `batch.logits_rows`.

        score: gives callers the logits of more rows than fit into memory at once. Raises InvalidArgumentError, before
        anything is written, if a token id is not in the vocabulary, a position is not below max_position_embeddings, a
        block or a state's slot is not in the cache, or a group has no block tables. These checks are the last guard
        against reads and writes out of bounds; a scheduler should refuse such a request when it arrives. Raises
        ModelError if the number of torch threads is not the one that the strategy was checked for. Changes the cache: K
        and V of every row with a slot, and the states of the batch's sequences.
        """
        self._check(batch, kv_cache)
        return self.compute(batch, self.attention.begin(batch, kv_cache), score, kv_cache.states)

    @torch.inference_mode()
    def compute(
        self, batch: StepBatch, step: StepAttention, score: Score | None = None, states: StateMemory | None = None
    ) -> Tensor:
        """As `forward`, with an attention step that has begun, and without checks: the caller has checked the batch.

        Reads no value of a tensor on the host, so it never waits for a GPU and can be captured in a CUDA graph. The
        exception is a strategy that aligns rows (`RowStrategy.is_aligned`): it reads their number.
        """
        layout = RowLayout.build(batch, self.strategy)
        hidden = self._embed(layout.token_ids)
        for _ in self._run_layers(layout, hidden, step, None if states is None else (states, batch.state_rows)):
            pass
        if score is not None:
            score(layout.take_own(hidden), self._logits)
        return self._logits(hidden.index_select(0, layout.logits_rows))

    def by_layers(self, batch: StepBatch, kv_cache: KVCache) -> Iterator[None]:
        """Run a step layer by layer: each of `num_layers` advances of the iterator computes the next layer.

        The first advance also does what `forward` does before the layers, and raises what that raises. No logits are
        computed. Other steps may run in between, if they write to none of the batch's blocks. After the last layer the
        cache is the same, bit by bit, as after `forward`. Advance it in torch's inference mode.
        """
        self._check(batch, kv_cache)
        layout = RowLayout.build(batch, self.strategy)
        hidden = self._embed(layout.token_ids)
        states = None if kv_cache.states is None else (kv_cache.states, batch.state_rows)
        yield from self._run_layers(layout, hidden, self.attention.begin(batch, kv_cache), states)

    def _run_layers(
        self, layout: RowLayout, hidden: Tensor, step: StepAttention, states: _StepStates | None
    ) -> Iterator[None]:
        """Compute one layer whenever it is advanced. Changes `hidden`, the first layer's input, [num_rows, hidden]."""
        parts = self._cut(layout, hidden, places=isinstance(step, PlacingStep))
        first_norm = self.weights.layers[0].input_norm
        normed: list[Tensor | None] = [self._layers.norm(part.hidden, first_norm) for part in parts]
        for layer in self._stack:
            gates: list[Tensor | None] = [None] * len(parts)
            if isinstance(layer, _MixingLayer):
                attended = self._mix_states(layer, normed, layout, states)
            else:
                placed = [self._place(layer, rows, part, step) for rows, part in zip(normed, parts, strict=True)]
                query = placed[0][0] if len(placed) == 1 else torch.cat([query for query, _ in placed])
                gates = [gate for _, gate in placed]
                attended = layout.put_own(self._attend(layer, layout.take_own(query), step))
            absorbed = self._absorbs and isinstance(layer, _AttendingLayer)
            normed = [
                self._layers.mix(
                    layer.weights, part.hidden, attended[part.rows], layer.next_norm, gate, absorbed=absorbed
                )
                for part, gate in zip(parts, gates, strict=True)
            ]
            yield

    def _mix_states(
        self, layer: _MixingLayer, normed: Sequence[Tensor | None], layout: RowLayout, states: _StepStates | None
    ) -> Tensor:
        """Advance the layer's states by the batch's rows: [num_rows, num_outputs]. normed: the layer's normed input."""
        assert states is not None and layer.weights.mixer is not None
        memory, where = states
        assert where is not None
        projected = [self._layers.project(layer.weights, rows) for rows in normed if rows is not None]
        mixed = advance(
            layer.mixer,
            layer.weights.mixer,
            layout.take_own(projected[0] if len(projected) == 1 else torch.cat(projected)),
            memory.layers[layer.index],
            where,
            by_token=self.strategy.is_deterministic,
        )
        return layout.put_own(mixed)

    @property
    def _absorbs(self) -> bool:
        """Whether queries of latent attention are over entries from the start: where a row has one form only."""
        return self.config.latent is not None and self.strategy.is_deterministic

    def _attend(self, layer: _AttendingLayer, query: Tensor, step: StepAttention) -> Tensor:
        """Attention of the batch's rows in a layer, whose `query` is as `_place` returns it."""
        heads = layer.weights.latent
        if heads is None or self._absorbs:
            return step.attend(layer.index, query, layer.how)
        assert isinstance(step, LatentStep)  # other attention is refused with such a model
        return step.attend_latents(layer.index, query, layer.how, heads)

    def _place(
        self, layer: _AttendingLayer, normed: Tensor | None, part: _Part, step: StepAttention
    ) -> tuple[Tensor, Tensor | None]:
        """Store K and V of a part's rows. Return their queries, and the gates of the attention's output if there are.

        normed: the layer's normed input.
        """
        assert normed is not None  # it is None only after the last layer
        slots = part.slot_mappings[layer.how.group]
        if layer.weights.latent is not None:
            query, entry = self._layers.latents(layer.weights, normed, absorbs=self._absorbs)
            step.store(layer.index, entry, entry, slots)
            return query, None
        heads = self._layers.heads(layer.weights, normed)
        if isinstance(step, PlacingStep):
            rope, eps = self._ropes[layer.rope], self.config.rms_norm_eps
            angles = HeadAngles(rope, part.positions, layer.weights.qk_norm, eps)
            return step.place(layer.index, heads, angles, slots), None
        query, key, value = self._layers.turn(layer.weights, heads, *part.angles[layer.rope])
        step.store(layer.index, key, value, slots)
        if layer.how.temperature is not None and self._temperature is not None:
            query = (query * self._temperature[part.positions, None, None]).to(query.dtype)
        return query, self._layers.gates(heads)

    def _cut(self, layout: RowLayout, hidden: Tensor, *, places: bool) -> list["_Part"]:
        """Cut a step's rows into chunks of the strategy's sizes, once for all layers. places: for a `PlacingStep`."""
        ropes = {} if places else self._ropes
        angles = {rope: table.at(layout.positions) for rope, table in ropes.items()}
        return [
            _Part(
                rows=rows,
                hidden=hidden[rows],
                positions=layout.positions[rows],
                angles={rope: (cos[rows], sin[rows]) for rope, (cos, sin) in angles.items()},
                slot_mappings=[slots[rows] for slots in layout.slot_mappings],
            )
            for rows in chunks(layout.num_rows, self.strategy.row_counts)
        ]

    def _embed(self, token_ids: Tensor) -> Tensor:
        """The first layer's input: [num_rows, hidden]."""
        hidden = self.weights.embed(token_ids)
        if self._embedding_scale is not None:
            hidden *= self._embedding_scale
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab], computed in chunks that the strategy allows for the head."""
        if hidden.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        counts = self.strategy.head_row_counts
        padded = pad_rows(hidden, counts)
        logits = [self._layers.logits(self.weights, padded[rows]) for rows in chunks(padded.shape[0], counts)]
        return (logits[0] if len(logits) == 1 else torch.cat(logits))[: hidden.shape[0]]

    def _check(self, batch: StepBatch, kv_cache: KVCache) -> None:
        if len(batch.block_tables) != self.num_groups:
            raise InvalidArgumentError(
                f"expected block tables of {self.num_groups} groups, got {len(batch.block_tables)}"
            )
        limits = (
            ("token ids", batch.token_ids, self.config.vocab_size),
            ("positions", batch.positions, self.config.max_position_embeddings),
            *(("block ids", table, kv_cache.num_blocks) for table in batch.block_tables),
        )
        for name, values, limit in limits:
            low, high = (int(bound) for bound in values.aminmax())
            if low < 0 or high >= limit:
                raise InvalidArgumentError(f"expected {name} from 0 to {limit - 1}, got {low if low < 0 else high}")
        self._check_states(batch, kv_cache)
        self.check_threads()

    def _check_states(self, batch: StepBatch, kv_cache: KVCache) -> None:
        if not self.config.has_states:
            return
        if kv_cache.states is None or batch.state_rows is None:
            raise InvalidArgumentError(
                f"expected a cache with states, and each sequence's slot, for {self.config.architecture.name}, got none"
            )
        slots, num_slots = batch.state_rows.slots, kv_cache.states.num_slots
        if min(slots) < 0 or max(slots) >= num_slots or len(set(slots)) < len(slots):
            raise InvalidArgumentError(f"expected slots from 0 to {num_slots - 1}, each once, got {[*slots]}")

    def check_threads(self) -> None:
        """Raise ModelError if the number of torch threads is not the one that the strategy was checked for."""
        wanted, num_threads = self.strategy.num_threads, torch.get_num_threads()
        if wanted is not None and wanted != num_threads:
            raise ModelError(
                f"expected {wanted} torch threads, for which {self.strategy.name} was checked, got {num_threads}"
            )
