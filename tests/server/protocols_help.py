"""Helps tests of protocols: reads named events, and a server's answers."""

import json


def events(response):
    """The events of a stream, as (name, value)."""
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = block.split("\n")
        assert len(lines) == 2, block
        assert lines[0].startswith("event: "), block
        assert lines[1].startswith("data: "), block
        found.append((lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))))
    return found
