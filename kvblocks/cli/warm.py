"""`kvblocks cache warm`: passes a file's prompts to a server one after another, and prints the cost of each."""

import json as json_module
import sys
from collections.abc import Callable
from typing import Any

from kvblocks.arguments import counted
from kvblocks.errors import InvalidArgumentError
from kvblocks.server.errors import ApiError

Json = dict[str, Any]


def read_prompts(text: str, *, raw: bool) -> list[tuple[int, Any]]:
    """Return a file's prompts with their line numbers, starting at 1. raw: the whole file is one prompt.

    The server checks the prompts. Raises InvalidArgumentError for a line that isn't JSON.
    """
    if raw:
        return [(1, {"text": text})]
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                prompts.append((number, json_module.loads(line)))
            except (ValueError, RecursionError) as error:
                raise InvalidArgumentError(f"line {number}: expected JSON, got an error: {error}") from error
    if not prompts:
        raise InvalidArgumentError("expected at least one line with a prompt, got none")
    return prompts


def warm_prompts(
    prompts: list[tuple[int, Any]], ask: Callable[[Json], Json], salt: str | None, *, json: bool = False
) -> None:
    """Have prompts cached, and print a line for each; with json, the server's whole answer.

    Prompts that the server refuses are reported on stderr, and the others go on; InvalidArgumentError is raised at the
    end if any was refused. Any other error of `ask` ends the call, and is raised after printing how many are done.
    """
    done: list[Json] = []
    num_refused = 0
    try:
        for number, prompt in prompts:
            try:
                (cost,) = ask({"prompts": [prompt], "cache_salt": salt})["prompts"]
            except ApiError as error:
                if error.status != 400:
                    raise
                num_refused += 1
                print(f"line {number}: {str(error).removeprefix('prompts[0]: ')}", file=sys.stderr)
                continue
            done.append({"line": number, **cost})
            if not json:
                print(f"line {number}: {_cost_line(cost)}", flush=True)
    except BaseException:
        print(f"interrupted: {len(done)} of {len(prompts)} prompts are cached", file=sys.stderr)
        raise
    finally:
        if json:
            print(json_module.dumps({"prompts": done}))
    if num_refused:
        raise InvalidArgumentError(
            f"expected {counted(len(prompts), 'prompt')} that can be cached, got {num_refused} that can't"
        )


def _cost_line(cost: Json) -> str:
    below = [f"{number} from {tier}" for tier, number in cost["num_cached_tokens_by_tier"].items() if tier != "device"]
    cached = f"{cost['num_cached_tokens']} cached" + (f" ({', '.join(below)})" if below else "")
    return (
        f"{counted(cost['num_prompt_tokens'], 'token')}: {cached}, {cost['num_computed_tokens']} computed,"
        f" {cost['seconds']:.2f} s"
    )
