"""A working folder with rows of the systems that docs/coming-from.md and docs/reproduce.md name, one or two of each file,
and a tiny model under the names of their models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from clips import encode, footage
from official_sets import SETS, write
from PIL import Image

from pixelis.datasets.readers.benchmarks import MVBENCH, REASON_RFT
from pixelis.jobs import tiny_model

MODELS = (
    "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen2-VL-2B-Instruct",
    "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen/Qwen2.5-Math-7B",
    "Mini-o3/Mini-o3-7B-SFT",
    "Mini-o3/Mini-o3-7B-v1",
    "ChenShawn/DeepEyes-7B",
)
IMAGE = "images/0.png"
BOX = {"bbox_2d": [0.1, 0.1, 0.9, 0.9], "target_image": 1}
CROP = f"Closer.<tool_call>{json.dumps({'name': 'crop_image_normalized', 'arguments': BOX})}</tool_call>"
GROUNDED = json.dumps({"bbox_2d": [0.1, 0.1, 0.9, 0.9], "source": "original_image"})
GROUND = f"<think>Closer.</think><grounding>{GROUNDED}</grounding>"
FOCUS = {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 300, 400]}}
VISUAL_PROBE = {"problem": "<image>\nWhat color?", "solution": "red", "data_source": "visual_probe_train"}
DRY = (
    # The layers of the tiny model are too small for the rank of some recipes.
    *("policy.lora.rank=16", "policy.adapter=null"),
    *("rewards.judge.api_key_env=", "--dry-run"),
)
"""Arguments that let a command of a page run here, where nothing has been trained and no key is set."""


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
    """Files below ``data/`` and their rows."""
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
    geometry = {"id": "geomath_1", "image": "0.png", "problem": "Find x.", "answer": "3", "solution": "3"}
    trance = {"id": "trance_1", "image": ["0.png", "0.png"], "problem": "What changed?"}
    trance |= {"answer": "change_size(0, large)", "solution": "<answer>change_size(0, large)</answer>"}
    thought = {"cot": "<think>t</think>\n<answer>7</answer>"}
    ttrl = {
        "data_source": "AIME-TTT",
        "prompt": [{"role": "user", "content": "3 + 4?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": "AIME-TTT-0"},
    }
    unlabelled = {"prompt": "3 + 4?", "source": "AIME-TTT", "id": 0}
    moving = {"video": "v.mp4", "question": "Where?", "candidates": ["Up", "Down"], "answer": "Up"}
    boxed = {"qid": "vstar-1", "question": "What color?", "answer": ["\\boxed{red}"]}
    r1v = {"image": inside, "problem": "?", "solution": "<answer> 7 </answer>"}
    tested = {"image_path": f"./{IMAGE}", "question": "How many?", "ground_truth": 7}
    triangle = {"images": [inside], "problem": "<image>Find x.", "answer": "3"}
    tests = ("VisualProbe_Hard", "VisualProbe_Medium", "VisualProbe_Easy", "Vstar_Bench")
    problems = "Reason-RFT-CoT-Dataset/train_jsons"
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
    return {
        "PixelReasoner-SFT-Data/release.json": [{"message_list": chat}],
        "PixelReasoner-RL-Data/release.parquet": [boxed | {"image": [IMAGE], "is_video": False}],
        f"{problems}/A3-Visual-Counting-train-35k-cot.json": [counted | thought],
        f"{problems}/clevr-math-train.json": [counting],
        f"{problems}/geomath-train.json": [geometry],
        f"{problems}/trance-train.json": [trance],
        "AIME-TTT/train.json": [unlabelled],
        "AIME-TTT/train.parquet": [ttrl],
        "AMC-TTT/train.json": [unlabelled],
        "MATH-TTT/train.json": [unlabelled],
        **{
            f"{name}/test.json": [unlabelled | {"answer": "7"}]
            for name in ("AIME-TTT", "AMC-TTT", "MATH-TTT")
        },
        "mini_o3/Mini-o3-Coldstart.json": [{"conversations": cold_start, "images": [IMAGE, IMAGE]}],
        "mini_o3/train/VisualProbe_train/train.json": [{"doc_id": "d1", "images": [IMAGE], **VISUAL_PROBE}],
        "mini_o3/train/DeepEyes_train_4K/train.json": [{"doc_id": "d2", "images": [IMAGE], **VISUAL_PROBE}],
        **{f"mini_o3/test/{name}/val.json": [{"images": [IMAGE], **VISUAL_PROBE}] for name in tests},
        "clevr_cogen_a_train/train.parquet": [r1v],
        "GEOQA_R1V_Train_8K/train.parquet": [r1v],
        "r1_v/prompts/superclevr_test200_counting_problems.jsonl": [tested],
        "r1_v/prompts/geoqa_test_prompts.jsonl": [tested],
        "DeepEyes-Datasets-47k/data_0.1.2_visual_toolbox_v2.parquet": [
            deepeyes("vstar", "visual_toolbox_v2", picture)
        ],
        "DeepEyes-Datasets-47k/data_thinklite_reasoning_acc.parquet": [
            deepeyes("thinklite_eureka", "", picture)
        ],
        **{f"MVBench/json/{task}.json": [moving | {"start": 0.5, "end": 2}] for task in MVBENCH},
        "geometry3k/train.parquet": [triangle],
        "geometry3k/test.parquet": [triangle],
        "math12k/train.jsonl": [{"problem": "3 + 4?", "answer": "7"}],
        "CoF-SFT-Data-5.4k/cof_sft_data_5.4k.json": [{"messages": focus, "images": [IMAGE, IMAGE]}],
        "CoF-RL-Data/train.json": [
            {"question": "What color?", "groundtruth": "red", "image_name": IMAGE, "data_source": "vstar"}
        ],
        "PyVision-Image-RL-Data/pyvision_image_rl_data.json": [pyvision],
        **{f"reason_rft_tests/{names[0]}": [_tested(split)] for split, names in REASON_RFT.items()},
    }


def _tested(split: str) -> dict[str, Any]:
    answer = "change_size(0, large)" if split.startswith("transformation") else "7"
    return {"id": split, "image": "0.png", "problem": "?", "answer": answer}


def write_folder(base: Path) -> None:
    """Write the folder: ``data/``, the models, and prompt templates."""
    first, *others = (base / name for name in MODELS)
    tiny_model.make(first)
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.symlink_to(first)
    tiny_model.make(base / "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl")
    tiny_model.make(base / "Qwen/Qwen3.5-9B", "qwen3_5")
    data = base / "data"
    picture = np.full((400, 600, 3), 90, np.uint8)
    owners = (
        "PixelReasoner-SFT-Data",
        "PixelReasoner-RL-Data",
        "CoF-SFT-Data-5.4k",
        "CoF-RL-Data",
        "PyVision-Image-RL-Data",
        "r1_v",
        *(f"mini_o3{folder}" for folder in ("", "/train", "/test")),
    )
    places = [f"{owner}/{IMAGE}" for owner in owners]
    places += ["Reason-RFT-CoT-Dataset/images/train_images/0.png", "reason_rft_tests/image/0.png"]
    places += ["tallyqa/VG_100K/1.jpg", "infographicsvqa/infographicsvqa_images/20471.jpeg"]
    for place in places:
        (data / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(data / place)
    clip = encode(footage())
    for place in MVBENCH.values():
        (data / "MVBench/video" / place).mkdir(parents=True, exist_ok=True)
        (data / "MVBench/video" / place / "v.mp4").write_bytes(clip)
    SETS["vstar"].write(data / "vstar_bench")
    write(data / "tallyqa", {"test.json": SETS["tallyqa"].files("3")["test.json"][:1]})
    graphics = SETS["infographicsvqa"].files("41").items()
    write(data / "infographicsvqa", {name.replace("train", "val"): content for name, content in graphics})
    for name, rows in files((data / places[0]).read_bytes()).items():
        path = data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    templates = base / "EasyR1/examples/format_prompt"
    templates.mkdir(parents=True)
    for name, ending in {
        "math": "Think in <think> tags, put the answer in \\boxed{}.",
        "r1v": "Think in <think> tags, answer in <answer> tags.",
        "dapo": "End with a line `Answer: ...`.",
    }.items():
        (templates / f"{name}.jinja").write_text(f"{{{{ content | trim }}}} {ending}")
