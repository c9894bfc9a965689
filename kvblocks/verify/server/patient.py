"""The server as a case sees it: it gets answers from a cold and a warm cache, and compares them."""

import itertools
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvblocks.verify.server.comparison import TIMES_NOISE, Tolerance, distance, show
from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.prompts import Words, recalling, text
from kvblocks.verify.server.target import Reply, Target, TargetError

NUMS_OF_WORDS = (90, 360, 1440)
"""Lengths of prompts to try, until a repeated prompt hits."""

_NUM_LEARNED = 4  # prompts from which the tolerance is learned, and as many as are asked at once
_WORDS_OF_A_FLUSH = 60


@dataclass(frozen=True)
class Coldness:
    """How to get an answer from a cold cache.

    by: "server" (ask another one without a cache), "salt" (use a new one), "reset", "traffic" (evict everything by
    other prompts), or "never" if there is no way.
    """

    by: str
    server: Target | None = None
    num_flush_prompts: int = 0


class Patient:
    """A target, how to make its cache cold, and its tolerance.

    expects_salts: whether `cache_salt` must separate requests; None: if the server knows the field. cold_target: a
    server of the same model that caches nothing. num_words: the approximate length of prompts, long enough that a
    repeated one hits. adapter_paths: the paths of LoRA adapters that may be loaded and unloaded. measured: what each
    case measured. Raises TargetError.
    """

    def __init__(
        self,
        target: Target,
        *,
        expects_salts: bool | None = None,
        cold_target: Target | None = None,
        num_flush_prompts: int = 0,
        adapter_paths: Sequence[str] = (),
        concurrency: int = 4,
    ) -> None:
        self.target = target
        self.adapter_paths = adapter_paths
        self.concurrency = concurrency
        self.notes: list[str] = []
        self.measured: dict[str, str] = {}
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._flush = Words(self._run)
        target.find_out()
        short, long = (target.ask(text(Words(self._run).draw(number)), 1) for number in (20, 60))
        told = (long.num_prompt_tokens or 0) - (short.num_prompt_tokens or 0)
        self.knows_lengths = told == 40  # a word is a token, so that it is known where blocks end
        self.num_extra_tokens = max(0, (short.num_prompt_tokens or 20) - 20)  # such as one for the beginning
        self.tells_cached = long.num_cached_tokens is not None
        if not self.knows_lengths:
            self.notes.append(f"40 words are {told} tokens, so it isn't known where blocks end")
        self.num_words = self._long_enough()
        self.takes_salts = expects_salts is not False and self._takes_salts()
        self.separates_salts = self.takes_salts and self._separates_salts()
        self.expects_salts = self.takes_salts and target.knows_salts() if expects_salts is None else expects_salts
        self.coldness = self._coldness(cold_target, num_flush_prompts)
        prompts = self._prompts_to_learn_from()
        answers = [self.cold(prompt) or self.ask(prompt, None) for prompt in prompts]
        self.tolerance = Tolerance(self._measure_noise(prompts, answers))
        rounding = self._measure_rounding(prompts, answers) if self.tolerance.is_known else 0.0
        if 2 * TIMES_NOISE * rounding > self.tolerance.nats:
            self.tolerance = Tolerance(2 * rounding)  # all of a beginning is computed otherwise, not one token
            self.notes.append(
                f"computing tokens one by one changes answers by up to {rounding:.4f} nats, compared with computing"
                " them at once. This is rounding; faults that change less aren't seen"
            )
        if not self.tolerance.is_known:
            self.notes.append(
                "equal requests get different texts without log probabilities, so answers can't be compared. Only the"
                " reported numbers of cached tokens are checked"
            )

    def salt(self) -> str | None:
        """Return a salt that nobody has used, or None if salts have no effect on this server."""
        return f"verify-{self._run}-{next(self._numbers)}" if self.separates_salts else None

    def run_name(self) -> str:
        """Return a name that differs in every run and every call."""
        return f"{self._run}-{next(self._numbers)}"

    def words(self, seed: str) -> Words:
        """Return words of a seed. If no salt separates two runs, each run has other words."""
        return Words(seed if self.separates_salts else f"{self._run}/{seed}")

    def cold(self, prompt: list[str], *, model: str | None = None, image: str | None = None) -> Reply | None:
        """Return the answer from a cold cache, or None if that is impossible. Nothing else may run meanwhile."""
        return self._cold_text(text(prompt), model=model, image=image)

    def ask(
        self,
        prompt: list[str],
        salt: str | None,
        *,
        max_tokens: int = 8,
        model: str | None = None,
        image: str | None = None,
    ) -> Reply:
        """Return an answer with whatever is cached for this salt.

        image: the URL of an image to show before the prompt.
        """
        return self.target.ask(text(prompt), max_tokens, salt=salt, model=model, image=image)

    def ask_all(self, prompts: Sequence[list[str]], salt: str | None) -> list[Reply]:
        """Send several prompts at once, and return the answers in order."""
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, salt), prompts))

    def compare(self, case: str, what: str, prompt: list[str], cold: Reply | None, warm: Reply) -> list[Finding]:
        """Compare a warm answer with a cold one. Return no or one finding; without a cold answer none."""
        if cold is None or not self.tolerance.is_known:
            return []
        times = self.tolerance.times(cold, warm)
        if times <= 1.0:
            return []
        return [Finding(case, what, show(cold), show(warm), times, prompts=(text(prompt),))]

    def _cold_text(
        self, prompt: str, max_tokens: int = 8, *, model: str | None = None, image: str | None = None
    ) -> Reply | None:
        if self.coldness.by == "never":
            return None
        self._cool()
        asked = self.coldness.server or self.target
        return asked.ask(prompt, max_tokens, salt=self.salt(), model=model, image=image)

    def _cool(self) -> None:
        """Make the cache cold, if a new salt doesn't."""
        if self.coldness.by == "reset":
            self.target.reset()
        for _ in range(self.coldness.num_flush_prompts):
            self.target.ask(text(self._flush.draw(_WORDS_OF_A_FLUSH)), 1)

    def _long_enough(self) -> int:
        """How many words a prompt must have, so that one which is asked again hits, as far as the server tells."""
        if not self.tells_cached:
            return NUMS_OF_WORDS[0]
        for number in NUMS_OF_WORDS:
            prompt = text(Words(f"{self._run}/{number}").draw(number))
            self.target.ask(prompt, 1)
            if self.target.ask(prompt, 1).num_cached_tokens:
                return number
        self.notes.append(f"a repeated prompt of {NUMS_OF_WORDS[-1]} words hits nothing: is prefix caching off?")
        return NUMS_OF_WORDS[0]

    def _takes_salts(self) -> bool:
        try:
            self.target.ask("one two three", 1, salt=f"verify-{self._run}-probe")
        except TargetError as error:
            self.notes.append(f"cache_salt is refused, so salts aren't tested: {error}")
            return False
        return True

    def _separates_salts(self) -> bool:
        """Whether a new salt hits nothing of another, as far as the server tells."""
        if not self.tells_cached:
            self.notes.append("the server doesn't report cached tokens, so it isn't known whether it keeps salts apart")
            return False
        prompt = text(Words(f"{self._run}/salts").draw(self.num_words))
        first, again, other = (self.target.ask(prompt, 1, salt=f"verify-{self._run}-{s}") for s in ("a", "a", "b"))
        return bool(again.num_cached_tokens) and not first.num_cached_tokens and not other.num_cached_tokens

    def _coldness(self, cold_target: Target | None, num_flush_prompts: int) -> Coldness:
        if cold_target is not None:
            cold_target.has_completions, cold_target.has_logprobs = (
                self.target.has_completions,
                self.target.has_logprobs,
            )
            return Coldness("server", cold_target)
        if self.separates_salts:
            return Coldness("salt")
        if self.target.can_reset:
            return Coldness("reset")
        if num_flush_prompts:
            return Coldness("traffic", num_flush_prompts=num_flush_prompts)
        self.notes.append(
            "there are no cold answers: the server keeps no salts apart, and none of --cold-url, --reset-path and"
            " --flush-prompts is given. Warm answers are compared with the first ones instead"
        )
        return Coldness("never")

    def _prompts_to_learn_from(self) -> list[list[str]]:
        found = []
        for number in range(max(_NUM_LEARNED, self.concurrency)):
            words = Words(f"{self._run}/learned/{number}")
            body = words.draw(60 + 10 * (number % _NUM_LEARNED))
            found.append(recalling(body, words.integer(0, len(body))))
        return found

    def _measure_noise(self, prompts: list[list[str]], alone: list[Reply]) -> float:
        """How far answers of equal states of the cache are apart: asked alone, twice, and among others."""
        again = [self.cold(prompt) or self.ask(prompt, None) for prompt in prompts[:2]]
        self._cool()
        together = self.ask_all(prompts, self.salt())
        return max([*map(distance, alone, again), *map(distance, alone, together)])

    def _measure_rounding(self, prompts: list[list[str]], answers: list[Reply]) -> float:
        """How far tokens that were generated one by one are from the same ones as the end of a prompt; 0.0: not known.

        Many kernels round differently for short chunks, and a cached beginning makes the rest of a prompt short. This
        measures it without the prefix cache: what is generated was computed one by one, behind a cold prompt.
        """
        found = 0.0
        if not self.target.has_completions or self.coldness.by == "never":
            return found
        for prompt, whole in list(zip(prompts, answers, strict=True))[:_NUM_LEARNED]:
            if not whole.tokens or "".join(whole.tokens) != whole.text:
                continue
            for count in (3, 6):
                rest = self._cold_text(text(prompt) + "".join(whole.tokens[:count]), 8 - count)
                if rest is not None and rest.num_prompt_tokens == (whole.num_prompt_tokens or 0) + count:
                    found = max(found, distance(whole.behind(count), rest))
        return found


def repeated(finding: Finding, num_seen: int, num_tries: int, repeat: str) -> Finding:
    """Return a copy of a finding that says how often it was seen."""
    return replace(finding, num_seen=num_seen, num_tries=num_tries, repeat=repeat)
