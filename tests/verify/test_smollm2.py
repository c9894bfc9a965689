"""Each fault is found in a server with a real model, in one turn of the cases: about a minute on a core of its own."""

import pytest
from server.server_harness import running_server
from verify.played_adapters import PlayedAdapters
from verify.proxy import proxy_of
from verify.server_faults import FAULTS

from kvblocks import Sequence
from kvblocks.engine import LoadedModel, intake
from kvblocks.verify.server import Checkup, CheckupOptions, Target
from kvblocks.verify.server.patient import Patient

pytestmark = [pytest.mark.model, pytest.mark.exhaustive, pytest.mark.timeout(900)]


def make_unsalted(*arguments, salt=None, **options):
    """Make a sequence, without its salt."""
    return Sequence(*arguments, **options)


@pytest.fixture(scope="module")
def model(smollm2_folder):
    return LoadedModel.load(smollm2_folder)


def checked(url, **options):
    """Run each case once."""
    with Target(url) as target:
        checkup = Checkup(Patient(target, **options), CheckupOptions())
        checkup.run_turns(1)
    return checkup


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_cache_is_found(model, fault):
    with running_server(model, cache={"num_blocks": 700}) as server:
        fault(server)
        assert checked(server.url).findings


def test_a_salt_that_is_dropped_is_found(model, monkeypatch):
    monkeypatch.setattr(intake, "KVSequence", make_unsalted)
    with running_server(model, cache={"num_blocks": 700}) as server:
        assert checked(server.url).findings


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_stale_adapter_is_found(model, is_listed):
    with running_server(model, cache={"num_blocks": 700}) as server:
        played = PlayedAdapters(server, ["one", "two"] if is_listed else (), is_stale=True)
        with proxy_of(server, played) as url:
            checkup = checked(url, adapter_paths=() if is_listed else ["one", "two"])
    assert {finding.case for finding in checkup.findings} & {"adapters" if is_listed else "reloads"}


def test_a_right_server_passes(model):
    with running_server(model, cache={"num_blocks": 700}) as server:
        assert checked(server.url).findings == []
