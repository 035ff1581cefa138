"""The dashboard in a real browser: Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from running import Running

playwright = pytest.importorskip("playwright.sync_api", reason="the test of the page needs playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-sync")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here; Debian's package is `chromium`"),
    pytest.mark.server,
]
#: For a busy machine; nothing is measured.
PATIENCE = 60_000
#: The number in a cell of the table of rules.
CELL = "+document.querySelector('tr[data-rule={rule}]').cells[{cell}].textContent.replaceAll(' ', '')"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS], timeout=2 * PATIENCE)
        yield made
        made.close()


@pytest.fixture
def page(browser, service):
    """An open page of the service; any message on its console is an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made, said = context.new_page(), []
    made.set_default_timeout(PATIENCE)
    made.on("console", lambda message: said.append(message.text))
    made.on("pageerror", lambda error: said.append(str(error)))
    made.on("request", lambda request: request.url.startswith((service.admin, "data:")) or said.append(request.url))
    made.goto(service.admin)
    made.wait_for_selector("#live.ok")
    yield made
    context.close()
    assert [one for one in said if "status of 400" not in one] == []  # Chromium reports each error response


def wait_for_text(page, selector, text):
    playwright.expect(page.locator(selector)).to_contain_text(text, timeout=PATIENCE)


def refused(page, rule):
    return int(page.locator(f"tr[data-rule={rule}] td").nth(7).inner_text().replace(" ", ""))


def test_it_shows_the_policy_and_a_refusal(page, service):
    """Without a reload of the page, and as a chart."""
    wait_for_text(page, "#policy", "policy served, version ")
    before = refused(page, "checkout")
    codes = [service.post("/v1/check", limit="checkout", key="shown").status_code for _ in range(5)]
    assert codes == [200, 200, 200, 429, 429]
    page.wait_for_function(f"n => {CELL.format(rule='checkout', cell=7)} === n", arg=before + 2)
    page.wait_for_selector("#chart svg path.area")
    assert page.locator("#chart svg path.area").count() == 3
    wait_for_text(page, "#offender-rows", "checkout")
    assert "shown" not in page.locator("#offender-rows").inner_text()
    page.check("#show-keys")
    wait_for_text(page, "#offender-rows", "shown")


def test_an_operator_blocks_explains_and_resets(page, service):
    """With the forms of the page, by keyboard where a form is sent."""
    page.fill("#key [name=key]", "user:blocked")
    page.fill("#key [name=reason]", "abuse")
    page.click("#key [value=block]")
    wait_for_text(page, "#override-rows", "user:blocked")
    wait_for_text(page, "#audit-rows", "override checkout user:blocked blocked abuse")
    assert service.post("/v1/check", limit="checkout", key="user:blocked").status_code == 429
    page.fill("#try [name=line]", "POST /checkout user=blocked")
    page.press("#try [name=line]", "Enter")
    wait_for_text(page, "#explanation", "blocked by an operator")
    page.click("#try [value=try]")
    wait_for_text(page, "#explanation", "answered 429")
    page.get_by_role("button", name="remove the override of user:blocked").press("Enter")
    wait_for_text(page, "#override-rows", "no overrides")
    for _ in range(4):
        service.post("/v1/check", limit="checkout", key="again")
    page.fill("#key [name=key]", "again")
    page.click("#key [value=reset]")
    wait_for_text(page, "#key-answer", '"reset": true')
    assert service.post("/v1/check", limit="checkout", key="again").status_code == 200
    page.fill("#key [name=to]", "nonsense")
    page.click("#key [value=override]")
    wait_for_text(page, "#key-answer", "unknown algorithm")


def test_demo_load_is_seen_and_a_rule_is_chosen(page):
    """The chart then shows that rule alone."""
    page.select_option("#load [name=limit]", "plenty")
    page.fill("#load [name=rate]", "50")
    page.fill("#load [name=seconds]", "2")
    page.click("#load button")
    page.wait_for_function(f"() => {CELL.format(rule='plenty', cell=6)} >= 100")
    page.get_by_role("button", name="show plenty in the chart").press("Enter")
    wait_for_text(page, "#chart-of", "plenty")
    page.click("#reload")
    wait_for_text(page, "#audit-rows", "reload")


def test_it_can_be_used_with_the_keyboard(page):
    """The first stop skips to the rules, and every control has a name."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the rules"
    nameless = "document.querySelectorAll('input, select, button').values()"
    names = page.evaluate(f"[...{nameless}].map(one => one.ariaLabel || one.textContent || one.labels?.[0]?.textContent || '')")
    assert all(name.strip() for name in names)


def test_dark_and_light_follow_the_system(browser, service):
    """And differ in the background; LIMITKEEPER_PICTURES names a folder for pictures of both."""
    colors, folder = set(), os.environ.get("LIMITKEEPER_PICTURES")
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.goto(service.admin, timeout=PATIENCE)
        page.wait_for_selector("#live.ok", timeout=PATIENCE)
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        if folder:
            page.screenshot(path=Path(folder) / f"{scheme}.png")
        context.close()
    assert len(colors) == 2


def test_a_token_is_required(browser, policy_file):
    """And kept for this tab only."""
    token = "0123456789abcdef"
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": token}) as service:
        context = browser.new_context()
        page = context.new_page()
        page.goto(service.admin, timeout=PATIENCE)
        page.wait_for_selector("dialog[open]", timeout=PATIENCE)
        page.fill("dialog input", "wrong-0123456789")
        page.keyboard.press("Enter")
        wait_for_text(page, "#login-answer", "unknown token")
        page.fill("dialog input", token)
        page.keyboard.press("Enter")
        page.wait_for_selector("#live.ok", timeout=PATIENCE)
        context.close()
