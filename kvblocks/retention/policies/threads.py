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
    """A session."""

    def __init__(self, key: SessionKey) -> None:
        self.key = key
        self.threads: dict[Thread, None] = {}
        self.waiting: dict[Thread, None] = {}
        """Those of its threads that pause, but are neither left nor set aside."""
        self.rhythms: dict[PauseKind, Rhythm] = {}
        self.reason: str | None = None
        """Why it pauses; None: not known."""
        self.began: float | None = None
        """When its last request began."""
        self.last: Thread | None = None
        """The thread of its last request."""
        self.has_ended = False


class Thread:
    """Free blocks that one request of a session gave back."""

    def __init__(self, session: Session | None) -> None:
        self.session = session
        self.blocks: OrderedDict[int, int] = OrderedDict()
        """Its blocks' depths, the next block to evict first."""
        self.kind: PauseKind | None = None
        """The kind of its pause; None: it doesn't pause."""
        self.is_open = False
        """Whether its return is still expected."""
        self.rhythm = 0.0
        self.since: float = 0.0
        self.took = 0.0
        """How long the request ran that gave the blocks back; 0: not known."""
        self.number = 0
