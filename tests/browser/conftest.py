"""One browser for the tests of a file; without one they skip, or fail where it is required."""

from __future__ import annotations

import os
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IS_REQUIRED = bool(os.environ.get("CI")) or os.environ.get("EAGLE_FSD_REQUIRE_BROWSER") == "1"


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        missing = "playwright" if sync_playwright is None else "chromium"
        (pytest.fail if IS_REQUIRED else pytest.skip)(f"{missing} is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
