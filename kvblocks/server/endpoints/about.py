"""Endpoints that describe the server and its model, under the names that the routers of vLLM and SGLang call."""

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kvblocks import __version__
from kvblocks.server.body.fields import show
from kvblocks.server.errors import ApiError
from kvblocks.server.service import Service
from kvblocks.server.wire import Json, json_response


class About:
    """The endpoints about one service and its model. names: the model's names; answers show the first one."""

    def __init__(self, service: Service, names: Sequence[str]) -> None:
        self._service = service
        self._names = names
        self._created = int(time.time())

    async def version(self, request: Request) -> Response:
        """The version of kvblocks."""
        del request
        return json_response({"version": __version__})

    async def models(self, request: Request) -> Response:
        """List the one model, once for each of its names."""
        del request
        return json_response({"object": "list", "data": [self._model_json(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """The model, by one of its names."""
        name = request.path_params["name"]
        check_model(self._names, name)
        return json_response(self._model_json(name))

    async def model_info(self, request: Request) -> Response:
        """The model, in SGLang's format."""
        del request
        model = self._service.engine.model
        return json_response(
            {
                "model_path": self._names[0],
                "tokenizer_path": self._names[0],
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "model_type": model.config.architecture.name,
                "max_model_len": model.config.max_position_embeddings,
                "vocab_size": model.config.vocab_size,
                "dtype": str(model.dtype).removeprefix("torch."),
                "has_tokenizer": model.tokenizer is not None,
                "has_chat_template": model.tokenizer is not None and model.tokenizer.has_chat_template,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """The settings that a router may need, under SGLang's names, and the size of the pool."""
        del request
        service = self._service
        manager, limits = service.engine.manager, service.engine.limits
        return json_response(
            {
                "version": __version__,
                "model_path": self._names[0],
                "served_model_name": self._names[0],
                "served_model_names": list(self._names),
                "tokenizer_path": self._names[0],
                "context_length": service.engine.model.config.max_position_embeddings,
                "page_size": manager.block_size,
                "max_total_num_tokens": manager.num_blocks * manager.block_size,
                "max_running_requests": limits.max_num_seqs,
                "chunked_prefill_size": limits.max_num_batched_tokens,
                "max_requests": service.settings.max_requests,
                "disable_radix_cache": not manager.enable_caching,
                "tp_size": 1,
                "dp_size": 1,
                "disaggregation_mode": "null",
                "status": "ready" if service.is_healthy else "stopping",
                "num_blocks": manager.num_blocks,
                "tiers": {tier.name: tier.num_blocks for tier in manager.tiers},
            }
        )

    async def embeddings(self, request: Request) -> Response:
        """Refused: this server generates text."""
        del request
        raise ApiError(
            404,
            "expected /v1/chat/completions, /v1/responses, /v1/messages or /v1/completions, got /v1/embeddings:"
            " this server generates text and has no embeddings",
            code="no_embeddings",
        )

    def _model_json(self, name: str) -> Json:
        context = self._service.engine.model.config.max_position_embeddings
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvblocks",
            "root": self._names[0],
            "max_model_len": context,
        }


def check_model(names: Sequence[str], name: str | None) -> None:
    """Raise ApiError for a name that isn't served. None (no name) is accepted."""
    if name is not None and name not in names:
        known = repr(names[0]) if len(names) == 1 else f"one of {', '.join(map(repr, names))}"
        suffix = ", the one that is served" if len(names) == 1 else ""
        raise ApiError(404, f"model: expected {known}{suffix}, got {show(name)}", param="model", code="model_not_found")
