"""The OpenAI client, unchanged: what it gets through the router is what it gets of one engine alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvops.launch.canary import make_prompt
from real_fleet import LooseFleet

MODEL = "kvops-tiny"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"celsius": {"type": "boolean"}},
            "required": ["celsius"],
            "additionalProperties": False,
        },
    },
}
CALL_IT = {"type": "function", "function": {"name": "get_weather"}}
ANSWER_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
}


@pytest.fixture
async def routed(fleet: LooseFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(fleet, "router") as client:
        yield client


@pytest.fixture
async def alone(fleet: LooseFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(fleet, "decode-0") as client:
        yield client


def client_of(fleet: LooseFleet, name: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.process(name).url}/v1", api_key="none", max_retries=0)


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": make_prompt()}]
    return {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 3, "temperature": 1, "extra_body": {"top_k": 1}},
        {"tools": [WEATHER], "tool_choice": CALL_IT},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"response_format": ANSWER_SCHEMA},
        {"stop": ["a", "e"], "presence_penalty": 0.5, "logit_bias": {"65": 5}},
        {"max_completion_tokens": 7},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
async def test_a_chat_is_answered_as_by_one_engine(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    request = chat(**fields)
    answers = [await client.chat.completions.create(**request) for client in (routed, alone)]
    got, expected = ([said(choice) for choice in answer.choices] for answer in answers)
    assert got == expected
    assert answers[0].usage.completion_tokens == answers[1].usage.completion_tokens


def said(choice: Any) -> Any:
    """Return what a choice says, without ids, which are drawn; logprobs of KV that moved differ in their last digits."""
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    tokens = choice.logprobs and [(each.token, len(each.top_logprobs)) for each in choice.logprobs.content]
    return choice.index, choice.finish_reason, choice.message.content, calls, tokens


async def test_a_streamed_chat_is_that_of_one_engine(routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI) -> None:
    request = chat(stream=True, stream_options={"include_usage": True}, logprobs=True)
    got, expected = [await whole(await client.chat.completions.create(**request)) for client in (routed, alone)]
    assert got == expected
    assert len(got[2]) == 24


async def test_a_streamed_tool_call_is_that_of_one_engine(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI
) -> None:
    request = chat(stream=True, tools=[WEATHER], tool_choice=CALL_IT)
    got, expected = [await whole(await client.chat.completions.create(**request)) for client in (routed, alone)]
    assert got == expected
    assert any(got)


async def whole(stream: Any) -> tuple[str, str, list[str], list[str]]:
    """Return content, arguments of the tool call, tokens and finish reasons."""
    content, arguments, tokens, reasons = "", "", [], []
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or ())
            tokens += [each.token for each in choice.logprobs.content] if choice.logprobs else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, arguments, tokens, reasons


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 3}, {"n": 3, "temperature": 1, "extra_body": {"top_k": 1}}, {"echo": True}],
    ids=lambda fields: "-".join(fields) or "plain",
)
async def test_completions_are_those_of_one_engine(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "temperature": 0, **fields}
    request["prompt"] = [make_prompt(), make_prompt()]
    answers = [await client.completions.create(**request) for client in (routed, alone)]
    got, expected = (
        [(choice.text, choice.finish_reason, choice.logprobs and choice.logprobs.tokens) for choice in answer.choices]
        for answer in answers
    )
    assert got == expected


async def test_a_streamed_completion_is_that_of_one_engine(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI
) -> None:
    request = {"model": MODEL, "prompt": make_prompt(), "max_tokens": 16, "temperature": 0, "stream": True}
    streams = [await client.completions.create(**request) for client in (routed, alone)]
    got, expected = ["".join([chunk.choices[0].text async for chunk in stream]) for stream in streams]
    assert got == expected


async def test_a_conversation_goes_on_turn_by_turn(routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI) -> None:
    messages: list[dict[str, str]] = []
    for _ in range(3):
        messages.append({"role": "user", "content": make_prompt()})
        request = chat(messages=messages)
        expected = await alone.chat.completions.create(**request)
        stream = await routed.chat.completions.create(
            **request, stream=True, extra_headers={"X-Conversation-ID": "by-header"}
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == expected.choices[0].message.content
        messages.append({"role": "assistant", "content": text})


async def test_it_lists_the_model_and_sees_the_errors_that_it_knows(routed: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in routed.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="gpt-0"):
        await routed.chat.completions.create(**chat(model="gpt-0"))
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await routed.completions.create(model=MODEL, prompt="x" * 9000)
