"""A real browser for the console: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
WIDE: Final = (1280, 800)
NARROW: Final = (390, 844)
_PATIENCE_MS: Final = 60_000  # only what never comes is waited for so long
_FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browser_path() -> str | None:
    """Where a browser is; `tools/browser.sh` installs one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a window. Its loop runs in this thread: no other may, until it ends."""
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page in a window of its own, and everything that went wrong in it."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append(dialog.message), dialog.dismiss()))
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)


def arrived(page: Page, url: str | re.Pattern[str]) -> None:
    """Wait until a page that was jumped to listens: its address is there before its scripts are, and keys pressed
    in between reach nobody."""
    expect(page).to_have_url(url)
    page.wait_for_load_state("load")


@contextmanager
def visiting(
    browser: Browser, url: str, *, size: tuple[int, int] = WIDE, dark: bool = False, base: str = ""
) -> Iterator[Visit]:
    """Look at a page; nothing may have gone wrong by the end."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", base_url=base or None
    )
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    try:
        visit = Visit(context)
        visit.page.goto(url)
        yield visit
        assert visit.faults == []
    finally:
        context.close()
