"""The session gate: which sessions may take turns, so that the cache can remember the prompts of all that do.

    gate = SessionGate(num_tokens=1_000_000)
    gate.ask("request 1", "session 1", None, prompt_tokens=20_000, cached_tokens=0, now=0.0)
    gate.release(num_busy=0, seconds_per_token=0.0001, now=0.0).admitted  # ("request 1",)

The gate counts tokens and touches no block, so any engine or router may use it, with or without a manager of kvblocks.
Of kvblocks it imports public names only: checks of arguments. `docs/gate.md` says when a gate helps, and what its rules
are. The code, in the order in which to read it:

- `gate.py`: `SessionGate`, the rules, and what it answers;
- `pause_lengths.py`: for how long a paused session keeps its place;
- `rounds.py`: `GateRounds`, when to ask the gate, and what to tell it before.
"""

from kvblocks.gate.gate import HOST_SHARE, Decision, GateStats, SessionGate, SessionKey, Waiting
from kvblocks.gate.rounds import NUM_LOOKED_UP, GateRounds

__all__ = [
    "HOST_SHARE",
    "NUM_LOOKED_UP",
    "Decision",
    "GateRounds",
    "GateStats",
    "SessionGate",
    "SessionKey",
    "Waiting",
]
