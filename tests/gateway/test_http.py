"""Plain HTTP on the gateway's port, spoken by hand so that no client library cleans it up."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.fake_engine import Script

from tinyvllm.gateway import web

if TYPE_CHECKING:
    Harness = Any  # the class of conftest.py, which cannot be imported


async def http(harness: Harness, request: str) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.gateway.port)
    writer.write(request.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(head[0].split()[1]), headers, body


async def get(harness: Harness, path: str) -> tuple[int, dict[str, str], bytes]:
    return await http(harness, f"GET {path} HTTP/1.1\nHost: 127.0.0.1")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "kind", "contains"),
    [
        ("/", "text/html; charset=utf-8", b"<!doctype html>"),
        ("/?x=1", "text/html; charset=utf-8", b"<!doctype html>"),
        ("/style.css", "text/css; charset=utf-8", b":root"),
        ("/app.js", "text/javascript; charset=utf-8", b"import"),
        ("/client.js", "text/javascript; charset=utf-8", b"export class ResponsesClient"),
        ("/markdown.js", "text/javascript; charset=utf-8", b"export class MarkdownView"),
        ("/theme.js", "text/javascript; charset=utf-8", b"localStorage"),
        ("/icon.svg", "image/svg+xml", b"<svg"),
    ],
)
async def test_the_page(running: Harness, path: str, kind: str, contains: bytes) -> None:
    status, headers, body = await get(running, path)
    assert (status, headers["content-type"]) == (200, kind)
    assert contains in body and int(headers["content-length"]) == len(body)
    assert headers["x-content-type-options"] == "nosniff"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'self'; connect-src 'self' ws: wss:")
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path",
    [
        "/../protocol.py",
        "/static/../../pyproject.toml",
        "/%2e%2e/protocol.py",
        "/..%2fprotocol.py",
        "//etc/passwd",
        "/index.html/",
        "/app.js/..",
        "/v1",
        "/v1/responses/",
        "/v1/chat/completions",
        "*",
        "/" + "a" * 4000,
    ],
)
async def test_nothing_else_is_there(running: Harness, path: str) -> None:
    status, headers, body = await get(running, path)
    assert status == 404 and headers["content-type"] == "application/json"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert len(body) < 500


@pytest.mark.asyncio
async def test_every_file_of_the_page_is_there(running: Harness) -> None:
    static = Path(web.__file__).parent / "static"
    for path in static.iterdir():
        name = "" if path.name == "index.html" else path.name
        status, _, body = await get(running, f"/{name}")
        assert (status, body) == (200, path.read_bytes())


@pytest.mark.asyncio
async def test_health_is_the_process_and_readiness_the_engine(running: Harness) -> None:
    status, _, body = await get(running, "/healthz")
    assert (status, json.loads(body)["alive"]) == (200, True)
    status, _, body = await get(running, "/readyz")
    assert (status, json.loads(body)["ready"]) == (200, True)
    await running.engine.aclose()
    assert (await get(running, "/healthz"))[0] == 200
    status, _, body = await get(running, "/readyz")
    assert (status, json.loads(body)["engine_alive"]) == (503, False)
    assert (await get(running, "/v1/models"))[0] == 200


@pytest.mark.asyncio
async def test_readiness_ends_with_draining(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    draining = asyncio.create_task(running.gateway.drain(10))
    assert (await client.until("tinyvllm.draining"))[-1]["seconds"] == 10
    status, _, body = await get(running, "/readyz")
    assert (status, json.loads(body)["draining"]) == (503, True)
    stream.finish()
    await draining


@pytest.mark.asyncio
async def test_models(running: Harness) -> None:
    status, _, body = await get(running, "/v1/models")
    (model,) = json.loads(body)["data"]
    assert (status, model["id"], model["object"]) == (200, "fake-model", "model")
    assert model["tinyvllm"] == {
        "max_model_len": 4096,
        "sampling_defaults": {"temperature": 0.6},
        "resume_seconds": 60.0,
        "max_num_seqs": 64,
        "block_size": 16,
    }


@pytest.mark.asyncio
async def test_metrics_are_prometheus_text(running: Harness) -> None:
    running.engine.script = Script(("a", "b"))
    client = await running.connect()
    await client.create()
    await client.answer()
    await client.send("{")
    await client.recv()
    status, headers, body = await get(running, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = body.decode().splitlines()
    for line in (
        'tinyvllm_gateway_responses_total{status="completed"} 1',
        'tinyvllm_gateway_errors_total{code="invalid_parameter"} 1',
        "tinyvllm_gateway_connections_total 1",
        "tinyvllm_gateway_tokens_total 3",
        "tinyvllm_gateway_responses 0",
        "# TYPE tinyvllm_gateway_tokens_total counter",
    ):
        assert line in lines
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[a-z_]+"\})? [0-9.e+-]+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in lines)


@pytest.mark.asyncio
async def test_a_response_over_http(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    stream.push("Hel")
    response_id = (await client.until("response.output_text.delta"))[0]["response"]["id"]
    status, _, body = await get(running, f"/v1/responses/{response_id}")
    assert (status, json.loads(body)["status"]) == (200, "in_progress")
    cancel = f"POST /v1/responses/{response_id}/cancel HTTP/1.1\nHost: x\nContent-Length: 0"
    status, _, body = await http(running, cancel)
    assert (status, json.loads(body)["id"]) == (200, response_id)
    assert (await client.until("response.incomplete"))[-1]
    assert stream.aborted.is_set()
    status, _, body = await get(running, f"/v1/responses/{response_id}")
    response = json.loads(body)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "cancelled"},
    )
    status, _, body = await get(running, "/v1/responses/resp_00")
    assert (status, json.loads(body)["error"]["code"]) == (404, "response_not_found")
    status, _, _ = await http(running, "POST /v1/models HTTP/1.1\nHost: x")
    assert status == 405


@pytest.mark.asyncio
async def test_responses_without_an_upgrade(running: Harness) -> None:
    status, headers, body = await get(running, "/v1/responses")
    assert (status, headers["upgrade"]) == (426, "websocket")
    assert "WebSocket" in json.loads(body)["error"]["message"]


@pytest.mark.asyncio
async def test_methods(running: Harness) -> None:
    status, headers, body = await http(running, "HEAD / HTTP/1.1\nHost: x")
    assert status == 200 and body == b"" and int(headers["content-length"]) > 1000
    status, headers, _ = await http(running, "DELETE / HTTP/1.1\nHost: x")
    assert (status, headers["allow"]) == (405, "get, head, post")


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        ("Content-Length: 17", '{"input": "Hi..."}'[:17]),
        ("Content-Length: 200000", "x" * 200_000),
        ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\n\r\n"),
    ],
)
async def test_a_body_is_refused_with_a_reply(
    running: Harness, path: str, framing: str, body: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.gateway.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n{body}".encode())
    async with asyncio.timeout(10):
        head, _, reply = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 405 ") and b"Content-Type: application/json" in head
    assert "ws://HOST/v1/responses" in json.loads(reply)["error"]["message"]
    await running.idle()
    assert (await get(running, "/"))[0] == 200


@pytest.mark.asyncio
async def test_an_upgrade_elsewhere_is_not_accepted(running: Harness) -> None:
    upgrade = "Host: 127.0.0.1\nUpgrade: websocket\nConnection: Upgrade\nSec-WebSocket-Version: 13"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    status, _, _ = await http(running, f"GET /v1/other HTTP/1.1\n{upgrade}\n{key}")
    assert status == 404


@pytest.mark.asyncio
async def test_garbage_does_not_disturb(running: Harness) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" * 300):
        reader, writer = await asyncio.open_connection("127.0.0.1", running.gateway.port)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert (await get(running, "/"))[0] == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("app.localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("192.0.2.1", False),
        ("localhost.evil.example", False),
        ("", False),
        (None, False),
    ],
)
def test_is_loopback(host: str | None, loopback: bool) -> None:
    assert web.is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("origin", "host", "loopback", "refused"),
    [
        (None, "example.org", False, False),
        ("https://example.org", "example.org", False, False),
        ("https://EXAMPLE.org", "example.ORG", False, False),
        ("https://example.org:444", "example.org", False, True),
        ("file://", "example.org", False, True),
        ("null", "example.org", False, True),
        ("", "", False, True),
        ("http://[", "[", True, True),
        ("http://[::1]:8765", "[::1]:8765", True, False),
        (None, None, True, True),
        (None, "[", True, True),
    ],
)
def test_origins(origin: str | None, host: str | None, loopback: bool, refused: bool) -> None:
    error = web.origin_error(origin, host, allowed=(), loopback=loopback)
    assert (error is not None) is refused
