"""The tests of `make test` find each of the faults in `faults.py`."""

import pytest
from model.faults import changed, first_failure
from tiers.faults import FAULTS, TESTS

import kvblocks


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_changes_the_sources_as_they_are(name: str) -> None:
    assert changed(name, FAULTS[name])


@pytest.mark.exhaustive
@pytest.mark.skipif(kvblocks.__compiled__, reason="faults are in sources")
@pytest.mark.parametrize("name", FAULTS)
def test_a_test_of_make_test_finds_each_fault(name: str) -> None:
    assert first_failure(name, FAULTS[name], TESTS), f"no test noticed: {name}"
