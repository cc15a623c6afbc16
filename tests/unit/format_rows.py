"""A row of each format of files of rows, about the picture ``a.png`` and with a given truth."""

from __future__ import annotations

from typing import Any

TEXT = "Which?\nA. cat\nB. 7"


def question_rows(truth: str, number: int) -> dict[str, dict[str, Any]]:
    picture = {"image": "a.png", "problem": "How many?"}
    verl: dict[str, Any] = {"data_source": "AIME-TTT", "prompt": [{"role": "user", "content": "How many?"}]}
    verl |= {"reward_model": {"style": "rule", "ground_truth": truth}}
    verl |= {"extra_info": {"split": "train", "index": number, "answer": truth}}
    deepeyes = {"prompt": [{"role": "user", "content": "<image>" + TEXT}], "images": ["a.png"]}
    mini_o3 = {"images": ["a.png"], "doc_id": number, "problem": "<image>\n" + TEXT, "solution": truth}
    question = {"id": f"q{number}", "question": TEXT, "answers": [truth]}
    clip = {"qid": f"v-{number}", "question": TEXT, "image": ["a.png"], "is_video": False}
    return {
        "question": {**question, "task": "t", "meta": {"difficulty": truth}},
        "pixel_reasoner": {**clip, "answer": [truth]},
        "reason_rft": {**picture, "id": number, "solution": f"<answer>{truth}</answer>", "answer": truth},
        "ttrl": {"prompt": "How many?", "answer": truth, "source": "AIME", "id": number},
        "ttrl_parquet": verl,
        "deepeyes": {**verl, **deepeyes, "env_name": "visual_toolbox_v2"},
        "mini_o3": {**mini_o3, "data_source": "visual_probe_train"},
        "r1v": {**picture, "solution": f"<answer> {truth} </answer>"},
        "r1v_evaluation": {"image_path": "a.png", "question": "How many?", "ground_truth": truth},
        "easyr1": {"problem": "<image>" + TEXT, "answer": truth, "images": ["a.png"]},
    }


def demonstration_rows(truth: str, number: int) -> dict[str, dict[str, Any]]:
    said = f"<think>So {truth}.</think><answer>{truth}</answer>"
    asked = {"role": "user", "content": [{"image": "a.png"}, {"text": TEXT}]}
    boxed = {"role": "assistant", "content": [{"text": f"It is \\boxed{{{truth}}}."}]}
    human, gpt = {"from": "human", "value": "<image>\n" + TEXT}, {"from": "gpt", "value": said}
    user, assistant = {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": said}
    own = {"id": f"q{number}", "question": TEXT, "answers": [truth], "task": "t"}
    cot = {"id": number, "image": "a.png", "problem": "How many?", "answer": truth}
    old = {"id": f"q{number}", "question": "How many?", "image_path": "a.png", "answer": truth}
    think = {"action": "THINK", "thought": f"So {truth}."}
    answer = {"action": "ANSWER", "parameters": {"answer": truth}}
    return {
        "demonstration": {**own, "turns": [{"think": f"It is {truth}.", "answer": truth}]},
        "pixel_reasoner_sft": {"id": number, "message_list": [asked, boxed]},
        "sharegpt": {"id": number, "images": ["a.png"], "conversations": [human, gpt]},
        "sharegpt_messages": {"id": number, "images": ["a.png"], "messages": [user, assistant]},
        "reason_rft_cot": {**cot, "cot": said},
        "pixelis_trajectory": {**old, "trajectory": [think, answer]},
        "pixelis_chain": {**old, "chain_of_thought": [think], "visual_operations": []},
    }
