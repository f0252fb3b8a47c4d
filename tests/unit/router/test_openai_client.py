"""The OpenAI client, unchanged, in front of the router."""

from __future__ import annotations

import openai
import pytest


@pytest.mark.parametrize("mode", ["pull", "push", "bidirectional"])
async def test_it_gets_whole_and_streamed_answers(start, mode):
    setup = await start(mode)
    text = "".join(setup.decode[0].tokens)
    messages = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{setup.url}/v1", api_key="k", max_retries=0) as client:
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        assert whole.choices[0].message.content == text
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, extra_body={"conversation_id": "c"}
        )
        assert "".join([chunk.choices[0].delta.content async for chunk in stream]) == text
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_it_sees_the_errors_that_it_knows(start):
    setup = await start("pull")
    setup.prefill[0].script.extend(["status:400", "status:500", "status:500"])
    async with openai.AsyncOpenAI(base_url=f"{setup.url}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="scripted"):
            await client.completions.create(model="tiny", prompt="hi")
        with pytest.raises(openai.InternalServerError) as error:
            await client.completions.create(model="tiny", prompt="hi")
    assert error.value.type == "prefill_failed"
