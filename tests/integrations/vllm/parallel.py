"""A tiny model on two tensor-parallel ranks: `python -m integrations.vllm.parallel`.

The answer is a line of JSON behind MARK: the cached tokens of two equal prompts, and whether their answers are equal.
"""

import json
from typing import Any

from integrations.vllm.one_after_another import MARK, model_folder

TELLING = "integrations.vllm.telling.TellingScheduler"


def main() -> None:
    """Run it, and print the answer."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=model_folder(),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=256,
        num_gpu_blocks_override=50,
        tensor_parallel_size=2,
        scheduler_cls=TELLING,
        disable_log_stats=True,
    )
    prompt: Any = {"prompt_token_ids": list(range(100))}
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0)
    answers = [model.generate([prompt], params, use_tqdm=False)[0] for _ in range(2)]
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    result = {"cached": [answer.num_cached_tokens for answer in answers], "equal": tokens[0] == tokens[1] != []}
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
