"""A connector that has the first tokens of some prompts, and a worker that brings them, or fails to."""

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from bench.vllm.schedulers import Settings, make_kv_cache_config, make_vllm_config
from integrations.vllm.stand import BLOCK, Stand
from integrations.vllm.worker import WrongReadError


class ZeroedConfig(KVCacheConfig):
    """A configuration whose new blocks are to be zeroed, as with layers of several precisions."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Yes."""
        return True


class Metadata(KVConnectorMetadata):
    """Nothing that a worker would need."""


class Loader(KVConnectorBase_V1):
    """Has the first `num_tokens` tokens of the requests named in `names`."""

    num_tokens = 4 * BLOCK
    is_async = False
    names: tuple[str, ...] = ()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        number = self.num_tokens - num_computed_tokens if request.request_id in self.names else 0
        return (number, self.is_async) if number > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def make_stand(
    whose: str,
    settings: Settings | None = None,
    policy: str = "recompute",
    needs_zeroing: bool = False,
    role: str = "kv_both",
    **what: Any,
) -> Stand:
    """Return a stand whose scheduler has a Loader. what: the Loader's attributes."""
    settings = settings or Settings()
    config = make_vllm_config(settings)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="Loader",
        kv_connector_module_path=__name__,
        kv_role=role,
        kv_load_failure_policy=policy,
    )
    config.cache_config.kv_cache_layout = "LBNHC"
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    groups = make_kv_cache_config(settings, config)
    if needs_zeroing:
        groups.__class__ = ZeroedConfig
    stand = Stand(settings, whose, config=config, groups=groups)
    connector: Any = stand.scheduler.connector
    for name, value in what.items():
        setattr(connector, name, value)
    return stand


def load(stand: Stand, name: str, num_tokens: int) -> None:
    """Write the first tokens of a request into its blocks, as the connector's worker does."""
    (table,) = stand.manager.get_block_ids(name)
    stand.worker.load(stand.requests[name], table, num_tokens)


class LoadingWorker:
    """Brings a sync load before its step, except blocks whose numbers are in `failing`."""

    def __init__(self, stand: Stand, names: tuple[str, ...], num_tokens: int, failing: tuple[int, ...] = ()) -> None:
        self.stand, self.num_tokens = stand, num_tokens
        self.names, self.failing = set(names), failing
        self.execute = stand.worker.execute
        setattr(stand.worker, "execute", self.load_and_execute)  # noqa: B010

    def load_and_execute(self, step: Any, requests: Any) -> Any:
        invalid: set[int] = set()
        for name in self.names & set(step.output.num_scheduled_tokens):
            (table,) = step.tables[name]
            self.stand.worker.load(self.stand.requests[name], table, self.num_tokens)
            invalid |= {table[number] for number in self.failing}
            self.names.discard(name)
        self.stand.worker.spoil(invalid)
        if invalid:
            self.stand.loads.append(KVConnectorOutput(invalid_block_ids=invalid))
            try:
                return self.execute(step, requests)
            except WrongReadError:  # what it says of this step is thrown away
                return dict.fromkeys(step.output.num_scheduled_tokens, 0)
        return self.execute(step, requests)
