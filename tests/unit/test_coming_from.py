"""Every command of docs/coming-from.md runs dry, with a tiny random model and rows of each system."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from clips import encode, footage
from command_line import pixelis
from PIL import Image

from pixelis.datasets.readers.benchmarks import MVBENCH
from pixelis.jobs import tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
BLOCKS = {title: "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)) for title, text in SECTIONS.items()}
COMMANDS = [(title, line) for title, block in BLOCKS.items() for line in block.splitlines() if line.strip()]

IMAGE, DEEPEYES = "images/0.png", "DeepEyes-Datasets-47k"
BOX = {"bbox_2d": [0.1, 0.1, 0.9, 0.9], "target_image": 1}
CROP = f"Closer.<tool_call>{json.dumps({'name': 'crop_image_normalized', 'arguments': BOX})}</tool_call>"
GROUNDED = json.dumps({"bbox_2d": [0.1, 0.1, 0.9, 0.9], "source": "original_image"})
GROUND = f"<think>Closer.</think><grounding>{GROUNDED}</grounding>"
FOCUS = {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 300, 400]}}
VISUAL_PROBE = {"images": [IMAGE], "problem": "<image>\nWhat color?", "solution": "red"}
VISUAL_PROBE |= {"data_source": "visual_probe_train"}


def deepeyes(source: str, env_name: str | None, picture: bytes) -> dict[str, Any]:
    asked = {"role": "user", "content": "<image>\nHow many?"}
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": "Tools."}, asked],
        "images": [{"bytes": picture, "path": None}],
        "ability": "vl",
        "env_name": env_name,
        "reward_model": {"ground_truth": "7", "style": "model"},
        "extra_info": {"index": "1", "split": "train"},
    }


def files(picture: bytes) -> dict[str, list[dict[str, Any]]]:
    """The files that the commands name, and their rows."""
    inside = {"bytes": picture, "path": None}
    chat = [
        {"role": "user", "content": [{"image": IMAGE}, {"text": "What color?"}]},
        {"role": "assistant", "content": [{"text": CROP}]},
        {"role": "user", "content": [{"text": "The crop:"}, {"image": IMAGE}]},
        {"role": "assistant", "content": [{"text": "It is \\boxed{red}."}]},
    ]
    cold_start = [
        {"from": "human", "value": "<image>\nWhat color?"},
        {"from": "gpt", "value": GROUND},
        {"from": "human", "value": "Observation 1: <image>"},
        {"from": "gpt", "value": "<think>Red.</think><answer>red</answer>"},
    ]
    counted = {"id": "clevr_1", "image": "0.png", "problem": "How many?", "answer": "7"}
    counting = counted | {"solution": "<answer>7</answer>"}
    trance = {"id": "trance_1", "image": ["0.png", "0.png"], "problem": "What changed?"}
    trance |= {"answer": "change_size(0, large)", "solution": "<answer>change_size(0, large)</answer>"}
    ttrl = {
        "data_source": "AIME-TTT",
        "prompt": [{"role": "user", "content": "3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": "AIME-TTT-0"},
    }
    moving = {"video": "v.mp4", "question": "Where?", "candidates": ["Up", "Down"], "answer": "Up"}
    vstar = {"image": "direct_attributes/a.png", "text": "Color?\n(A) red\n(B) blue", "label": "A"}
    vstar |= {"question_id": 0, "category": "direct_attributes"}
    focus = [
        {"role": "user", "content": "<image>What color?"},
        {
            "role": "assistant",
            "content": f"<think>Closer.</think> <tool_call>{json.dumps(FOCUS)}</tool_call>",
        },
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "<think>Red.</think> <answer>red</answer>"},
    ]
    pyvision = {"id": "0", "question": "What color?", "answer": "red", "ability": "visual_search"}
    pyvision |= {"data_source": "deepeyes", "image_path": IMAGE}
    boxed = {"qid": "vstar-1", "question": "What color?", "answer": ["\\boxed{red}"]}
    return {
        "PixelReasoner-SFT-Data/release.json": [{"message_list": chat}],
        "PixelReasoner-RL-Data/release.parquet": [boxed | {"image": [IMAGE], "is_video": False}],
        "train_jsons/clevr_math_cot.json": [counted | {"cot": "<think>t</think>\n<answer>7</answer>"}],
        "train_jsons/clevr_math.json": [counting],
        "train_jsons/trance.json": [trance],
        "benchmarks/visual_counting/super_clevr.json": [counting],
        "AIME-TTT/train.json": [{"prompt": "3 + 4?", "source": "AIME-TTT", "id": 0}],
        "AIME-TTT/train.parquet": [ttrl],
        "Mini-o3-Coldstart.json": [{"conversations": cold_start, "images": [IMAGE, IMAGE]}],
        "VisualProbe_train/train.json": [{"doc_id": "d1", **VISUAL_PROBE}],
        "VisualProbe_Hard/val.json": [VISUAL_PROBE],
        "clevr_cogen_a_train/train.parquet": [
            {"image": inside, "problem": "?", "solution": "<answer> 7 </answer>"}
        ],
        "superclevr_test200.jsonl": [{"image_path": IMAGE, "question": "How many?", "ground_truth": 7}],
        f"{DEEPEYES}/data_0.1.2_visual_toolbox_v2.parquet": [deepeyes("vstar", "visual_toolbox_v2", picture)],
        f"{DEEPEYES}/data_thinklite_reasoning_acc.parquet": [deepeyes("thinklite_eureka", "", picture)],
        "vstar_bench/test_questions.jsonl": [vstar],
        **{f"MVBench/json/{task}.json": [moving | {"start": 0.5, "end": 2}] for task in MVBENCH},
        "CoF-SFT-Data-5.4k/cof_sft_data_5.4k.json": [{"messages": focus, "images": [IMAGE, IMAGE]}],
        "CoF-RL-Data/train.json": [
            {"question": "What color?", "groundtruth": "red", "image_name": IMAGE, "data_source": "vstar"}
        ],
        "PyVision-Image-RL-Data/pyvision_image_rl_data.json": [pyvision],
        "geometry3k/train.parquet": [{"images": [inside], "problem": "<image>Find x.", "answer": "3"}],
        "math12k/train.jsonl": [{"problem": "3 + 4?", "answer": "7"}],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the model, the recipes and every data file of the page."""
    base = tmp_path_factory.mktemp("coming_from")
    tiny_model.make(base / "Qwen/Qwen2.5-VL-7B-Instruct")
    tiny_model.make(base / "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl")
    tiny_model.make(base / "Qwen/Qwen3.5-9B", "qwen3_5")
    shutil.copytree(ROOT / "configs", base / "configs")
    released = "PixelReasoner-SFT-Data", "PixelReasoner-RL-Data", "PyVision-Image-RL-Data"
    released += "CoF-SFT-Data-5.4k", "CoF-RL-Data"
    for place in ("", *released, "VisualProbe_train", "VisualProbe_Hard"):
        (base / place / "images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((400, 600, 3), 90, np.uint8)).save(base / place / IMAGE)
    copies = "train_jsons/images/0.png", "benchmarks/image/0.png", "vstar_bench/direct_attributes/a.png"
    for place in copies:
        (base / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(base / IMAGE, base / place)
    clip = encode(footage())
    for place in MVBENCH.values():
        (base / "MVBench/video" / place).mkdir(parents=True, exist_ok=True)
        (base / "MVBench/video" / place / "v.mp4").write_bytes(clip)
    annotation = {"target_object": ["cup"], "bbox": [[10, 10, 20, 20]]}
    (base / "vstar_bench/direct_attributes/a.json").write_text(json.dumps(annotation))
    for name, rows in files((base / IMAGE).read_bytes()).items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    (base / "r1v.jinja").write_text("{{ content | trim }} Think in <think> tags, answer in <answer> tags.")
    (base / "dapo.jinja").write_text("{{ content | trim }}\nEnd with a line `Answer: ...`.")
    return base


def test_every_system_has_a_section_with_commands() -> None:
    systems = [
        "Pixel-Reasoner", "Reason-RFT", "TTRL", "Mini-o3", "R1-V", "DeepEyes", "Chain-of-Focus", "PyVision-RL",
        "Qwen3-VL and Qwen3.5", "EasyR1", "lmms-eval and VLMEvalKit",
    ]  # fmt: skip
    assert list(SECTIONS) == systems
    for title in systems:
        assert "Theirs: `" in SECTIONS[title]
        assert BLOCKS[title].strip()


@pytest.mark.parametrize(
    ("title", "command"), COMMANDS, ids=[f"{title}-{i}" for i, (title, _) in enumerate(COMMANDS)]
)
def test_a_command_of_the_page_runs(
    folder: Path,
    title: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    program, *arguments = shlex.split(command)
    assert program == "pixelis"
    if "--help" not in arguments:
        # The layers of the tiny model are too small for the recipe's rank
        arguments += ["policy.lora.rank=16", "--dry-run"]
    code, _, errors = pixelis(capsys, monkeypatch, *arguments)
    assert code == 0, errors
