"""A real Chromium for the tests of the page: one for all of them, and a fresh profile for each.

Debian's package is driven, since Playwright's own browsers are downloads. Where there is none, the tests are skipped and say so;
`.ci/install-chromium` installs it.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.serve.browser.reader import DEADLINE_MILLISECONDS, Reader, open_reader

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
"""The first is the same browser without a window, and takes half of the CPU time."""

CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

MISSING = "there is no Chromium here: run .ci/install-chromium as root, or apt-get install chromium-headless-shell"


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    """Chromium. Its sandbox needs privileges that a container does not have, and the page's content is ours."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-component-update"]
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=arguments, timeout=2 * DEADLINE_MILLISECONDS
        )
        try:
            yield browser
        finally:
            await browser.close()


@pytest.fixture
def reader(browser: Browser) -> Callable[..., AbstractAsyncContextManager[Reader]]:
    """Opens the page of some jobs: `async with reader(directory, ...) as page`."""
    return partial(open_reader, browser)
