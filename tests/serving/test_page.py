"""The page at /, in a real browser where there is one."""

import shutil

import pytest

from specrun.runner.serving.app import Limits, make_app
from tests.serving.conftest import API_KEY, Server, running

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_tokens_arrive_coloured_by_their_origin(server: Server, served_bundle: object) -> None:
    from playwright.sync_api import sync_playwright

    app = make_app(server.service, Limits(), api_key=API_KEY, drain_seconds=0.0)
    # Without the lifespan's end the service goes on when this app stops.
    with running(app, lifespan="off") as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.fill("#prompt", "the sun rose over the sea and the sun")
        page.fill("#tokens", "24")
        page.click("#send")
        page.wait_for_function("document.getElementById('error').textContent.includes('API key')")
        page.fill("#key", API_KEY)
        page.click("#send")
        page.wait_for_function(
            "document.getElementById('verdict').textContent.includes('times as fast')", timeout=60_000
        )
        assert page.inner_text("#verdict").startswith("The same text")
        assert page.locator("#output span").count() > 0
        origins = {span.get_attribute("class") for span in page.locator("#output span").all()}
        assert origins <= {"plain", "drafted", "correction", "bonus"}
        assert page.locator("#figures tbody tr").count() == 2
        page.fill("#prompt", "")
        page.fill("#tokens", "2000")
        page.click("#send")
        page.wait_for_function(
            "document.getElementById('error').textContent || !document.getElementById('stop').disabled"
        )
        assert not errors
        browser.close()
