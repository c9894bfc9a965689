"""What a query of each kind of layers sees, token by token: the specification that `first_seen` is compared with."""

from kvblocks import ChunkedLocal, FullAttention, Group, Scratch, SlidingWindow


def sees(group: Group, position: int, token: int) -> bool:
    """Whether a query at `position` sees an earlier token, or its own."""
    match group:
        case FullAttention():
            return True
        case Scratch():  # what is before a token is there in another form, if at all
            return token == position
        case SlidingWindow(window=window):
            return token > position - window
        case ChunkedLocal(chunk_size=chunk_size):
            return token // chunk_size == position // chunk_size
    raise TypeError(group)


def sees_all(group: Group) -> bool:
    return sees(group, 1_000_000, 0)


def first_seen(group: Group, position: int) -> int:
    return min(token for token in range(position + 1) if sees(group, position, token))
