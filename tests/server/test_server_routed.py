"""examples/route_by_prefix.py before real servers: prompts go where they are cached, and one server is away."""

import re
import runpy
import socket
from contextlib import ExitStack

import pytest
from server.server_harness import MODEL, ROOT, outcomes, running_server, tiny_loaded

from kvblocks.server.settings import EventSettings

LOCAL = "tcp://127.0.0.1:0"


def test_prompts_go_where_they_are_cached(tiny_folder, capsys):
    model = tiny_loaded(tiny_folder)
    example = runpy.run_path(str(ROOT / "examples" / "route_by_prefix.py"))
    with ExitStack() as stack, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        nowhere = f"127.0.0.1:{bound.getsockname()[1]}"
        workers = {"away": f"http://{nowhere},tcp://{nowhere},tcp://{nowhere}"}
        servers = []
        for name in "ab":
            events = EventSettings(endpoint=LOCAL, replay=LOCAL)
            server = stack.enter_context(running_server(model, events=events))
            publisher = server.service.publisher
            workers[name] = f"{server.url},{publisher.endpoint},{publisher.replay_endpoint}"
            servers.append(server)
        arguments = [part for name, where in workers.items() for part in ("--worker", f"{name}={where}")]
        kettle, whale = "The kettle holds 1.2 litres. " * 4, "Call me Ishmael. " * 8
        prompts = [kettle, whale, f"{kettle}How much?", f"{whale}Who?", f"{kettle}What?"]
        example["main"]([*arguments, "--model", MODEL, "--max-tokens", "2", *prompts])
        said = re.findall(
            r"^(\w+): (\d+) of (\d+) tokens cached, (\d+) expected$", capsys.readouterr().out, re.MULTILINE
        )
        assert [name for name, *_ in said] == ["a", "b", "a", "b", "a"]
        assert [int(cached) > 0 for _, cached, _, _ in said] == [False, False, True, True, True]
        assert all(cached == expected for _, cached, _, expected in said)
        assert [outcomes(server)["finished"] for server in servers] == [3, 2]
        with pytest.raises(LookupError, match="expected a worker that answers, got none"):
            example["main"]([*arguments[:2], "prompt"])
