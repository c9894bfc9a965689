"""Puts tokens that only the device knows into a step: those that the previous step has drawn.

In the token ids of a step, -1 - i stands for the drawn token with index i (`ScheduledChunk.token_ids`).
"""

from torch import Tensor


def feed(token_ids: Tensor, codes: list[int], drawn: Tensor) -> None:
    """Replace the codes in `token_ids` by the tokens that were drawn. Never waits for the device.

    token_ids: integers [at least len(codes)] that begin with `codes`; those after them aren't negative. drawn: numbers
    [num_draws], on the same device. A decode step of the same sequences as the previous step takes one launch.
    """
    number = len(codes)
    if number <= len(drawn) and codes == list(range(-1, -1 - number, -1)):
        token_ids[:number].copy_(drawn[:number])
        return
    is_code = token_ids < 0
    places = (-1 - token_ids).clamp_(min=0)
    token_ids.copy_(drawn.index_select(0, places).to(token_ids.dtype).where(is_code, token_ids))
