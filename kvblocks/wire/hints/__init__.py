"""KV hints: wishes of an orchestrator's about prefixes, in the envelope of vLLM and Dynamo.

`HintExecutor` (executor) reads an envelope (envelope), finds the prefixes that it names (prefix), carries its actions
out on a manager's pins and tiers (prefetch) within bounds (limits), and keeps what stands of each tenant (book).
docs/wire-hints.md shows how. Needs nothing but what `import kvblocks` does.
"""

from kvblocks.wire.hints.envelope import HintAction, HintAnswer, HintAnswers, HintsEnvelope, Outcome, parse_envelope
from kvblocks.wire.hints.executor import HintExecutor
from kvblocks.wire.hints.limits import HintLimits, HintStats
from kvblocks.wire.hints.prefetch import LoadId

__all__ = [
    "HintAction",
    "HintAnswer",
    "HintAnswers",
    "HintExecutor",
    "HintLimits",
    "HintStats",
    "HintsEnvelope",
    "LoadId",
    "Outcome",
    "parse_envelope",
]
