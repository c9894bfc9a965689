"""A request as the scheduler sees it: its sequence, its end, and its cost so far.

A sampled token joins the sequence at once, without a slot. The next step allocates its slot, as for any other token
that isn't computed yet. So a request that loses its blocks loses no token, and prefill, decode and recompute are the
same case. Only the scheduler changes a request.

Each sample of a prompt is a request of its own. Until the prompt is computed, only the first one is scheduled. Then all
of them get a token from its logits, and the others get its blocks, by forking.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from kvblocks import Sequence
from kvblocks.arguments import check_count
from kvblocks.errors import SequenceStateError
from kvblocks.hashing import PositionKey

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

PromptKey = tuple[bytes, str | None, str | None, tuple[PositionKey, ...]]
"""A prompt with all that its KV depends on: packed tokens, salt, LoRA name, position keys."""


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to continue by at most `max_tokens` tokens; one of `stop_token_ids` ends it earlier.

    What it is to do:
    - sequence: the tokens and blocks. A fork replaces this object by another.
    - max_tokens: if 0, it ends when its prompt is computed, and has no samples.
    - deadline: when `Scheduler.expire` cancels the request, on the caller's clock; None: never. Set it before the
      request is queued.
    - siblings: the other samples of the prompt; empty once the prompt is computed.
    - max_hit_tokens: the most tokens that it may take from the cache when it is admitted, for requests that need the
      logits of the remaining ones. The caller may raise this later. None: any number.
    - priority: among waiting requests of one salt, smaller numbers go first.
    - prompt_key: the key by which its first token is remembered (`RememberedPrompts`), if the token depends only on the
      prompt. None: it isn't remembered.
    - name_stop: returns a more exact reason than "stop", from the generated tokens without the stop token. It must not
      raise. None: the reason is "stop".

    What became of it:
    - finish_reason: None while it is unfinished; "stop" or "length" if it has all its tokens; otherwise why it ended
      early.
    - num_cached_tokens: tokens of the prompt that weren't computed for this request: those that the cache had when it
      was first admitted, or the whole prompt if it was forked.
    - num_loaded_tokens: how many of these were loaded from tiers below the device, by tier.
    - num_computed_tokens: tokens that went through the model for it, recomputed ones included.
    - num_preemptions: how often it lost its blocks to an older request.
    - was_admitted: whether it ever ran.
    - num_overtakes: how many requests behind it in the queue were admitted before it.
    - round: its round in the turns of salts (`Turns`), set when it is queued.
    - is_long: whether it was admitted with more tokens to compute than one step takes of a request.
    - was_sought: whether a store that servers share was asked for its prefix. is_sought: whether the answer is still
      awaited; until it is there, the request isn't admitted.

    Raises InvalidArgumentError.
    """

    sequence: Sequence
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    num_cached_tokens: int = 0
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    deadline: float | None = None
    siblings: "list[Request]" = field(default_factory=list)
    was_admitted: bool = False
    num_overtakes: int = 0
    round: int = 0
    is_long: bool = False
    max_hit_tokens: int | None = None
    was_sought: bool = False
    is_sought: bool = False
    prompt_key: PromptKey | None = None
    priority: int = 0
    name_stop: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens, 0)

    @property
    def num_left_tokens(self) -> int:
        """Tokens that have no slot yet: the rest of the prompt, or the last sampled token. O(1)."""
        return self.sequence.num_tokens - self.sequence.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far. O(1)."""
        return self.sequence.num_tokens - self.sequence.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far, a stop token included. O(tokens generated)."""
        return self.sequence.token_ids(self.sequence.num_prompt_tokens)

    @property
    def pause_reason(self) -> str | None:
        """Why its session pauses: the finish_reason, or what `name_stop` makes of "stop". O(tokens generated)."""
        if self.finish_reason != "stop" or self.name_stop is None:
            return self.finish_reason
        tokens = self.output_token_ids
        return self.name_stop(tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens)

    def add_sample(self, sequence_id: Hashable) -> "Request":
        """Return a request for one more sample of the prompt. It is queued together with this request.

        sequence_id: an id that no other request has. Raises SequenceStateError if this request has already generated
        tokens, or has max_tokens 0. O(prompt).
        """
        if not self.max_tokens:
            raise SequenceStateError("add_sample: expected a request that is to generate tokens, got max_tokens 0")
        if self.num_output_tokens:
            raise SequenceStateError(
                f"add_sample: expected a request that has generated nothing, got {self.num_output_tokens} tokens"
            )
        sample = Request(self.sequence.fork(sequence_id), self.max_tokens, self.stop_token_ids, deadline=self.deadline)
        sample.priority, sample.name_stop = self.priority, self.name_stop
        self.siblings.append(sample)
        return sample

    def note_loaded(self, num_tokens: int) -> None:
        """Note that loads have ended, after which cache hit and loads cover `num_tokens` tokens. O(tiers)."""
        num_left = num_tokens - (self.num_cached_tokens - sum(self.num_loaded_tokens.values()))
        for tier, num_wanted in self.num_loaded_tokens.items():  # nearest first
            self.num_loaded_tokens[tier] = num_here = max(0, min(num_wanted, num_left))
            self.num_cached_tokens -= num_wanted - num_here
            num_left -= num_wanted
        self.num_cached_tokens = min(self.num_cached_tokens, num_tokens)  # the hit may be lost too

    def take_token(self, token_id: int | None) -> None:
        """Add a sampled token, which may finish the request. None (no token) ends it with finish_reason "error".

        O(1).
        """
        if token_id is None:
            self.finish_reason = "error"
            return
        self.sequence.append_tokens([token_id])
        self._end_with(token_id)

    def end_if_done(self) -> None:
        """Set the finish_reason that an interrupted `take_token` has not set. O(tokens generated)."""
        if self.finish_reason is None and self.num_output_tokens:
            self._end_with(self.output_token_ids[-1])

    def _end_with(self, token_id: int) -> None:
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_output_tokens == self.max_tokens:
            self.finish_reason = "length"

    def hand_over(self) -> "Request":
        """Make the next sample the one that is scheduled for all, and return it.

        That sample takes over the prompt's costs so far and its place in the queue. O(samples).
        """
        heir, *others = self.siblings
        self.siblings, heir.siblings = [], others
        heir.num_cached_tokens, heir.num_computed_tokens = self.num_cached_tokens, self.num_computed_tokens
        heir.num_loaded_tokens = dict(self.num_loaded_tokens)
        heir.num_preemptions, heir.num_overtakes = self.num_preemptions, self.num_overtakes
        heir.was_admitted, heir.max_hit_tokens = self.was_admitted, self.max_hit_tokens
        heir.round, heir.is_long = self.round, self.is_long
        return heir
