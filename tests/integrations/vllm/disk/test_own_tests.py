"""vLLM's own tests of tiers, with `DiskTier` in the place of vLLM's tiers: all pass but those in REFUSED.

They say in vLLM's own words what it expects of a tier.
"""

import pytest

from integrations.vllm.disk.own import FOLDER, REFUSED, run
from integrations.vllm.own_tests import copy_tests, judge, sources

LEAST = 150  # of 168


@pytest.mark.timeout(600)
def test_vllms_own_tests_of_tiers_pass_but_for_those_refused(tmp_path, capsys):
    found = sources()
    if found is None:
        pytest.skip("needs vLLM's sources, which `make test-vllm` fetches; VLLM_SOURCES may name their folder")
    copy_tests(found, tmp_path)
    outcomes = run(tmp_path)
    problems = judge(list(outcomes), {f"{FOLDER}/{name}": reason for name, reason in REFUSED.items()}, outcomes)
    assert not problems, "\n" + "\n".join(problems)
    num_passed = sum(outcome == "passed" for outcome in outcomes.values())
    with capsys.disabled():
        print(f"\nof vLLM's own {len(outcomes)} tests of tiers {num_passed} pass with kvblocks' disk")
    assert num_passed >= LEAST
