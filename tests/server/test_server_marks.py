"""A server of a model with recurrent states: where the system prompt of a chat ends, its state is saved."""

import json
import shutil

import pytest
from engine.hybrid_models import save_tiny
from server.server_harness import running_server

from kvblocks.engine import LoadedModel

SYSTEM = "You are the assistant of a small company that makes one product. " * 4
TOOL = {"type": "function", "function": {"name": "look_up", "description": SYSTEM, "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_folder):
    folder = tmp_path_factory.mktemp("hybrid")
    vocab_size = json.loads((tiny_folder / "config.json").read_text())["vocab_size"]
    save_tiny(folder, "lfm2", vocab_size=vocab_size, max_position_embeddings=4096)
    for file in tiny_folder.glob("*token*"):
        shutil.copy(file, folder)
    for file in tiny_folder.glob("*.jinja"):
        shutil.copy(file, folder)
    with running_server(LoadedModel.load(folder), cache={"num_blocks": 2000}) as running:
        yield running


def ask(client, *messages, **options):
    """Returns how many tokens of the prompt were cached, and how many it has."""
    options = {"model": "tiny", "max_tokens": 2, "temperature": 0} | options
    usage = client.chat.completions.create(messages=list(messages), **options).usage
    return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


def say(role, content):
    return {"role": role, "content": content}


def test_the_second_chat_with_a_system_prompt_begins_behind_it(server):
    client, system = server.client(), say("system", SYSTEM)
    assert ask(client, system, say("user", "a question about the kettle and its cable, " * 8))[0] == 0
    cached, length = ask(client, system, say("user", "Where is my parcel? " * 16))
    size = server.engine.manager.block_size
    assert cached % size == 0
    shared = server.engine.model.tokenizer.apply_chat_template([system, say("user", "Z")], add_generation_prompt=False)
    assert len(shared) - size - 8 <= cached <= len(shared) < length, "where the user's text begins, in whole blocks"


def test_what_a_template_writes_of_tools_is_part_of_it(server):
    client = server.client()
    assert ask(client, say("user", "one thing that is quite long, " * 8), tools=[TOOL])[0] == 0
    assert ask(client, say("user", "Something else, as long as it, " * 8), tools=[TOOL])[0] > 100


def test_a_chat_without_a_system_prompt_marks_nothing(server):
    before = server.on_thread(lambda: server.engine.manager.states.stats.num_saved)
    ask(server.client(), say("user", "Quite another beginning. " * 8))
    assert server.on_thread(lambda: server.engine.manager.states.stats.num_saved) == before + 1, "the prompt's end"
