"""Refinement by processes of Ray Data writes the files that one process writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pixelis.config import load
from pixelis.datasets.questions import read_demonstrations
from pixelis.jobs import refine
from pixelis.records import Demonstration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]

RUN = ["policy.model=nano", "telemetry.progress=false", "refinement.quality.provenance=false"]
RUN += ["refinement.quality.min_score=0.5", "refinement.gates.replay=0.1", "refinement.gates.corrupted=0.1"]
RUN += [f"refinement.gates.{name}=0" for name in ("per_task", "sizes")]


def refined(folder: Path, source: str, workers: int, *overrides: str) -> tuple[dict, dict[str, bytes]]:
    """The summary and the sets of a run."""
    arguments = [*RUN, f"data.demonstrations={source}", f"refinement.workers={workers}", *overrides]
    arguments.append(f"run.dir={folder}")
    summary = refine.run(load(None, arguments)) | {"config_sha256": ""}
    assert not (folder / "working").exists()
    sets = [path for path in folder.glob("*.jsonl") if path.name != "pictures.jsonl"]
    return summary, {path.name: path.read_bytes() for path in sets}


@pytest.mark.long
def test_workers_write_the_files_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of two files; torn lines, repeated ids and contents, lost pictures, refused calls."""
    monkeypatch.setattr("pixelis.datasets.stream.PART_BYTES", 8_000)
    made = read_demonstrations("cards:", 80, 3, 0.3)
    good = [d.model_copy(update={"id": f"d{i:03}"}) for i, d in enumerate(made)]
    looking = next(d for d in good if d.turns[0].op == "zoom_in")
    empty_box = {"arguments": {"box": [0.5, 0.5, 0.5, 0.5]}, "observation": None}
    point = looking.turns[0].model_copy(update=empty_box)
    no_picture = good[1].media[0].model_copy(update={"uri": "/no/such.png"})
    lost = good[1].model_copy(update={"id": "lost", "media": [no_picture]})
    more: list[Demonstration | str] = [lost, "{torn", looking, looking.model_copy(update={"id": "again"})]
    more.append(good[3].model_copy(update={"id": "short", "question": "?"}))
    more.append(looking.model_copy(update={"id": "refused", "turns": [point, *looking.turns[1:]]}))
    source = tmp_path / "data"
    source.mkdir()
    for name, part in (("a", [*good[:40], *more]), ("b", good[40:])):
        lines = [row if isinstance(row, str) else row.model_dump_json() for row in part]
        (source / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    summary, files = refined(tmp_path / "two", str(source), 2, "data.limit=75")
    alone, expected = refined(tmp_path / "one", str(source), 0, "data.limit=75")
    assert json.dumps(summary) == json.dumps(alone)
    assert summary["bad_rows"] == {"media_not_found": 1, "not_json": 1, "duplicate_id": 1}
    assert {"duplicate", "question_length"} < set(summary["dropped"])
    assert files == expected
    assert len(files["sft.jsonl"].splitlines()) > 10
    assert summary["rows"] == 78, "a torn line, a repeated id and a lost picture do not count"


@pytest.mark.long  # above: files of demonstrations
def test_generated_demonstrations_are_checked_by_workers_too(tmp_path: Path) -> None:
    results = [
        refined(tmp_path / str(workers), "cards:?split=train", workers, "data.limit=20") for workers in (0, 1)
    ]
    assert results[0] == results[1]
    assert results[0][0]["rows"] == 20
