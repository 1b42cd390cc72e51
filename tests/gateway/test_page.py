"""The chat page in headless Chromium, its tokens pushed by hand.

With TINYVLLM_SHOTS=directory the screenshots stay there, to be looked at.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.chromium import Page, find_chromium, open_browser
from support.fake_engine import Script

from tinyvllm import ContextLengthError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Harness = Any  # the class of conftest.py, which cannot be imported

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.chromium,
    pytest.mark.skipif(
        find_chromium() is None, reason="no chromium in PATH (apt install chromium)"
    ),
]

LAST = "document.querySelector('.message.assistant:last-child')"
MARKDOWN = """## A short answer

Here is **bold**, *italic* and `code`, and a [link](https://example.org/a_(b)).

1. First
2. Second
   - nested *one*
   - nested two

> A quote.

```python
def reverse(text: str) -> str:
    return text[::-1]
```

That is all."""


@pytest_asyncio.fixture
async def open_page(running: Harness) -> AsyncIterator[Callable[..., Awaitable[Page]]]:
    """Opens the chat page, connected. Afterwards the browser must have nothing to complain of."""
    pages: list[Page] = []
    async with open_browser() as browser:

        async def open_page(**options: Any) -> Page:
            page = await browser.new_page(running.gateway.url, **options)
            pages.append(page)
            await page.wait_for("document.getElementById('connection')?.dataset.state === 'open'")
            await page.wait_for("document.getElementById('model').textContent === 'fake-model'")
            return page

        yield open_page
        for page in pages:
            assert page.problems == []


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    path = Path(os.environ.get("TINYVLLM_SHOTS", tmp_path))
    path.mkdir(exist_ok=True, parents=True)
    return path


async def text_of_answer(page: Page) -> str:
    text: str = await page.evaluate(f"{LAST}.querySelector('.text').innerText")
    return text


async def test_type_watch_stop_and_ask_again(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    page = await open_page()
    await page.type("Tell me")
    await page.press("Enter", shift=True)
    await page.type("a story")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    assert stream.messages == [{"role": "user", "content": "Tell me\na story"}]
    assert stream.params.temperature == 0.6  # the model's own default
    await page.wait_for(f"{LAST}.querySelector('.typing')")
    await page.wait_for("!document.getElementById('stop').hidden")

    # One state of the DOM per token, each seen before the next token exists.
    words = ["Once", " upon", " a", " time", ", there", " was"]
    for count in range(1, len(words) + 1):
        stream.push(words[count - 1])
        await page.wait_for(
            f"{LAST}.querySelector('.text').innerText === {json.dumps(''.join(words[:count]))}"
        )
    assert "6 tokens" in await page.evaluate(f"{LAST}.querySelector('.meta').innerText")

    # Stop: the engine is told within 100 ms of the key, and the page is ready for more.
    loop = asyncio.get_running_loop()
    pressed = loop.time()
    await page.press("Escape")
    async with asyncio.timeout(5):
        await stream.aborted.wait()
    assert loop.time() - pressed < 0.1 * patience()
    assert not running.engine.live
    await page.wait_for("document.getElementById('stop').hidden")
    meta = await page.evaluate(f"{LAST}.querySelector('.meta').innerText")
    assert "6 tokens" in meta and "tok/s" in meta and "first token" in meta and "stopped" in meta
    assert await page.evaluate("document.activeElement.id") == "input"

    await page.type("Go on")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    assert [m["content"] for m in stream.messages] == [
        "Tell me\na story",
        "Once upon a time, there was",
        "Go on",
    ]
    stream.push("The end.")
    stream.finish()
    await page.wait_for("document.getElementById('stop').hidden")
    assert await text_of_answer(page) == "The end."
    assert await page.evaluate("document.querySelectorAll('.message').length") == 4

    await page.click("#new-chat")
    assert await page.evaluate("document.querySelectorAll('.message').length") == 0
    await page.type("Fresh")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    assert [m["content"] for m in stream.messages] == ["Fresh"]
    # A new chat while an answer runs stops that answer.
    await page.click("#new-chat")
    async with asyncio.timeout(5):
        await stream.aborted.wait()
    assert await page.evaluate("document.getElementById('stop').hidden")


def patience() -> int:
    """CI shares its cores: the 100 ms that are promised there may be a second."""
    return 10 if os.environ.get("CI") else 1


async def test_settings_travel_and_stay(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    running.engine.script = Script(("ok",))
    page = await open_page()
    await page.click("#settings-toggle")
    await page.evaluate(
        """for (const [id, value] of Object.entries({
            instructions: "Be brief.", temperature: "1.25", "top-p": "0.5", "max-tokens": "77"
        })) {
            const input = document.getElementById(id);
            input.value = value;
            input.dispatchEvent(new Event("input", { bubbles: true }));
        }"""
    )
    await page.press("Escape")
    assert await page.evaluate("document.getElementById('settings').hidden")
    await page.click("#suggestions button")
    await running.engine.next_stream()
    await page.call("Page.reload")
    await page.wait_for("document.getElementById('connection')?.dataset.state === 'open'")
    await page.click("#suggestions button")
    await running.engine.next_stream()
    for stream in running.engine.streams:
        params = stream.params
        assert (params.temperature, params.top_p, params.max_tokens) == (1.25, 0.5, 77)
        assert stream.messages[0] == {"role": "system", "content": "Be brief."}
    await page.wait_for(f"{LAST}.querySelector('.meta .copy')")


async def test_errors_are_shown(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    page = await open_page()
    await page.type("long")
    await page.press("Enter")
    (await running.engine.next_stream()).fail(
        ContextLengthError("the prompt has 9 tokens; 8 fit", param="prompt")
    )
    await page.wait_for(f"{LAST}.querySelector('.error')?.innerText.includes('8 fit')")
    running.engine.refuse = RuntimeError("secret")
    await page.type("again")
    await page.press("Enter")
    await page.wait_for("document.querySelectorAll('.error').length === 2")
    assert "secret" not in await page.evaluate("document.body.innerText")
    # Failed turns are not told to the model.
    await page.type("third")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    assert [m["content"] for m in stream.messages] == ["third"]


async def test_a_restarted_server_is_found_again(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    page = await open_page()
    await page.type("hi")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    stream.push("half an")
    await page.wait_for(f"{LAST}.innerText.includes('half an')")
    port = running.gateway.port
    await running.gateway.aclose()
    assert stream.aborted.is_set()
    await page.wait_for("!document.getElementById('banner').hidden")
    assert "Connection lost" in await page.evaluate("document.getElementById('banner').innerText")
    await page.wait_for(f"{LAST}.querySelector('.error')?.innerText.includes('lost')")
    assert await page.evaluate("document.getElementById('send').disabled")
    running.engine.script = Script(("back",))
    running.restart_on(port)
    await running.gateway.start()
    await page.click("#retry")
    await page.wait_for("document.getElementById('banner').hidden")
    await page.type("again")
    await page.press("Enter")
    await page.wait_for(f"{LAST}.querySelector('.text').innerText === 'back'")
    page.problems.clear()  # the browser logs the refused connections


async def test_it_follows_only_a_reader_at_the_end(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    page = await open_page(width=700, height=500)
    await page.type("long")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    at_end = (
        "(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight < 8)"
    )
    scroller = "document.getElementById('scroller')"
    for number in range(30):
        stream.push(f"Paragraph {number}.\n\n")
    await page.wait_for(f"{LAST}.innerText.includes('Paragraph 29') && {at_end}({scroller})")
    await page.evaluate(f"{scroller}.scrollTop = 40")
    await page.wait_for("!document.getElementById('latest').hidden")
    for number in range(30, 60):
        stream.push(f"Paragraph {number}.\n\n")
    await page.wait_for(f"{LAST}.innerText.includes('Paragraph 59')")
    assert await page.evaluate(f"{scroller}.scrollTop") == 40
    await page.click("#latest")
    await page.wait_for(f"{at_end}({scroller}) && document.getElementById('latest').hidden")
    stream.push("The end.")
    await page.wait_for(f"{LAST}.innerText.includes('The end.') && {at_end}({scroller})")


XSS = """<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2"> <svg onload="window.hacked = 3">
<a href="javascript:window.hacked = 4">a</a> [b](javascript:window.hacked=5)
[c](data:text/html,<script>window.hacked=6</script>) [d](JaVaScRiPt:window.hacked=7)
[e](https://example.org"onmouseover="window.hacked=8) **<b onclick="window.hacked=9">x</b>**
```"><img src=x onerror="window.hacked=10">
</code></pre><script>window.hacked = 11</script>
```
<iframe srcdoc="<script>parent.hacked = 12</script>"></iframe> `<script>window.hacked=13</script>`
&lt;img src=x onerror=window.hacked=14&gt; <style>body { display: none }</style>
"""


async def test_model_text_is_only_ever_text(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    page = await open_page()
    await page.type(XSS)
    await page.press("Enter")
    stream = await running.engine.next_stream()
    for character in XSS:
        stream.push(character)
    stream.finish()
    await page.wait_for(f"{LAST}.querySelector('.meta .copy')")
    assert await page.evaluate("window.hacked") is None
    allowed = "article div p br span strong em code pre button a ul ol li h3 blockquote".split()
    tags = await page.evaluate(
        "[...document.querySelectorAll('#messages *')].map((e) => e.localName)"
    )
    assert set(tags) <= set(allowed)
    hrefs = await page.evaluate(
        "[...document.querySelectorAll('#messages a')].map((a) => a.getAttribute('href'))"
    )
    assert all(href.startswith(("https://", "http://")) for href in hrefs)
    attributes = await page.evaluate(
        "[...document.querySelectorAll('#messages *')].flatMap((e) => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on")]


async def test_streamed_markdown_is_the_markdown_of_the_whole(
    running: Harness, open_page: Callable[..., Awaitable[Page]]
) -> None:
    page = await open_page()
    code = f"""(async () => {{
        const {{ MarkdownView }} = await import("/markdown.js");
        const wrong = [];
        for (const source of {json.dumps([MARKDOWN, XSS, *INLINE])}) {{
            const streamed = document.createElement("div");
            const view = new MarkdownView(streamed);
            for (let end = 1; end <= source.length; end++) {{
                view.update(source.slice(0, end));
                const whole = document.createElement("div");
                new MarkdownView(whole).update(source.slice(0, end));
                if (!streamed.isEqualNode(whole)) wrong.push(source.slice(0, end));
            }}
        }}
        return wrong;
    }})()"""
    assert await page.evaluate(code) == []


INLINE = {
    "plain": "<p>plain</p>",
    "a **b** c *d* e": "<p>a <strong>b</strong> c <em>d</em> e</p>",
    "***x***": "<p><strong><em>x</em></strong></p>",
    "snake_case_name and _it_": "<p>snake_case_name and <em>it</em></p>",
    "2 * 3 * 4": "<p>2 * 3 * 4</p>",
    "`a*b*` and ``a`b``": "<p><code>a*b*</code> and <code>a`b</code></p>",
    "**open": "<p>**open</p>",
    "\\*no\\*": "<p>*no*</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# Title\ntext": "<h3>Title</h3><p>text</p>",
    "#hashtag": "<p>#hashtag</p>",
    "- a\n- b": "<ul><li>a</li><li>b</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "> q": "<blockquote><p>q</p></blockquote>",
    "~~x~~": "<p><s>x</s></p>",
}


async def test_markdown(running: Harness, open_page: Callable[..., Awaitable[Page]]) -> None:
    page = await open_page()
    code = f"""(async () => {{
        const {{ MarkdownView }} = await import("/markdown.js");
        return {json.dumps(list(INLINE))}.map((source) => {{
            const root = document.createElement("div");
            new MarkdownView(root).update(source);
            return root.innerHTML;
        }});
    }})()"""
    assert await page.evaluate(code) == list(INLINE.values())


async def test_looks(
    running: Harness, open_page: Callable[..., Awaitable[Page]], shots: Path
) -> None:
    """Both themes, wide and phone: nothing sticks out, and the pictures are there to look at."""
    page = await open_page(width=1200, height=800)

    async def shoot(name: str) -> None:
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.evaluate(overflow) <= 0, name
        await page.wait_for("document.getAnimations().every((a) => !(a instanceof CSSTransition))")
        await page.screenshot(shots / f"{name}.png")

    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await shoot(f"welcome-{scheme}")
    await page.type("How do I reverse a string in Python? Please explain it briefly.")
    await page.press("Enter")
    stream = await running.engine.next_stream()
    await page.wait_for(f"{LAST}.querySelector('.typing')")
    await shoot("thinking-dark")
    for line in MARKDOWN.splitlines(keepends=True):
        stream.push(line)
    await page.wait_for(f"{LAST}.innerText.includes('That is all')")
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await shoot(f"streaming-{scheme}")
    stream.finish()
    await page.wait_for(f"{LAST}.querySelector('.meta .copy')")
    await page.click("#settings-toggle")
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await shoot(f"settings-{scheme}")
    await page.press("Escape")
    await page.resize(390, 844, mobile=True)
    for scheme in ("light", "dark"):
        await page.prefer(scheme)
        await shoot(f"phone-{scheme}")
    await page.click("#settings-toggle")
    await shoot("phone-settings-dark")
    await page.press("Escape")
    await page.click("#new-chat")
    await shoot("phone-welcome-dark")
    # The toggle wins over the system, and is remembered.
    await page.click("#theme")
    assert await page.evaluate("document.documentElement.dataset.theme") == "light"
    await page.call("Page.reload")
    await page.wait_for("document.documentElement.dataset.theme === 'light'")
    background = "getComputedStyle(document.body).backgroundColor"
    assert await page.evaluate(background) == "rgb(251, 251, 253)"
    await page.wait_for("document.getElementById('connection')?.dataset.state === 'open'")
