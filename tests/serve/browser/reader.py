"""Somebody who reads the page in a browser: opens it, waits for what it shows, and notes whatever must never happen."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, Request, expect

from tests.serve.api_client import ADMIN, Client, api

DEADLINE_MILLISECONDS = 60_000
"""The end of every wait. Nothing takes so long; a busy machine may take a while."""

expect.set_options(timeout=DEADLINE_MILLISECONDS)


@dataclass
class Reader:
    """The page of one tab."""

    page: Page
    client: Client
    base: str
    complaints: list[str] = field(default_factory=list)
    """Errors of the page's scripts, of its policy, and requests to other hosts."""
    expects_failures: bool = False
    """Whether Chromium may log that a request failed."""

    async def go(self, path: str = "/") -> None:
        """Opens a view by the address after `#`, and waits until the page has asked for it."""
        await self.page.evaluate("path => { location.hash = path }", path)
        await self.ask()

    async def ask(self) -> None:
        """Lets the page ask for news, and waits until it has shown them."""
        await self.page.evaluate("import('./app.js').then(({ application }) => application.poll()).then(() => true)")

    async def views(self, **parameters: str) -> list[str]:
        """The addresses of all views of a job with runs that need no other parameters than these."""
        paths: list[str] = await self.page.evaluate(
            "import('./views/index.js').then(({ views }) =>"
            " views.filter(({ kinds }) => !kinds || kinds.includes('job')).map(({ path }) => path))"
        )
        return [path.format_map(parameters) for path in paths if {*re.findall(r"{(\w+)}", path)} <= {*parameters}]

    async def wait(self, condition: str, argument: Any = None) -> None:
        """Waits until an expression of JavaScript holds."""
        await self.page.wait_for_function(condition, arg=argument)

    def note(self, message: ConsoleMessage) -> None:
        """A line on the console."""
        is_expected = self.expects_failures and "Failed to load resource" in message.text
        if message.type in ("error", "warning") and not is_expected:
            self.complaints.append(f"console: {message.text}")

    def note_request(self, request: Request) -> None:
        """A request."""
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.base:
            self.complaints.append(f"request to {request.url}")


@asynccontextmanager
async def open_reader(
    browser: Browser,
    *directories: Path,
    path: str = "/",
    token: str = ADMIN,
    width: int = 1280,
    height: int = 900,
    theme: str = "dark",
    expects_failures: bool = False,
) -> AsyncIterator[Reader]:
    """Serves the directories and opens their page at a view. At the end there must have been no complaint."""
    async with api(*directories) as client:
        base = str(client.http.make_url("")).rstrip("/")
        context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
        try:
            context.set_default_timeout(DEADLINE_MILLISECONDS)
            page = await context.new_page()
            reader = Reader(page, client, base, expects_failures=expects_failures)
            page.on("console", reader.note)
            page.on("pageerror", lambda error: reader.complaints.append(f"error: {error}"))
            context.on("request", reader.note_request)
            await page.goto(f"{base}/#token={quote(token)}")
            if not expects_failures:
                await page.wait_for_selector("[data-connection=connected]")
                await reader.go(path)
            yield reader
            assert not reader.complaints, reader.complaints
        finally:
            await context.close()
