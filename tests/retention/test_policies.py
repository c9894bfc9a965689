"""Eviction policies: the contract with the box's, with random and with malicious ones."""

from typing import Any

import pytest
from model.policy_contract import Any_, Beginnings, Malicious, check_policy, check_policy_in_groups

from kvblocks import FullAttention, SlidingWindow
from kvblocks.retention.policies import NAMED

POLICIES: dict[str, Any] = {**NAMED, "any": Any_, "beginnings": Beginnings, "malicious": Malicious}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "options"),
    [(24, 2, {"debug": True, "enable_events": True}), (14, 1, {"first_block_id": 2})],
)
def test_manager_and_dumb_model_agree(name: str, num_blocks: int, block_size: int, options: dict[str, Any]) -> None:
    contract = check_policy(POLICIES[name], num_blocks, block_size, 3000, seed=10 * num_blocks + block_size, **options)
    print(contract.counts)
