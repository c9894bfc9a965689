"""vLLM's own scheduler-level tests, with kvblocks in place of its manager: all pass but those in `refused`.

They say what vLLM expects of a manager in vLLM's own words.
"""

import pytest

from integrations.vllm.own_tests import copy_tests, judge, listed, run, sources
from integrations.vllm.refused import refused

NAMES = listed()
MIN_PASSED = 262  # of 282, as promised; the list has grown since


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of vLLM's tests."""
    found = sources()
    if found is None:
        pytest.skip("needs vLLM's sources, which `make test-vllm` fetches; VLLM_SOURCES may name their folder")
    folder = tmp_path_factory.mktemp("own-tests")
    copy_tests(found, folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """How each of them ends with our schedulers in place of vLLM's."""
    return run(folder, NAMES, swaps=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_passes_what_is_listed_with_its_own_manager(folder):
    assert judge(NAMES, {}, run(folder, NAMES, swaps=False)) == []


@pytest.mark.timeout(1800)
def test_with_ours_all_pass_but_what_is_refused(outcomes):
    problems = judge(NAMES, refused(NAMES), outcomes)
    assert not problems, "\n" + "\n".join(problems)


def test_as_many_pass_as_promised(outcomes, capsys):
    num_passed = sum(outcome == "passed" for outcome in outcomes.values())
    with capsys.disabled():
        print(f"\nof vLLM's own {len(NAMES)} scheduler-level tests {num_passed} pass with kvblocks")
    assert num_passed * 282 >= MIN_PASSED * len(NAMES)


def test_the_list_is_long_enough():
    assert len(NAMES) == len(set(NAMES)) >= 282


@pytest.mark.parametrize(
    ("reasons", "outcomes", "problem"),
    [
        ({}, {"a": "passed", "b": "passed"}, None),
        ({"b": "why"}, {"a": "passed", "b": "KeyError"}, None),
        ({"b": "why"}, {"a": "passed", "b": "passed"}, "b: passes, though it is listed as refused: why"),
        ({}, {"a": "KeyError", "b": "passed"}, "a: KeyError"),
        ({}, {"a": "passed"}, "b: did not run"),
        ({"c": "why"}, {"a": "passed", "b": "passed"}, "c: refused, but vLLM has no such test"),
    ],
)
def test_what_is_not_as_it_is_said_to_be_is_a_problem(reasons, outcomes, problem):
    assert judge(["a", "b"], reasons, outcomes) == ([problem] if problem else [])


def test_a_refusal_of_no_test_is_an_error():
    with pytest.raises(ValueError, match="no such tests"):
        refused(NAMES[:1])
