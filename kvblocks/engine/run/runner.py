"""The model side of a step: the loaded model, its KV cache, and the computation of chunks.

The scheduler deals with requests and chunks, the model with tensors. This module converts one into the other. The rest
of the engine doesn't know the model, and the model doesn't know requests.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from kvblocks import StateCopy
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.attention.kv_scales import KVScales
from kvblocks.engine.errors import UnknownModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.fetch import KNOWN_MODELS, fetch_model
from kvblocks.engine.model.fields import parse_dtype, stored_dtype
from kvblocks.engine.model.gguf.magic import is_gguf
from kvblocks.engine.model.loader import check_weights, load_weights
from kvblocks.engine.model.weights import ModelWeights
from kvblocks.engine.run.forward import DecoderModel, Score
from kvblocks.engine.run.warm_up import WarmUpStep
from kvblocks.engine.sampling.batch_sampler import DrawTokens
from kvblocks.engine.sampling.feeding import feed
from kvblocks.engine.schedule.open_chunk import OpenChunk
from kvblocks.engine.schedule.step import ScheduledChunk
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import InvalidArgumentError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, which engines may share. `tokenizer` is None if its folder has no tokenizer.json."""

    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer | None = None

    @classmethod
    def load(
        cls,
        model: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
    ) -> "LoadedModel":
        """Load a known model by name (fetched if needed), a Hugging Face folder, or a GGUF file.

        dtype: float32, float16 or bfloat16, as a name or a torch.dtype, for weights, KV cache and computation. None:
        float32 on a CPU; on other devices what the folder's config.json says, or float32 if it doesn't.

        Raises ModelError, FetchError and InvalidArgumentError. O(bytes of the model).
        """
        if not isinstance(model, str | Path) or not str(model):
            raise InvalidArgumentError(f"model: expected the name of a model or a folder, got {model!r}")
        if str(model) in KNOWN_MODELS:
            folder = fetch_model(str(model))
        else:
            folder = Path(model).expanduser()
            if is_gguf(folder):
                return cls._load_gguf(folder, device, parse_dtype(dtype))
            if not folder.is_dir():
                known = ", ".join(sorted(KNOWN_MODELS))
                message = f"expected a known model ({known}), a Hugging Face folder or a GGUF file, got {str(model)!r}"
                raise UnknownModelError(message + _how_to_get(str(model)))
        wanted = parse_dtype(dtype)
        if wanted is None:
            wanted = torch.float32 if torch.device(device).type == "cpu" else stored_dtype(folder)
        config = ModelConfig.from_folder(folder)
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        return cls(config, load_weights(folder, config, dtype=wanted, device=device), tokenizer)

    @classmethod
    def _load_gguf(cls, path: Path, device: torch.device | str, dtype: torch.dtype | None) -> "LoadedModel":
        from kvblocks.engine.model.gguf.file import GGUFModel

        model = GGUFModel(path)
        config = ModelConfig.from_fields(model.fields)
        check_weights(model, config)
        definition, fields = model.tokenizer
        tokenizer = Tokenizer.from_text(definition, {"tokenizer_config.json": fields, "config.json": model.fields})
        return cls(config, load_weights(model, config, dtype=dtype or torch.float32, device=device), tokenizer)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the computation."""
        return self.weights.embedding.dtype

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end a generation."""
        return frozenset(self.config.eos_token_ids) if self.tokenizer is None else self.tokenizer.eos_token_ids


class ModelRunner:
    """Runs steps of one model over a KV cache of `num_blocks` blocks, in the model's dtype, or e4m3 with `scales`.

    num_slots: how many live states to have room for, if the model's layers keep states. Attribute: draw_tokens, the
    kernel that draws tokens from logits, or None. Raises InvalidArgumentError for sizes below 1.
    """

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        block_size: int,
        *,
        scales: KVScales | None = None,
        num_slots: int = 1,
    ) -> None:
        self.model = model
        self.kv_cache = model.new_kv_cache(num_blocks, block_size, scales, num_slots)
        self.draw_tokens: DrawTokens | None = None
        self._stream = current_stream(model.weights.embedding.device)

    def check_stream(self) -> None:
        """Raise InvalidArgumentError unless the CUDA stream is current under which the runner was made. O(1).

        Nothing but the stream's order keeps a step behind the steps and copies before it.
        """
        stream = current_stream(self.model.weights.embedding.device)
        if stream != self._stream:
            raise InvalidArgumentError(
                "CUDA stream: expected the one that was current when the engine was made"
                f" ({self._stream:#x}), got another one ({stream:#x})"
            )

    @property
    def num_slice_layers(self) -> int:
        """The number of layers, if `run` can compute a chunk a few layers at a time; 1 if it can't.

        It can't where layers keep states, since a state is saved only after a step through all layers.
        """
        return 1 if self.model.config.has_states else self.model.config.num_layers

    def run(self, chunks: Sequence[ScheduledChunk], score: Score | None = None, drawn: Tensor | None = None) -> Tensor:
        """Compute all chunks in one forward pass: float32 logits [chunks that sample, vocab]. Changes the KV cache.

        First makes the chunks' copies of shared blocks that this step would write to. score: called with all rows, in
        the order of the chunks. drawn: the tokens that the previous step has drawn (`BegunDraws.tokens`), for chunks
        with a `source`. A slice of an open chunk is a step of its own, and has no logits.
        """
        part = chunks[0].part
        if part is not None:
            return self._run_slice(chunks[0], part)
        return self.model.forward(self._begin(chunks, drawn), self.kv_cache, score)

    @torch.inference_mode()
    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy between states and blocks, as `manager.states.take_copies` says. Call it before or after `run`."""
        if self.kv_cache.states is not None:
            self.kv_cache.states.copy(copies, self.kv_cache)

    @torch.inference_mode()
    def _run_slice(self, chunk: ScheduledChunk, part: OpenChunk) -> Tensor:
        """Compute the next layers of an open chunk."""
        self.model.check_threads()
        if part.rest is None:
            part.rest = self.model.by_layers(self._begin([chunk]), self.kv_cache)
        for _ in part.layers:
            next(part.rest)
        return torch.empty(0, self.model.config.vocab_size)

    def _begin(self, chunks: Sequence[ScheduledChunk], drawn: Tensor | None = None) -> StepBatch:
        """Return the chunks as a batch, and make their copies."""
        rows = [self.rows_of(chunk, self.model.num_groups) for chunk in chunks]
        batch = StepBatch.build(rows, self.kv_cache.block_size, self.model.weights.embedding.device)
        if drawn is not None:
            feed(batch.token_ids, list(chain.from_iterable(sequence.token_ids for sequence in rows)), drawn)
        self.kv_cache.copy_blocks([pair for chunk in chunks for pair in chunk.copies])
        return batch

    def warm_up_steps(self, max_num_seqs: int, max_num_tokens: int = 1) -> list[WarmUpStep]:
        """Steps that compile and capture what steps up to this size need. Empty for plain torch.

        Run them only while nothing is running. They change no cached block.
        """
        del max_num_seqs, max_num_tokens
        return []

    @staticmethod
    def rows_of(chunk: ScheduledChunk, num_groups: int = 1) -> SequenceRows:
        """Turn a chunk into rows of a batch. Their block tables are the sequence's own lists."""
        sequence = chunk.request.sequence
        if sequence.side_tables is None:
            return SequenceRows(
                chunk.token_ids, chunk.start, sequence.block_ids, sequence.num_readonly_tokens, chunk.samples
            )
        return SequenceRows(
            token_ids=chunk.token_ids,
            start=chunk.start,
            block_ids=sequence.group_block_ids(0),
            num_readonly_tokens=sequence.num_readonly_tokens,
            wants_logits=chunk.samples,
            other_block_ids=[sequence.group_block_ids(group) for group in range(1, num_groups)],
            state_slot=sequence.state_slot,
        )


def current_stream(device: torch.device) -> int:
    """The address of the current CUDA stream on a device; 0 for the default stream, and without CUDA. O(1)."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _how_to_get(model: str) -> str:
    """Help for a name that may be on Hugging Face's hub, from which this package downloads nothing."""
    if not _HUB_NAME.fullmatch(model):
        return ""
    folder = model.rpartition("/")[2]
    return (
        f": a model on Hugging Face's hub is downloaded first, `pip install huggingface_hub` and"
        f" `hf download {model} --local-dir {folder}`, and then given as the folder, ./{folder}"
    )
