"""Headless Chromium over its DevTools protocol, spoken directly: one browser, any number of pages.

Needs Debian's `chromium` (or any Chromium in PATH) and nothing from PyPI but websockets.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


def find_chromium() -> str | None:
    """The browser's path, or None: then page tests are skipped."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@asynccontextmanager
async def open_browser() -> AsyncIterator[Browser]:
    """A browser with a profile of its own, gone afterwards."""
    executable = find_chromium()
    if executable is None:
        raise FileNotFoundError("no Chromium in PATH")
    profile = await asyncio.to_thread(tempfile.mkdtemp, prefix="tinyvllm-chromium-")
    try:
        process = await asyncio.create_subprocess_exec(
            executable,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HOME": profile},
        )
        assert process.stderr is not None
        draining: asyncio.Task[bytes] | None = None
        try:
            url = await _devtools_url(process.stderr)
            draining = asyncio.create_task(process.stderr.read())
            async with connect(url, max_size=None, compression=None, proxy=None) as socket:
                browser = Browser(socket)
                try:
                    yield browser
                finally:
                    await browser.close()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            if draining is not None:
                await draining
    finally:
        await asyncio.to_thread(shutil.rmtree, profile, ignore_errors=True)


async def _devtools_url(stderr: asyncio.StreamReader) -> str:
    seen = b""
    async with asyncio.timeout(60):
        while line := await stderr.readline():
            seen += line
            if line.startswith(b"DevTools listening on "):
                return line.split()[-1].decode()
    raise RuntimeError(f"Chromium did not start: {seen.decode(errors='replace')[-2000:]}")


class Browser:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._receiving = asyncio.create_task(self._receive())

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        await self._socket.send(json.dumps(message))
        async with asyncio.timeout(30):
            return await reply

    async def _receive(self) -> None:
        async for raw in self._socket:
            message = json.loads(raw)
            if "id" in message:
                reply = self._replies.pop(message["id"])
                if reply.done():
                    continue
                if "error" in message:
                    reply.set_exception(RuntimeError(str(message["error"])))
                else:
                    reply.set_result(message["result"])
            elif page := self._pages.get(message.get("sessionId", "")):
                page.on_event(message["method"], message["params"])

    async def new_page(self, url: str, *, width: int = 1200, height: int = 800) -> Page:
        """A page in a window of its own: tabs of one window hide each other, and hidden pages
        are drawn no frames."""
        target = (await self.call("Target.createTarget", url="about:blank", newWindow=True))[
            "targetId"
        ]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.resize(width, height)
        await page.call("Page.navigate", url=url)
        return page

    async def close(self) -> None:
        self._receiving.cancel()
        await asyncio.wait({self._receiving})


class Page:
    """One tab. `problems` collects console errors, exceptions and policy violations."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser = browser
        self.session = session
        self.problems: list[str] = []

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str(params["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.browser.call(method, self.session, **params)

    async def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value; promises are awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def wait_for(self, condition: str, seconds: float = 10) -> None:
        """Until a JavaScript expression is true."""
        code = f"""new Promise((resolve) => {{
            const started = performance.now();
            const timer = setInterval(() => {{
                let value = false;
                try {{ value = Boolean({condition}); }} catch {{}}
                if (value || performance.now() - started > {seconds * 1000}) {{
                    clearInterval(timer);
                    resolve(value);
                }}
            }}, 4);
        }})"""
        if not await self.evaluate(code):
            text = await self.evaluate("document.body.innerText")
            raise TimeoutError(f"{condition!r} did not become true; the page reads:\n{text}")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False, control: bool = False) -> None:
        """A key by its name; letters are lower case."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "/": 191}
        event = {
            "key": key,
            "code": f"Key{key.upper()}" if key.isalpha() and len(key) == 1 else key,
            "windowsVirtualKeyCode": codes.get(key) or ord(key.upper()),
            "modifiers": 8 * shift + 2 * control,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )

    async def prefer(self, scheme: str) -> None:
        """The system's theme: "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
