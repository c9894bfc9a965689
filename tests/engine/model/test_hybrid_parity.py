"""Logits of models with recurrent states equal those of `transformers`, on small random models of every kind.

The oracle is a forward pass of `transformers` without a cache. Ours computes the same tokens in chunks and one by one,
with its own states. The oracle computes in float64, since in float32 it is up to
1.6e-5 of the largest logit from that (qwen3_next), where ours is 7e-6. Tolerance: 1e-5 of the largest logit.
"""

from itertools import pairwise

import pytest
import torch
from engine.hybrid_models import FIELDS, load_tiny, save_tiny
from engine.small_models import random_tokens
from transformers import AutoModelForCausalLM

from kvblocks.engine import Engine, LoadedModel, ModelError
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.hybrid.mixer import StateRows, advance
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.errors import InvalidArgumentError

KINDS = {
    "lfm2": {},
    "lfm2, biases, own sizes": {
        "conv_bias": True,
        "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
        "layer_types": None,
        "full_attn_idxs": [2],
    },
    "bamba": {},
    "bamba, biases, one group": {
        "mamba_n_groups": 1,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mlp_bias": True,
        "attention_bias": True,
    },
    "granitemoehybrid": {},
    "granitemoehybrid, dense, rope": {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "layer_types": ["attention", "mamba", "mamba"],
        "tie_word_embeddings": True,
    },
    "qwen3_next": {},
    "qwen3_next, dense layers, scores as they are": {
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "head_dim": 24,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_hidden_layers": 5,
        "full_attention_interval": 2,
    },
    "qwen3_next, whole heads": {"partial_rotary_factor": 1.0, "linear_conv_kernel_dim": 2, "decoder_sparse_step": 2},
    "kimi_linear": {},
    "kimi_linear, one group, two layers attend": {
        "linear_attn_config": {},
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_head_dim": 12,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": False,
        "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
        "rms_norm_eps": 0.01,  # but for the latents' norm
    },
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
}


QUICK = ("lfm2", "qwen3_next", "granitemoehybrid", "kimi_linear")
some_models = pytest.mark.parametrize(
    "pair",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS],
    indirect=True,
)


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """A model of transformers, and our model of the same folder, whose weights are in three files."""
    folder = save_tiny(
        tmp_path_factory.mktemp("model"), request.param.partition(",")[0], num_files=3, **KINDS[request.param]
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    return reference, LoadedModel.load(folder)


def reference_logits(reference, token_ids):
    """float32 [num_tokens, vocab]."""
    with torch.inference_mode():
        return reference(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def assert_same(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("pair", KINDS, indirect=True)
def test_chunks_and_single_tokens(pair):
    reference, model = pair
    decoder = DecoderModel(model.config, model.weights)
    cache = decoder.new_kv_cache(num_blocks=20, block_size=16, num_slots=3)
    tokens = random_tokens(model.config, 210)
    expected = reference_logits(reference, tokens)
    for cuts in ([0, 210], [0, 1, 2, 3, 67, 131, 195, *range(196, 211)], [0, 64, 65, 130, 210]):
        cache.states.slots.zero_()
        for start, stop in pairwise(cuts):
            rows = SequenceRows(tokens[start:stop], start, list(range(20)), state_slot=1)
            logits = decoder.forward(StepBatch.build([rows], 16), cache)
            assert_same(logits[0], expected[stop - 1])


@some_models
def test_sequences_of_one_step(pair):
    """Prompts and decodes of several sequences in one step, whose states are in slots of any order."""
    reference, model = pair
    decoder = DecoderModel(model.config, model.weights)
    cache = decoder.new_kv_cache(num_blocks=20, block_size=16, num_slots=4)
    prompts = [random_tokens(model.config, length, seed=length) for length in (40, 70, 33, 5)]
    tables, slots = [[3, 1, 2], [7, 8, 0, 9, 10], [11, 5, 4], [6]], [2, 0, 3, 1]
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    bounds = [(0, 20, 35, 38, 39, 40), (0, 68, 69, 70), (0, 32, 33), (0, 4, 5)]
    for number in range(5):
        step = [
            SequenceRows(prompt[spans[number] : spans[number + 1]], spans[number], table, state_slot=slot)
            for prompt, spans, table, slot in zip(prompts, bounds, tables, slots, strict=True)
            if number + 1 < len(spans)
        ]
        logits = decoder.forward(StepBatch.build(step, 16), cache)
        wanted = [
            own[spans[number + 1] - 1] for own, spans in zip(expected, bounds, strict=True) if number + 1 < len(spans)
        ]
        assert_same(logits, torch.stack(wanted))


@some_models
def test_the_engine_with_hits_and_preemptions(pair):
    """What the engine samples from, under a scarce pool, is what transformers computes from all tokens before."""
    reference, model = pair
    # A block of latents has half the bytes of one of K and V, and a state takes as many more blocks.
    engine = Engine(model, num_blocks=40 if model.config.latent is None else 60)
    logits = {}
    run = engine.runner.run

    def watched(chunks, score=None):
        rows = run(chunks, score)
        sampling = [chunk for chunk in chunks if chunk.samples]
        for chunk, row in zip(sampling, rows, strict=True):
            logits[tuple(chunk.request.sequence.token_ids())] = row
        return rows

    engine.runner.run = watched
    shared = random_tokens(model.config, 130, seed=3)
    for own in range(3):
        prompts = [shared[:cut] + random_tokens(model.config, 9, seed=10 * own + cut) for cut in (130, 100, 128, 30)]
        engine.generate(prompts, max_tokens=4, n=2, temperature=1.0, seed=1, ignore_eos=True)
    assert engine.manager.states.stats.num_restored > 2
    assert len(logits) > 40
    for tokens, row in [*logits.items()][::5]:
        assert_same(row, reference_logits(reference, list(tokens))[-1])


@pytest.mark.parametrize("model_type", FIELDS)
def test_both_forms_of_a_mixer_agree(model_type, tmp_path):
    model = load_tiny(tmp_path, model_type)
    (mixer,) = {mixer for mixer in model.config.mixers if mixer is not None}
    weights = model.weights.layers[0].mixer
    rows = torch.randn(150, mixer.num_inputs, generator=torch.Generator().manual_seed(1))
    found = []
    for by_token in (False, True):
        memory = tuple(torch.zeros(2, *part.shape) for part in mixer.parts)
        mixed = advance(mixer, weights, rows, memory, StateRows((1,), (0, 150)), by_token=by_token)
        assert all(not part[0].any() for part in memory)
        found.append((mixed, *memory))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_bfloat16_keeps_matrices_in_float32(tmp_path):
    folder = save_tiny(tmp_path, "qwen3_5_text")
    model = LoadedModel.load(folder, dtype="bfloat16")
    engine = Engine(model, num_blocks=60)
    states = [part.dtype for part in engine.runner.kv_cache.states.layers[0]]
    assert states == [torch.bfloat16, torch.float32]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = random_tokens(model.config, 100)
    (completion,) = engine.generate([tokens], max_tokens=1, logprobs=0)
    expected = reference_logits(reference, tokens)[-1].log_softmax(-1)[completion.token_ids[0]]
    assert abs(completion.logprobs[0].logprob - float(expected)) < 0.1


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("lfm2", {"layer_types": ["conv"] * 4}, "at least one layer with full attention"),
        ("lfm2", {"layer_types": ["conv", "mamba"]}, "expected layer_types to be a list of 4"),
        ("bamba", {"attn_layer_indices": None}, "attn_layer_indices to be a list"),
        ("bamba", {"mamba_n_heads": 5}, "mamba_n_heads to divide 64"),
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit from 0 to infinity"),
        ("granitemoehybrid", {"num_experts_per_tok": 9}, "num_experts_per_tok of at most num_local_experts"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'rope'"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads to divide"),
        ("qwen3_next", {"num_experts_per_tok": 6}, "num_experts_per_tok of at most num_experts"),
        ("qwen3_next", {"mlp_only_layers": 3}, "mlp_only_layers to be a list"),
        ("qwen3_next", {"partial_rotary_factor": 2}, "partial_rotary_factor above 0 and at most 1"),
        ("qwen3_next", {"hidden_act": "gelu"}, "expected hidden_act 'silu'"),
        ("kimi_linear", {"q_lora_rank": 8}, "expected q_lora_rank None, got 8"),
        ("kimi_linear", {"mla_use_nope": False}, "expected mla_use_nope True, got False"),
        ("kimi_linear", {"attention_bias": True}, "expected attention_bias False"),
        ("kimi_linear", {"tie_word_embeddings": True}, "expected tie_word_embeddings False"),
        ("kimi_linear", {"num_key_value_heads": 1}, "expected num_key_value_heads 2, got 1"),
        ("kimi_linear", {"linear_attn_config": [1]}, "linear_attn_config to be an object"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": 3, "kda_layers": []}}, "kda_layers to be lists"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 3]}}, "1 to 4 once"),
        ("kimi_linear", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types to be a list of 4"),
        ("kimi_linear", {"first_k_dense_replace": -1}, "first_k_dense_replace to be a number of layers"),
        ("kimi_linear", {"num_expert_group": 4}, r"num_expert_group to divide num_experts \(6\)"),
        ("kimi_linear", {"topk_group": 4}, "and topk_group of at most as many"),
        ("kimi_linear", {"num_experts_per_token": 5}, r"num_experts_per_token of at most .*\(4\), got 5"),
    ],
)
def test_configs_that_cannot_be_computed(model_type, fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_fields(FIELDS[model_type] | {"model_type": model_type} | fields)


def test_a_step_without_slots_is_refused(tmp_path):
    model = load_tiny(tmp_path, "lfm2")
    decoder = DecoderModel(model.config, model.weights)
    cache = decoder.new_kv_cache(num_blocks=4, block_size=16, num_slots=2)
    for slots in ([None], [2], [-1], [0, 0]):
        rows = [SequenceRows([1], 0, [number], state_slot=slot) for number, slot in enumerate(slots)]
        with pytest.raises(InvalidArgumentError, match="slot"):
            decoder.forward(StepBatch.build(rows, 16), cache)


def test_a_missing_tensor_is_named_as_in_the_folder(tmp_path):
    save_tiny(tmp_path, "lfm2")
    save_tiny(tmp_path, "lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    config = ModelConfig.from_fields(FIELDS["lfm2"] | {"model_type": "lfm2"})
    from kvblocks.engine.model.loader import load_weights

    with pytest.raises(ModelError, match=r"the tensor model\.layers\.3\.operator_norm\.weight"):
        load_weights(tmp_path, config)
