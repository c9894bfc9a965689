"""The tests of `make test` find each fault that a room's `faults.py` puts into the code."""

import core.faults
import gate.faults
import pytest
import states.faults
import tiers.faults
from model.faults import changed, first_failure

import kvblocks

FAULTS = [(room, name) for room in (core.faults, tiers.faults, states.faults, gate.faults) for name in room.FAULTS]
IDS = [name for _, name in FAULTS]


@pytest.mark.parametrize(("room", "name"), FAULTS, ids=IDS)
def test_each_fault_changes_the_sources_as_they_are(room, name):
    assert changed(name, room.FAULTS[name])


@pytest.mark.exhaustive
@pytest.mark.skipif(kvblocks.__compiled__, reason="faults are in sources")
@pytest.mark.parametrize(("room", "name"), FAULTS, ids=IDS)
def test_a_test_of_make_test_finds_each_fault(room, name):
    assert first_failure(name, room.FAULTS[name], room.TESTS), f"no test noticed: {name}"
