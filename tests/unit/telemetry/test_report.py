"""Reports: one self-contained file, in which no text of a model, dataset or user becomes markup."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from pixelis.actors.report import choose_differing
from pixelis.records import Action, Group, ImageView, Observation, Question, StopReason, Trajectory, Turn
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.filters import data_url
from pixelis.telemetry.html.report import render_report, write_report

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202edcba\x00</style></pre></article>"
VOID = {"meta", "img", "br"}
TAGS = """html head meta title style body main section header nav article h1 h2 h3 h4 p b i small span div bdi pre ul ol li dl dt
dd a table thead tbody tr th td figure figcaption img details summary svg line text polyline circle"""
ALLOWED = set(TAGS.split())


class Page(HTMLParser):
    """Collects elements and fails on what is not well nested."""

    def __init__(self, document: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def all(self, tag: str, cls: str | None = None) -> list[dict[str, str | None]]:
        return [
            a for t, a in self.elements if t == tag and (cls is None or cls in (a.get("class") or "").split())
        ]


def picture(height: int = 768, width: int = 1024) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=-1).astype(np.uint8)


def episode(question: str = "Which digit?", answer: str | None = "7", **rewards: float) -> EpisodePage:
    """Zooms, zooms into the crop, fails once, answers."""
    seen = {"view_size": (64, 48)}
    boxes = {"img0": (0.25, 0.5, 0.75, 1.0), "obs1": (0.5, 0.0, 1.0, 0.5)}
    views = [ImageView(id="img0", source_size=(1024, 768), **seen)]
    turns = [Turn(role="user", text="<|im_start|>user\n" + "<|image_pad|>" * 12 + question, images=["img0"])]
    for number, (parent, box) in enumerate(boxes.items(), 1):
        size = (1024 >> number, 768 >> number)
        views.append(ImageView(id=f"obs{number}", parent=parent, box=box, source_size=size, **seen))
        call = Action(op="zoom_in", target=parent, arguments={"box": box})
        text = f"<think>{question}</think><tool_call>{{}}</tool_call>"
        observation = Observation(status="ok", id=f"obs{number}", images=views[-1:])
        turns += [
            Turn(role="assistant", text=text, action=call),
            Turn(role="tool", text="<tool_response>", images=[f"obs{number}"], observation=observation),
        ]
    failure = Observation(status="error", code="bad_json", text=question)
    turns += [
        Turn(role="assistant", text="<tool_call>{", error="bad_json"),
        Turn(role="tool", text="error", observation=failure),
        Turn(role="assistant", text=f"<answer>{answer}</answer>", tokens=[1, 2], log_probs=[-0.1, -0.2]),
    ]
    stop = StopReason.NO_ACTION if answer is None else StopReason.ANSWER
    ended = {"answer": answer, "stop_reason": stop, "unscored": None if rewards else "no_truth"}
    total = sum(rewards.values()) if rewards else None
    trajectory = Trajectory(
        question_id="q", images=views, turns=turns, rewards=rewards, reward=total, **ended
    )
    asked = Question(id="q", question=question, answers=["7"] if rewards else None)
    crop = picture(48, 64)
    return EpisodePage(asked, trajectory, {"img0": picture(), "obs1": crop, "obs2": crop}, title=question)


def page_of(episode: EpisodePage, number: int = 1) -> Page:
    """The part of a report that shows an episode."""
    document = render_report({}, [], [episode] * number)
    return Page(re.findall(r"<article.*?</article>", document, re.DOTALL)[number - 1])


def arm(name: str, accuracy: float, rapr: float) -> dict:
    measured = {"accuracy": accuracy, "ci95": [accuracy - 0.03, accuracy + 0.03], "n": 500}
    return {"name": name, **measured, "rapr": rapr, "tool_error_rate": 0.01 if rapr else 0.0}


SUMMARY = {
    "arms": [arm("direct", 0.11, 0.0), arm("sft", 0.134, 0.04), arm("rft", 0.848, 0.99)],
    "paired": {"rft_minus_sft": {"mean": 0.714, "ci95": [0.67, 0.756]}},
    "seconds": {"sft": 31.0, "rft": 84.0},
    "versions": {"pixelis": "0.1.0", "torch": "2.13.0"},
    "seed": 42,
    "shift": {
        "before": arm("", 0.316, 0.9),
        "after": arm("", 0.35, 0.9),
        "updates": 20,
        "replies_right": {"first_quarter": 0.8, "last_quarter": 0.815},
        "after_minus_before": {"mean": 0.034, "ci95": [-0.02, 0.09]},
    },
    "hardware": {"cores": 2},
    "command": "python -m pixelis.jobs.quickstart",
}
CURVES = [{"kind": "step/sft", "step": i, "sft/loss": 2 / i} for i in range(1, 6)] + [
    {
        "stage": "rft",
        "step": i,
        "train/accuracy": i / 20,
        "rollout/rapr": i / 10,
        "reward/accuracy": i / 20,
        "reward/curiosity": float("nan") if i == 3 else 0.1,
        "rollout/seconds": 2.0,
        "note": "text",
    }
    for i in range(1, 11)
]


def test_a_report_is_one_file_with_all_results(tmp_path):
    path = write_report(tmp_path / "run", SUMMARY, CURVES, [episode(accuracy=1.0)])
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["report.html"]
    document = path.read_text(encoding="utf-8")
    page = Page(document)
    assert {tag for tag, _ in page.elements} <= ALLOWED
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:image/", "#"))
    assert "http" not in re.sub(r"http-equiv", "", document)
    assert any("default-src 'none'" in (a.get("content") or "") for a in page.all("meta"))
    for said in (
        "answers 84.8 % of 500 held-out questions",
        "rft minus sft: +71.4 points 95 % interval +67.0 to +75.6",
        "31.6 %",
        "after minus before: +3.4 points 95 % interval -2.0 to +9.0",
        "35.0 %",
        "1:24 min",
        "torch",
        "python -m pixelis.jobs.quickstart",
        "Seed 42",
        "no calls",
        "replies right, first quarter",
    ):
        assert said in page.text, said


def test_every_figure_has_a_sentence():
    page = Page(render_report(SUMMARY, CURVES, []))
    assert len(page.all("svg")) == 4  # sft loss; accuracy and rapr; reward terms; seconds among the rest
    assert "rate of pixel reasoning (rollout/rapr) 100 %" in page.text
    assert "Look whether both rise together" in page.text
    assert "1 more curve" in page.text


def test_hostile_text_stays_text():
    bad = {"name": HOSTILE, "accuracy": 0.5, "ci95": [0.4, 0.6], "n": HOSTILE, "rapr": 0.1}
    summary = {
        "arms": [bad],
        "paired": {HOSTILE: {"mean": 0.1, "ci95": [0, 1]}},
        "versions": {HOSTILE: HOSTILE},
        "hardware": HOSTILE,
        "command": HOSTILE,
        "seed": HOSTILE,
        "seconds": {HOSTILE: 3.0},
        "shift": {"before": bad, "after": bad, HOSTILE: [HOSTILE]},
    }
    curves = [{"stage": HOSTILE, "step": i, f"x/{HOSTILE}": i, "reward/" + HOSTILE: i} for i in range(3)]
    one = episode(HOSTILE, HOSTILE, **{HOSTILE: 1.0})
    one.trajectory.images[0] = one.trajectory.images[0].model_copy(update={"id": HOSTILE})
    silent = episode(HOSTILE, None)
    page = Page(render_report(summary, curves, [one, silent], title=HOSTILE, compared=[[one, silent]]))
    assert {tag for tag, _ in page.elements} <= ALLOWED
    assert "script" not in {tag for tag, _ in page.elements}
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "<script>alert(1)</script>" in page.text  # seen, as text
    shown = "".join(page.words)
    assert "\u202e" not in shown
    assert "\x00" not in shown


def test_policies_answer_one_question_side_by_side():
    def scored(id: str, accuracy: float) -> Group:
        page = episode(accuracy=accuracy)
        group = Group(question=page.question.model_copy(update={"id": id}))
        group.trajectories.append(page.trajectory)
        return group

    sft, rft = {"a": 1.0, "b": 0.0, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": 0.0}
    policies = {
        name: ([scored(id, value) for id, value in scores.items()], [None] * 3)
        for name, scores in {"sft": sft, "rft": rft}.items()
    }
    chosen = choose_differing(policies, 2)
    assert [[(name, group.question.id) for name, group, _ in of_question] for of_question in chosen] == [
        [("sft", "b"), ("rft", "b")],
        [("sft", "a"), ("rft", "a")],
    ]
    looked, silent = episode(accuracy=1.0), episode("Which digit?", None)
    looked.title, silent.title = "rft", "sft"
    page = Page(render_report({}, [], [], compared=[[silent, looked]]))
    assert "sft after supervised" in page.text
    assert page.text.index("answer: none") < page.text.index("rft after reinforcement")
    assert page.text.index("zoom_in") < page.text.index("answer: 7")
    assert len(page.all("span", "box")) == 4  # two of each policy, which looked at the same places


def test_boxes_are_drawn_where_the_policy_zoomed():
    page = page_of(episode(accuracy=1.0))
    first, second = page.all("span", "box")
    assert first["style"] == "left:25.00%;top:50.00%;width:50.00%;height:50.00%"
    # A crop of the crop, in the whole picture
    assert second["style"] == "left:50.00%;top:50.00%;width:25.00%;height:25.00%"
    assert len(page.all("span", "mark")) == 2


def test_an_episode_tells_its_story_in_order():
    words = page_of(episode(accuracy=1.0, curiosity=0.05), 3).text
    order = [
        "Episode 3", "Which digit?", "right", "Answer: 7", "truth: 7", "1024 × 768 pixels", "64 × 48 pixels",
        "[picture: 12 tokens]", "Turn 1: the policy calls zoom_in on img0",
        "512 × 384 pixels, seen at 64 × 48", "Turn 2: the policy calls zoom_in on obs1",
        "Turn 3: the policy makes a call that cannot be read", "The call fails: bad_json",
        "Turn 4: the policy answers", "reward 1.05", "2 tokens generated",
    ]  # fmt: skip
    places = [words.index(part) for part in order]
    assert places == sorted(places)


def test_wrong_unscored_and_unanswered_episodes_say_so():
    assert "wrong" in page_of(episode(accuracy=0.0)).text
    silent = page_of(episode(answer=None)).text
    for said in ("not scored", "no answer", "unscored: no_truth", "neither an answer nor a call"):
        assert said in silent


def test_missing_pictures_and_broken_chains_are_said_not_fatal():
    one = episode(accuracy=1.0)
    one.pictures = {"obs1": picture(48, 64)}
    one.trajectory.images[2] = one.trajectory.images[2].model_copy(update={"parent": "gone"})
    page = page_of(one)
    assert "The picture img0 was not kept." in page.text
    assert "The picture obs2 was not kept." in page.text


def test_pictures_are_scaled_and_small_ones_kept_exactly():
    kind, _, data = data_url(picture()).partition(";base64,")
    assert kind == "data:image/jpeg"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (640, 480)
    kind, _, data = data_url(picture(48, 64)).partition(";base64,")
    assert kind == "data:image/png"
    assert (np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) == picture(48, 64)).all()
