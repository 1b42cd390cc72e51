"""Who may use the gateway, and who may not: token, cookie, subprotocol, TLS, bounds."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tinyvllm.gateway.auth import Auth, choose_subprotocol
from tinyvllm.gateway.limits import Limits

if TYPE_CHECKING:
    from pathlib import Path

    Harness = Any  # the class of conftest.py, which cannot be imported

TOKEN = "s3cret-Token.1"


def allows(auth: Auth, **headers: str) -> bool:
    names = ("authorization", "subprotocols", "cookie")
    return auth.allows(**{name: headers.get(name) for name in names})


def cookie_of(auth: Auth) -> str:
    return auth.cookie_header(secure=False).partition(";")[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer  {TOKEN}"},
        {"subprotocols": f"realtime, openai-insecure-api-key.{TOKEN}"},
        {"cookie": f"other=1; {cookie_of(Auth(TOKEN))}"},
    ],
)
def test_the_token_opens(headers: dict[str, str]) -> None:
    assert allows(Auth(TOKEN), **headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}, Bearer x"},
        {"authorization": "Bearer \udcff"},
        {"subprotocols": "realtime, openai-insecure-api-key."},
        {"subprotocols": TOKEN},
        {"cookie": f"tinyvllm_session={TOKEN}"},
        {"cookie": cookie_of(Auth("another"))},
        {"cookie": "tinyvllm_session="},
        {"cookie": ";;=\x00"},
    ],
)
def test_nothing_else_does(headers: dict[str, str]) -> None:
    assert not allows(Auth(TOKEN), **headers)
    assert allows(Auth(None), **headers)


def test_the_cookie_is_not_the_token_and_is_kept_from_scripts() -> None:
    header = Auth(TOKEN).cookie_header(secure=True)
    assert TOKEN not in header
    assert "HttpOnly" in header and "SameSite=Strict" in header and "Secure" in header


def test_the_secret_subprotocol_is_never_selected() -> None:
    secret = "openai-insecure-api-key.x"
    assert choose_subprotocol([secret, "realtime"]) == "realtime"
    assert choose_subprotocol([secret, "other"]) == "other"
    assert choose_subprotocol([secret]) is None


async def http(harness: Harness, request: str) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.gateway.port)
    writer.write(request.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(head[0].split()[1]), headers, body


@pytest.mark.asyncio
async def test_http_with_a_token(harness: Harness) -> None:
    await harness.start(token=TOKEN)
    for path in ("/", "/healthz", "/readyz"):
        assert (await http(harness, f"GET {path} HTTP/1.1\nHost: x"))[0] == 200
    for path in ("/v1/models", "/metrics", "/v1/responses/resp_1", "/v1/responses", "/nothing"):
        status, headers, body = await http(harness, f"GET {path} HTTP/1.1\nHost: x")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.loads(body)["error"]["code"] == "unauthorized"
        url = f"GET {path}?token={TOKEN}&api_key={TOKEN} HTTP/1.1\nHost: x"
        assert (await http(harness, url))[0] == 401
    with_token = f"GET /v1/models HTTP/1.1\nHost: x\nAuthorization: Bearer {TOKEN}"
    assert (await http(harness, with_token))[0] == 200


@pytest.mark.asyncio
async def test_login_gives_a_cookie_that_opens_the_socket(harness: Harness) -> None:
    await harness.start(token=TOKEN)
    wrong = "POST /login HTTP/1.1\nHost: x\nAuthorization: Bearer wrong"
    assert (await http(harness, wrong))[0] == 401
    right = f"POST /login HTTP/1.1\nHost: x\nAuthorization: Bearer {TOKEN}\nContent-Length: 0"
    status, headers, _ = await http(harness, right)
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert status == 204
    client = await harness.connect(additional_headers={"Cookie": cookie})
    await client.cancel()
    status, headers, _ = await http(harness, "POST /logout HTTP/1.1\nHost: x")
    assert status == 204 and "Max-Age=0" in headers["Set-Cookie"]


@pytest.mark.asyncio
async def test_programs_get_401_and_pages_a_close_code(harness: Harness) -> None:
    await harness.start(token=TOKEN)
    with pytest.raises(InvalidStatus) as info:
        await harness.connect()
    assert info.value.response.status_code == 401
    client = await harness.connect(origin=f"http://127.0.0.1:{harness.gateway.port}")
    with pytest.raises(ConnectionClosed) as closed:
        await client.recv()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    protocols = ["realtime", f"openai-insecure-api-key.{TOKEN}"]
    client = await harness.connect(subprotocols=protocols)
    assert client.socket.subprotocol == "realtime"
    client = await harness.connect(additional_headers={"Authorization": f"Bearer {TOKEN}"})
    await client.create()
    await harness.engine.next_stream()
    assert (await client.recv())["type"] == "response.created"


@pytest.mark.asyncio
async def test_connections_are_bounded_and_health_is_still_told(harness: Harness) -> None:
    await harness.start(limits=Limits(max_connections=2))
    for _ in range(2):
        await harness.connect()
    with pytest.raises(InvalidStatus) as info:
        await harness.connect()
    assert info.value.response.status_code == 503
    body = json.loads(info.value.response.body)
    assert body["error"]["code"] == "websocket_connection_limit_reached"
    assert (await http(harness, "GET /healthz HTTP/1.1\nHost: x"))[0] == 200


@pytest.mark.asyncio
async def test_a_handshake_that_does_not_come_is_not_waited_for(harness: Harness) -> None:
    await harness.start(limits=Limits(handshake_seconds=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.gateway.port)
    writer.write(b"GET /v1/responses HT")
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()
    await harness.idle()


@pytest.mark.asyncio
async def test_a_peer_that_is_gone_without_a_word_is_reaped(harness: Harness) -> None:
    """Half-open: no FIN ever comes, and pings stay without answer."""
    await harness.start(
        limits=Limits(ping_seconds=0.1, pong_seconds=0.2, close_seconds=0.2, resume_seconds=0)
    )
    client = await harness.connect()
    await client.create()
    stream = await harness.engine.next_stream()
    client.socket.transport.pause_reading()
    async with asyncio.timeout(5):
        await stream.aborted.wait()
    await harness.idle()
    client.socket.transport.abort()


@pytest.mark.asyncio
async def test_tls(harness: Harness, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    try:
        await asyncio.to_thread(
            subprocess.run,
            [*command.split(), "-addext", names, "-keyout", str(key), "-out", str(cert)],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("no openssl in PATH (apt install openssl)")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    await harness.start(ssl_context=server, token=TOKEN)
    assert harness.gateway.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(cert))
    url = harness.url.replace("ws://", "wss://")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with connect(url, ssl=context, additional_headers=headers, proxy=None) as socket:
        await socket.send('{"type":"response.create","input":"Hi"}')
        stream = await harness.engine.next_stream()
        stream.push("x" * 300_000)  # more than one TLS record
        stream.finish()
        async with asyncio.timeout(10):
            while json.loads(await socket.recv())["type"] != "response.completed":
                pass
