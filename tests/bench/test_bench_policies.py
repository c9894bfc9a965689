"""The bench of what eviction policies cost runs and prints what it says. No test asks how long it took."""

import json
import subprocess
import sys
from pathlib import Path

from kvblocks.retention.policies import NAMED

ROOT = Path(__file__).resolve().parents[2]


def test_it_prints_json_and_nothing_else():
    command = [sys.executable, "-m", "bench.core.policy_cost", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert {(row["item"], row["policy"]) for row in rows} == {
        (item, policy)
        for item in ("allocate", "free", "hit", "long hit")
        for policy in ("none", *NAMED, "sessions, none told", "users")
    }
    assert all(0 < row["min"] <= row["median"] <= row["max"] for row in rows)
