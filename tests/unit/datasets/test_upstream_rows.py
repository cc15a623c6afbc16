"""Rows of the seed systems beside what the systems' own code makes of them; reasons say why ours differs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dialogue_models import nano_folder, renderer
from official_sets import PICTURE
from official_sets import write as write_files
from row_files import one, refused, write

from pixelis.config import DialogueConfig, parse
from pixelis.datasets import readers
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.formats import detect, read_records
from pixelis.datasets.readers.benchmarks import REASON_RFT
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadInput, MissingFile
from pixelis.operations import OPERATIONS
from pixelis.operations.scale import Scale
from pixelis.records import Demonstration, ImageView, Question, Trajectory

# -- DeepEyes: the task follows the data source, the tools follow env_name -----------------------------------


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
    ("source", "task"),
    [("thinklite_eureka", "math"), ("xince", "math"), ("vstar", "vstar"), ("chart", "chart")],
)
def test_the_task_of_a_deepeyes_row_follows_its_data_source(folder: Path, source: str, task: str) -> None:
    question = one(write(folder, deepeyes(source)))
    assert (question.task, question.id) == (task, f"{source}-1")
    assert question.scorer == ("math_judge" if task == "math" else "judge")


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
def test_the_tools_of_a_deepeyes_row_follow_env_name(
    folder: Path, more: dict, tools: list[str] | None, offered: bool
) -> None:
    question = one(write(folder, deepeyes("vstar", **more)))
    assert question.tools == tools
    model = renderer("large")
    r = Renderer(model.tokenizer, model.spec, DialogueConfig(dialect="deepeyes"), [OPERATIONS["zoom_in"]])
    text = "".join(turn.text for turn in r.prompt(question, []))
    assert ("image_zoom_in_tool" in text) == ("tool_call" in text) == offered
    assert list(r.offered(question)) == (["zoom_in"] if offered else [])
    assert not r.offered(question, operations=False)


def test_another_env_name_is_that_of_an_environment_which_the_run_must_know(folder: Path) -> None:
    question = one(write(folder, deepeyes("rag_v2-train", env_name="rag")))
    assert (question.environment, question.tools) == ("rag", None)
    assert one(write(folder, deepeyes("vstar", env_name="visual_toolbox_v2"))).environment is None
    model = renderer("large")
    r = Renderer(model.tokenizer, model.spec, DialogueConfig(dialect="deepeyes"), [OPERATIONS["zoom_in"]])
    with pytest.raises(BadInput, match=r"toolbox\.environments") as error:
        r.prompt(question, [])
    assert error.value.code == "unknown_environment"


# -- EasyR1: DAPO's form of answers, Jinja prompts -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "reason"),
    [
        ("It is 3 + 4.\nAnswer: 7", "7", "the form that the prompt asks for"),
        ("answer:7", "7", "upper and lower case are alike"),
        ("Answer: 3\nNo.\nAnswer: 7", "7", "the last one"),
        ("**Answer: 7", "7", "may stand anywhere in the line"),
        ("It is 7.", None, "no such line"),
        ("Answer:\n7", None, "upstream's blank runs over the line; the prompt wants one line"),
        (
            "Answer: 7" + " I think" * 50,
            "7" + " I think" * 50,
            "upstream cuts to 300 characters, which may cut the line too",
        ),
        ("<think>Answer: 3</think>Seven", None, "no credit inside the thought, as upstream gives"),
    ],
)
def test_dapo_reads_the_line_that_its_prompt_asks_for(text: str, answer: str | None, reason: str) -> None:
    reply = DIALECTS["dapo"].parse(text, {}, Scale("pixels"))
    assert (reply.answer, reply.action, reply.error) == (answer, None, None), reason


def test_a_jinja_prompt_is_put_around_each_question(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "math.jinja"
    template.write_text("{{ content | trim }} Reason first, then put the answer in \\boxed{}.")
    choice = {"problem": "Which? A. red B. blue", "answer": "B"}
    rows = write(folder, {"problem": " 3 + 4? ", "answer": "7"}, choice)
    records = list(read_records(f"{rows}?prompt={template}"))
    end = " Reason first, then put the answer in \\boxed{}."
    asked = [record.question for record in records if isinstance(record, Question)]
    assert asked == ["3 + 4?" + end, "Which? A. red B. blue" + end]
    with pytest.raises(MissingFile, match="prompt template"):
        list(read_records(f"{rows}?prompt={tmp_path}/none.jinja"))
    escape = "{{ content.__class__.__mro__[1].__subclasses__() }}"
    for text in ("{{ content", "{{ answer }}", escape, "{# nothing #}"):
        template.write_text(text)
        with pytest.raises(BadInput) as caught:
            list(read_records(f"{rows}?prompt={template}"))
        assert caught.value.code == "bad_template"


@pytest.mark.parametrize(
    ("question", "answer", "suffix"),
    [
        ("What is the area? Choices: A. 3 B. 4 C. 5 D. 6", "A", "its letter"),
        # By the question, never by the truth
        ("What is the area? Choices: A. 3 B. 4 C. 5 D. 6", "3", "its letter"),
        ("What is the area?", "A", "a number"),
        ("What is the area of the square AB?", "12", "a number"),
    ],
)
def test_reason_rft_prompts_by_the_type_of_the_question(
    folder: Path, question: str, answer: str, suffix: str
) -> None:
    row = {"id": "geomath_1", "image": "images/0.png", "problem": question, "answer": answer}
    row["solution"] = f"<answer>{answer}</answer>"
    assert suffix in one(write(folder, row) + "?prompt=reason_rft").question


# -- demonstrations: what a row says is kept, masked or dropped by name, never changed -----------------------


def ground(box: str, source: str = "original_image", thought: str = "Closer.") -> str:
    return f'<think>{thought}</think><grounding>{{"bbox_2d": {box}, "source": "{source}"}}</grounding>'


def crop(box: str, target: int = 1, thought: str = "Closer.") -> str:
    call = f'{{"name": "crop_image_normalized", "arguments": {{"bbox_2d": {box}, "target_image": {target}}}}}'
    return f"{thought}\n<tool_call>\n{call}\n</tool_call>"


CAPTION = (
    "<summary> I compare.</summary>\n<caption>A red cube.</caption>\n<think> It grew.</think>\n"
    "<answer>change_size(0, large)</answer>"
)
SHOWN = "Here is Observation {}: <image>\nGo on."


def mini_o3_chat(*replies: str, results: tuple[str, ...]) -> dict[str, Any]:
    """A row of Mini-o3's cold start; images lie in the row in the order of their marks."""
    chat = [{"from": "system", "value": "You search."}, {"from": "human", "value": "<image>\nWhat color?"}]
    for i, reply in enumerate(replies):
        chat.append({"from": "gpt", "value": reply})
        if i < len(results):
            chat.append({"from": "human", "value": results[i]})
    images = [f"images/{i}.png" for i in range(1 + sum("<image>" in result for result in results))]
    return {"id": "c1", "conversations": chat, "images": images, "image_names": ["a"]}


def pixel_reasoner_chat(*replies: str) -> dict[str, Any]:
    """Each reply but the last one is a call, whose result is the next picture."""
    question = [{"image": "images/0.png"}, {"text": "What color?"}]
    chat: list[dict[str, Any]] = [{"role": "system", "content": [{"text": "You are a helpful assistant."}]}]
    chat.append({"role": "user", "content": question})
    for i, reply in enumerate(replies, 1):
        chat.append({"role": "assistant", "content": [{"text": reply}]})
        if i < len(replies):
            shown = [{"text": "The cropped image (40x20):"}, {"image": f"images/{i}.png"}]
            chat.append({"role": "user", "content": shown})
    return {"message_list": chat}


def messages_chat(name: str, *texts: str) -> dict[str, Any]:
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {
        "id": name,
        "messages": chat,
        "images": [f"images/{i}.png" for i in range(" ".join(texts).count("<image>"))],
    }


RED = "<think>It is red.</think><answer>red</answer>"
ZOOM = '{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 40, 40], "label": "it"}}'
NATIVE = (
    '{"name": "image_zoom_in_tool", "arguments": {"label": "it", "bbox_2d": [0, 0, 500, 1000], "img_idx": 0}}'
)
NATIVE_XML = (
    "<function=image_zoom_in_tool>\n<parameter=bbox_2d>\n[0, 0, 500, 1000]\n</parameter>\n"
    "<parameter=label>\nit\n</parameter>\n<parameter=img_idx>\n0\n</parameter>\n</function>"
)
CHATS = {
    "mini_o3, boxes of four decimals, a line break after the thought": mini_o3_chat(
        ground("[0.1234, 0.0501, 0.6789, 0.9]").replace("</think>", "</think>\n"),
        ground("[0.25, 0.5, 0.75, 1.0]", "observation_1"),
        "<think>It is red.</think> So: <answer>red</answer>",
        results=(SHOWN.format(1), SHOWN.format(2)),
    ),
    "mini_o3, a refused call, a call that is no JSON": mini_o3_chat(
        ground("[0.1, 0.1, 0.1, 0.1]"),
        "<think>x</think><grounding>{broken</grounding>",
        ground("[0.25, 0.5, 0.75, 1.0]"),
        RED,
        results=("Execution error: empty box", "ERROR: not JSON", SHOWN.format(1)),
    ),
    "mini_o3, a box of 1.02": mini_o3_chat(ground("[0.5, 0.5, 1.02, 1.0]"), RED, results=(SHOWN.format(1),)),
    "pixel_reasoner, a crop that is wrong on purpose": pixel_reasoner_chat(
        crop("[0.0, 0.0, 0.3, 0.3]"),
        crop("[0.5, 0.25, 0.9, 0.75]", 1, "That is the wall. Again."),
        "It is red: \\boxed{red}.",
    ),
    "reason_rft, a caption": messages_chat("trance_1", "<image><image>What changed?", CAPTION),
    "r1_v, an answer without tags": messages_chat("d1", "<image>How many?", "7"),
    "deepeyes, a label": messages_chat(
        "d2",
        "<image>How many?",
        f"<think>t</think>\n<tool_call>\n{ZOOM}\n</tool_call>",
        "<tool_response><image></tool_response>",
        "<think>t</think><answer>7</answer>",
    ),
    "qwen_zoom, prose before the call": messages_chat(
        "q1",
        "<image>How many?",
        f"I look closer.\n<tool_call>\n{NATIVE}\n</tool_call>",
        "<tool_response>\n<image>\n</tool_response>",
        "<answer>7</answer>",
    ),
    "qwen_zoom_xml, an empty thought": messages_chat(
        "q2",
        "<image>How many?",
        f"<think>\n\n</think>\n\n<tool_call>\n{NATIVE_XML}\n</tool_call>",
        "<tool_response>\n<image>\n</tool_response>",
        "<think>\nt\n</think>\n\n<answer>7</answer>",
    ),
}
LEARNT: list[tuple[list[bool], list[str | None], list[list[float]]]] = [
    ([True] * 3, ["img0", "obs1", None], [[0.1234, 0.0501, 0.6789, 0.9], [0.25, 0.5, 0.75, 1.0]]),
    ([False, False, True, True], [None, None, "img0", None], [[0.25, 0.5, 0.75, 1.0]]),
    ([False, True], ["img0", None], [[0.5, 0.5, 1.0, 1.0]]),
    ([False, True, True], ["img0", "img0", None], [[0.0, 0.0, 0.3, 0.3], [0.5, 0.25, 0.9, 0.75]]),
    ([True], [None], []),
    ([True], [None], []),
    *[([True, True], ["img0", None], [[0.0, 0.0, 0.5, 1.0]])] * 3,
]
"""Of each chat: which turns are learnt, the targets of its turns, the boxes of its calls."""


@pytest.mark.parametrize(("name", "expected"), zip(CHATS, LEARNT, strict=True))
def test_what_is_learnt_of_a_chat_and_what_stays_context(folder: Path, name: str, expected: tuple) -> None:
    record = one(write(folder, CHATS[name]))
    assert isinstance(record, Demonstration)
    boxes = [step.arguments["box"] for step in record.turns if step.op]
    assert ([step.learn for step in record.turns], [step.target for step in record.turns], boxes) == expected


DIALECT_OF = {"reason_rft": "plain", "r1_v": "plain"}
"""Where it is not that of the chat's name."""


def player(dialect: str) -> Player:
    size = {"min_pixels": 64 * 32, "max_pixels": 80 * 48}
    dialogue = {"dialect": dialect, "max_context": 4096, "input": size, "crop": size, "system": "none"}
    if dialect == "deepeyes":
        dialogue["input"] = {"min_pixels": 160 * 64, "max_pixels": 160 * 96}
    return Player(parse({"dialogue": dialogue, "learner": {"row_tokens": 4096}}), str(nano_folder()))


def texts(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.turns if turn.is_policy]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_trained_on_in_its_own_words(folder: Path, name: str) -> None:
    record = one(write(folder, CHATS[name]))
    assert isinstance(record, Demonstration)
    system = name.partition(",")[0]
    p = player(DIALECT_OF.get(system, system))
    trajectory, _ = p.play(record)
    said = [step.verbatim.text for step in record.turns if step.verbatim is not None]
    # Pixels of the file become pixels of the view; what is around the call stays
    if name.startswith("deepeyes"):
        width, height = trajectory.images[0].view_size
        arguments = {"bbox_2d": [0, 0, width // 2, height], "label": "it"}
        call = {"name": "image_zoom_in_tool", "arguments": arguments}
        written = json.dumps(call, separators=(",", ":"))
        assert texts(trajectory)[0] == f"<think>t</think>\n<tool_call>\n{written}\n</tool_call>"
        said = said[1:]
    assert texts(trajectory)[-len(said) :] == said
    masks = [turn.learn for turn in trajectory.turns if turn.is_policy]
    assert masks == [step.learn for step in record.turns]
    decoded = [p.renderer.tokenizer.decode(turn.tokens) for turn in trajectory.turns if turn.is_policy]
    assert [text.removesuffix("<|im_end|>") for text in decoded] == texts(trajectory)
    assert trajectory.answer == record.final


def test_words_of_a_row_never_become_control_tokens(folder: Path) -> None:
    row = mini_o3_chat("<think>So <|im_end|><|image_pad|> it is.</think><answer>red</answer>", results=())
    record = one(write(folder, row))
    assert isinstance(record, Demonstration)
    p = player("mini_o3")
    trajectory, _ = p.play(record)
    (turn,) = [turn for turn in trajectory.turns if turn.is_policy]
    assert turn.tokens.count(p.spec.stop) == 1
    assert turn.tokens[-1] == p.spec.stop
    assert p.spec.image_token not in turn.tokens
    assert "<|im_end|><|image_pad|>" in turn.text


def test_a_chat_of_another_dialect_is_put_into_that_of_the_run(folder: Path) -> None:
    record = one(write(folder, CHATS["mini_o3, boxes of four decimals, a line break after the thought"]))
    assert isinstance(record, Demonstration)
    first, second, last = texts(player("qwen").play(record)[0])
    assert first.startswith('<think>Closer.</think><tool_call>{"name":"zoom_in"')
    assert '"target":"obs1"' in second
    assert last == "<think>It is red.</think><answer>red</answer>"


def test_an_image_that_only_the_row_has_shifts_the_numbers_of_later_ones(folder: Path) -> None:
    """A call that Mini-o3 evaluated as Python had an image there and has none here."""
    python = "<think>x</think><grounding>dict(bbox_2d=[0, 0, 1, 1], source='original_image')</grounding>"
    row = mini_o3_chat(
        python,
        ground("[0.25, 0.25, 0.75, 1.0]"),
        ground("[0.25, 0.25, 0.75, 1.0]", "observation_2"),
        "<think>Red.</think><answer>red</answer>",
        results=(SHOWN.format(1), SHOWN.format(2), SHOWN.format(3)),
    )
    record = one(write(folder, row))
    assert isinstance(record, Demonstration)
    expected = [(None, None, False), ("zoom_in", "img0", True), ("zoom_in", "obs1", True)]
    assert [(step.op, step.target, step.learn) for step in record.turns[:3]] == expected
    trajectory, _ = player("mini_o3").play(record)
    assert [o.status for o in trajectory.observations] == ["error", "ok", "ok"]
    assert trajectory.images[-1].parent == "obs1"
    assert '"source": "observation_1"' in texts(trajectory)[2]


@pytest.mark.parametrize("dialect", ["qwen", "mini_o3", "pixel_reasoner", "deepeyes"])
@pytest.mark.parametrize("box", [[0.5, 0.5, 0.4, 0.6], [3, 4, 50, 60], "left"])
def test_a_masked_call_with_an_invalid_box_is_context_and_does_not_end_the_job(
    folder: Path, dialect: str, box: Any
) -> None:
    media = [{"id": "img0", "uri": str(folder / "images/0.png")}]
    turns = [
        {"think": "Here.", "op": "zoom_in", "arguments": {"box": box}, "learn": False},
        {"think": "No, here.", "op": "zoom_in", "box": [0.0, 0.0, 0.75, 1.0]},
        {"think": "Red.", "answer": "red"},
    ]
    fields = {"question": "?", "media": media, "answers": ["red"], "turns": turns}
    record = Demonstration.model_validate({"id": "d", **fields})
    trajectory, views = player(dialect).play(record)
    assert [o.status for o in trajectory.observations] == ["error", "ok"]
    assert [turn.learn for turn in trajectory.turns if turn.is_policy] == [False, True, True]
    assert len(views) == 2


# -- rows ----------------------------------------------------------------------------------------------------

ROWS = r"""
Pixel-Reasoner, a clip | pixel_reasoner
[{"qid": "mv-7", "question": "Which?", "answer": ["red", "dark red"], "image": ["images/0.png", "images/1.png"],
 "is_video": true}, {"id": "mv-7", "task": "mv", "answers": ["red", "dark red"]}]

Reason-RFT, two images | reason_rft
[{"id": "trance_1", "image": ["images/0.png", "images/1.png"], "problem": "What changed?", "solution":
 "<answer>change_size(0, large)</answer>", "answer": "change_size(0, large)"}, {"scorer": "func_seq"}]

Reason-RFT, text alone | reason_rft
[{"id": "t1", "problem": "3 + 4?", "solution": "<answer>7</answer>", "answer": "7"}, {"answers": ["7"], "media":
 []}]

Reason-RFT, text alone, without an answer column | reason_rft_text
[{"id": "t1", "problem": "3 + 4?", "solution": "<answer>7</answer>"}, {"answers": ["7"], "media": []}]

TTRL, without an answer | ttrl
[{"prompt": "3 + 4?", "source": "AIME-TTT", "id": "3"}, {"id": "AIME-TTT-3", "answers": null, "scorer": "math"}]

TTRL, a choice without an answer | ttrl
[{"prompt": "Which?\nA. red\nB. blue", "source": "GPQA-TTT", "id": "0"}, {"answers": null, "scorer":
 "mc_letter"}]

TTRL, parquet | ttrl_parquet
[{"data_source": "AIME-TTT", "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "3
 + 4?"}], "ability": "math", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"split":
 "test", "index": 4, "level": "easy"}}, {"id": "AIME-TTT-4", "split": "test", "answers": ["7"]}]

TTRL, parquet without an answer | ttrl_parquet
[{"data_source": "AIME-TTT", "prompt": [{"role": "user", "content": "3 + 4?"}], "ability": "math",
 "reward_model": {"style": "rule"}, "extra_info": {"split": "train", "index": "4"}}, {"answers": null, "scorer":
 "math"}]

Mini-o3 | mini_o3
[{"images": ["images/0.png"], "doc_id": "d1", "problem": "<image>\nWhat?", "solution": "red", "data_source":
 "visual_probe_train"}, {"id": "d1", "scorer": "judge", "task": "visual_probe_train"}]

Mini-o3, without doc_id | mini_o3
[{"images": ["images/0.png"], "problem": "<image>\nWhat?", "solution": "red", "data_source": "deepeyes_train"},
 {"id": "rows-1", "scorer": "judge"}]

R1-V, evaluation | r1v_evaluation
[{"image_path": "images/0.png", "question": "How many?", "ground_truth": "7"}, {"answers": ["7"], "split":
 "test"}]

"""
"""What it is | its format, and the row with fields of its question as JSON."""


@pytest.mark.parametrize("block", ROWS.strip().split("\n\n"))
def test_a_row_is_read_by_its_own_format(folder: Path, block: str) -> None:
    head, *body = block.split("\n")
    format, (row, fields) = head.rpartition(" | ")[2], json.loads("".join(body))
    assert detect(row) == format
    question = one(write(folder, row))
    assert {key: getattr(question, key) for key in fields} == fields


COT = "<think>3 and 4.</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    "row",
    [
        {"id": "clevr_1", "image": "images/0.png", "problem": "How many?", "answer": "7", "cot": COT},
        {"id": "text_1", "problem": "3 + 4?", "answer": "7", "cot": COT, "level": 2},
        {"id": "trance_1", "image": "images/0.png", "problem": "?", "answer": "change_size(0, large)", "cot": CAPTION},
    ],
)  # fmt: skip
def test_reason_rft_rows_with_a_chain_of_thought_are_demonstrations(
    folder: Path, row: dict[str, Any]
) -> None:
    assert detect(row) == "reason_rft_cot"
    record = one(write(folder, row))
    assert isinstance(record, Demonstration)
    assert record.final == record.answers[0]
    assert texts(player("plain").play(record)[0]) == [row["cot"]]


def test_images_inside_a_question_are_shown_where_it_says(folder: Path) -> None:
    row = {"problem": "Is <image> like <image>?", "answer": "no", "images": ["images/0.png", "images/1.png"]}
    question = one(write(folder, row))
    r = player("plain").renderer
    views = [ImageView(id=f"img{i}", view_size=(64, 32)) for i in range(2)]

    def shown(asked: Question) -> str:
        (turn,) = r.prompt(asked, views)
        text = r.tokenizer.decode(turn.tokens, skip_special_tokens=False)
        return re.sub(r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>", "[picture]", text)

    assert "Is [picture] like [picture]?" in shown(question)
    literal = question.model_copy(update={"question": "What does <image> mean?"})
    assert "[picture][picture]What does <image> mean?" in shown(literal)


def test_the_earlier_questions_of_a_prompt_are_its_history(folder: Path) -> None:
    row = deepeyes("vstar")
    row["prompt"] += [{"role": "assistant", "content": "7"}, {"role": "user", "content": "Sure?"}]
    question = one(write(folder, row))
    expected = ("Sure?", [("How many?", "7", ["img0"])])
    assert (question.question, [(e.question, e.answer, e.media) for e in question.history]) == expected
    bad = refused(write(folder, {**row, "prompt": row["prompt"][:2]}))
    assert (bad.column, bad.code) == ("prompt", "no_question")


def test_the_test_sets_of_reason_rft_have_names(folder: Path) -> None:
    row = {"id": "1", "image": "a.png", "problem": "How many?", "answer": "3"}
    trance = {**row, "image": ["a.png", "a.png"], "answer": "change_size(0, large)"}
    answers = {"structure_perception/geometry3k.json": {**row, "answer": "B"}}
    scorers, asked = {}, {}
    for split, (name, *_) in REASON_RFT.items():
        content = answers.get(name, trance if "trance" in name else row)
        write_files(folder, {name: [content], "image/a.png": PICTURE})
        (question,) = readers.read(f"reason_rft_tests:{folder}?split={split}")
        (prompted,) = readers.read(f"reason_rft_tests:{folder}?split={split}&prompt=reason_rft&scorer=exact")
        assert isinstance(question, Question), question
        assert isinstance(prompted, Question), prompted
        assert (question.split, prompted.scorer, prompted.answers) == (split, "exact", question.answers)
        asked[split] = prompted.question.removeprefix(question.question)
        scorers[split] = question.scorer
    assert (scorers["counting_id"], scorers["structure_ood"]) == ("math", "mc_letter")
    assert scorers["transformation_left"] == "func_seq_eval"
    assert "a number" in asked["counting_ood"]
    for split in REASON_RFT:
        assert "transformation" not in split or "the sequence of functions" in asked[split]
    with pytest.raises(BadInput, match="no split"):
        list(readers.read(f"reason_rft_tests:{folder}?split=test"))
    with pytest.raises(MissingFile, match="no prompt template"):
        readers.read(f"reason_rft_tests:{folder}?prompt=none.jinja")
