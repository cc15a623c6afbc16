"""axe-core finds nothing serious on the views of the page, light and dark, phone and desktop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from browser_helpers import Opened, ask
from gateway_helpers import publish
from playwright.sync_api import Page, expect
from scripted import Deployed
from test_page_evolution import put_review, shown

pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[1] / "vendor" / "axe-core" / "axe.min.js"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
RUN = "async () => (await axe.run(document, { resultTypes: ['violations'] })).violations"
FOCUS = """() => {
    const focused = document.activeElement;
    const label = (focused.closest("label") ?? focused.labels?.[0])?.textContent;
    const name = label ?? focused.getAttribute("aria-label") ?? focused.textContent;
    const outlined = focused.closest("label:has(.away)") ?? focused;
    const { width } = outlined.getBoundingClientRect();
    return { name: name.trim().replace(/\\s+/g, " "), width, outline: getComputedStyle(outlined).outlineStyle };
}"""
"""The focused element: its name, the width of what is visible of it, and the outline that shows the focus."""
MAX_TABS = 120


def violations(page: Page) -> list[str]:
    """Everything serious or critical, with the elements, in light and dark and at both widths."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = set()
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            for rule in page.evaluate(RUN):
                if rule["impact"] in ("serious", "critical"):
                    elements = {
                        node["html"][:120] + " " + node["failureSummary"][-160:] for node in rule["nodes"]
                    }
                    found |= {f"{size['width']} {scheme} {rule['id']}: {element}" for element in elements}
    return sorted(found)


def test_the_ask_view(opened: Opened) -> None:
    page = opened()
    assert violations(page) == []
    page.click(".settings summary")
    ask(page, "say 7,7,8,none")
    expect(page.locator("#answer .final")).to_have_text("7")
    page.get_by_role("button", name="Wrong", exact=True).click()
    page.get_by_role("button", name="Compare ways to answer").click()
    expect(page.locator(".arm .final")).to_have_count(2)
    expect(page.locator("#comparison [role=status]")).to_contain_text("Both were answered")
    page.fill("#question", "say 8")
    page.keyboard.press("Enter")
    expect(page.locator("#answer .final")).to_have_text("8")
    page.click("#send")
    expect(page.locator("#error")).to_contain_text("There is no question yet.")
    assert violations(page) == []


@pytest.mark.long
def test_the_memory_view(deployed: Deployed, opened: Opened) -> None:
    assert deployed.ask("say 7 ocelot").status_code == 200
    page = opened("memory")
    page.fill("#words", "ocelot")
    page.keyboard.press("Enter")
    expect(page.locator("#memory-note")).to_have_text("1 result, the most similar first.")
    expect(page.locator(".experience .seen img")).to_have_js_property("naturalWidth", 8)
    page.locator(".experience summary").click()
    assert violations(page) == []


@pytest.mark.long
def test_the_evolution_view_and_its_dialog(deployed: Deployed, opened: Opened) -> None:
    alerts = [
        {"time": 1e9, "metric": "rollback", "value": 1, "severity": "critical"},
        {"time": 1e9, "metric": "queue_fill", "value": 1, "severity": "warning"},
    ]
    event = {"time": 1e9, "event": "pause", "actor": "key a", "action": "pause", "details": {"a": 1}}
    audit = [{**event, "result": "refused"}]
    question = put_review(deployed.evolution)
    page = shown(opened, alerts=alerts, audit=audit, reviews=True)
    expect(page.locator(".review", has_text=question)).to_be_visible()
    expect(page.locator(".chart")).to_be_visible()
    assert violations(page) == []
    page.get_by_role("button", name="Go back to version 0").click()
    assert violations(page) == []


@pytest.fixture
def later(deployed: Deployed) -> Iterator[tuple[int, int]]:
    """The served version, and a later one that is served during the test."""
    before = ray.get(deployed.evolution.status.remote())["served"]
    ray.get(deployed.evolution.promote.remote(publish(0.4), "test", force=True))
    version = ray.get(deployed.evolution.status.remote())["served"]
    yield before, version
    if ray.get(deployed.evolution.status.remote())["served"] == version:
        ray.get(deployed.evolution.roll_back.remote(before, "test"))


@pytest.mark.long
def test_the_keyboard_asks_follows_up_searches_and_goes_back(
    deployed: Deployed, opened: Opened, later: tuple[int, int]
) -> None:
    before, version = later
    page = opened()
    # A busy browser may take the key before it starts to report choosers
    page.on("filechooser", lambda chooser: None)

    def go(name: str) -> None:
        """Press Tab until the focus is on the element of this name, and check that it shows."""
        for _ in range(MAX_TABS):
            page.keyboard.press("Tab")
            focus: dict[str, Any] = page.evaluate(FOCUS)
            if focus["name"].startswith(name):
                assert focus["width"] > 10, f"{name} has the focus and cannot be seen"
                assert focus["outline"] != "none", f"nothing shows that {name} has the focus"
                return
        raise AssertionError(f"Tab does not reach {name}")

    go("Which digit is in the cyan frame?")
    page.keyboard.press("Enter")
    expect(page.locator("#answer .final")).to_have_text("7")
    go("Ask a follow-up question")
    page.keyboard.type("recall")
    page.keyboard.press("Enter")
    expect(page.locator("#answer .final")).to_have_text("7 1 of 1")
    go("Choose a picture or clip")
    with page.expect_file_chooser():
        page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    go("Memory")
    page.keyboard.press("Enter")
    go("Words in the question")
    page.keyboard.type("recall")
    page.keyboard.press("Enter")
    expect(page.locator(".experience .question").first).to_have_text("recall")
    go("Evolution")
    page.keyboard.press("Enter")
    expect(page.locator("#evolution-status")).to_contain_text(f"Version {version} answers now")
    go(f"Go back to version {before}")
    page.keyboard.press("Enter")
    expect(page.locator("#confirm")).to_be_visible()
    go(f"Go back to version {before}")
    page.keyboard.press("Enter")
    expect(page.locator("#evolution-result")).to_contain_text(f"Version {before} answers again.")
    assert ray.get(deployed.evolution.status.remote())["served"] == before
