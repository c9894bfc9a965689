"""The cases of `kvblocks verify`: each puts the cache into a state, and asks for what must not depend on it.

A case is a function of a patient and a seed, which yields what it finds. Its docstring says what it shows.
"""

from collections.abc import Callable, Iterator

from kvblocks.verify.server.case import Case
from kvblocks.verify.server.finding import Finding
from kvblocks.verify.server.patient import Patient
from kvblocks.verify.server.prompts import picture, recalling, text
from kvblocks.verify.server.timing import timing

_BLOCK_SIZES = (16, 32, 64)


def repeats(patient: Patient, seed: str) -> Iterator[Finding]:
    """A prompt that is asked again, and one that is asked after its own beginning, get the answer of a cold cache."""
    words, salt = patient.words(seed), patient.salt()
    body = words.draw(words.integer(20, patient.num_words))
    prompt = recalling(body, words.integer(0, len(body)))
    cold = patient.cold(prompt)
    if words.integer(0, 1):
        patient.ask(prompt[: len(prompt) * 2 // 3], salt)
    first = patient.ask(prompt, salt)
    cold = cold or first
    for what, warm in (("asked first", first), ("asked again", patient.ask(prompt, salt))):
        yield from patient.compare("repeats", f"a prompt of {len(prompt)} words, {what}", prompt, cold, warm)


def prefixes(patient: Patient, seed: str) -> Iterator[Finding]:
    """Beginnings of a cached prompt, of every length in a row, get the answers of a cold cache."""
    words, salt = patient.words(seed), patient.salt()
    whole = words.draw(patient.num_words)
    first = words.integer(14, patient.num_words - 8)
    prompts = [whole[:length] for length in range(first, first + 5)]
    cold = [patient.cold(prompt) for prompt in prompts]
    patient.ask(whole, salt)
    for prompt, expected in zip(prompts, cold, strict=True):
        warm = patient.ask(prompt, salt)
        what = f"the first {len(prompt)} words of a cached prompt of {len(whole)}"
        yield from patient.compare("prefixes", what, prompt, expected or patient.ask(prompt, salt), warm)


def foreign(patient: Patient, seed: str) -> Iterator[Finding]:
    """Conversations that differ from some word on, asked at once and in turns, get the answers that each gets alone."""
    words, salt = patient.words(seed), patient.salt()
    base = words.draw(patient.num_words)
    prompts = [recalling(base, words.integer(0, patient.num_words))]
    places = []
    for _ in range(3):
        place = words.integer(8, patient.num_words - 8)
        places.append(place)
        other = base[:place] + words.draw(patient.num_words - place)
        prompts.append(recalling(other, place - words.integer(0, 4)))
    cold = [patient.cold(prompt) for prompt in prompts]
    first = patient.ask_all(prompts, salt)
    for replies in (first, patient.ask_all(prompts[::-1], salt)[::-1]):
        for number, (prompt, warm) in enumerate(zip(prompts, replies, strict=True)):
            where = "from which the others differ" if not number else f"which differs from word {places[number - 1]} on"
            expected = cold[number] or first[number]
            yield from patient.compare(
                "foreign", f"a conversation of {len(prompt)} words, {where}", prompt, expected, warm
            )


def middles(patient: Patient, seed: str) -> Iterator[Finding]:
    """Words that follow others in one prompt are computed anew where they follow something else."""
    words, salt = patient.words(seed), patient.salt()
    for size in (_BLOCK_SIZES[0], _BLOCK_SIZES[words.integer(1, 2)]):
        length = size - patient.num_extra_tokens
        known, beginning, shared = words.draw(length), words.draw(length), words.draw(2 * size + 4)
        moved = recalling(shared, words.integer(0, size))
        joined = recalling(beginning + shared, words.integer(0, length))
        cold = patient.cold(moved), patient.cold(joined)
        patient.ask(known + shared, salt)
        patient.ask(beginning + words.draw(size), salt)
        what = f"{len(shared)} words that were cached after {length} others"
        yield from patient.compare("middles", f"{what}, at the beginning", moved, cold[0], patient.ask(moved, salt))
        yield from patient.compare(
            "middles", f"{what}, after another beginning", joined, cold[1], patient.ask(joined, salt)
        )


def edits(patient: Patient, seed: str) -> Iterator[Finding]:
    """Histories of a conversation that are cut, or changed in the middle, get the answers of a cold cache."""
    words, salt = patient.words(seed), patient.salt()
    turns = [words.draw(words.integer(12, 28)) for _ in range(4)]
    whole = [word for turn in turns for word in turn]
    changed = list(whole)
    place = words.integer(1, len(whole) - 2)
    changed[place] = next(word for word in words.draw(50) if word != whole[place])
    edited = {
        f"with word {place} changed": changed,
        "without its second turn": [*turns[0], *turns[2], *turns[3]],
        "without its last words": whole[: -words.integer(1, 20)],
        "with another beginning": [*words.draw(len(turns[0])), *whole[len(turns[0]) :]],
    }
    prompts = {what: recalling(prompt, min(place, len(prompt))) for what, prompt in edited.items()}
    cold = {what: patient.cold(prompt) for what, prompt in prompts.items()}
    for end in range(1, len(turns) + 1):
        patient.ask([word for turn in turns[:end] for word in turn], salt)
    for what, prompt in prompts.items():
        warm = patient.ask(prompt, salt)
        yield from patient.compare("edits", f"a conversation of {len(turns)} turns, {what}", prompt, cold[what], warm)


def cancels(patient: Patient, seed: str) -> Iterator[Finding]:
    """A prompt whose first request was cancelled before its answer gets the answer of a cold cache."""
    words, salt = patient.words(seed), patient.salt()
    prompt = recalling(words.draw(3 * patient.num_words), words.integer(0, 3 * patient.num_words))
    cold = patient.cold(prompt)
    assert cold is not None
    for share in (0.2, 0.5, 0.9):
        patient.target.begin_and_leave(text(prompt), max(0.01, share * cold.seconds), salt=salt)
        warm = patient.ask(prompt, salt)
        what = f"a prompt of {len(prompt)} words, cancelled after {share * cold.seconds:.2f} s, asked again"
        yield from patient.compare("cancels", what, prompt, cold, warm)
        salt = patient.salt()


def pressure(patient: Patient, seed: str) -> Iterator[Finding]:
    """Many prompts at once, some with common beginnings, get the answers that each gets alone."""
    words, salt = patient.words(seed), patient.salt()
    beginning = words.draw(patient.num_words // 2)
    prompts = []
    for number in range(2 * patient.concurrency):
        body = (beginning if number % 2 else []) + words.draw(patient.num_words)
        prompts.append(recalling(body, words.integer(0, len(body))))
    cold = [patient.cold(prompt) for prompt in prompts]
    first = patient.ask_all(prompts, salt)
    for replies in (first, patient.ask_all(prompts, salt)):
        for number, (prompt, warm) in enumerate(zip(prompts, replies, strict=True)):
            what = f"prompt {number} of {len(prompts)} that are asked at once"
            yield from patient.compare("pressure", what, prompt, cold[number] or first[number], warm)


def salts(patient: Patient, seed: str) -> Iterator[Finding]:
    """A request with one `cache_salt` hits nothing of another, by the cached tokens that the server reports."""
    prompt = patient.words(seed).draw(patient.num_words)
    first, second = f"verify-{seed}-{patient.run_name()}-one", f"verify-{seed}-{patient.run_name()}-two"
    expected = patient.target.ask(text(prompt), salt=first)
    patient.target.ask(text(prompt), salt=first)
    got = patient.target.ask(text(prompt), salt=second)
    if got.num_cached_tokens:
        yield Finding(
            "salts",
            "a prompt that was asked with other salts only",
            "0 cached tokens",
            f"{got.num_cached_tokens} cached tokens of {expected.num_prompt_tokens}",
            prompts=(text(prompt),),
        )


def usage(patient: Patient, seed: str) -> Iterator[Finding]:
    """No answer reports more cached tokens than its prompt shares with earlier ones."""
    salt = patient.salt()
    words = patient.words(seed if salt else f"{seed}/{patient.run_name()}")  # nobody has asked these
    base = words.draw(patient.num_words)
    asked: list[list[str]] = []
    for _ in range(4):
        place = words.integer(0, patient.num_words) if asked else 0
        prompt = base[:place] + words.draw(words.integer(8, 40)) if asked else base
        shared = max((_num_shared(prompt, other) for other in asked), default=0)
        most = shared + patient.num_extra_tokens + 1  # two words may begin with the same token
        reply = patient.ask(prompt, salt)
        asked.append(prompt)
        cached = reply.num_cached_tokens or 0
        if cached > (most if shared else 0) and cached >= _BLOCK_SIZES[0]:
            what = f"a prompt of {len(prompt)} words, {shared} of which were asked before"
            expected, got = f"at most {most if shared else 0} cached tokens", f"{cached} of {reply.num_prompt_tokens}"
            yield Finding("usage", what, expected, got, prompts=(text(prompt),))


def adapters(patient: Patient, seed: str) -> Iterator[Finding]:
    """The same prompt, asked of the model and of each of its LoRA adapters, gets the answer of that one alone."""
    models = [patient.target.model, *patient.target.adapters[:3]]
    words, salt = patient.words(seed), patient.salt()
    body = words.draw(patient.num_words)
    prompt = recalling(body, words.integer(0, len(body)))
    cold = {model: patient.cold(prompt, model=model) for model in models}
    for model in [*models, *models]:
        warm = patient.ask(prompt, salt, model=model)
        what = f"model {model!r}, after {len(models) - 1} others with the same prompt"
        yield from patient.compare("adapters", what, prompt, cold[model], warm)


def reloads(patient: Patient, seed: str) -> Iterator[Finding]:
    """A LoRA adapter that is loaded under the name of an earlier one gets its own answers, not the earlier one's KV."""
    words, salt = patient.words(seed), patient.salt()
    body = words.draw(patient.num_words)
    prompt = recalling(body, words.integer(0, len(body)))
    name = f"verify-{patient.run_name()}"
    for path in (*patient.adapter_paths, *patient.adapter_paths[:1]):
        patient.target.load_adapter(name, path)
        try:
            warm = patient.ask(prompt, salt, model=name)
            cold = patient.cold(prompt, model=name)
        finally:
            patient.target.unload_adapter(name)
        yield from patient.compare(
            "reloads", f"an adapter from {path}, under the name of the one before", prompt, cold, warm
        )


def images(patient: Patient, seed: str) -> Iterator[Finding]:
    """The same words about one image, and then about another of the same size, get the answers for the image shown."""
    words, salt = patient.words(seed), patient.salt()
    prompt = recalling(words.draw(30), 0)
    shown = [picture(words) for _ in range(2)]
    cold = [patient.cold(prompt, image=image) for image in shown]
    if cold[0] is not None and cold[1] is not None and patient.tolerance.times(cold[0], cold[1]) <= 1.0:
        patient.measured["images"] = "two images get the same answer, so this model may ignore them"
    for number in (0, 1, 0, 1):
        warm = patient.ask(prompt, salt, image=shown[number])
        what = f"image {number + 1} of two that were shown with the same words"
        yield from patient.compare("images", what, prompt, cold[number], warm)


def _num_shared(first: list[str], second: list[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _has_cold_answers(patient: Patient) -> bool:
    return patient.coldness.by != "never"


def _has_salts(patient: Patient) -> bool:
    return patient.expects_salts and patient.takes_salts


_NEEDS: dict[Callable[[Patient, str], Iterator[Finding]], Callable[[Patient], bool]] = {
    middles: lambda patient: patient.knows_lengths,
    salts: lambda patient: _has_salts(patient) and patient.tells_cached,
    timing: _has_salts,
    usage: lambda patient: patient.tells_cached and patient.knows_lengths,
    cancels: _has_cold_answers,
    adapters: lambda patient: bool(patient.target.adapters),
    reloads: lambda patient: len(patient.adapter_paths) > 1 and patient.coldness.by in {"salt", "reset"},
    images: lambda patient: _has_cold_answers(patient) and patient.target.takes_images(),
}

# The quickest first.
CASES: dict[str, Case] = {
    run.__name__: Case(run, _NEEDS.get(run))
    for run in (
        salts, usage, repeats, adapters, reloads, images, cancels, middles, foreign, edits, prefixes, timing, pressure,
    )
}  # fmt: skip
