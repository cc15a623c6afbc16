"""The page for raters in a real browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from pixelis.evaluation.ratings import RatingFile, RatingKey, analyse
from pixelis.jobs.rate import make_page

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from rated import save_evaluation

pytestmark = pytest.mark.slow


def fill(page: Page, item: str, preference: str) -> None:
    form = page.locator(f"form[data-item='{item}']")
    for side in ("left", "right"):
        form.locator(
            f"input[name='{item}-{side}-correct'][value='{'yes' if side == preference else 'no'}']"
        ).check()
        for scale in ("coherence", "efficiency", "thoroughness"):
            form.locator(
                f"input[name='{item}-{side}-{scale}'][value='{4 if side == preference else 2}']"
            ).check()
    form.locator(f"input[name='{item}-preference'][value='{preference}']").check()
    form.locator(f"input[name='{item}-confidence'][value='3']").check()


@pytest.mark.long
def test_a_rater_compares_all_pairs_and_saves_a_file(browser: Browser, tmp_path: Path) -> None:
    a, b = (
        save_evaluation(tmp_path / name, answer, zooms)
        for name, answer, zooms in (("a", "cat", True), ("b", "dog", False))
    )
    make_page(a, b, tmp_path / "out", count=3, seed=0)
    key = RatingKey.model_validate_json((tmp_path / "out/key.json").read_text())
    context = browser.new_context(accept_downloads=True, viewport={"width": 360, "height": 800})
    page, messages = context.new_page(), list[str]()
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("console", lambda message: messages.append(message.text))
    page.goto((tmp_path / "out/page.html").as_uri())
    page.get_by_label("Your name or number").fill("Ann 1")
    page.get_by_role("button", name="Start").click()
    items = list(key.items)
    page.get_by_role("button", name="Next").click()
    expect(page.locator(f"form[data-item='{items[0]}']")).to_be_visible()  # nothing is chosen yet
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing is wider than a phone"
    )
    for number, (item, of) in enumerate(key.items.items()):
        form = page.locator(f"form[data-item='{item}']")
        fill(page, item, "equal" if of.is_check else "left" if of.left == "a" else "right")
        if number == 0:
            form.get_by_label("Comment").fill("<b>clear</b>")
            form.get_by_label("Comment").blur()
        if number == 1:
            page.reload()  # what was entered is still there
            expect(page.locator(f"input[name='{items[0]}-confidence'][value='3']")).to_be_checked()
        form.get_by_role("button", name="Next" if number < len(items) - 1 else "Finish").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save the ratings").click()
    saving.value.save_as(tmp_path / "ann.json")
    context.close()
    assert saving.value.suggested_filename == "ratings-Ann_1.json"
    assert messages == []
    file = RatingFile.model_validate_json((tmp_path / "ann.json").read_text())
    assert (file.rater, file.ratings[0].comment) == ("Ann 1", "<b>clear</b>")
    assert all(0 < rating.seconds < 600 for rating in file.ratings)
    report = analyse(key, [file])
    assert (report["preferred"]["a"], report["preferred"]["b"]) == (3, 0)
    assert report["raters"][0]["checks_passed"] == 1
