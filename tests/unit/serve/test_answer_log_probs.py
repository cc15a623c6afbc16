"""Log-probabilities of an answer that the samples gave, and of one that neighbours elected against them."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

from pixelis.config import load
from pixelis.protocol.chat import ChatBody
from pixelis.protocol.errors import parse_body
from pixelis.protocol.responses import LOG_PROBS, ResponsesBody
from pixelis.records import Experience, Group, Neighbour, Question, StopReason, Trajectory, Turn, Verdict
from pixelis.rewards.vote import OVERRULED, vote, winning
from pixelis.serve.agent_types import Answer
from pixelis.serve.protocol.openai import ChatFormat, ResponsesFormat

CONFIG = load(None, ["evolution.vote.strategy=majority"])
QUESTION = Question(id="q", question="Which digit?", task="serve", split="serve")


def sample(answer: str) -> Trajectory:
    text, log_probs = f"<answer>{answer}</answer>", [-0.1, -0.2, -0.3]
    turn = Turn(role="assistant", text=text, tokens=[1, 2, 3], log_probs=log_probs)
    asked = {"question_id": "q", "group_id": "g", "stop_reason": StopReason.ANSWER}
    return Trajectory(turns=[turn], answer=answer, **asked)


def neighbour(answer: str, number: int) -> Neighbour:
    verdict = Verdict(answer=answer, confidence=1.0, strategy="majority")
    made = {"question": QUESTION, "trajectory": sample(answer), "verdict": verdict, "policy_version": 0}
    experience = Experience(id=f"exp_{number}", created_at=time.time(), **made)
    return Neighbour(experience=experience, similarity=1.0)


def answer_of(*neighbours: Neighbour) -> Answer:
    samples = [sample("7"), sample("7")]
    verdict = vote(samples, list(neighbours), CONFIG.evolution, QUESTION, time.time())
    group = Group(id="g", question=QUESTION, trajectories=samples, policy_version=0)
    return Answer(verdict, group, winning(samples, verdict), None, samples)  # type: ignore[arg-type]


async def pieces(turns: list[list[int]]) -> list[list[bytes]]:
    return [[{1: b"<answer>", 2: b"7", 3: b"</answer>"}[token] for token in tokens] for tokens in turns]


def replies(answer: Answer) -> tuple[list[Any], Any]:
    """The log-probs of two choices, and those of a response."""
    agent: Any = SimpleNamespace(router=SimpleNamespace(pieces=pieces))
    message = {"role": "user", "content": "Which digit?"}
    body = {"model": "pixelis-nano", "messages": [message], "logprobs": True, "n": 2}
    chat = ChatFormat(CONFIG, parse_body(ChatBody, json.dumps(body).encode()), 0.0)
    body = {"model": "pixelis-nano", "input": "Which digit?", "include": [LOG_PROBS]}
    response = ResponsesFormat(CONFIG, parse_body(ResponsesBody, json.dumps(body).encode()), 0.0)
    choices = asyncio.run(chat.reply(agent, answer))["choices"]
    output = asyncio.run(response.reply(agent, answer))["output"]
    assert choices[0]["message"]["content"] == output[-1]["content"][0]["text"] == answer.verdict.answer
    return [choice["logprobs"] for choice in choices], output[-1]["content"][0]["logprobs"]


def tokens(log_probs: Any) -> list[tuple[str, float]]:
    return [(token["token"], token["logprob"]) for token in log_probs]


def test_an_answer_of_the_samples_has_their_log_probs() -> None:
    choices, response = replies(answer_of())
    assert [tokens(choice["content"]) for choice in choices] == [[("7", -0.2)]] * 2
    assert tokens(response) == [("7", -0.2)]


def test_an_answer_that_neighbours_elected_against_the_samples_has_none() -> None:
    answer = answer_of(*(neighbour("8", number) for number in range(3)))
    assert (answer.verdict.answer, answer.verdict.reason, answer.winner.answer) == ("8", OVERRULED, "7")
    (elected, own), response = replies(answer)
    assert elected is None
    assert tokens(own["content"]) == [("7", -0.2)]
    assert response == []
