"""Chromium, controlled by Playwright."""

import os
import shutil
import sys
from contextlib import contextmanager

from . import venv


def enter():
    """Continues in an environment with Playwright."""
    venv.enter(lambda: venv.prepare("browser", ["playwright==1.65.2"], "150 MB"))


@contextmanager
def opened():
    """A running Chromium; exits if none is installed."""
    from playwright.sync_api import sync_playwright

    binary = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        sys.exit("no Chromium: install it (Debian: `apt-get install chromium`), or set $CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()
