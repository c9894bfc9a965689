"""The bench of agents on the real engine runs at a small size, and the gate saves what agents take from each other."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from bench.engine_cpu import agents


def test_agents_are_run_with_and_without_a_gate(tiny_folder, tmp_path, capsys):
    kept = tmp_path / "agents.json"
    words = "--agents 6 --fitting 2 --turns 3 --rounds 2 --prompt 60 --answer 2 --result 20 --within 0 --pause 0.01"
    agents.main(["--model", str(tiny_folder), *words.split(), "--json", str(kept)])
    found = json.loads(kept.read_text())
    assert found["conditions"]["num_blocks"] == 14  # two sessions of 106 tokens
    assert [(row["seed"], row["gate"]) for row in found["results"]] == [(1, False), (1, True), (2, True), (2, False)]
    assert len({row["num_prompt_tokens"] for row in found["results"]}) == 1
    for row in found["results"]:
        assert 0 < row["computed_share"] <= 1
        assert row["cpu_s"] > 0
        assert 0 < row["delay_mean_s"] <= row["delay_most_s"] <= row["completion_s"]
    assert "no gate" in capsys.readouterr().out


def test_the_script_is_the_same_for_both_runs():
    given = agents.argparse.Namespace(agents=3, turns=4, prompt=5, result=2, within=9.0, pause=1.0)
    one, other = agents.make_agents(given, 1), agents.make_agents(given, 1)
    assert [vars(agent) for agent in one] == [vars(agent) for agent in other]
    assert all(len(agent.results) == len(agent.pauses_s) == 3 for agent in one)
    assert all(0 <= pause <= 4.0 for agent in one for pause in agent.pauses_s)
