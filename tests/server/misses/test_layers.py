"""Real models with windows or states, over HTTP: a prompt misses though layers with full attention have it cached."""

import pytest
from engine.hybrid_models import load_tiny
from engine.small_models import GEMMA3, random_tokens, random_weights
from server.server_harness import running_server

from kvblocks.cli import app as cli
from kvblocks.engine import LoadedModel


def ask(http, prompt):
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
    assert response.status_code == 200, response.text
    return response.json()


def explain(http, **body):
    response = http.post("/v1/cache/explain", json=body)
    assert response.status_code == 200, response.text
    return response.json()["prompts"][0]


def said(capsys, server):
    with pytest.raises(SystemExit):
        cli.main(["cache", "explain", "--last", "--url", server.url])
    return capsys.readouterr().out


def test_a_window_that_was_evicted(capsys):
    """Gemma 3's layers: what left the windows goes first when another prompt needs blocks."""
    model = LoadedModel(GEMMA3, random_weights(GEMMA3))
    long = random_tokens(GEMMA3, 200, seed=1)
    with running_server(model, cache={"num_blocks": 60}) as server, server.http() as http:
        ask(http, long)
        ask(http, random_tokens(GEMMA3, 100, seed=2))
        assert explain(http, token_ids=long)["cache"]["reason"] == "hit"  # its last window is there
        again = ask(http, long[:100] + random_tokens(GEMMA3, 20, seed=3))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cache = explain(http, request_id=again["id"])["cache"]
        assert (cache["reason"], cache["kind"], cache["missing_tokens"]) == (
            "window_missing",
            "a window of 27",
            [80, 96],
        )
        assert (cache["removed"], cache["evicted_from"], cache["still_in"]) == ("evicted", "device", [])
        assert cache["seconds_since"] >= 0
        lines = said(capsys, server)
        assert (
            "6 are in the primary one, but group 0 (a window of 27) lacks tokens 80 to 95; they were evicted" in lines
        )
        assert "reason: layers with a window lack tokens that a longer hit needs" in lines


@pytest.mark.parametrize("model_type", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.exhaustive)])
def test_a_state_that_nobody_saved_there(tmp_path, capsys, model_type):
    model = load_tiny(tmp_path, model_type)
    long = random_tokens(model.config, 200, seed=1)
    with running_server(model, cache={"num_blocks": 200}) as server, server.http() as http:
        ask(http, long)
        parting = [long[:100] + random_tokens(model.config, 20, seed=seed) for seed in (2, 3)]
        first = ask(http, parting[0])
        cache = explain(http, request_id=first["id"])["cache"]
        assert (cache["reason"], cache["kind"], cache["missing_tokens"]) == (
            "state_missing",
            "a recurrent state",
            [0, 96],
        )
        assert cache["num_cached_blocks"] == 0
        assert "removed" not in cache
        assert "reason: layers with a recurrent state have no checkpoint there" in said(capsys, server)
        second = ask(http, parting[1])  # now one was saved where the two part
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert explain(http, request_id=second["id"])["cache"]["reason"] == "never_cached"
