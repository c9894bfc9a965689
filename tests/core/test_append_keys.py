"""Extra keys of tokens that are appended: they belong to the prefix as if they had been given at first.

A session's later turn may bring an image. If its key were lost, a prompt with another image would hit the same blocks.
"""

import pytest

from kvblocks import InvalidArgumentError, InvalidTokensError, KVCacheManager, Sequence


def test_keys_of_appended_tokens_are_part_of_the_prefix_as_if_given_at_first():
    manager = KVCacheManager(20, 4)
    grown = Sequence("grown", [1] * 6, salt="s", extra_keys=[(2, 6, "cat")])
    manager.allocate_slots(grown)
    grown.append_tokens([2] * 7, extra_keys=[(7, 12, "dog")])
    manager.allocate_slots(grown)
    assert grown.extra_keys == ((2, 6, "cat"), (7, 12, "dog")) and grown.salt == "s"
    tokens = grown.token_ids()
    whole = Sequence("whole", tokens, salt="s", extra_keys=grown.extra_keys)
    assert manager.get_computed_blocks(whole).num_tokens == 12
    other = Sequence("other", tokens, salt="s", extra_keys=[(2, 6, "cat"), (7, 12, "cow")])
    assert manager.get_computed_blocks(other).num_tokens == 4
    assert manager.inspect.block_hashes(grown) == manager.inspect.block_hashes(whole)


def test_a_child_keeps_its_own_keys():
    manager = KVCacheManager(20, 4)
    first = Sequence("first", [1] * 4)
    manager.allocate_slots(first)
    child = manager.fork(first, "child")
    first.append_tokens([2] * 4, extra_keys=[(4, 8, "dog")])
    assert child.extra_keys == () and first.extra_keys == ((4, 8, "dog"),)


@pytest.mark.parametrize("keys", [[(3, 6, "dog")], [(4, 9, "dog")], [(4, 4, "dog")], [(4, 6, "")], 7])
def test_keys_of_other_tokens_are_refused_and_nothing_is_appended(keys):
    sequence = Sequence("one", [1] * 4, extra_keys=[(0, 2, "cat")])
    with pytest.raises(InvalidArgumentError):
        sequence.append_tokens([2] * 4, extra_keys=keys)
    with pytest.raises(InvalidTokensError):
        sequence.append_tokens([-1], extra_keys=[(4, 5, "dog")])
    assert sequence.num_tokens == 4 and sequence.extra_keys == ((0, 2, "cat"),)
    sequence.append_tokens([2], extra_keys=[])
    assert sequence.num_tokens == 5 and sequence.extra_keys == ((0, 2, "cat"),)
