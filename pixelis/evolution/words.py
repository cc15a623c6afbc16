"""Learning from a user's words: the policy that was told teaches the policy that is not.

The words are a user turn of the teacher's prompt and nothing else: what the teacher does is transplanted onto
the prompt of the answer that the words are about.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from pixelis.records import Exchange, Experience, Question, Trajectory, Turn, new_id


def original(id: str) -> str:
    """The name of the picture of a question's medium as it was sent, beside the stored views."""
    return f"{id} as sent"


def corrected_question(experience: Experience, words: str) -> Question:
    """The experience's question once more, after its answer as an earlier exchange and a user's words."""
    question = experience.question
    earlier = {id for exchange in question.history for id in exchange.media}
    answered = Exchange(
        question=question.question,
        answer=experience.verdict.answer or "",
        media=[media.id for media in question.media if media.id not in earlier],
    )
    again = f"{words}\n{question.question}"
    return Question.of(question, id=new_id("q"), history=[*question.history, answered], question=again)


def transplant(student: Trajectory, teacher: Trajectory) -> Trajectory | None:
    """The teacher's trajectory after the student's prompt; its views are the teacher's.

    None if that prompt was redacted, or if the teacher saw views of other sizes, to whose pixels its calls
    refer.
    """
    prompt, taught = prompt_of(student), prompt_of(teacher)
    if not all(turn.tokens for turn in prompt) or _shown(student, prompt) != _shown(teacher, taught):
        return None
    turns = [*prompt, *teacher.turns[len(taught) :]]
    return teacher.model_copy(update={"turns": turns, "transplanted": True})


def prompt_of(trajectory: Trajectory) -> list[Turn]:
    """The turns before the policy's first."""
    return list(itertools.takewhile(lambda turn: not turn.is_policy, trajectory.turns))


def _shown(trajectory: Trajectory, turns: Sequence[Turn]) -> list[tuple[str, tuple[int, int] | None]]:
    """Ids and view sizes of the images of the turns."""
    sizes = {image.id: image.view_size for image in trajectory.images}
    return [(id, sizes[id]) for turn in turns for id in turn.images]
