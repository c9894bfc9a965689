"""Finds the factors of K and V in 8 bits.

When an engine is made, the model computes one text, and its K and V are read. The text is always the same (or the token
ids, for a model without a tokenizer), and is computed in plain torch. So engines of the same model find the same
factors. Factors are powers of 2 with headroom (`kv_scales`), so small differences, such as another machine's rounding,
rarely change them. The factors are part of the fingerprint of blocks in tiers, so an engine with other factors doesn't
load these blocks.
"""

from dataclasses import dataclass, field

from torch import Tensor

from kvblocks.engine.attention.attention import KVCache, StepAttention, TorchAttention
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.attention.kv_scales import KVScales
from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.engine.model.layers import RowOps, TorchRows
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.runner import LoadedModel

_MAX_TOKENS = 512
_BLOCK_SIZE = 16
_STRIDE = 7919
"""A prime, whose multiples give token ids from all parts of a vocabulary."""

TEXT = """The harbour was quiet at 5:40 in the morning. "You're early," said the ferryman, counting 17 coins into a tin.
Three weeks later the committee published its report (pp. 112-140), which found that 63.5 % of the samples were bad.

# Setup
1. Install the package: `pip install --upgrade example==2.4.1`
2. Set `EXAMPLE_HOME=/opt/example` and restart.

def fibonacci(n: int) -> list[int]:
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

{"id": 90210, "name": "Ada", "tags": ["math", "engines"], "active": true, "score": -1.25e-3, "parent": null}

SELECT city, COUNT(*) FROM orders WHERE total > 99.90 GROUP BY city ORDER BY 2 DESC LIMIT 10;

Q: What is the derivative of x^3 + 2x? A: 3x^2 + 2. Q: And the integral? A: x^4/4 + x^2 + C.

Le train de nuit pour Marseille partira du quai numéro 9 à 22 h 15. Der Zug nach Köln fällt heute leider aus.
El gato duerme sobre la mesa. 東京は今日も雨です。Москва слезам не верит. Ça va? 好的谢谢

<|user|> Summarise the following e-mail in one sentence, please.
<|assistant|> The supplier asks for payment of invoice no. 4711 ($1,280.00) by 31 March 2024 - otherwise delivery stops.

In the beginning there was only a list of words, and the list was very, very, very long; aaaa bbbb 0000 1111 ----
"""


@dataclass
class _Watching:
    """An attention that notes the largest magnitudes of K and V of every layer and head, [num_kv_heads] each."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    is_tiled: bool = False

    def begin(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        return _WatchedStep(TorchAttention().begin(batch, kv_cache), self)

    def row_ops(self, config: ModelConfig) -> RowOps:
        return TorchRows(config)


@dataclass(frozen=True)
class _WatchedStep:
    """The only step of a calibration. Its layers come in order."""

    step: StepAttention
    seen: _Watching

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        self.seen.keys.append(key.abs().amax((0, 2)))
        self.seen.values.append(value.abs().amax((0, 2)))
        self.step.store(layer, key, value, slot_mapping)

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        return self.step.attend(layer, query, how)


def calibrate(model: LoadedModel) -> KVScales:
    """The factors of a model's K and V. Computes up to 512 tokens. Raises ModelError if K or V are not finite."""
    token_ids = _token_ids(model)
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    watching = _Watching()
    decoder = DecoderModel(model.config, model.weights, attention=watching)
    rows = SequenceRows(token_ids, 0, list(range(num_blocks)), state_slot=0)
    batch = StepBatch.build([rows], _BLOCK_SIZE, model.device)
    decoder.forward(batch, decoder.new_kv_cache(num_blocks, _BLOCK_SIZE))
    if not all(bool(largest.isfinite().all()) for largest in (*watching.keys, *watching.values)):
        raise ModelError("kv_cache_dtype='fp8_e4m3': expected a model with finite keys and values, got infinity or NaN")
    return KVScales.of_largest(watching.keys, watching.values)


def _token_ids(model: LoadedModel) -> list[int]:
    """The token ids to compute: the text's, or ids from all over the vocabulary."""
    most = min(_MAX_TOKENS, model.config.max_position_embeddings)
    if model.tokenizer is not None:
        return model.tokenizer.encode(TEXT)[:most]
    return [index * _STRIDE % model.config.vocab_size for index in range(most)]
