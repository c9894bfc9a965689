"""examples/vllm/disk_tier.json configures the disk tier: vLLM reads it as its users would pass it."""

import json
from pathlib import Path

from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from integrations.vllm.disk.stand import make_spec
from kvblocks.integrations.vllm import DiskTier

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "vllm" / "disk_tier.json"


def test_the_example_configures_the_tier(tmp_path):
    config = KVTransferConfig(**json.loads(EXAMPLE.read_text(encoding="utf-8")))
    extra = config.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(extra) is TieringOffloadingSpec
    (tier,) = extra["secondary_tiers"]
    manager = make_spec(tiers=[tier | {"root_dir": str(tmp_path)}]).get_manager()
    assert type(manager.secondary_tiers[0]) is DiskTier
    manager.shutdown()
