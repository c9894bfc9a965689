"""Turns prompts into requests. All errors in a prompt and its options are found here, before anything is queued."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from kvblocks import Sequence as KVSequence
from kvblocks.arguments import wrong
from kvblocks.engine.errors import ModelError
from kvblocks.engine.generation import Generation
from kvblocks.engine.grammar.grammar import Grammar
from kvblocks.engine.options import GenerationOptions
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.sampling.prompt_scores import PromptScores
from kvblocks.engine.sampling.sampler import Sampler, make_samplers
from kvblocks.engine.schedule.remembered import prompt_key
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.text.stop_strings import StopMatcher
from kvblocks.engine.text.tokenizer import StreamDecoder
from kvblocks.errors import InvalidArgumentError, InvalidTokensError, KVBlocksError

Prompt = str | Sequence[int]


class Intake:
    """Makes generations from prompts, for one model and scheduler. It also assigns the ids of their sequences."""

    def __init__(self, model: LoadedModel, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler
        self._sequence_ids: Iterator[int] = count()

    def read(self, prompt: Prompt, options: GenerationOptions, name: str, prompt_index: int = 0) -> list[Generation]:
        """Check a prompt, called `name` in errors, and return a generation for each of its samples. Queues nothing.

        prompt_index: the number that its generations and pieces carry.

        Raises InvalidArgumentError (the prompt is empty, unreadable, or could never fit; options out of range),
        PoolExhaustedError (it can't fit until a pin ends) and ModelError (text without a tokenizer). O(n x prompt).
        """
        samplers = make_samplers(options.sampling, options.seed, options.n)
        tokenizer, skips = self._model.tokenizer, options.skip_special_tokens
        if options.stop and tokenizer is None:
            raise ModelError("stop: expected none, since the model's folder has no tokenizer.json; got strings")
        try:
            request = self._new_request(prompt, options)
        except KVBlocksError as error:
            raise type(error)(f"{name}: {error}") from error
        if options.grammar is not None:
            _constrain(samplers, options.grammar, self._model.config.vocab_size)
        _add_bias(samplers, options, self._model.config.vocab_size)
        _ban_stops(samplers, request, options, self._model.config.vocab_size)
        requests = [request, *(request.add_sample(next(self._sequence_ids)) for _ in samplers[1:])]
        generations = [
            Generation(
                prompt_index,
                number,
                sample,
                sampler,
                None if tokenizer is None else StreamDecoder(tokenizer, skip_special_tokens=skips),
                StopMatcher(options.stops, options.min_tokens),
            )
            for number, (sample, sampler) in enumerate(zip(requests, samplers, strict=True))
        ]
        if options.prompt_logprobs is not None:
            scores = PromptScores(request.sequence.num_prompt_tokens, options.prompt_logprobs)
            for generation in generations:
                generation.scores = scores
        return generations

    def _new_request(self, prompt: Prompt, options: GenerationOptions) -> Request:
        sequence = KVSequence(
            next(self._sequence_ids), self._encode(prompt), salt=options.salt, session=options.session
        )
        vocab_size, own_stops = self._model.config.vocab_size, frozenset(options.stop_token_ids)
        if own_stops and max(own_stops) >= vocab_size:
            raise InvalidTokensError(
                f"stop_token_ids: expected token ids below {vocab_size}, the vocabulary's size, got {max(own_stops)}"
            )
        stop_token_ids = own_stops if options.ignore_eos else own_stops | self._model.stop_token_ids
        # For a prompt that fills the context this is 1, which `check_fits` refuses. Blocks that pins keep count as
        # taken, although a prompt that begins with them would have a little more room.
        most = options.max_tokens
        if most is None:
            most = max(1, self._scheduler.max_request_tokens - sequence.num_tokens)
        request = Request(sequence, most, stop_token_ids, priority=options.priority, name_stop=options.name_stop)
        if options.prompt_logprobs is not None and sequence.num_tokens > 1:
            request.max_hit_tokens = 0
        if self._scheduler.remembered is not None and options.is_plainly_greedy:
            request.prompt_key = prompt_key(sequence)
        largest = max(sequence.token_ids())
        if largest >= vocab_size:
            raise InvalidTokensError(f"expected token ids below {vocab_size}, the vocabulary's size, got {largest}")
        if max(options.marks, default=0) > sequence.num_tokens:
            raise wrong("marks", f"numbers of tokens up to the prompt's {sequence.num_tokens}", options.marks)
        self._scheduler.check_fits(request)
        for mark in options.marks if self._model.config.has_states else ():
            self._scheduler.manager.states.mark(sequence, mark)
        return request

    def _encode(self, prompt: Any) -> Any:
        if not isinstance(prompt, str):
            return prompt
        if self._model.tokenizer is None:
            raise ModelError("expected token ids, since the model's folder has no tokenizer.json; got text")
        return self._model.tokenizer.encode(prompt)


def _constrain(samplers: Sequence[Sampler], grammar: Grammar, vocab_size: int) -> None:
    """Constrain each answer to the grammar. Raises InvalidArgumentError for a grammar of another model."""
    if grammar.vocab_size != vocab_size:
        raise InvalidArgumentError(
            f"grammar: expected one for the model's vocabulary of {vocab_size}, got one for {grammar.vocab_size}"
        )
    for sampler in samplers:
        sampler.constraint = grammar.start()


def _add_bias(samplers: Sequence[Sampler], options: GenerationOptions, vocab_size: int) -> None:
    """Give each answer its bias. Raises InvalidTokensError for a token that the model doesn't have."""
    if not options.logit_bias:
        return
    largest = max(options.logit_bias)
    if largest >= vocab_size:
        raise InvalidTokensError(
            f"logit_bias: expected token ids below {vocab_size}, the vocabulary's size, got {largest}"
        )
    bias = tuple((int(token), float(value)) for token, value in options.logit_bias.items())
    for sampler in samplers:
        sampler.bias = bias


def _ban_stops(samplers: Sequence[Sampler], request: Request, options: GenerationOptions, vocab_size: int) -> None:
    """Exclude stop tokens before an answer has `min_tokens`. Raises InvalidArgumentError if all tokens are such."""
    if not options.min_tokens:
        return
    stops = [token for token in request.stop_token_ids if token < vocab_size]
    if len(stops) == vocab_size:
        raise InvalidArgumentError("min_tokens: expected 0, since each token of the vocabulary ends an answer")
    for sampler in samplers:
        sampler.ban(stops, options.min_tokens)
