"""Records back into the row formats of other systems, so that a set made here can be trained on there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pixelis.dialogue.dialects import DIALECTS, default_target
from pixelis.errors import BadInput, OperationError
from pixelis.operations.scale import Scale
from pixelis.records import Action, Demonstration, Question, Step

Row = dict[str, Any]


def emit(record: Question, format: str) -> Row:
    """A question as a row of ``format``, one of ``QUESTIONS``; BadInput for what the format has no place for."""
    if format not in QUESTIONS:
        raise BadInput(f"no format `{format}` to write questions in", code="unknown_format", fix=f"one of {', '.join(QUESTIONS)}")
    if not record.answers:
        raise BadInput(f"{record.id} has no answer, which {format} asks for", code="no_label")
    return QUESTIONS[format](record)


def emit_chat(record: Demonstration, format: str, shown: Sequence[Sequence[str]] = (), dialect: str = "") -> Row:
    """A demonstration as a row of ``format``, one of ``CHATS``, its calls written in ``dialect`` (default: the format's own).

    ``shown`` are the files of the pictures that each operation showed, in order; BadInput when there are not as many as
    operations, or when the dialect cannot say what the demonstration does.
    """
    if format not in CHATS:
        raise BadInput(f"no format `{format}` to write chats in", code="unknown_format", fix=f"one of {', '.join(CHATS)}")
    if len(shown) != len(record.steps):
        raise BadInput(
            f"{record.id} calls {len(record.steps)} operations and there are pictures of {len(shown)}",
            code="media_count",
            fix="give the files of what each operation showed, an empty list for one that showed none",
        )
    own, write = CHATS[format]
    return write(record, _said(record, dialect or own, shown), [list(files) for files in shown])


def _said(record: Demonstration, dialect: str, shown: Sequence[Sequence[str]]) -> list[str]:
    """The turns in a dialect, which may number the images: those of the question, frames of clips too, and of each result."""
    sizes = dict[str, tuple[int, int]]()
    for item in record.media:
        for name in (item.id, *(f"{item.id}.{i}" for i in range(len(item.frames or [])))):
            sizes[name] = (item.width or 0, item.height or 0)
    clips = tuple(item.id for item in record.media if item.kind == "video")
    out, results, successes = [], iter(shown), 0
    for place, turn in enumerate(record.turns):
        target = turn.target or default_target(sizes)
        said = turn.answer if turn.answer is not None else Action(op=turn.op or "", target=target, arguments=turn.arguments)
        try:
            out.append("".join(DIALECTS[dialect].render(said, Scale("thousand", sizes, clips=clips), turn.think)))
        except OperationError as error:
            raise BadInput(f"{record.id}, turn {place}: {dialect} cannot say it: {error.message}", code=error.code) from None
        if turn.op is not None and not _refused(turn, files := next(results)):
            successes += 1
            own = f"obs{successes}"
            sizes |= dict.fromkeys([own] if len(files) == 1 else [f"{own}.{i}" for i in range(len(files))], (0, 0))
    return out


def _refused(turn: Step, files: Sequence[str]) -> bool:
    """Whether a call was an error, which takes no number."""
    return turn.observation.status == "error" if turn.observation is not None else not turn.learn and not files


# -- questions ----------------------------------------------------------------------------------------------------------------


def _files(record: Question, kind: str = "image") -> list[str]:
    return [item.uri for item in record.media if item.kind == kind and item.uri]


def _pictures_only(record: Question, format: str, most: int | None = None) -> list[str]:
    pictures = _files(record)
    if len(pictures) != len(record.media) or (most is not None and len(pictures) > most):
        raise BadInput(f"{record.id}: {format} takes {most if most is not None else 'any number of'} pictures and no clips")
    return pictures


def _picture(record: Question, format: str) -> str:
    pictures = _pictures_only(record, format, 1)
    if not pictures:
        raise BadInput(f"{record.id}: {format} asks for a picture", code="no_media")
    return pictures[0]


def _one_or_all(values: Sequence[str]) -> Any:
    return values[0] if len(values) == 1 else list(values)


def _marked(record: Question) -> str:
    return "".join("<image>" if item.kind == "image" else "<video>" for item in record.media) + record.question


def _pixel_reasoner(record: Question) -> Row:
    clips = [item for item in record.media if item.kind == "video"]
    if clips and (len(record.media) > 1 or not clips[0].frames):
        raise BadInput(f"{record.id}: pixel_reasoner takes pictures, or one clip as a list of frames")
    pictures = list(clips[0].frames or []) if clips else _files(record)
    return {"qid": record.id, "question": record.question, "answer": record.answers, "image": pictures, "is_video": bool(clips)}


def _reason_rft(record: Question) -> Row:
    answer = _one_or_all(record.answers or [])
    row = {
        "id": record.id,
        "problem": record.question,
        "solution": f"<answer>{(record.answers or [''])[0]}</answer>",
        "answer": answer,
    }
    return row | ({"image": _one_or_all(pictures)} if (pictures := _pictures_only(record, "reason_rft")) else {})


def _ttrl(record: Question) -> Row:
    _pictures_only(record, "ttrl", 0)
    return {"prompt": record.question, "answer": _one_or_all(record.answers or []), "id": record.id}


def _chat_row(record: Question, style: str) -> Row:
    return {
        "data_source": record.task,
        "prompt": [{"role": "user", "content": _marked(record)}],
        "ability": "math" if style == "rule" else "vl",
        "reward_model": {"style": style, "ground_truth": (record.answers or [""])[0]},
        "extra_info": {"split": record.split, "index": record.id.removeprefix(f"{record.task}-")},
    }


def _ttrl_parquet(record: Question) -> Row:
    _pictures_only(record, "ttrl_parquet", 0)
    return _chat_row(record, "rule")


def _deepeyes(record: Question) -> Row:
    pictures = [{"bytes": Path(path).read_bytes(), "path": None} for path in _pictures_only(record, "deepeyes")]
    return _chat_row(record, "model") | {"images": pictures, "env_name": record.meta.get("env_name", "visual_toolbox_v2")}


def _mini_o3(record: Question) -> Row:
    pictures = _pictures_only(record, "mini_o3")
    problem = "<image>\n" * len(pictures) + record.question
    solution = _one_or_all(record.answers or [])
    return {"images": pictures, "doc_id": record.id, "problem": problem, "solution": solution, "data_source": record.task}


def _r1v(record: Question) -> Row:
    picture = _picture(record, "r1v")
    solution = f"<answer> {(record.answers or [''])[0]} </answer>"
    return {"image": {"bytes": Path(picture).read_bytes(), "path": None}, "problem": record.question, "solution": solution}


def _r1v_evaluation(record: Question) -> Row:
    picture = _picture(record, "r1v_evaluation")
    return {"image_path": picture, "question": record.question, "ground_truth": _one_or_all(record.answers or [])}


def _easyr1(record: Question) -> Row:
    row: Row = {"problem": _marked(record), "answer": _one_or_all(record.answers or [])}
    clips = [item.frames or item.uri for item in record.media if item.kind == "video"]
    return row | ({"images": _files(record)} if _files(record) else {}) | ({"videos": clips} if clips else {})


QUESTIONS: dict[str, Callable[[Question], Row]] = {
    "question": lambda record: record.model_dump(mode="json"),
    "pixel_reasoner": _pixel_reasoner,
    "reason_rft": _reason_rft,
    "ttrl": _ttrl,
    "ttrl_parquet": _ttrl_parquet,
    "deepeyes": _deepeyes,
    "mini_o3": _mini_o3,
    "r1v": _r1v,
    "r1v_evaluation": _r1v_evaluation,
    "easyr1": _easyr1,
}
"""Formats that questions are written in."""


# -- chats --------------------------------------------------------------------------------------------------------------------


def _result(turn: Step, files: Sequence[str]) -> str:
    """What is told about a result beside its pictures; that of an error begins with the word, as `rows_sft` reads it."""
    told = turn.observation.text if turn.observation is not None else ""
    if _refused(turn, files):
        return f"error: {told or 'the call was refused'}"
    return "" if files else told or "The operation gave text alone."


def _turns(
    record: Demonstration, said: list[str], shown: list[list[str]], first: str, who: str, what: str, names: tuple[str, str]
) -> list[Row]:
    results = ["<image>" * len(files) + _result(turn, files) for turn, files in zip(record.steps, shown, strict=True)]
    users = [first, *results]
    return [
        {who: names[place], what: text}
        for user, reply in zip(users, said, strict=True)
        for place, text in enumerate((user, reply))
    ]


def _conversations(record: Demonstration, said: list[str], shown: list[list[str]]) -> Row:
    pictures = _pictures_only(record, "sharegpt")
    first = "<image>\n" * len(pictures) + record.question
    turns = _turns(record, said, shown, first, "from", "value", ("human", "gpt"))
    return {"id": record.id, "conversations": turns, "images": [*pictures, *(path for files in shown for path in files)]}


def _messages(record: Demonstration, said: list[str], shown: list[list[str]]) -> Row:
    pictures = _pictures_only(record, "sharegpt_messages")
    first = "<image>" * len(pictures) + record.question
    turns = _turns(record, said, shown, first, "role", "content", ("user", "assistant"))
    return {"id": record.id, "messages": turns, "images": [*pictures, *(path for files in shown for path in files)]}


def _message_list(record: Demonstration, said: list[str], shown: list[list[str]]) -> Row:
    media = [{"image": item.uri} if item.kind == "image" else {"video": item.frames or item.uri} for item in record.media]
    users: list[list[Row]] = [[*media, {"text": record.question}]]
    for turn, files in zip(record.steps, shown, strict=True):
        users.append([{"text": _result(turn, files) or "The result:"}, *({"image": path} for path in files)])
    turns: list[Row] = []
    for user, reply in zip(users, said, strict=True):
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": [{"text": reply}]}]
    return {"message_list": turns}


CHATS: dict[str, tuple[str, Callable[[Demonstration, list[str], list[list[str]]], Row]]] = {
    "sharegpt": ("mini_o3", _conversations),
    "sharegpt_messages": ("plain", _messages),
    "pixel_reasoner_sft": ("pixel_reasoner", _message_list),
}
"""Formats that demonstrations are written in, and the dialect each is read with by its own system."""
