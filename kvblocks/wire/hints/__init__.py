"""KV hints: what an orchestrator asks for about prefixes, in the envelope of vLLM and Dynamo.

`HintExecutor` (executor) reads an envelope (envelope) and finds the prefixes that it names (prefix). It carries out the
actions on a manager's pins and tiers (prefetch) within limits (limits), and keeps a record of each tenant's pins and
prefetches (book). docs/wire-hints.md shows how. Imports only what `import kvblocks` does.
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
