"""Draw docs/images/console-*.png: pages of the console on a shop with a past. `./dev docs console` runs it."""

from __future__ import annotations

import asyncio
import shutil
import sys

import asyncpg
from playwright.sync_api import sync_playwright

from holdfast.embedded import EmbeddedPostgres
from holdfast.postgres import migrate
from tests.console import shop
from tests.console.serving import served
from tests.docs.support import ROOT

IMAGES = ROOT / "docs" / "images"
# The name of the picture, the address of the page, the theme and the size of the window.
PICTURES = (
    ("overview", "/", "light", 1280, 800),
    ("failures", "/failures", "dark", 1280, 800),
    ("event", "{event}", "light", 1280, 800),
    ("phone", "/", "dark", 390, 844),
)


async def prepare(dsn: str) -> str:
    """Fill the database; the address of an event that failed twice."""
    await migrate.apply(dsn)
    conn = await asyncpg.connect(dsn)
    try:
        await shop.fill(conn)
        return f"/events/{await conn.fetchval(shop.FAILED_TWICE)}"
    finally:
        await conn.close()


def main() -> int:
    program = shutil.which("chromium")
    if program is None:
        print("docs: Chromium is not on this machine: apt-get install chromium", file=sys.stderr)
        return 1
    with EmbeddedPostgres(settings={"fsync": "off"}) as server:
        dsn = server.create_database("shop")
        event = asyncio.run(prepare(dsn))
        with served(dsn) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for name, path, theme, width, height in PICTURES:
                size = {"width": width, "height": height}
                page = browser.new_page(base_url=address, viewport=size, color_scheme=theme)  # type: ignore[arg-type]
                page.goto(path.format(event=event))
                page.wait_for_selector("main .card, main .states")
                page.screenshot(path=IMAGES / f"console-{name}.png")
                page.close()
                print(f"docs/images/console-{name}.png")
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
