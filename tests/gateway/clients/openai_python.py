"""Runs in an environment with nothing but openai and websockets: python openai_python.py BASE_URL.

Prints one JSON object: what each scenario saw. Asserts nothing; the test does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


async def answer(connection: Any) -> dict[str, Any]:
    kinds, deltas, event = [], [], None
    while event is None or event.type not in TERMINAL:
        event = await asyncio.wait_for(connection.recv(), 10)
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            deltas.append(event.delta)
    if event.type == "error":
        error = event.error
        return {"error": [event.status, error.code, error.param, error.message]}
    return {
        "kinds": kinds,
        "deltas": deltas,
        "id": event.response.id,
        "text": event.response.output_text,
        "status": event.response.status,
        "output_tokens": event.response.usage.output_tokens,
        "calls": [
            [item.name, item.arguments]
            for item in event.response.output
            if item.type == "function_call"
        ],
    }


async def main(base_url: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"version": openai.__version__}
    client = openai.AsyncOpenAI(base_url=base_url, api_key="test-token")
    async with client.responses.connect() as connection:
        await connection.response.create(input="Hello", instructions="Brief.", temperature=0)
        seen["create"] = await answer(connection)

        await connection.response.create(
            input=[{"role": "user", "content": "And then?"}],
            previous_response_id=seen["create"]["id"],
        )
        seen["previous"] = await answer(connection)

        await connection.response.create(
            input="call",
            tools=[
                {
                    "type": "function",
                    "name": "add",
                    "parameters": {"type": "object"},
                    "strict": False,
                }
            ],
        )
        seen["tools"] = await answer(connection)

        await connection.response.create(input="slow", stream_id="a")
        await connection.response.create(input="quick", stream_id="b")
        ended = []
        while len(ended) < 2:
            event = await asyncio.wait_for(connection.recv(), 10)
            if event.type in TERMINAL:
                ended.append((event.stream_id, event.response.output_text))
        seen["lanes"] = ended

        await connection.response.create(input="x", previous_response_id="resp_0")
        seen["not_found"] = await answer(connection)
        await connection.response.create(input="x", model="gpt-9")
        seen["model"] = await answer(connection)
        await connection.response.create(input="x", temperature=9e99)
        seen["parameter"] = await answer(connection)

        own = {"type": "response.create", "input": "own", "tinyvllm": {"top_k": 3, "seed": 1}}
        await connection.send(own)
        seen["own"] = await answer(connection)

    async with client.responses.connect() as connection:
        own = {"type": "response.create", "input": "endless", "tinyvllm": {"resume_seconds": 0}}
        await connection.send(own)
        while (await asyncio.wait_for(connection.recv(), 10)).type != "response.output_text.delta":
            pass
    seen["closed"] = True

    wrong = openai.AsyncOpenAI(base_url=base_url, api_key="wrong", max_retries=0)
    try:
        async with wrong.responses.connect() as connection:
            await connection.recv()
    except Exception as exc:
        seen["wrong_token"] = f"{type(exc).__name__}: {exc}"
    return seen


print(json.dumps(asyncio.run(main(sys.argv[1]))))
