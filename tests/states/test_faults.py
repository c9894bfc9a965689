"""The walks find each of the faults in `faults.py`."""

import pytest
from states.faults import FAULTS, changed, run

import kvblocks


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_changes_the_sources_as_they_are(name: str) -> None:
    assert changed(name)


@pytest.mark.exhaustive
@pytest.mark.skipif(kvblocks.__compiled__, reason="faults are in sources")
@pytest.mark.parametrize("name", FAULTS)
def test_walks_find_each_fault(name: str) -> None:
    assert run(name, num_rounds=25), f"no walk noticed: {name}"
