"""What `--dry-run` adds to the resolved configuration: checks of it against the model's config.json, on standard error.

Nothing is started and no weight is read. What contradicts itself is an error that names the key; what cannot be checked, because
the model's folder, its tokenizer or the questions are not here, is said.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pixelis.config import Config
from pixelis.errors import BadConfig, PixelisError

if TYPE_CHECKING:
    from pixelis.policy.estimate import Prompt

QUESTIONS = 256
"""Questions that are read for the longest prompt."""


def checks(job: Literal["rft", "sft"]) -> Callable[[Config], None]:
    """What `config.from_command_line` calls on `--dry-run` of a job."""
    return functools.partial(show, job=job)


def show(config: Config, job: Literal["rft", "sft"]) -> None:
    """Print the table; raises BadConfig when a check found a contradiction."""
    from pixelis.dialogue.dialects import offered
    from pixelis.policy import estimate

    forms = [operation.name for operation in offered(config)]
    print(f"operations offered in the dialect {config.dialogue.dialect}: {', '.join(forms) or 'none'}", file=sys.stderr)
    findings = estimate.check(config, job, prompts(config) if job == "rft" else [])
    print(f"checks of {job} with {config.policy.model}:\n{estimate.table(findings)}", file=sys.stderr)
    if wrong := [finding.text for finding in findings if finding.level == "error"]:
        raise BadConfig("; ".join(wrong), fix="change one of the keys named")


def prompts(config: Config) -> list[Prompt]:
    """Of the first questions: tokens of the text (system prompt included), number of pictures and of clips.

    Without readable questions an empty one with a picture stands for them; empty without a tokenizer.
    """
    from pixelis.datasets.questions import read_questions
    from pixelis.dialogue.render import Renderer
    from pixelis.dialogue.spec import ModelSpec, load_tokenizer
    from pixelis.operations import select
    from pixelis.policy.model_path import resolve
    from pixelis.records import Question

    try:
        tokenizer = load_tokenizer(folder := resolve(config.policy.model))
    except PixelisError:
        return []
    renderer = Renderer(tokenizer, ModelSpec.load(folder, tokenizer), config.dialogue, select(config.toolbox.operations))
    try:
        data = config.data
        rows = read_questions(data.train, limit=data.limit, epochs=1, max_bad_rows=data.max_bad_rows)
        questions = list(itertools.islice(rows, QUESTIONS))
    except PixelisError as error:
        print(f"questions are not read, one picture without text stands for them: {error.message}", file=sys.stderr)
        questions = [Question(id="none", question="")]
    out: list[Prompt] = []
    for question in questions:
        kinds = [media.kind for media in question.media] or ["image"]
        tokens = sum(len(turn.tokens) for turn in renderer.prompt(question, []))
        out.append({"text": tokens, "images": kinds.count("image"), "clips": kinds.count("video")})
    return out
