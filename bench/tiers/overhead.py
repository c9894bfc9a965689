"""The cost of tiers where no prompt repeats: the same prompts with and without tiers.

One contestant takes part twice: the difference between its two results is noise.
"""

import random
from time import perf_counter, process_time

from bench.tiers.first_token import folder
from bench.timing import Spread
from kvblocks.engine.engine import Engine
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.engine.tiers.options import TierOptions

CONTESTANTS = ("without", "host", "without, again", "host and disk")


def time_overhead(
    model: LoadedModel, num_rounds: int, num_prompts: int = 4, num_tokens: int = 256, max_tokens: int = 16
) -> dict[str, dict[str, Spread]]:
    """Return seconds per round, "wall" and "cpu", by contestant. The first round doesn't count.

    A round is `num_prompts` prompts of `num_tokens` tokens at once, each answered with `max_tokens` tokens. The pools
    hold two rounds.
    """
    chooser = random.Random(2)
    size = {"num_blocks": 2 * num_prompts * (num_tokens + max_tokens) // 16 + 1}
    samples = {kind: {name: list[float]() for name in CONTESTANTS} for kind in ("wall", "cpu")}
    with folder() as path:
        engines = {
            "without": Engine(model, **size),
            "host": Engine(model, tiers=["host:256MiB"], **size),
            "without, again": Engine(model, **size),
            "host and disk": Engine(model, tiers=["host:256MiB", TierOptions(f"disk:{path}", "1GiB")], **size),
        }
        for number in range(num_rounds + 1):
            prompts = [
                [chooser.randrange(2, model.config.vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)
            ]
            for name in chooser.sample(CONTESTANTS, len(CONTESTANTS)):
                wall, cpu = perf_counter(), process_time()
                engines[name].generate(prompts, max_tokens=max_tokens, ignore_eos=True)
                while engines[name].has_work:
                    engines[name].step()
                took = {"wall": perf_counter() - wall, "cpu": process_time() - cpu}
                for kind, value in took.items():
                    if number:
                        samples[kind][name].append(value)
        for engine in engines.values():
            engine.close()
    return {kind: {name: Spread(values) for name, values in rows.items()} for kind, rows in samples.items()}
