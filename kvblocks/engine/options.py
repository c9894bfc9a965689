"""How a prompt is to be answered: the options of `generate`, `stream` and `submit`."""

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from kvblocks.arguments import as_int, check_count, is_a, wrong
from kvblocks.engine.grammar.grammar import Grammar
from kvblocks.engine.sampling.params import MAX_LOGPROBS, SamplingParams
from kvblocks.errors import InvalidArgumentError


class OptionValues(TypedDict, total=False):
    """The fields of `GenerationOptions` as keyword arguments, all of them optional."""

    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    ignore_eos: bool
    min_tokens: int
    stop_token_ids: tuple[int, ...] | list[int]
    skip_special_tokens: bool
    grammar: Grammar | None
    salt: str | None
    session: Hashable


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How a prompt is to be answered.

    n: how many samples; the prompt is computed once for all of them, and its KV is there once.
    max_tokens: of each sample; None: as many as the model's context and the pool have room for. 0: the prompt is
    computed, so that it is cached, and nothing is generated; n is 1 then.
    temperature: 0 is greedy, and all samples are equal.
    top_p: only the most likely tokens are drawn from, as few as have this probability together.
    top_k: at most so many, and None any number. min_p: none that is less likely than this share of the most likely
    one's probability. Both count before top_p.
    presence_penalty, frequency_penalty: taken from a token's logit if the answer has it, and for each time that it has.
    repetition_penalty: makes tokens of prompt and answer less likely above 1, more likely below.
    logprobs: how many of the most likely tokens are named beside each token of the answer, with their logarithms of
    probability; 0: that of the token alone; None: nothing.
    prompt_logprobs: the same for the tokens of the prompt, each given those before it. It is computed anew then, except
    for what an earlier preemption left of it, since what is cached has no logits.
    See `sampling.params.SamplingParams`, which says all of it exactly.
    seed: every prompt gets random numbers of its own from it, so the same prompt with the same seed has the same
    samples, whatever else is in the batch; sample k is that of a call with n=1 and
    `sampling.random_numbers.sample_seed(seed, k)`. None: others each time.
    stop: one string or several; the text ends before the first of them.
    ignore_eos: go on until max_tokens, `stop` or one of stop_token_ids.
    min_tokens: nothing but max_tokens ends a sample before it has so many: no token that would is drawn, and strings of
    `stop` that begin in their text don't count.
    stop_token_ids: tokens that end a sample, beside those of the model. The text goes up to them.
    skip_special_tokens: whether special tokens, such as "<|im_end|>", are left out of the text.
    grammar: what the text must be like, made by a `GrammarCompiler` for the model: no token is drawn that would make it
    anything else, and one that ends it when it is whole; at max_tokens it may be cut off. Needs the tokens that end
    answers, so neither ignore_eos nor min_tokens.
    salt: prompts with different ones (None is one of them) never share anything in the cache.
    session: the conversation that the prompt is of, hashable, for `Engine(eviction="sessions")`; None: of none. The end
    of an answer is told as a pause of the session, with the finish_reason.

    Raises InvalidArgumentError; the numbers for sampling are checked by `SamplingParams`, salt and session by
    `kvblocks.Sequence`.
    """

    n: int = 1
    max_tokens: int | None = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] | list[int] = ()
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    salt: str | None = None
    session: Hashable = None

    def __post_init__(self) -> None:
        check_count("n", self.n, 1)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 0)
            if not self.max_tokens and self.n > 1:
                raise InvalidArgumentError(f"n: expected 1 with max_tokens 0, which generates nothing, got {self.n}")
        if self.prompt_logprobs is not None:
            check_count("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_grammar()
        stops: Any = self.stop
        is_list = isinstance(stops, str | tuple | list)
        if not is_list or not all(isinstance(text, str) and text for text in self.stops):
            raise InvalidArgumentError(f"stop: expected a non-empty str, or a list of them, got {stops!r}")
        ids: Any = self.stop_token_ids
        numbers = [as_int(index) for index in ids] if isinstance(ids, tuple | list) else [None]
        if not all(number is not None and number >= 0 for number in numbers):
            raise wrong("stop_token_ids", "a list of token ids", ids)
        if not is_a(self.skip_special_tokens, bool):
            raise wrong("skip_special_tokens", "True or False", self.skip_special_tokens)
        most = check_count("min_tokens", self.min_tokens, 0) if self.max_tokens is None else self.max_tokens
        check_count("min_tokens", self.min_tokens, 0, most)

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise wrong("grammar", "None or what a GrammarCompiler returns", self.grammar)
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidArgumentError(f"{name}: expected none with a grammar, which says when an answer ends")

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn. Raises InvalidArgumentError. O(1)."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(SamplingParams)})

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether there is one answer, and its first token depends on the prompt alone, as does all said of it. O(1).

        Not with penalties, a grammar, min_tokens or log probabilities.
        """
        sampling = self.sampling
        is_plain = sampling.is_greedy and not sampling.is_penalized and sampling.logprobs is None
        has_more = self.prompt_logprobs is not None or self.grammar is not None or self.min_tokens
        return is_plain and not has_more and self.n == 1 and self.max_tokens != 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. O(1)."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
