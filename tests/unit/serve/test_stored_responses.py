"""What a question sees of the stored response that it continues."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from gateways import client

from pixelis.config import load
from pixelis.errors import BadInput
from pixelis.operations.image import data_url
from pixelis.protocol.answer_format import AnswerFormat
from pixelis.records import Exchange, Experience, ImageView, Media, Question, Trajectory, Verdict
from pixelis.serve.agent_types import AgentQuery

ID = "0123456789abcdef"
PNGS = {"img0": b"whole", "obs1": b"wide crop", "obs2": b"narrow crop"}


def continue_from(experience: Experience, pictures: dict[str, bytes], max_images: int) -> AgentQuery:
    """The query of a question that names the response of ``experience``."""
    asked = list[AgentQuery]()

    async def get(id: str) -> Experience:
        return experience

    async def pictures_of(id: str) -> dict[str, bytes]:
        return pictures

    async def measure(query: AgentQuery) -> tuple[AgentQuery, int]:
        asked.append(query)
        raise BadInput("that is all")

    memory = SimpleNamespace(get=get, pictures=pictures_of)
    gateway = client(f"dialogue.max_images={max_images}", memory=memory, measure=measure)
    body = {"model": "pixelis-nano", "input": "And its colour?", "previous_response_id": f"resp_{ID}"}
    reply = gateway.post("/v1/responses", json=body)
    assert reply.json()["error"]["message"] == "that is all"
    return asked[0]


def stored(question: Question, images: list[ImageView], answer: str = "7") -> Experience:
    return Experience(
        id=f"exp_{ID}",
        question=question,
        trajectory=Trajectory(question_id="q", images=images),
        verdict=Verdict(answer=answer, confidence=1.0, strategy="majority"),
        policy_version=0,
        created_at=1.0,
    )


@pytest.mark.parametrize(
    ("max_images", "shown"),
    [(8, ["img0", "obs1", "obs2"]), (6, ["img0", "obs1", "obs2"]), (4, ["img0", "obs2"]), (2, ["img0"])],
)
def test_earlier_crops_are_pictures_of_the_history_in_half_of_the_room(
    max_images: int, shown: list[str]
) -> None:
    question = Question(id="q", question="Which digit?", media=[Media(id="img0", uri="stored:img0")])
    images = [ImageView(id="img0"), ImageView(id="obs1", parent="img0"), ImageView(id="obs2", parent="obs1")]
    query = continue_from(stored(question, images), PNGS, max_images)
    assert query.images == [data_url(PNGS[id]) for id in shown]
    (exchange,) = query.history
    assert (exchange.question, exchange.answer) == ("Which digit?", "7")
    assert exchange.media == [f"img{n}" for n in range(len(shown))]


def test_a_response_with_a_schema_and_a_long_answer_is_continued() -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in map("field_{}".format, range(200))},
    }
    text, answer = "Which fields?" + AnswerFormat(schema).instruction, json.dumps(["x" * 4100])
    assert len(text) > load(None, []).serve.max_question_chars
    history = [Exchange(question=text, answer=answer)]
    query = continue_from(stored(Question(id="q", question=text, history=history), [], answer), {}, 8)
    assert query.history == [*history, Exchange(question=text, answer=answer)]
