"""lm-eval's task in examples/lm_eval: what its client reads from the server is what the engine says of each choice.

The client itself is run where KVBLOCKS_LM_EVAL names its command, since it needs an environment of its own.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from server.server_harness import MODEL, running_server, tiny_loaded

from kvblocks.engine import Engine, LoadedModel

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "lm_eval"
LM_EVAL = os.environ.get("KVBLOCKS_LM_EVAL")


def facts():
    """(question, choices, answer) of each line, as the YAML says to read them."""
    lines = [json.loads(line) for line in (FOLDER / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["question"], [f" {choice}" for choice in line["choices"]], line["answer"]) for line in lines]


def accuracy(rows, score):
    """The share of questions whose right choice is the most likely one. score: of (question, choice)."""
    hits = [max(range(len(choices)), key=[score(q, c) for c in choices].__getitem__) == a for q, choices, a in rows]
    return sum(hits) / len(hits)


def direct_scores(model, rows):
    """(question, choice) -> the sum of the choice's log probabilities, and whether each is the likeliest."""
    engine, scores = Engine(model, num_blocks=256, deterministic=True), {}
    pairs = [(question, choice) for question, choices, _ in rows for choice in choices]
    encoded = [model.tokenizer.encode(question + choice) for question, choice in pairs]
    for pair, completion in zip(pairs, engine.generate(encoded, max_tokens=0, prompt_logprobs=1), strict=True):
        own = completion.prompt_logprobs[len(model.tokenizer.encode(pair[0])) :]
        scores[pair] = (sum(one.logprob for one in own), all(one.logprob == one.top[0][1] for one in own))
    return scores


def parse_as_lm_eval(choice, num_context):
    """What lm-eval 0.4.13's `LocalCompletionsAPI.parse_logprobs` does."""
    own = choice["logprobs"]["token_logprobs"][num_context:-1]
    top = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(own), all(one == max(names.values()) for one, names in zip(own, top, strict=True))


def test_its_requests_give_the_engines_own_scores(tiny_folder):
    model = tiny_loaded(tiny_folder)
    rows = facts()[:8]
    expected = direct_scores(model, rows)
    found = {}
    with running_server(model, cache={"deterministic": True}) as server, server.http() as http:
        for question, choices, _ in rows:
            prompts = [
                http.post("/tokenize", json={"prompt": question + choice, "add_special_tokens": False}).json()["tokens"]
                for choice in choices
            ]
            context = len(model.tokenizer.encode(question))
            body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
            answer = http.post("/v1/completions", json={**body, "seed": 1234}).json()
            for choice, text in zip(answer["choices"], choices, strict=True):
                found[question, text] = parse_as_lm_eval(choice, context)
    assert found == expected
    assert accuracy(rows, lambda *pair: found[pair][0]) == accuracy(rows, lambda *pair: expected[pair][0])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(LM_EVAL is None, reason="needs KVBLOCKS_LM_EVAL, the command of an lm-eval in its own environment")
def test_lm_eval_itself_finds_the_same_accuracy(smollm2_folder, tmp_path):
    model = LoadedModel.load(smollm2_folder)
    scores = direct_scores(model, facts())
    with running_server(model, cache={"deterministic": True}) as server:
        arguments = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
        command = [LM_EVAL, "--model", "local-completions", "--tasks", "kvblocks_facts", "--include_path", "."]
        output = ["--model_args", arguments, "--output_path", str(tmp_path), "--log_samples"]
        environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        subprocess.run([*command, *output], cwd=FOLDER, env=environment, check=True, timeout=170)
    (results,) = tmp_path.glob("**/results_*.json")
    found = json.loads(results.read_text())["results"]["kvblocks_facts"]
    assert found["acc,none"] == accuracy(facts(), lambda *pair: scores[pair][0])
    (samples,) = tmp_path.glob("**/samples_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        for (logprob, is_likeliest), choice in zip(sample["filtered_resps"], choices, strict=True):
            expected, was_likeliest = scores[question, f" {choice}"]
            assert float(logprob) == pytest.approx(expected, abs=1e-9)
            assert (str(is_likeliest) == "True") == was_likeliest
