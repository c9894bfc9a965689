"""Models by name, for `--groups`: their groups of layers, in blocks of a trace."""

from kvblocks.arguments import shown
from kvblocks.errors import InvalidArgumentError
from kvblocks.groups.kinds import FullAttention, Group, SlidingWindow
from kvblocks.groups.plan import KVLayer, plan

_BF16_BYTES = 2
_GIB = 2**30

MODELS: dict[str, tuple[int, list[KVLayer]]] = {
    # 34 layers with 4 KV heads of 256; for each with full attention, five with a window of 1,024 tokens
    "gemma3-4b": (1024, [KVLayer(0 if (layer + 1) % 6 == 0 else 1, 4, 256) for layer in range(34)]),
}
"""By name: tokens in the window, and the layers, of kind 0 (full attention) or 1 (window)."""


def model_groups(name: str, block_size: int) -> tuple[Group, ...]:
    """Return a model's groups of layers, in which one token stands for a block of `block_size` tokens.

    A hit ends at the end of a block, and the next token sees the window - 1 tokens before it. The window in blocks is
    the number of blocks that these tokens are in. Raises InvalidArgumentError.
    """
    if name not in MODELS:
        raise InvalidArgumentError(f"groups: expected one of {', '.join(MODELS)}, got {shown(name)}")
    window, layers = MODELS[name]
    num_seen = -(-(window - 1) // block_size)
    return plan((FullAttention(1), SlidingWindow(1, num_seen + 1)), layers, _BF16_BYTES, _GIB).groups
