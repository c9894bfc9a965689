"""Small random models, and ways to run them: shared by the engine's tests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from kvblocks.engine.attention.batch import SequenceRows, StepBatch, StepColumns
from kvblocks.engine.model.architectures import GEMMA3 as GEMMA3_ARCHITECTURE
from kvblocks.engine.model.architectures import LLAMA4 as LLAMA4_ARCHITECTURE
from kvblocks.engine.model.architectures import QWEN3 as QWEN3_ARCHITECTURE
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import Temperature
from kvblocks.engine.model.llama4 import Experts
from kvblocks.engine.model.loader import expected_shapes
from kvblocks.engine.model.products import pack
from kvblocks.engine.model.rope_config import RopeConfig
from kvblocks.engine.model.weights import ExpertWeights, LayerWeights, ModelWeights
from kvblocks.engine.run.forward import DecoderModel, KVCache

BLOCK_SIZE = 16
WINDOW = 27  # no multiple of anything

# Sizes that no vector width divides, so that every kernel has a remainder to treat; grouped heads; biases.
ODD = ModelConfig(
    hidden_size=52,
    intermediate_size=75,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    vocab_size=131,
    max_position_embeddings=1000,
    attention_bias=True,
    mlp_bias=True,
)
# SmolLM2's proportions: sizes that are multiples of 16, one K and V head for three query heads, tied embeddings.
EVEN = ModelConfig(
    hidden_size=192,
    intermediate_size=512,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
# Odd sizes again; norms of heads, and windows in some layers.
QWEN3 = replace(ODD, architecture=QWEN3_ARCHITECTURE, windows=(None, WINDOW), attention_bias=False, mlp_bias=False)
# Two kinds of layers with their own frequencies, all four norms, both softcaps.
GEMMA3 = replace(
    EVEN,
    architecture=GEMMA3_ARCHITECTURE,
    num_layers=4,
    head_dim=16,
    windows=(WINDOW, WINDOW, None, WINDOW),
    local_rope=RopeConfig(theta=777.0),
    query_scale=0.3,
    attention_softcap=2.0,
    logits_softcap=5.0,
    vocab_size=131,
)
# A layer with chunks, RoPE and experts, and one with none of these but a temperature.
LLAMA4 = replace(
    ODD,
    architecture=LLAMA4_ARCHITECTURE,
    attention_bias=False,
    mlp_bias=False,
    chunk_sizes=(WINDOW, None),
    unrotated_layers=frozenset({1}),
    temperature=Temperature(20, 0.5),
    norms_rotated=True,
    experts=Experts(frozenset({0}), num_experts=3, num_chosen=1, width=40),
)
CONFIGS = {"odd": ODD, "even": EVEN, "qwen3": QWEN3, "gemma3": GEMMA3}


def random_weights(config: ModelConfig, seed: int = 0) -> ModelWeights:
    """Weights whose logits spread over a few units, so that differences show."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(*shape: int) -> torch.Tensor:
        return 1 + matrix(*(shape or (config.hidden_size,)))

    architecture = config.architecture
    shapes = expected_shapes(config)
    hidden, experts = config.hidden_size, config.experts
    queries = config.num_heads * config.head_dim
    heads = queries + 2 * config.num_kv_heads * config.head_dim

    def qk_norm(layer: int) -> torch.Tensor | None:
        num_heads = config.num_heads + config.num_kv_heads
        if config.norms_rotated and layer not in config.unrotated_layers:
            return torch.ones(num_heads, config.head_dim)
        return norm(num_heads, config.head_dim) if architecture.has_qk_norms else None

    widths = [
        config.intermediate_size if experts is None or layer not in experts.layers else experts.width
        for layer in range(config.num_layers)
    ]
    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=matrix(heads, hidden),
            output=matrix(hidden, queries),
            mlp_norm=norm(),
            gate_up=matrix(2 * wide, hidden),
            down=matrix(hidden, wide),
            qkv_bias=matrix(heads) if config.attention_bias else None,
            output_bias=matrix(hidden) if config.attention_bias else None,
            gate_up_bias=matrix(2 * wide) if config.mlp_bias else None,
            down_bias=matrix(hidden) if config.mlp_bias else None,
            qk_norm=qk_norm(layer),
            attention_output_norm=norm() if architecture.has_output_norms else None,
            mlp_output_norm=norm() if architecture.has_output_norms else None,
            experts=ExpertWeights(
                router=matrix(experts.num_experts, hidden),
                gate_up=tuple(matrix(2 * wide, hidden) for _ in range(experts.num_experts)),
                down=tuple(matrix(hidden, wide) for _ in range(experts.num_experts)),
            )
            if experts is not None and layer in experts.layers
            else None,
        )
        for layer, wide in enumerate(widths)
    )
    embedding = matrix(*shapes["model.embed_tokens.weight"]) * (1 if architecture.scales_embedding else hidden**0.5)
    head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, hidden)
    return ModelWeights(embedding, layers, norm(), head)


def converted(weights: ModelWeights, *target: torch.dtype | torch.device) -> ModelWeights:
    """Weights in another dtype, or on another device."""

    def moved(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.to(*target)

    layers = [LayerWeights(**{name: moved(value) for name, value in vars(layer).items()}) for layer in weights.layers]
    fields = {name: moved(value) for name, value in vars(weights).items() if name != "layers"}
    return ModelWeights(**fields, layers=tuple(layers))


def packed(weights: ModelWeights) -> ModelWeights:
    """The same weights as the loader lays them out."""
    layers = []
    for layer in weights.layers:
        matrices = {name: pack(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")}
        layers.append(replace(layer, **matrices))
    return replace(weights, layers=tuple(layers), lm_head=pack(weights.lm_head))


def random_tokens(config: ModelConfig, num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (num_tokens,), generator=generator).tolist()


def columns(rows: Sequence[SequenceRows]) -> StepColumns:
    """A step by columns."""
    return StepColumns(
        token_ids=[token for sequence in rows for token in sequence.token_ids],
        lengths=[len(sequence.token_ids) for sequence in rows],
        starts=[sequence.start for sequence in rows],
        num_readonly_tokens=[sequence.num_readonly_tokens for sequence in rows],
        wants_logits=[sequence.wants_logits for sequence in rows],
        block_tables=[*zip(*[sequence.block_tables for sequence in rows], strict=True)],
    )


def step(model: DecoderModel, cache: KVCache, *rows: SequenceRows) -> torch.Tensor:
    """One step of the model: logits of the sequences that want them."""
    return model.forward(StepBatch.build(rows, cache.block_size), cache)


def prefill(
    model: DecoderModel, cache: KVCache, token_ids: Sequence[int], block_ids: Sequence[int], cuts: Sequence[int] = ()
) -> torch.Tensor:
    """Compute a prompt in the chunks that `cuts` leave: the last token's logits [vocab]."""
    bounds = [0, *cuts, len(token_ids)]
    for start, stop in pairwise(bounds):
        logits = step(model, cache, SequenceRows(token_ids[start:stop], start, block_ids))
    return logits[0]
