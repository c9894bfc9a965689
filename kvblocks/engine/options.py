"""The options of `generate`, `stream` and `submit`."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from kvblocks.arguments import as_int, check_count, is_a, is_number, wrong
from kvblocks.engine.grammar.grammar import Grammar
from kvblocks.engine.sampling.params import MAX_LOGPROBS, SamplingParams
from kvblocks.errors import InvalidArgumentError

MAX_BIASED = 1024
"""The most tokens of a `logit_bias`."""

MAX_PRIORITY = 2**31 - 1


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
    logit_bias: Mapping[int, float] | None
    priority: int
    marks: tuple[int, ...] | list[int]
    salt: str | None
    session: Hashable
    name_stop: Callable[[list[int]], str] | None


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to answer a prompt.

    n: how many samples to generate. The prompt is computed once for all of them, and its KV is stored once.
    max_tokens: the most tokens of each sample. None: as many as the model's context and the pool have room for. 0: the
    prompt is computed and cached, and nothing is generated; n must be 1 then.
    temperature: 0 is greedy, and all samples are equal.
    top_p: keeps the smallest set of most likely tokens that together have this probability.
    top_k: keeps at most this many tokens; None: any number. min_p: drops tokens whose probability is below this share
    of the most likely token's. Both apply before top_p.
    presence_penalty: subtracted from a token's logit if the answer already has the token. frequency_penalty: subtracted
    once for each time that the answer has it. repetition_penalty: above 1 makes tokens of prompt and answer less
    likely, below 1 more likely.
    logprobs: how many of the most likely tokens are returned for each token of the answer, with their log
    probabilities; 0: only the token's own; None: none.
    prompt_logprobs: the same for the tokens of the prompt, each given those before it. Cached tokens have no logits, so
    the whole prompt is computed, except for tokens that were scored before a preemption.
    `sampling.params.SamplingParams` defines the parameters of sampling exactly.
    seed: the same prompt with the same seed gets the same samples, whatever else is in the batch. Sample k equals the
    sample of a call with n=1 and the seed `sampling.random_numbers.sample_seed(seed, k)`. None: different samples each
    time.
    stop: one string or several; the text ends before the first of them.
    ignore_eos: go on until max_tokens, `stop` or one of stop_token_ids.
    min_tokens: until a sample has this many tokens, only max_tokens ends it. Tokens that would end it are not drawn,
    and strings of `stop` that begin in the text of these tokens don't count.
    stop_token_ids: tokens that end a sample, in addition to the model's own. The text ends before them.
    skip_special_tokens: whether special tokens, such as "<|im_end|>", are left out of the text.
    grammar: the form of the text, made by a `GrammarCompiler` for the model. Only tokens that the form allows are
    drawn, and the answer ends when its text is complete; max_tokens may cut it off before. Excludes ignore_eos and
    min_tokens, since it needs the tokens that end answers.
    logit_bias: a number from -100 to 100 for each of at most MAX_BIASED tokens, added to the token's logit before each
    draw, after penalties.
    priority: among waiting prompts with the same salt, those with smaller numbers are admitted first.
    marks: positions (numbers of leading tokens) at which later prompts will probably diverge, such as the end of a
    system prompt. A model with recurrent states also saves its state there; other models ignore marks.
    salt: prompts with different salts never share cached blocks. None is a salt of its own.
    session: a hashable id of the prompt's conversation, for `Engine(eviction="sessions")` and `session_gate`; None: no
    session. The end of an answer is reported as a pause of the session, with the finish_reason.
    name_stop: called when an answer in a session ends with "stop", with its tokens except the stop token. It returns
    the reason to report for the pause instead, such as "tool_calls", and must not raise. None: "stop" is reported.

    Raises InvalidArgumentError. `SamplingParams` checks the parameters of sampling, `kvblocks.Sequence` checks salt and
    session.
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
    logit_bias: Mapping[int, float] | None = None
    priority: int = 0
    marks: tuple[int, ...] | list[int] = ()
    salt: str | None = None
    session: Hashable = None
    name_stop: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        check_count("n", self.n, 1)
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 0)
            if not self.max_tokens and self.n > 1:
                raise InvalidArgumentError(f"n: expected 1 with max_tokens 0, which generates nothing, got {self.n}")
        if self.prompt_logprobs is not None:
            check_count("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_grammar()
        self._check_bias()
        if as_int(self.priority) is None or abs(self.priority) > MAX_PRIORITY:
            raise wrong("priority", f"an int from {-MAX_PRIORITY} to {MAX_PRIORITY}", self.priority)
        stops: Any = self.stop
        is_list = isinstance(stops, str | tuple | list)
        if not is_list or not all(isinstance(text, str) and text for text in self.stops):
            raise InvalidArgumentError(f"stop: expected a non-empty str, or a list of them, got {stops!r}")
        namer: Any = self.name_stop
        if namer is not None and not callable(namer):
            raise wrong("name_stop", "None or a function", namer)
        _check_numbers("stop_token_ids", "a list of token ids", self.stop_token_ids, 0)
        _check_numbers("marks", "a list of numbers of tokens, at least 1", self.marks, 1)
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

    def _check_bias(self) -> None:
        given: Any = self.logit_bias
        if given is None:
            return
        if not isinstance(given, Mapping) or len(given) > MAX_BIASED:
            raise wrong("logit_bias", f"None or at most {MAX_BIASED} numbers by token id", given)
        for token, value in given.items():
            if as_int(token) is None or token < 0 or not is_number(value) or not -100 <= value <= 100:
                raise wrong("logit_bias", "token ids with numbers from -100 to 100", {token: value})

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn. Raises InvalidArgumentError. O(1)."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(SamplingParams)})

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether there is one sample, and all that is returned with its first token depends only on the prompt.

        False with penalties, a grammar, a bias, min_tokens or log probabilities. O(1).
        """
        sampling = self.sampling
        is_plain = sampling.is_greedy and not sampling.is_penalized and sampling.logprobs is None
        has_more = self.prompt_logprobs is not None or self.grammar is not None or self.min_tokens or self.logit_bias
        return is_plain and not has_more and self.n == 1 and self.max_tokens != 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings. O(1)."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _check_numbers(name: str, expected: str, given: Any, least: int) -> None:
    numbers = [as_int(item) for item in given] if isinstance(given, tuple | list) else [None]
    if not all(number is not None and number >= least for number in numbers):
        raise wrong(name, expected, given)
