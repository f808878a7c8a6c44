"""What the tests of the page share: a page that must behave, uploads, and waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from serving import Server


def opened(browser: Any, server: Server, **options: Any) -> Iterator[Any]:
    """A page that must neither raise an error nor ask for anything elsewhere."""
    context = browser.new_context(**options)
    shown = context.new_page()
    shown.set_default_timeout(30_000)
    wrong: list[str] = []
    shown.on("pageerror", lambda error: wrong.append(str(error)))
    shown.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    shown.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(ours(server)) else None)
    shown.goto(server.url)
    shown.wait_for_selector(".sample")
    yield shown
    context.close()
    assert not wrong


def ours(server: Server) -> tuple[str, ...]:
    return (server.url, "data:", f"blob:{server.url}")


def upload(page: Any, data: bytes, name: str = "photo.png") -> None:
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": data})


def until(page: Any, condition: str) -> None:
    """Playwright's own waiting needs `eval` in the page, which its security policy forbids."""
    limit = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < limit, f"never came: {condition}"
        time.sleep(0.05)
