"""Puts tokens that only the device knows into a step: those that the step before has drawn.

In the token ids of a step, -1 - i stands for the i-th token that was drawn (`ScheduledChunk.token_ids`).
"""

from torch import Tensor


def feed(token_ids: Tensor, codes: list[int], drawn: Tensor) -> None:
    """Replace the codes in `token_ids` by the tokens that were drawn. Never waits for the device.

    token_ids: integers [at least len(codes)], which begin with `codes` and are 0 or more behind them. drawn: numbers
    [num_draws], on the same device. Decode steps of the same sequences as the step before take one launch.
    """
    number = len(codes)
    if number <= len(drawn) and codes == list(range(-1, -1 - number, -1)):
        token_ids[:number].copy_(drawn[:number])
        return
    is_code = token_ids < 0
    places = (-1 - token_ids).clamp_(min=0)
    token_ids.copy_(drawn.index_select(0, places).to(token_ids.dtype).where(is_code, token_ids))
