"""A measure of a call's work that is the same on any machine: the bytecodes that it executes."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import kvblocks

uncompiled = pytest.mark.skipif(
    kvblocks.__compiled__, reason="compiled code can't be traced; the algorithm is the same"
)


def count_bytecodes(function: Callable[[], object]) -> int:
    """Count the bytecodes that a call executes. The count grows as an algorithm's cost does, but misses work in C."""
    num_bytecodes = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_bytecodes
        frame.f_trace_opcodes = True
        num_bytecodes += event == "opcode"
        return count

    previous, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection runs others' callbacks, such as Hypothesis's, and they would be counted
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(previous)
        if collects:
            gc.enable()
    return num_bytecodes
