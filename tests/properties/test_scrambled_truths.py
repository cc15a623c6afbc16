"""Labels never leak: with scrambled truths every reward, verdict and weight is bitwise the same."""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pixelis import config
from pixelis.config import RewardsConfig
from pixelis.datasets import readers
from pixelis.datasets.labels import Labels
from pixelis.datasets.questions import read_questions
from pixelis.evolution.updates import make_task
from pixelis.policy.advantages import assign_advantages
from pixelis.records import Group, Question, StopReason, Trajectory, Turn
from pixelis.rewards.equality import Equality
from pixelis.rewards.grader import Grader
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group
from pixelis.rewards.vote import vote

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

TRUTHS = ["A", "B", "(B)", "42", "7", "cat", r"\boxed{7}", "5 cm", "", "change_size(1, small)"]
TEXT = "Which?\nA. cat\nB. 7"
ROWS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "question": lambda t, i: {
        "id": f"q{i}",
        "question": TEXT,
        "answers": [t],
        "task": "t",
        "meta": {"difficulty": t},
    },
    "pixel_reasoner": lambda t, i: {
        "qid": f"v-{i}",
        "question": TEXT,
        "answer": [t],
        "image": ["a.png"],
        "is_video": False,
    },
    "reason_rft": lambda t, i: {
        "id": i,
        "image": "a.png",
        "problem": TEXT,
        "solution": f"<answer>{t}</answer>",
        "answer": t,
    },
    "ttrl": lambda t, i: {"prompt": "How many?", "answer": t, "source": "AIME", "id": i},
    "ttrl_parquet": lambda t, i: verl(t, i, "How many?"),
    "deepeyes": lambda t, i: {
        **verl(t, i, "<image>" + TEXT),
        "images": ["a.png"],
        "env_name": "visual_toolbox_v2",
    },
    "mini_o3": lambda t, i: {
        "images": ["a.png"],
        "doc_id": i,
        "problem": "<image>\n" + TEXT,
        "solution": t,
        "data_source": "visual_probe_train",
    },
    "r1v": lambda t, i: {"image": "a.png", "problem": "How many?", "solution": f"<answer> {t} </answer>"},
    "r1v_evaluation": lambda t, i: {"image_path": "a.png", "question": "How many?", "ground_truth": t},
    "easyr1": lambda t, i: {"problem": "<image>" + TEXT, "answer": t, "images": ["a.png"]},
}


def verl(truth: str, i: int, text: str) -> dict[str, Any]:
    model = {"style": "rule", "ground_truth": truth}
    extra = {"split": "train", "index": i, "answer": truth}
    return {
        "data_source": "AIME-TTT",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": model,
        "extra_info": extra,
    }


def read(folder: Path, format: str, truths: list[str]) -> tuple[list[str], dict[str, Labels]]:
    """The questions as JSON, and the labels that were cut off."""
    path, labels = folder / "rows.jsonl", dict[str, Labels]()
    path.write_text("".join(json.dumps(ROWS[format](truth, i)) + "\n" for i, truth in enumerate(truths)))
    questions = read_questions(f"{path}?format={format}", seed=3, epochs=1, on_labels=labels.__setitem__)
    return [question.model_dump_json() for question in questions], labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return folder


@pytest.mark.parametrize("format", ROWS)
def test_what_a_reader_returns_does_not_depend_on_the_truths(folder: Path, format: str) -> None:
    rng = random.Random(format)
    sets = [[rng.choice(TRUTHS) for _ in range(3)] for _ in range(100)]
    first, _ = read(folder, format, ["7", "A", "cat"])
    assert len(first) == 3
    assert all(json.loads(question)["answers"] is None for question in first)
    assert all(read(folder, format, truths)[0] == first for truths in sets)
    _, labels = read(folder, format, ["7", "A", "cat"])
    assert sorted(label.answers[0] for label in labels.values()) == ["7", "A", "cat"]


def test_rows_of_ttrl_need_no_answer_where_no_reward_uses_one(folder: Path) -> None:
    path = folder / "bare.jsonl"
    path.write_text(json.dumps({"prompt": "How many?", "source": "AIME", "id": 4}) + "\n")
    (question,) = read_questions(str(path), epochs=1, on_labels=lambda *_: pytest.fail("there is no label"))
    assert (question.id, question.answers, question.scorer) == ("AIME-4", None, "math")


CHATS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "demonstration": lambda t, i: {
        "id": f"q{i}",
        "question": TEXT,
        "answers": [t],
        "task": "t",
        "turns": [{"think": f"It is {t}.", "answer": t}],
    },
    "pixel_reasoner_sft": lambda t, i: {
        "id": i,
        "message_list": [
            {"role": "user", "content": [{"image": "a.png"}, {"text": TEXT}]},
            {"role": "assistant", "content": [{"text": f"It is \\boxed{{{t}}}."}]},
        ],
    },
    "sharegpt": lambda t, i: {
        "id": i,
        "images": ["a.png"],
        "conversations": [
            {"from": "human", "value": "<image>\n" + TEXT},
            {"from": "gpt", "value": f"<think>So {t}.</think><answer>{t}</answer>"},
        ],
    },
    "sharegpt_messages": lambda t, i: {
        "id": i,
        "images": ["a.png"],
        "messages": [
            {"role": "user", "content": "<image>How many?"},
            {"role": "assistant", "content": f"<think>So {t}.</think><answer>{t}</answer>"},
        ],
    },
    "reason_rft_cot": lambda t, i: {
        "id": i,
        "image": "a.png",
        "problem": "How many?",
        "answer": t,
        "cot": f"<think>So {t}.</think>\n<answer>{t}</answer>",
    },
    "pixelis_trajectory": lambda t, i: {
        "id": f"q{i}",
        "question": "How many?",
        "image_path": "a.png",
        "answer": t,
        "trajectory": [
            {"action": "THINK", "thought": f"So {t}."},
            {"action": "ANSWER", "parameters": {"answer": t}},
        ],
    },
    "pixelis_chain": lambda t, i: {
        "id": f"q{i}",
        "question": "How many?",
        "image_path": "a.png",
        "answer": t,
        "chain_of_thought": [{"thought": f"So {t}."}],
        "visual_operations": [],
    },
}


@pytest.mark.parametrize("format", CHATS)
def test_a_chat_read_as_a_question_does_not_depend_on_its_answer(folder: Path, format: str) -> None:
    path, results = folder / "chats.jsonl", []
    for truths in (
        ["7", "A", "cat"],
        ["A", "B", "A"],
        ["42", "cat", "B"],
        ["5 cm", "7", "change_size(1, small)"],
    ):
        labels: dict[str, Labels] = {}
        path.write_text("".join(json.dumps(CHATS[format](truth, i)) + "\n" for i, truth in enumerate(truths)))
        questions = read_questions(f"{path}?format={format}", seed=3, epochs=1, on_labels=labels.__setitem__)
        results.append([question.model_dump_json() for question in questions])
        assert sorted(label.answers[0] for label in labels.values()) == sorted(truths)
    assert len(results[0]) == 3
    assert all("turns" not in json.loads(question) for question in results[0])
    assert all(result == results[0] for result in results)


# The same rows with one of two truths, in the official layout of each annotated set that has answers.

LETTERS, WORDS = ("A", "B"), ("7", "cat")


def vstar(truth: str) -> dict[str, Any]:
    row = {
        "image": "direct_attributes/a.png",
        "text": "Color?\n(A) red\n(B) blue",
        "label": truth,
        "question_id": 0,
    }
    boxes = {"target_object": ["cup"], "bbox": [[1, 1, 2 + (truth == "A"), 2]]}
    return {
        "test_questions.jsonl": [{**row, "category": "direct_attributes"}],
        "direct_attributes/a.png": None,
        "direct_attributes/a.json": boxes,
    }


def hrbench(truth: str) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    values = ["0", "Color?", base64.b64encode(stream.getvalue()).decode(), truth, "red", "blue"]
    return "\t".join(["index", "question", "image", "answer", "A", "B"]) + "\n" + "\t".join(values) + "\n"


def documents(truth: str, folder: str) -> list[dict[str, Any]]:
    return [
        {
            "questionId": 1,
            "question": "Who?",
            "image": f"{folder}a.png",
            "answers": [truth],
            "data_split": "train",
        }
    ]


def mmmu(truth: str) -> bytes:
    stream, picture = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    row = {
        "id": "validation_Math_1",
        "question": "<image 1> What?",
        "options": "['red', 'blue']",
        "answer": truth,
    }
    pq.write_table(
        pa.Table.from_pylist([{**row, "image_1": {"bytes": picture.getvalue(), "path": None}}]), stream
    )
    return stream.getvalue()


PROBLEM = {
    "question": "What?",
    "choices": ["red", "blue"],
    "grade": "grade1",
    "subject": "natural science",
    "split": "test",
}
STAR = {"question_id": "q", "video_id": "v", "question": "What?", "start": 1.0, "end": 2.0}
STAR |= {"choices": [{"choice_id": i, "choice": choice} for i, choice in enumerate(("red", "blue"))]}
TVQA = {
    "qid": 1,
    "q": "Who?",
    "vid_name": "friends_s01",
    "ts": "1-2",
    **{f"a{i}": f"Name {i}" for i in range(5)},
}
MVBENCH = {"video": "v.mp4", "question": "Where?", "candidates": ["Up", "Down"], "start": 1, "end": 2}
ANNOTATED: dict[str, tuple[tuple[str, ...], Callable[[str], dict[str, Any]]]] = {
    "vstar": (LETTERS, vstar),
    "hrbench": (LETTERS, lambda t: {"hr_bench_4k.tsv": hrbench(t)}),
    "tallyqa?split=test": (
        ("7", "3"),
        lambda t: {
            "test.json": [{"question_id": 1, "image": "a.png", "question": "How many?", "answer": int(t)}],
            "a.png": None,
        },
    ),
    "superclevr": (
        WORDS,
        lambda t: {
            "images/a.png": None,
            "superCLEVR_questions_30k.json": {
                "questions": [
                    {
                        "question_index": 0,
                        "image_filename": "a.png",
                        "question": "What?",
                        "answer": int(t) if t == "7" else t,
                    }
                ]
            },
        },
    ),
    "mvbench?task=action_sequence": (
        ("Up", "Down"),
        lambda t: {
            "json/action_sequence.json": [{**MVBENCH, "answer": t}],
            "video/star/Charades_v1_480/v.mp4": "",
        },
    ),
    "reason_rft_tests?split=structure_id": (
        ("7", "A"),
        lambda t: {
            "structure_perception/geomath.json": [
                {"id": "g1", "image": "a.png", "problem": "How long?", "answer": t}
            ],
            "image/a.png": None,
        },
    ),
    "docvqa?ocr=no": (
        WORDS,
        lambda t: {
            "spdocvqa_qas/train_v1.0.json": {"data": documents(t, "documents/")},
            "spdocvqa_images/a.png": None,
        },
    ),
    "infographicsvqa?ocr=no": (
        WORDS,
        lambda t: {
            "infographicsvqa_qas/infographicsVQA_train_v1.0.json": {
                "data": [{**documents(t, "")[0], "image_local_name": "a.png"}]
            },
            "infographicsvqa_images/a.png": None,
        },
    ),
    "mmmu": (LETTERS, lambda t: {"Math/validation-00000-of-00001.parquet": mmmu(t)}),
    "scienceqa": (
        ("0", "1"),
        lambda t: {
            "problems.json": {"1": {**PROBLEM, "answer": int(t), "solution": t}},
            "pid_splits.json": {"test": ["1"]},
        },
    ),
    "mmvet": (
        WORDS,
        lambda t: {
            "mm-vet.json": {
                "v1_0": {"imagename": "a.png", "question": "What?", "answer": t, "capability": ["ocr"]}
            },
            "images/a.png": None,
        },
    ),
    "star": (
        ("red", "blue"),
        lambda t: {"STAR_train.json": [{**STAR, "answer": t}], "Charades_v1_480/v.mp4": ""},
    ),
    "tvqa": (
        ("1", "3"),
        lambda t: {
            "tvqa_train.jsonl": [{**TVQA, "answer_idx": int(t)}],
            "frames_hq/friends_frames/friends_s01/00001.jpg": "",
        },
    ),
}


def put(root: Path, files: dict[str, Any]) -> None:
    """Text as it is, rows as JSON or JSON lines, None for a picture."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            path.write_text(
                "\n".join(map(json.dumps, content)) if path.suffix == ".jsonl" else json.dumps(content)
            )
        else:
            Image.new("RGB", (8, 8)).save(path)


WITHOUT_ANSWERS = (
    *(
        "coco", "lvis", "partimagenet", "sa1b", "textcaps", "hiertext", "art", "flickr30k", "unsplash",
        "msrvtt", "mot17", "mot20",
    ),
    *("youtube_vis", "uvo", "youtube_vos", "visor", "didemo", "activitynet", "assembly101", "mind2web"),
)  # fmt: skip


def test_a_new_annotated_set_is_scrambled_here_or_has_no_answers() -> None:
    assert {name.partition("?")[0] for name in ANNOTATED} == readers.READERS.keys() - set(WITHOUT_ANSWERS)


@pytest.mark.parametrize("name", ANNOTATED)
def test_an_annotated_set_compares_answers_the_same_whatever_they_are(tmp_path: Path, name: str) -> None:
    (truths, files), (reader, _, options) = ANNOTATED[name], name.partition("?")
    results, found = [], []
    for truth in truths:
        put(tmp_path, files(truth))
        labels: dict[str, Labels] = {}
        source = f"{reader}:{tmp_path}" + (f"?{options}" if options else "")
        results.append(
            [q.model_dump_json() for q in read_questions(source, epochs=1, on_labels=labels.__setitem__)]
        )
        found += [label.answers for label in labels.values()]
    assert len(results[0]) == 1
    assert results[0] == results[1]
    assert json.loads(results[0][0])["answers"] is None
    assert len(found) == 2
    assert found[0] != found[1]


def test_the_card_world_keeps_its_truths_to_itself() -> None:
    labels: dict[str, Labels] = {}
    open_ = list(read_questions("cards:?split=train&seed=1", epochs=1, limit=20))
    blind = list(
        read_questions("cards:?split=train&seed=1", epochs=1, limit=20, on_labels=labels.__setitem__)
    )
    assert [q.question for q in open_] == [q.question for q in blind]
    assert [labels[q.id].answers for q in open_] == [q.answers for q in open_]
    assert all(q.answers is None and q.annotations is None for q in blind)


# -- from the file to the gradient ---------------------------------------------------------------------------

TTRL = RewardsConfig(preset="ttrl")
ANSWERS = [["A", "cat", "(B)", "A", "7"], ["7", "7.0", "B", "8", None], ["1/2", "0.5", "3", "3", "A. cat"]]


def rollouts(question: Question, answers: list[str | None]) -> Group:
    episodes = [
        Trajectory(
            id=f"{question.id}-{i}",
            question_id=question.id,
            group_id=question.id,
            turns=[
                Turn(role="user", text="?", tokens=[1]),
                Turn(
                    role="assistant",
                    text=f"<answer>{answer}</answer>",
                    tokens=[2, 3 + i],
                    log_probs=[-0.1, -0.2],
                ),
            ],
            answer=answer,
            stop_reason=StopReason.ANSWER if answer is not None else StopReason.LENGTH,
        )
        for i, answer in enumerate(answers)
    ]
    return Group(id=question.id, question=question, trajectories=episodes)


def learnt(folder: Path, format: str, truths: list[str], services: Services) -> tuple[list[Group], list[str]]:
    """Scored groups with advantages, and update tasks as JSON, from a file of rows."""
    questions = [Question.model_validate_json(text) for text in read(folder, format, truths)[0]]
    groups = [rollouts(q, a) for q, a in zip(questions, ANSWERS, strict=True)]
    scored = [score_group(group, TTRL, services=services) for group in groups]
    assign_advantages(scored, config.RftConfig(algorithm="ttrl").advantage)
    evolution, tasks = config.EvolutionConfig(gate=0.0), []
    for group in groups:
        same = Equality(group.question, group.question.scorer, services)
        task = make_task(
            group,
            vote(group.trajectories, [], evolution, group.question, 0.0, same),
            evolution,
            RewardsConfig(),
            0.0,
        )
        tasks.append("" if task is None else task.model_copy(update={"id": ""}).model_dump_json())
    return scored, tasks


@pytest.fixture(scope="module")
def services():
    services = Services(TTRL)
    yield services
    services.close()


@pytest.mark.parametrize(
    ("format", "sets"),
    [("reason_rft", 100), ("pixel_reasoner", 100), pytest.param("ttrl", 15, marks=pytest.mark.slow)],
)
def test_update_tasks_and_advantages_are_bitwise_the_same(
    folder: Path, services: Services, format: str, sets: int
) -> None:
    rng = random.Random(7)
    first = learnt(folder, format, ["7", "A", "42"], services)
    assert any(t.advantage for group in first[0] for t in group.trajectories)
    assert any(first[1])
    expected = [group.model_dump_json() for group in first[0]]
    for _ in range(sets):
        groups, tasks = learnt(folder, format, [rng.choice(TRUTHS) for _ in range(3)], services)
        assert [group.model_dump_json() for group in groups] == expected
        assert tasks == first[1]


CURRICULA: dict[str, dict[str, Any]] = {
    "none": {},
    "steps without accuracy": {"kind": "steps", "steps": [(0, 0, 0, 0), (1, 0, 0.5, 0.2), (2, 0, 0.1, 0.4)]},
    "steps with accuracy": {"kind": "steps", "steps": [(0, 0, 0, 0), (1, 0.5, 0.5, 0)]},
    "trigger": {
        "kind": "trigger",
        "trigger": [(0, 0, 0), (0, 0.5, 0), (0, 0.5, 0.5)],
        **{"window": 1, "check_every": 1, "min_samples": 1},
    },
}


@pytest.mark.slow  # imports torch
@pytest.mark.parametrize("name", CURRICULA)
def test_a_curriculum_that_is_called_unlabelled_learns_nothing_from_truths(name: str) -> None:
    """Even where truths are at hand, for metrics: rewards, phases and the state after three steps."""
    settings = RewardsConfig(preset="ttrl", curriculum=config.CurriculumConfig(**CURRICULA[name]))

    def scored(truth: str) -> list[Any]:
        grader, rng, result = Grader(settings), np.random.default_rng(5), list[Any]()
        try:
            for step in range(3):
                question = Question(id=f"q{step}", question="How many?", answers=[truth], scorer="math")
                group = rollouts(question, ["7", "7", "7", "7", "8"])
                states = {t.id: rng.normal(size=(t.policy_turns + 1, 4)).tolist() for t in group.trajectories}
                for t in grader.score(group, step, states).trajectories:
                    result.append((t.reward, t.weighted, t.unscored))
                result += [grader.advance(step).boundary, dict(grader.curriculum.mixture)]
            tensors = {} if grader.dynamics is None else grader.dynamics.tensors()
            return [*result, {name: tensor.tolist() for name, tensor in tensors.items()}]
        finally:
            grader.close()

    assert (scored("7") == scored("9")) is not bool(settings.labelled)
    assert bool(settings.labelled) is (name in ("steps with accuracy", "trigger"))


@pytest.mark.slow
def test_the_weights_are_bitwise_the_same(folder: Path, services: Services) -> None:
    from tiny_policy import Maker, policy

    from pixelis.policy.train_step import Trainer

    def trained(truths: list[str]) -> dict[str, np.ndarray]:
        maker, samples = Maker(seed=4), []
        for group in learnt(folder, "reason_rft", truths, services)[0]:
            for trajectory in group.trajectories:
                sample = maker.sample(advantage=0.0)
                sample.advantage = trajectory.advantage or 0.0
                samples.append(sample)
        learner = config.LearnerConfig(lr=3e-3, warmup=0.0, row_tokens=512, rows=2)
        trainer = Trainer(
            policy(), learner, config.RftConfig(algorithm="ttrl").loss, total_steps=1, device="cpu"
        )
        try:
            trainer.update(samples)
            return trainer.adapter().tensors
        finally:
            trainer.close()

    first, *others = [trained(truths) for truths in (["7", "A", "42"], ["A", "B", "A"], ["42", "", "cat"])]
    assert any(np.any(tensor) for name, tensor in first.items() if name.endswith(".B"))
    assert all(np.array_equal(first[name], other[name]) for other in others for name in first)
