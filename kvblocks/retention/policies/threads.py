"""What `SessionsPolicy` knows: sessions, their threads of blocks, and kinds of pauses."""

from collections import OrderedDict
from collections.abc import Hashable

from kvblocks.retention.policies.returns import RECENCY_WEIGHT, Returns, Rhythm

SessionKey = tuple[str | None, Hashable]


class PauseKind:
    """A kind of pause. returns: what was learned about it. paused: its threads by rhythm, each in order of pausing."""

    def __init__(self, recency_weight: float = RECENCY_WEIGHT) -> None:
        self.returns = Returns(recency_weight)
        self.paused: dict[float, OrderedDict[Thread, None]] = {}


class Session:
    """A session. reason: why it pauses; None: not known. last: the thread of its last request."""

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.threads: dict[Thread, None] = {}
        self.waiting: dict[Thread, None] = {}  # those that pause, but are neither left nor set aside
        self.rhythms: dict[PauseKind, Rhythm] = {}
        self.reason: str | None = None
        self.began: float | None = None  # when its last request began
        self.last: Thread | None = None
        self.has_ended = False


class Thread:
    """Free blocks with their depths, the next to evict first.

    kind: that of its pause; None: it doesn't pause. is_open: whether its return is still expected.
    """

    def __init__(self, session: Session | None) -> None:
        self.session = session
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.kind: PauseKind | None = None
        self.is_open = False
        self.rhythm = 0.0
        self.since: float = 0.0
        self.took = 0.0  # how long the request ran that gave the blocks back, 0: not known
        self.number = 0
