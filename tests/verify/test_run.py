"""`verify.run`: managers that are right pass; each fault of one that is not is found, named and shown in few calls."""

import pytest
from verify.toy_cache import FAULTS, ToyCache

import kvblocks
from kvblocks import InvalidArgumentError, verify
from kvblocks.verify.adapters.own import ManagerAdapter
from kvblocks.verify.calls import EndStep, Finish, Free, Grow, Start
from kvblocks.verify.shrink import shrink


def found(fault, seed=1, steps=40_000):
    with pytest.raises(verify.VerificationError) as raised:
        verify.run(lambda num_blocks: ToyCache(num_blocks, fault), steps, seed)
    return raised.value


@pytest.mark.parametrize("make", [ToyCache, ManagerAdapter, lambda blocks: ManagerAdapter(blocks, delays=True)])
def test_a_manager_that_is_right_passes(make):
    report = verify.run(make, 6000, 3)
    assert report.num_steps == 6000
    assert 0 < report.num_hit_tokens < report.num_prompt_tokens
    met = {"ends", "hits", "starts refused", "grows refused", "steps", "steps that died", "resets"}
    assert met <= report.met.keys()
    assert "6000 calls in 15 walks from seed 3: no fault." in str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_named_and_shown_in_few_calls(fault):
    error = found(fault)
    assert error.kind == FAULTS[fault]
    assert str(error).startswith(f"{error.kind}: {error.what}\n  1. a pool of ")
    assert len(error.calls) <= 11, error


def test_equal_seeds_find_the_same():
    assert str(found("no parent")) == str(found("no parent"))
    assert str(found("no parent")) != str(found("no parent", seed=2))


def test_what_it_says_names_what_is_in_the_slot():
    error = found("no salt")
    assert "with salt" in error.what
    assert "computed before the last reset" in found("reset forgets nothing").what


class Forgetful(ManagerAdapter):
    """Our manager as an engine would misuse it: a step that died is freed rather than aborted."""

    def fail_step(self, requests):
        for request in requests:
            self.free(request)
        return True


def test_misusing_our_own_manager_is_found():
    with pytest.raises(verify.VerificationError, match="unwritten KV"):
        verify.run(Forgetful, 20_000)


def test_a_manager_of_several_groups_is_walked_by_its_first_one():
    class Grouped(ManagerAdapter):
        def make(self, num_blocks):
            groups = [kvblocks.FullAttention(self.block_size), kvblocks.FullAttention(self.block_size)]
            return kvblocks.KVCacheManager(2 * num_blocks, groups=groups, eviction="slru")

        def slots(self, request):
            size = self.block_size
            ids = request.state.group_block_ids(0)
            return [block * size + offset for block in ids for offset in range(size)]

        def num_free_slots(self):
            return self.manager.num_free_blocks // 2 * self.block_size

    assert verify.run(Grouped, 2000).num_hit_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps: expected an int of at least 1, got 0"),
        ({"num_blocks": 3}, "num_blocks: expected an int of at least 4, got 3"),
        ({"seed": "x"}, "seed: expected an int, got 'x'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InvalidArgumentError) as raised:
        verify.run(ToyCache, **arguments)
    assert message in str(raised.value)


def test_shrinking_keeps_what_shows_the_fault_and_tries_no_more_than_it_may():
    calls = [Start(str(number), (1, 0, 1), "a", 1) for number in range(20)] + [EndStep(), Free("3"), Finish()]
    shown = shrink(calls, lambda fewer: any(isinstance(call, Start) and call.name == "7" for call in fewer))
    assert shown == [Start("7", (0,), None, 1)]
    tried = []
    shrink(calls, lambda fewer: bool(tried.append(fewer)), max_tries=5)
    assert len(tried) == 5
    assert shrink([Grow("a", (1, 1), 2)], bool) == [Grow("a", (1,), 1)]
