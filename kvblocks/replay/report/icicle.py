"""The prefix structure as an icicle picture: the tree of all prompts, from the top down.

A run of blocks is a rectangle. Its width is the share of the requests that have it, and its height is its number of
blocks, so its area is its share of all references. What is below a rectangle continues its prefix.
"""

from collections.abc import Iterator

from kvblocks.arguments import counted
from kvblocks.replay.report.axes import Frame, Scale, text, ticks, width_of, y_axis
from kvblocks.replay.report.charts import WIDE, Kind, part, picture
from kvblocks.replay.report.markup import Attributes, Element, count, element, label
from kvblocks.replay.result import PrefixNode

KINDS = [Kind("shared by several sessions", 0), Kind("of one session alone", 4)]
"""The kinds of runs."""
LEAST_WIDTH = 0.5
"""In pixels. Narrower runs are left out, with all below them."""
LEAST_PATTERN = 24.0
"""In pixels. Narrower runs have neither pattern nor edges."""


def icicle(root: PrefixNode, width: int) -> Element:
    """Return the picture. O(nodes)."""
    height = 360 if width >= WIDE else 400
    frame = Frame(40.0, 24.0, width - 2.0, height - 8.0)
    each = (frame.right - frame.left) / max(1, root.num_requests)
    drawn = [(node, x) for node, x in _places(root, frame.left, each) if node.num_requests * each >= LEAST_WIDTH]
    deepest = max((node.depth + node.num_blocks for node, _ in drawn), default=1)
    scale = Scale(0.0, float(max(1, deepest)), frame.top, frame.bottom)
    children = [text(2, 12, "blocks from the beginning of the prompt", kind="name")]
    children += y_axis(frame, scale, ticks(0.0, scale.high, 6))
    children += [_run(node, x, node.num_requests * each, scale) for node, x in drawn if node.num_blocks]
    return picture("The prefix structure: how many requests share how many blocks", width, height, children)


def _places(root: PrefixNode, left: float, each: float) -> Iterator[tuple[PrefixNode, float]]:
    """Yield each node with the place where it begins. each: the width of a request."""
    waiting = [(root, left)]
    while waiting:
        node, x = waiting.pop()
        yield node, x
        for child in node.children:
            waiting.append((child, x))
            x += child.num_requests * each


def walk(root: PrefixNode) -> Iterator[PrefixNode]:
    """Yield a node and all nodes below it, parents first."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


def says(node: PrefixNode) -> str:
    """Return a description of a run."""
    blocks = f"blocks {count(node.depth)} to {count(node.depth + node.num_blocks - 1)}"
    requests, sessions = counted(node.num_requests, "request", ","), counted(node.num_sessions, "session", ",")
    return f"{label(node.label)}: {blocks}, {requests} of {sessions}"


def _run(node: PrefixNode, x: float, wide: float, scale: Scale) -> Element:
    top, bottom = scale(node.depth), scale(node.depth + node.num_blocks)
    made = part(x, top, (wide, max(0.5, bottom - top)), KINDS[node.num_sessions <= 1].style, says(node))
    if wide < LEAST_PATTERN:  # a pattern or an edge would cover all of it
        made.remove(made[1])
        made[0].set("class", f"{made[0].get('class')} thin")
    name = label(node.label)
    if bottom - top >= 18 and wide >= width_of(name) + 16:
        at: Attributes = {"x": x + 4, "y": top + 2, "width": width_of(name) + 6, "height": 15, "class": "plate"}
        made.insert(2, element("rect", at))
        made.insert(3, text(x + 7, top + 14, name))
    return made
