"""Agents' frameworks at their defaults, each by its name: langchain, instructor, pydantic-ai, openai-agents."""

import sys
from typing import Literal

from pydantic import BaseModel

NAME, URL, MODEL = sys.argv[1:]
ASK = "Which kettle?"


class Kettle(BaseModel):
    """A kettle."""

    colour: Literal["slate", "sand"]
    is_new: bool


def langchain():
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def find_kettle(colour: Literal["slate", "sand"]) -> str:
        """Find a kettle."""
        return f"{colour}: sold"

    model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_completion_tokens=600)
    assert model.bind_tools([find_kettle]).invoke(ASK).response_metadata["finish_reason"]
    called = model.bind_tools([find_kettle], tool_choice="any", parallel_tool_calls=False).invoke(ASK)
    (call,) = called.tool_calls
    assert call["args"]["colour"] in {"slate", "sand"}
    result = find_kettle.invoke(call)
    assert model.bind_tools([find_kettle]).invoke([("human", ASK), called, result]).usage_metadata["input_tokens"]
    assert model.with_structured_output(Kettle).invoke(ASK).colour in {"slate", "sand"}
    parts = list(model.bind_tools([find_kettle], tool_choice="any").stream(ASK))
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.tool_calls


def instructor():
    import instructor as library
    import openai

    client = library.from_openai(openai.OpenAI(base_url=URL, api_key="none"))
    found = client.chat.completions.create(
        model=MODEL, response_model=Kettle, messages=[{"role": "user", "content": ASK}]
    )
    assert found.colour in {"slate", "sand"}


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    agent = Agent(model, output_type=Kettle)
    assert agent.run_sync(ASK).output.colour in {"slate", "sand"}
    assert agent.run_sync(ASK).usage is not None


def openai_agents():
    import agents
    import openai

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=URL, api_key="none"), use_for_tracing=False)

    @agents.function_tool
    def find_kettle(colour: Literal["slate", "sand"]) -> str:
        """Find a kettle."""
        return f"{colour}: sold"

    settings = agents.ModelSettings(max_tokens=60)
    agent = agents.Agent(
        name="Shop", instructions="You sell.", model=MODEL, tools=[find_kettle], model_settings=settings
    )
    result = agents.Runner.run_sync(agent, ASK)
    assert result.raw_responses[0].usage.input_tokens > 0
    typed = agents.Agent(name="Shop", model=MODEL, output_type=Kettle)
    assert agents.Runner.run_sync(typed, ASK).final_output.colour in {"slate", "sand"}
    forced = agents.Agent(
        name="Shop",
        model=MODEL,
        tools=[find_kettle],
        tool_use_behavior="stop_on_first_tool",
        model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
    )
    assert "sold" in str(agents.Runner.run_sync(forced, ASK).final_output)


{"langchain": langchain, "instructor": instructor, "pydantic-ai": pydantic_ai, "openai-agents": openai_agents}[NAME]()
