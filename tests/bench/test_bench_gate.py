"""The bench of the session gate runs, on a small trace, and keeps what it finds."""

import json

import numpy as np

from bench.replay import gate
from kvblocks.replay.readers import read_trace


def write_trace(path, num_sessions=8, num_turns=6):
    lines = [
        {"timestamp": 1000 * (9 * turn + session), "input_length": 512 * (8 + turn), "output_length": 20}
        | {"hash_ids": [*range(20 * session, 20 * session + 8 + turn)]}
        for turn in range(num_turns)
        for session in range(num_sessions)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_trace_without_sessions_gets_them(tmp_path):
    write_trace(tmp_path / "trace.jsonl")
    trace = gate.chain(read_trace(tmp_path / "trace.jsonl", 512))
    assert len(trace.session_names) == 8
    assert trace.sessions.tolist() == [*range(8)] * 6
    assert np.all(gate.pauses(trace, "agents")[8:] == 2.0), "the limit after any reason but a tool call"


def test_it_keeps_a_row_for_each_load_seed_and_entrance(tmp_path, capsys):
    write_trace(tmp_path / "trace.jsonl")
    rows = tmp_path / "rows.json"
    words = "--kind mooncake --pool 40000 --servers 8B --gaps recorded --loads 1 0.5 --seeds 1 2 --caps 2 4"
    gate.main([str(tmp_path / "trace.jsonl"), *words.split(), "--json", str(rows)])
    kept = json.loads(rows.read_text(encoding="utf-8"))["results"]
    found = [(row["load"], row["seed"], row["entrance"]) for row in kept]
    entrances = ["none", "gate", "infinite"]
    wanted = [(1.0, seed, name) for seed in (1, 2) for name in (*entrances, "tuned cap")]
    assert found == wanted + [(0.5, seed, name) for seed in (1, 2) for name in entrances]
    assert "delay mean" in capsys.readouterr().out


def test_users_of_a_closed_loop_begin_another_session_when_one_has_ended(tmp_path):
    write_trace(tmp_path / "trace.jsonl")
    trace = gate.chain(read_trace(tmp_path / "trace.jsonl", 512))
    times = gate.beginnings(trace, 100.0, 1), gate.pauses(trace, "recorded")
    runs = [gate.ClosedRun(users, trace, times, 400, "none", gate.SERVERS["8B"], None) for users in (1, 4)]
    for run in runs:
        assert run.run().num_sessions == 8
    assert runs[0].sessions_per_hour() < runs[1].sessions_per_hour()
