"""BROWSER: a page in headless Chromium; the policy sees screenshots, clicks, and answers.

A row holds its page, `meta.html`. The page decides: `data-reward` of its body is what has been earned, and
`data-done` ends the episode. This file also makes such rows:

    python docs/examples/browser.py 1500 --direct 0.6 > demonstrations.jsonl
    python docs/examples/browser.py 200 --questions --seed 1 > questions.jsonl
"""

from __future__ import annotations

import argparse
import functools
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from string import Template

import numpy as np
from PIL import Image
from playwright.sync_api import Error, sync_playwright
from pydantic import Field

from pixelis.errors import MissingDependency
from pixelis.operations import Environment, EnvironmentAction, EnvironmentResult, OperationArguments
from pixelis.records import Action, Demonstration, Question

SIDE = 256
"""Width and height of the page in pixels."""
THREAD = ThreadPoolExecutor(1, "browser")
"""Playwright's objects belong to one thread, in which no asyncio loop may run."""


class ClickArguments(OperationArguments):
    """``x``, ``y``: thousandths of the screenshot."""

    x: int = Field(ge=0, le=1000, description="thousandths of the width, from the left")
    y: int = Field(ge=0, le=1000, description="thousandths of the height, from the top")


class Click(EnvironmentAction):
    """One click."""

    name = "click"
    description = "Click on the page at this place."
    Arguments = ClickArguments


class Browser(Environment):
    """An episode is a page of the process's Chromium, without a network."""

    name = "browser"
    actions = (Click,)
    page = None

    def reset(self, question, media, seed):
        """Open the page of the row."""
        return THREAD.submit(self._open, question.meta["html"]).result()

    def execute(self, action):
        """Click, and show the page. A click on nothing changes nothing."""
        return THREAD.submit(self._click, **action.arguments).result()

    def close(self):
        """Close the page, later."""
        if self.page is not None:
            THREAD.submit(self.page.close)

    def _open(self, html: str) -> EnvironmentResult:
        if not chromium().browser.is_connected():  # it has crashed
            chromium.cache_clear()
        self.page = chromium().new_page()
        self.page.set_content(html)
        self.earned = 0.0
        return self._look()

    def _click(self, x: int, y: int) -> EnvironmentResult:
        self.page.mouse.click(*(min(place * SIDE / 1000, SIDE - 1) for place in (x, y)))
        return self._look()

    def _look(self) -> EnvironmentResult:
        state = self.page.evaluate("({...document.body.dataset})")
        reward = float(state.get("reward", 0)) - self.earned
        self.earned += reward
        self.page.bring_to_front()  # a screenshot of a page behind others takes a second
        picture = np.array(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))
        return EnvironmentResult(self.page.title(), [picture], reward=reward, done="done" in state)


@functools.cache
def chromium():
    """A context of a new Chromium, which ends with this process. Raises MissingDependency.

    Pages share it, a renderer process, and the window of a page that stays: this halves their processor time.
    """
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    flags = ["--disable-gpu", "--renderer-process-limit=1"]
    try:
        browser = driver().chromium.launch(executable_path=path, args=flags)
    except Error as error:
        fix = "apt install chromium, or playwright install chromium"
        raise MissingDependency(f"Chromium does not start: {error.message}", fix=fix) from None
    context = browser.new_context(viewport={"width": SIDE, "height": SIDE}, service_workers="block")
    context.route("**", lambda route: route.fulfill(status=204))  # no content: links lead nowhere
    context.route_web_socket("**", lambda socket: socket.close())
    context.new_page()
    return context


@functools.cache
def driver():
    """Playwright in THREAD."""
    return sync_playwright().start()


# Making rows

COLORS = ("red", "green", "blue", "yellow", "purple", "cyan")
BUTTON = '<button style="left:{}px;top:{}px;background:{color}" onclick="press(\'{color}\')">{color}</button>'
PAGE = Template("""<title>Menu</title>
<style>button {position: absolute; width: 64px; height: 40px}</style>
<body>$buttons<script>
function press(color) {
  const light = '<div role="img" aria-label="$light" style="height: 200px; background: $light"></div>'
  document.title = color == "$wanted" ? "Light" : "Wrong"
  document.body.innerHTML = color == "$wanted" ? light : ""
  document.body.dataset[color == "$wanted" ? "reward" : "done"] = 1
}
</script>""")


def questions(count: int, seed: int) -> Iterator[Question]:
    """Pages of three buttons, of which one switches on a light and the others end the episode."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        (wanted, *others), light = rng.permutation(COLORS)[:3].tolist(), str(rng.choice(COLORS))
        # One button in each of three of nine fields
        fields = [divmod(int(field), 3) for field in rng.choice(9, 3, replace=False)]
        places = [
            rng.integers((85 * column, 85 * row), (85 * column + 21, 85 * row + 45)) for row, column in fields
        ]
        buttons = [BUTTON.format(*place, color=c) for place, c in zip(places, [wanted, *others], strict=True)]
        yield Question(
            id=f"browser-{seed}-{number}",
            question=f"Press the {wanted} button. What color is the light?",
            answers=[light],
            environment="browser",
            meta={"html": PAGE.substitute(buttons="".join(buttons), wanted=wanted, light=light)},
        )


def demonstration(question: Question, is_direct: bool) -> Demonstration:
    """What a user of the page does, who finds its elements by their roles; played and verified here.

    A direct one is the answer alone, which the first screenshot does not show.
    """
    if is_direct:
        return Demonstration.of(question, turns=[{"answer": question.answers[0]}])
    browser = Browser()
    browser.reset(question, {}, 0)
    button = browser.page.get_by_role("button", name=question.question.split()[2])
    box = THREAD.submit(button.bounding_box).result()
    # To 20 thousandths: the embedded model has one token for each of these
    x, y = (20 * round((box[a] + box[b] / 2) * 50 / SIDE) for a, b in (("x", "width"), ("y", "height")))
    click = Action(op="click", arguments={"x": x, "y": y})
    assert browser.execute(click).reward == 1
    light = THREAD.submit(browser.page.get_by_role("img").get_attribute, "aria-label").result()
    browser.close()
    turns = [{"op": "click", "x": x, "y": y}, {"answer": light}]
    return Demonstration.of(question, turns=turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", action="store_true", help="rows without turns")
    parser.add_argument("--direct", type=float, default=0.0, help="share that answers without a click")
    options = parser.parse_args()
    rng = np.random.default_rng([options.seed, 1])
    for row in questions(options.count, options.seed):
        if not options.questions:
            row = demonstration(row, is_direct=rng.random() < options.direct)
        print(row.model_dump_json(exclude_defaults=True), flush=True)


if __name__ == "__main__":
    main()
