"""Rows of the seed systems beside what the systems' own code makes of them: input, upstream's value, ours, reason.

The tables are written by hand from the systems' public code and descriptions; where ours differs, the reason says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_server import ChatServer
from dialogue_models import renderer
from PIL import Image

from pixelis.config import DialogueConfig, RewardsConfig
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.formats import read_records, write_question
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadInput, MissingFile
from pixelis.operations import OPERATIONS
from pixelis.operations.scale import Scale
from pixelis.records import Group, Question, StopReason, Trajectory, Turn
from pixelis.rewards.terms import score_group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.fromarray(np.full((40, 80, 3), 60 * i, np.uint8)).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def write(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif name.endswith("json"):
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def one(source: str) -> Question:
    (record,) = list(read_records(source))
    assert isinstance(record, Question), record
    return record


# -- DeepEyes: the task follows the data source, the tools follow env_name -----------------------------------------------------


def deepeyes(source: str, truth: str = "7", **more: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "<image>\nHow many?"}],
        "images": ["images/0.png"],
        "ability": "vl",
        "reward_model": {"ground_truth": truth, "style": "model"},
        "extra_info": {"index": "1", "split": "train"},
        **more,
    }


@pytest.mark.parametrize(
    ("source", "text", "judge", "upstream", "task"),
    [
        # data_source, the last turn, what the judge says, DeepEyes' compute_score, task
        ("thinklite_eureka", "<think>t</think>So \\boxed{7}", 0, 1.2, "math"),
        ("thinklite_eureka", "<think>t</think><answer>\\boxed{7}</answer>", 0, 1.2, "math"),
        ("thinklite_eureka", "<think>t</think><answer>7</answer>", 1, -0.4, "math"),  # right, but nothing is in a box
        ("thinklite_eureka", "<think>t</think>So \\boxed{9}", 0, 0.0, "math"),
        ("thinklite_eureka", "<think>t</think>So \\boxed{seven}", 1, 1.2, "math"),  # the judge is asked after the rules
        ("xince", "<think>t</think>So \\boxed{7.0}", 0, 1.2, "math"),
        ("xince", "<think>t</think>So \\boxed{seven}", 1, 1.2, "math"),
        ("xince", "<think>t</think>Seven.", 1, -0.4, "math"),
        ("vstar", "<think>t</think><answer>seven</answer>", 1, 0.8, "vstar"),
        ("chart", "<think>t</think><answer>nine</answer>", 0, 0.0, "chart"),
        ("geoguessr", "<think>t</think><answer>seven</answer>", 1, 0.8, "geoguessr"),
        ("vstar", "<think>t<answer>seven</answer>", 1, 0.6, "vstar"),  # the thought is not closed: -0.2
    ],
)
def test_the_task_of_a_deepeyes_row_follows_its_data_source(
    folder: Path, source: str, text: str, judge: int, upstream: float, task: str
) -> None:
    question = one(write(folder, deepeyes(source)))
    assert (question.task, question.id) == (task, f"{source}-1")
    answer = DIALECTS["deepeyes"].parse(text, OPERATIONS, Scale("pixels")).answer
    stop = StopReason.ANSWER if answer is not None else StopReason.NO_ACTION
    turns = [Turn(role="user", text="?"), Turn(role="assistant", text=text)]
    episode = Trajectory(question_id=question.id, group_id="g", turns=turns, answer=answer, stop_reason=stop, dialect="deepeyes")
    server = ChatServer(json.dumps({"score": judge, "why": "."}))
    try:
        config = {"preset": "deepeyes-repo", "judge": {"url": server.url, "model": "m", "api_key_env": "", "cache": False}}
        settings = RewardsConfig.model_validate(config)
        (scored,) = score_group(Group(id="g", question=question, trajectories=[episode]), settings).trajectories
    finally:
        server.close()
    assert scored.unscored is None
    assert scored.reward == pytest.approx(upstream)


def test_the_data_source_of_a_math_row_is_written_back(folder: Path) -> None:
    question = one(write(folder, deepeyes("xince", env_name=""), name="rows.parquet"))
    row = write_question(question, "deepeyes")
    assert (row["data_source"], row["env_name"], row["extra_info"]["index"]) == ("xince", "", "1")


@pytest.mark.parametrize(
    ("more", "tools", "offered"),
    [
        ({"env_name": "visual_toolbox_v2"}, ["zoom_in", "rotate"], True),
        ({"env_name": "visual_toolbox_v5"}, ["zoom_in", "rotate"], True),
        ({"env_name": ""}, [], False),
        ({"env_name": None}, [], False),
        ({}, None, True),  # the row says nothing: the run's own operations
    ],
)
def test_the_tools_of_a_deepeyes_row_follow_env_name(folder: Path, more: dict, tools: list[str] | None, offered: bool) -> None:
    question = one(write(folder, deepeyes("vstar", **more)))
    assert question.tools == tools
    model = renderer("large")
    r = Renderer(model.tokenizer, model.spec, DialogueConfig(dialect="deepeyes"), [OPERATIONS["zoom_in"]])
    text = "".join(turn.text for turn in r.prompt(question, []))
    assert ("image_zoom_in_tool" in text) == ("tool_call" in text) == offered
    assert list(r.offered(question)) == (["zoom_in"] if offered else [])
    assert not r.offered(question, operations=False)


def test_an_environment_that_pixelis_lacks_is_named(folder: Path) -> None:
    (row,) = read_records(write(folder, deepeyes("rag_v2-train", env_name="rag")))
    assert isinstance(row, BadRow)
    assert (row.column, row.code) == ("env_name", "unknown_environment")


# -- EasyR1: DAPO's form of answers, Jinja prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "upstream", "ours", "reason"),
    [
        ("It is 3 + 4.\nAnswer: 7", "7", "7", "the form that the prompt asks for"),
        ("answer:7", "7", "7", "upper and lower case are alike"),
        ("Answer: 3\nNo.\nAnswer: 7", "7", "7", "the last one"),
        ("**Answer: 7", "7", "7", "may stand anywhere in the line"),
        ("It is 7.", None, None, "no such line"),
        ("Answer:\n7", "7", None, "upstream's blank runs over the line; the prompt wants one line"),
        (
            "Answer: 7" + " I think" * 50,
            None,
            "7" + " I think" * 50,
            "upstream cuts to 300 characters, which may cut the line too",
        ),
        ("<think>Answer: 3</think>Seven", "3</think>Seven", None, "no credit inside the thought"),
    ],
)
def test_dapo_reads_the_line_that_its_prompt_asks_for(text: str, upstream: str | None, ours: str | None, reason: str) -> None:
    reply = DIALECTS["dapo"].parse(text, {}, Scale("pixels"))
    assert (reply.answer, reply.action, reply.error) == (ours, None, None), reason


def test_dapo_earns_plus_and_minus_one(folder: Path) -> None:
    question = one(write(folder, {"problem": "3 + 4?", "answer": "7"}))
    texts = ["So.\nAnswer: 7", "So.\nAnswer: 8", "So it is 7."]
    episodes = []
    for text in texts:
        answer = DIALECTS["dapo"].parse(text, {}, Scale("pixels")).answer
        turn = Turn(role="assistant", text=text, tokens=[1])
        stop = StopReason.ANSWER if answer else StopReason.NO_ACTION
        episodes.append(
            Trajectory(question_id=question.id, group_id="g", turns=[turn], answer=answer, stop_reason=stop, dialect="dapo")
        )
    scored = score_group(Group(id="g", question=question, trajectories=episodes), RewardsConfig(preset="easyr1-dapo"))
    assert [t.reward for t in scored.trajectories] == [1.0, -1.0, -1.0]
    assert [DIALECTS["dapo"].well_formed(text) for text in (*texts, "Answer: 7\nSure.")] == [True, True, False, False]
    assert "".join(DIALECTS["dapo"].render("7", Scale("pixels"), "So.")) == texts[0]


def test_a_jinja_prompt_is_put_around_each_question(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "math.jinja"
    template.write_text("{{ content | trim }} Reason first, then put the answer in \\boxed{}.")
    rows = write(folder, {"problem": " 3 + 4? ", "answer": "7"}, {"problem": "Which? A. red B. blue", "answer": "B"})
    asked = [record.question for record in read_records(f"{rows}?prompt={template}") if isinstance(record, Question)]
    end = " Reason first, then put the answer in \\boxed{}."
    assert asked == ["3 + 4?" + end, "Which? A. red B. blue" + end]
    with pytest.raises(MissingFile, match="prompt template"):
        list(read_records(f"{rows}?prompt={tmp_path}/none.jinja"))
    for text in ("{{ content", "{{ answer }}", "{{ content.__class__.__mro__[1].__subclasses__() }}", "{# nothing #}"):
        template.write_text(text)
        with pytest.raises(BadInput) as caught:
            list(read_records(f"{rows}?prompt={template}"))
        assert caught.value.code == "bad_template"


@pytest.mark.parametrize(
    ("question", "answer", "suffix"),
    [
        ("What is the area? Choices: A. 3 B. 4 C. 5 D. 6", "A", "its letter"),
        ("What is the area? Choices: A. 3 B. 4 C. 5 D. 6", "3", "its letter"),  # by the question, never by the truth
        ("What is the area?", "A", "a number"),
        ("What is the area of the square AB?", "12", "a number"),
    ],
)
def test_reason_rft_prompts_by_the_type_of_the_question(folder: Path, question: str, answer: str, suffix: str) -> None:
    row = {
        "id": "geomath_1",
        "image": "images/0.png",
        "problem": question,
        "solution": f"<answer>{answer}</answer>",
        "answer": answer,
    }
    assert suffix in one(write(folder, row) + "?prompt=reason_rft").question
