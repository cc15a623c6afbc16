"""R1-V's training rows ``{image, problem, solution}`` and evaluation rows ``{image_path, question, ground_truth}``."""

from __future__ import annotations

from pixelis.datasets.formats.base import Row, image_bytes, single_image
from pixelis.datasets.formats.table import Columns
from pixelis.records import Question

TRAINING = Columns(question="problem", answers="solution", images="image")
EVALUATION = Columns(question="question", answers="ground_truth", images="image_path", split="test")


def _write_training(record: Question) -> Row:
    solution = f"<answer> {(record.answers or [''])[0]} </answer>"
    return {"image": image_bytes(single_image(record)), "problem": record.question, "solution": solution}


def _write_evaluation(record: Question) -> Row:
    return {**EVALUATION.write(record), "image_path": single_image(record)}


FORMATS = {
    "r1v": TRAINING.format("image problem solution", _write_training, excluded="answer doc_id cot"),
    "r1v_evaluation": EVALUATION.format("image_path question ground_truth", _write_evaluation, excluded="trajectory"),
}
