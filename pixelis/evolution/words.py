"""Learning from a user's words: the policy that was told teaches the policy that is not.

The words are a user turn of the teacher's prompt and nothing else: what the teacher does is transplanted onto the
prompt of the answer that the words are about.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pixelis.records import Exchange, Experience, Question, Trajectory, Turn, new_id


def original(id: str) -> str:
    """The name of the picture of a question's medium as it was sent, beside the stored views."""
    return f"{id} as sent"


def told(experience: Experience, words: str) -> Question:
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


def transplant(
    student: Trajectory,
    student_views: Sequence[np.ndarray],
    teacher: Trajectory,
    teacher_views: Sequence[np.ndarray],
) -> tuple[Trajectory, list[np.ndarray]] | None:
    """The teacher's trajectory after the student's prompt, and its views; these are aligned with the images.

    ``student_views``: at least those of its prompt. None if that prompt was redacted, or if the teacher saw
    views of other sizes, to whose pixels its calls refer.
    """
    prompt, taught = prompt_of(student), prompt_of(teacher)
    shown, seen = (sum(len(turn.images) for turn in turns) for turns in (prompt, taught))
    sizes = [image.view_size for image in student.images[:shown]]
    if not all(turn.tokens for turn in prompt) or sizes != [i.view_size for i in teacher.images[:seen]]:
        return None
    trajectory = teacher.model_copy(
        update={
            "images": [*student.images[:shown], *teacher.images[seen:]],
            "turns": [*prompt, *teacher.turns[len(taught) :]],
            "transplanted": True,
        }
    )
    return trajectory, [*student_views[:shown], *teacher_views[seen:]]


def prompt_of(trajectory: Trajectory) -> list[Turn]:
    """The turns before the policy's first."""
    return list(itertools.takewhile(lambda turn: not turn.is_policy, trajectory.turns))
