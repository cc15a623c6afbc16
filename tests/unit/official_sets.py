"""Tiny annotated data sets, each in its official layout: files by name, with a right and some bad rows."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pixelis.datasets.annotation_geometry import mask_rle
from pixelis.datasets.readers import READERS

SQUARE = [10, 10, 30, 10, 30, 30, 10, 30]
"""A polygon of 20 x 20 pixels; in a picture of 100 x 50 its box is (.1, .2, .3, .6)."""
PICTURE = np.zeros((50, 100, 3), np.uint8)
Files = dict[str, Any]


@dataclass(frozen=True)
class OfficialSet:
    source: str
    files: Callable[[str], Files]
    """Files of the set, whose first row has this truth."""
    truths: tuple[str, ...]
    """Truths that the first row may have; none where the set has no answers."""

    def write(self, root: Path, truth: str = "") -> str:
        """Writes the set with a truth, else with its first one; returns its source."""
        write(root, self.files(truth or (self.truths or ("",))[0]))
        name, _, options = self.source.partition("?")
        if "cache" in READERS[name].options:
            options += f"&cache={root / 'cache'}"
        return f"{name}:{root}?{options}"


SETS: dict[str, OfficialSet] = {}


def official(source: str, *truths: str) -> Callable[[Callable[[str], Files]], Callable[[str], Files]]:
    def add(files: Callable[[str], Files]) -> Callable[[str], Files]:
        SETS[source.partition("?")[0]] = OfficialSet(source, files, truths)
        return files

    return add


def write(root: Path, files: Files) -> None:
    """Text and bytes as they are, an array as a picture, None as a folder, anything else as JSON."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, np.ndarray):
            Image.fromarray(content).save(path)
        else:
            path.write_text(json.dumps(content), encoding="utf-8")


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def parquet(rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), stream)
    return stream.getvalue()


def lines(*rows: Any) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


# -- segmentation --------------------------------------------------------------------------------------------


def thing(number: int = 1, **changes: Any) -> dict[str, Any]:
    row = {"id": number, "image_id": 7, "category_id": 3, "bbox": [10, 10, 20, 20], "area": 400}
    return {**row, "segmentation": [SQUARE], "iscrowd": 0, **changes}


def coco_file(*annotations: dict, **picture: Any) -> dict[str, Any]:
    image = {"id": 7, "file_name": "000000000007.jpg", "width": 100, "height": 50, **picture}
    categories = [{"id": 3, "name": "cup", "supercategory": "kitchen"}]
    return {"info": {}, "images": [image], "categories": categories, "annotations": list(annotations)}


@official("coco?split=val2017")
def coco(_: str) -> Files:
    column = {"size": [50, 100], "counts": [0, 50, 4950]}
    crowd = thing(2, bbox=[90, 40, 20, 20], iscrowd=1, segmentation=column)
    return {"val2017": None, "annotations/instances_val2017.json": coco_file(thing(), crowd)}


@official("lvis")
def lvis(_: str) -> Files:
    data = coco_file(thing(), coco_url="http://images.cocodataset.org/train2017/000000000007.jpg")
    del data["images"][0]["file_name"]
    data["images"][0] |= {"neg_category_ids": [4], "not_exhaustive_category_ids": [3]}
    data["categories"] = [
        {"id": 3, "name": "tea_cup", "frequency": "r"},
        {"id": 4, "name": "goat", "frequency": "f"},
    ]
    return {"annotations/lvis_v1_train.json": data}


@official("partimagenet?split=val")
def partimagenet(_: str) -> Files:
    data = coco_file(thing(), file_name="n01440764_1.JPEG")
    data["categories"] = [{"id": 3, "name": "Fish Head", "supercategory": "Fish"}]
    return {"annotations/val/val.json": data, "images/val": None}


def masklet(number: int, **changes: Any) -> dict[str, Any]:
    row = {"id": number, "bbox": [10, 10, 20, 20], "point_coords": [[20, 20]], "area": 400}
    row |= {"predicted_iou": 0.9, "stability_score": 0.95, "segmentation": mask_rle([SQUARE], 100, 50)}
    return row | changes


@official("sa1b")
def sa1b(_: str) -> Files:
    weak = [masklet(2, area=99), masklet(3, predicted_iou=0.4), masklet(4, stability_score=0.1)]
    least = masklet(5, area=100, predicted_iou=0.5, stability_score=0.5)
    image = {"image_id": 1, "width": 100, "height": 50, "file_name": "sa_1.jpg"}
    first = {"image": image, "annotations": [masklet(1), *weak, least]}
    return {"sa_000000/sa_1.json": first, "sa_000001/sa_2.json": "{ not JSON"}


# -- writing -------------------------------------------------------------------------------------------------


def corners(x: int, y: int, width: int, height: int) -> list[int]:
    return [x, y, x + width, y, x + width, y + height, x, y + height]


@official("docvqa?split=val", "$ 5", "Total:")
def docvqa(truth: str) -> Files:
    words = [
        {"boundingBox": corners(10, 10, 20, 10), "text": "Total:"},
        {"boundingBox": corners(40, 10, 20, 10), "text": "$ 5"},
    ]
    line = {"boundingBox": corners(10, 10, 50, 10), "text": "Total: $ 5", "words": words}
    page = {"page": 1, "width": 100, "height": 50, "lines": [line]}
    row = {"questionId": 337, "question": "How much?", "image": "documents/xn_1.png"}
    row |= {"answers": [truth, truth.replace(" ", "")], "question_types": ["form"]}
    bad = {**row, "questionId": 338, "answers": ["", " "]}
    without = {**row, "questionId": 339, "answers": None, "ocr_output_file": "gone.json"}
    return {
        "spdocvqa_ocr/xn_1.json": {"recognitionResults": [page]},
        "spdocvqa_qas/val_v1.0_withQT.json": {"dataset_name": "SP-DocVQA", "data": [row, bad, without]},
        "spdocvqa_images": None,
    }


@official("infographicsvqa", "41 Percent", "7")
def infographicsvqa(truth: str) -> Files:
    def block(kind: str, text: str, left: float) -> dict:
        box = {"Left": left, "Top": 0.1, "Width": 0.2, "Height": 0.1}
        return {"BlockType": kind, "Text": text, "Geometry": {"BoundingBox": box}}

    words = [block("WORD", "41", 0.1), block("WORD", "percent", 0.4)]
    row = {"questionId": 1, "question": "Share?", "image_local_name": "20471.jpeg", "answers": [truth]}
    row |= {"ocr_output_file": "20471.json", "answer_type": ["single span"], "operation/reasoning": [""]}
    return {
        "infographicsvqa_ocr/20471.json": {
            "PAGE": [],
            "LINE": [block("LINE", "41 percent", 0.1)],
            "WORD": words,
        },
        "infographicsvqa_qas/infographicsVQA_train_v1.0.json": {"data": [row]},
        "infographicsvqa_images": None,
    }


@official("textcaps?split=val")
def textcaps(_: str) -> Files:
    row = {"image_id": "ab", "caption_str": "A sign.", "image_width": 100, "image_height": 50}
    box = {"top_left_x": 0.9, "top_left_y": 0.2, "width": 0.2, "height": 0.1, "rotation": 0, "yaw": 0}
    texts = [
        {"image_id": "ab", "ocr_info": [{"word": "GO", "bounding_box": box}]},
        {"ocr_info": []},
        "nothing",
    ]
    return {
        "TextCaps_0.1_val.json": {"data": [row, {**row, "caption_str": "It says go."}]},
        "TextVQA_Rosetta_OCR_v0.2_val.json": {"data": texts},
        "train_images": None,
    }


@official("hiertext?split=validation")
def hiertext(_: str) -> Files:
    def place(text: str, left: int, width: int, **more: Any) -> dict[str, Any]:
        right = left + width
        vertices = [[left, 10], [right, 10], [right, 20], [left, 20]]
        return {"vertices": vertices, "text": text, "legible": bool(text), **more}

    words = [place("No", 10, 10), place("exit", 30, 10), place("", 50, 10)]
    paragraph = place("x", 0, 50, lines=[place("No exit", 10, 30, words=words)])
    image = {"image_id": "0001", "image_width": 100, "image_height": 50, "paragraphs": [paragraph]}
    content = json.dumps({"info": {}, "annotations": [image]}).encode()
    return {"gt/validation.jsonl.gz": gzip.compress(content), "validation": None}


@official("art")
def art(_: str) -> Files:
    points = [[10, 10], [30, 10], [30, 30], [10, 30]]
    items = [
        {"transcription": "CAFÉ", "points": points, "language": "Latin", "illegibility": False},
        {"transcription": "###", "points": points, "language": "Chinese", "illegibility": True},
    ]
    return {"train_labels.json": {"gt_0": items, "gt_1": items}, "train_images/gt_0.jpg": PICTURE}


# -- captions ------------------------------------------------------------------------------------------------

ENTITIES = """<annotation><filename>10.jpg</filename><size><width>100</width><height>50</height><depth>3</depth></size>
<object><name>5</name><name>6</name><bndbox><xmin>11</xmin><ymin>11</ymin><xmax>30</xmax><ymax>30</ymax></bndbox></object>
<object><name>7</name><scene>1</scene><nobndbox>1</nobndbox></object></annotation>"""


@official("flickr30k?split=val&boxes=yes")
def flickr30k(_: str) -> Files:
    sentences = "[/EN#5/people A man] with [/EN#8/clothing a hat] .\n[/EN#5/people A person] ."
    captions = ["10.jpg#0\tA man with a hat .", "10.jpg#1\tA person .", "11.jpg#0\tA dog .", "no caption"]
    return {
        "results_20130124.token": lines(*captions),
        "flickr30k-images": None,
        "Annotations/10.xml": ENTITIES,
        "Sentences/10.txt": sentences,
        "val.txt": "10\n",
    }


@official("unsplash")
def unsplash(_: str) -> Files:
    header = "photo_id\tphoto_image_url\tphoto_width\tphoto_height\tphoto_description\tai_description"
    good = "XMy\thttps://images.unsplash.com/p\t4272\t2848\t\tgreen grass"
    return {"photos.tsv000": lines(header, good, "Bad\thttps://x\twide\t1\t\t"), "photos": None}


@official("msrvtt?split=validate")
def msrvtt(_: str) -> Files:
    videos = [{"video_id": f"video{i}", "category": 9, "split": ("train", "validate")[i]} for i in range(2)]
    said = [{"video_id": "video1", "caption": text, "sen_id": 0} for text in ("a man sings", "a song")]
    return {"train_val_videodatainfo.json": {"videos": videos, "sentences": said}, "TrainValVideo": None}


# -- tracking ------------------------------------------------------------------------------------------------


def mot(name: str, length: int, *rows: str) -> Files:
    info = f"[Sequence]\nname={name}\nimDir=img1\nframeRate=30\nseqLength={length}\nimWidth=100\nimHeight=50\nimExt=.jpg\n"
    return {f"train/{name}/seqinfo.ini": info, f"train/{name}/gt/gt.txt": lines(*rows)}


@official("mot17")
def mot17(_: str) -> Files:
    rows = ["1,4,11,11,20,20,1,1,0.5", "3,4,91,41,20,20,1,1,1", "2,9,11,11,20,20,0,8,1"]
    bad = ["1,4,11,11,20,20,1,1,0.5", "1,2,11,11", "9,1,11,11,20,20,1,1,1", "2,1,nan,11,20,20,1,1,1"]
    bad += ["2,2,500,11,20,20,1,1,1", "2,3,11,11,-4,20,1,1,1"]
    same_sequence, test_split = mot("MOT17-02-DPM", 3), mot("MOT17-04-FRCNN", 3)
    del test_split["train/MOT17-04-FRCNN/gt/gt.txt"]
    empty = {"train/MOT17-03-FRCNN": None}
    return mot("MOT17-02-FRCNN", 3, *rows, *bad) | same_sequence | empty | test_split


@official("mot20?window=120&stride=100")
def mot20(_: str) -> Files:
    return mot("MOT20-01", 130, *(f"{frame},1,11,11,20,20,1,1,1" for frame in (1, 130)))


@official("youtube_vis")
def youtube_vis(_: str) -> Files:
    video = {"id": 1, "width": 100, "height": 50, "length": 3}
    video["file_names"] = [f"00f8/0000{i}.jpg" for i in (0, 5, 7)]
    code = {"size": [50, 100], "counts": [10 * 50 + 10, 20, 4470]}
    track = {"id": 5, "video_id": 1, "category_id": 2, "iscrowd": 0, "segmentations": [code, None, code]}
    track |= {"bboxes": [[10, 10, 20, 20], None, [10, 10, math.inf, 20]]}
    data = {"videos": [video], "categories": [{"id": 2, "name": "giant_panda"}], "annotations": [track]}
    return {"train.json": data, "train/JPEGImages": None}


@official("uvo?split=val")
def uvo(_: str) -> Files:
    video = {"id": 1, "width": 100, "height": 50, "length": 3, "ytid": "abc"}
    video["file_names"] = [f"abc/{i}.png" for i in range(3)]
    track = {"id": 5, "video_id": 1, "category_id": 1, "start_idx": 2, "length": 1}
    track |= {"segmentations": [[SQUARE]], "bboxes": [[10, 10, 20, 20]]}
    data = {"videos": [video], "categories": [{"id": 1, "name": "object"}], "annotations": [track]}
    return {"VideoDenseSet/UVO_video_val_dense.json": data, "uvo_videos_dense_frames": None}


@official("youtube_vos")
def youtube_vos(_: str) -> Files:
    lion, duck = ({"category": name, "frames": ["00000", "00005"]} for name in ("sea_lion", "duck"))
    odd = {"1": {"category": "\ud800", "frames": ["00000"]}}
    numbers = np.zeros((50, 100), np.uint8)
    numbers[10:30, 10:30] = 1
    videos = {"0032": {"objects": {"1": lion, "2": {**duck, "frames": ["00005"]}}}, "v": {"objects": odd}}
    return {
        "train/meta.json": {"videos": videos},
        "train/JPEGImages": None,
        "train/Annotations/0032/00000.png": numbers,
        "train/Annotations/v/00000.png": numbers,
    }


@official("visor?split=val")
def visor(_: str) -> Files:
    def frame(number: int, *annotations: dict) -> dict:
        name = f"P01_01_frame_{number:010d}.jpg"
        image = {"image_path": f"P01_01/{name}", "name": name, "subsequence": "P01_01_seq_00001"}
        return {"image": {**image, "video": "P01_01"}, "annotations": list(annotations)}

    square = [[[192, 108], [384, 108], [384, 216], [192, 216]]]
    cup = {"id": "c", "name": "cup", "class_id": 13, "exhaustive": "y", "segments": square}
    hand = {**cup, "id": "h", "name": "left hand", "class_id": 300, "in_contact_object": "c"}
    away = {**hand, "id": "h2", "in_contact_object": "hand-not-in-contact"}
    frames = [frame(20, away, {**cup, "id": "c2", "segments": []}), frame(3, hand, cup)]
    data = {"info": {}, "video_annotations": frames}
    folder = "GroundTruth-SparseAnnotations"
    return {f"{folder}/annotations/val/P01_01.json": data, f"{folder}/rgb_frames/val": None}


# -- what happens --------------------------------------------------------------------------------------------


@official("didemo?split=val&suffix=.mp4")
def didemo(_: str) -> Files:
    row = {"annotation_id": 1, "description": "a cat jumps", "video": "9@N0_1.avi", "num_segments": 5}
    sits = {**row, "description": "it sits", "times": [[4, 4]]}
    rows = [{**row, "times": [[1, 2], [0, 0], [1, 2]]}, sits, {**row, "times": [[3]]}]
    return {"val_data.json": rows, "videos": None}


@official("activitynet?split=val_1")
def activitynet(_: str) -> Files:
    spans, sentences = [[0.5, 10], [40, 60], [9, 3], [51, 60]], ["He runs.", " He stops. ", "x", "y"]
    row = {"duration": 50.5, "timestamps": spans, "sentences": sentences}
    return {"val_1.json": {"v_ab": row}, "videos": None}


@official("assembly101")
def assembly101(_: str) -> Files:
    rows = ["id,video,start_frame,end_frame,action_id,action_cls", "0,s/C1.mp4,90,120,1,clap hand"]
    rows += ["1,s/C2.mp4,0,30,1,clap hand", "2,s/C1.mp4,30,60,2,pick up wheel", "3,s/C1.mp4,a,6,2,x"]
    return {"fine-grained-annotations/train.csv": lines(*rows), "recordings": None}


@official("star?split=val&situations=yes", "The table.", "The sofa.")
def star(truth: str) -> Files:
    graph = {"actions": ["a059"], "bbox": [[10, 10, 30, 30], None, [0, 0, 50, 50]]}
    graph |= {"bbox_labels": ["o000", "o001", "o002"], "rel_labels": ["r007", "r001"]}
    graph |= {"rel_pairs": [["o000", "o002"], ["o000", "o001"]]}
    row = {"question_id": "T1_13", "question": "What did they sit at?", "video_id": "6H78U", "start": 11.1}
    row |= {"end": 19.6, "answer": truth, "question_program": [{"function": "Situations"}]}
    row["choices"] = [{"choice_id": i, "choice": c} for i, c in enumerate(("The sofa.", "The table."))]
    row["situations"] = {"000012": graph}
    bad, open_ = (
        {**row, "question_id": "b", "answer": "The cat."},
        {**row, "question_id": "c", "answer": None},
    )
    return {
        "STAR_val.json": [row, bad, {**open_, "situations": {}}],
        "Charades_v1_480": None,
        "STAR_classes/object_classes.txt": "o000 person\no001 broom\no002 table\n",
        "STAR_classes/relationship_classes.txt": "r007 sitting_on\n",
        "frames/6H78U.mp4/000012.png": PICTURE,
    }


@official("tvqa?split=val", "2", "3")
def tvqa(truth: str) -> Files:
    row = {"qid": 1, "q": "Who enters?", "vid_name": "friends_s01e01_seg01_clip_00", "ts": "1.5-4"}
    row |= {"show_name": "Friends", "answer_idx": int(truth), **{f"a{i}": f"Name {i}" for i in range(5)}}
    bad = {**row, "qid": 2, "ts": "nan-nan"}, {**row, "qid": 3, "answer_idx": 5}
    frames = "frames_hq/friends_frames/friends_s01e01_seg01_clip_00"
    return {
        "tvqa_val.jsonl": lines(row, *bad, {**row, "qid": 4, "vid_name": "s01e01_x"}, "not JSON"),
        f"{frames}/00001.jpg": "",
        f"{frames}/00002.jpg": "",
    }


# -- agents, benchmarks --------------------------------------------------------------------------------------


@official("mind2web")
def mind2web(_: str) -> Files:
    def element(rect: str, target: bool) -> str:
        attributes = json.dumps({"bounding_box_rect": rect})
        return json.dumps({"tag": "button", "attributes": attributes, "is_original_target": target})

    row = {"action_uid": "u1", "raw_html": "x" * 1000, "website": "united", "domain": "Travel"}
    row |= {"operation": '{"op": "CLICK", "original_op": "CLICK", "value": ""}', "subdomain": "Airlines"}
    row |= {"pos_candidates": [element("10,10,20,20", True), element("-1,-1,-1,-1", False)]}
    row |= {"annotation_id": "t1", "confirmed_task": "Rent a car", "target_action_index": "1"}
    row |= {"screenshot": {"bytes": png(100, 50), "path": None}}
    row |= {"action_reprs": ["[link]  Home -> CLICK", "[button]  Find -> CLICK"]}
    broken = {**row, "action_uid": "u2", "screenshot": {"bytes": b"no picture", "path": None}}
    return {"data/train-00000-of-00027-ab.parquet": parquet([row, broken])}


@official("vstar", "A", "B")
def vstar(truth: str) -> Files:
    row = {"image": "direct_attributes/sa_1.jpg", "text": "Colour?\n(A) red\n(B) blue", "label": truth}
    boxes = {"target_object": ["cup"], "bbox": [[10, 10, 20, 20]], "question": "", "options": []}
    return {
        "test_questions.jsonl": lines({**row, "question_id": 0, "category": "direct_attributes"}),
        "direct_attributes/sa_1.jpg": PICTURE,
        "direct_attributes/sa_1.json": boxes,
    }


@official("hrbench", "B", "A")
def hrbench(truth: str) -> Files:
    picture = base64.b64encode(png(100, 50)).decode()
    header = ["index", "question", "image", "answer", "A", "B"]
    first, second = ["0", "What?", picture, truth, "cat", "dog"], ["1", "What?", "0", "A", "dog", "cat"]
    rows = [header, first, second, ["2", "What?", "7", "A", "a", "b"]]
    return {"hr_bench_4k.tsv": lines(*("\t".join(row) for row in rows))}


def picture(width: int, height: int = 10) -> dict[str, Any]:
    """An image as `datasets` keeps it in parquet."""
    return {"bytes": png(width, height), "path": None}


@official("cvbench?split=3d", "(B)", "(A)")
def cvbench(truth: str) -> Files:
    row = {"idx": 7, "type": "3D", "task": "Depth", "source": "Omni3D", "answer": truth}
    row |= {"prompt": "Which is nearer?\n(A) the cup\n(B) the pen", "image": picture(20)}
    return {"test_3d.parquet": parquet([row, row | {"idx": 8, "answer": None}])}


@official("mme_realworld?split=lite", "B", "E")
def mme_realworld(truth: str) -> Files:
    row = {"Question_id": "perception/monitoring/counting/0310", "Image": "a.png", "Text": "How many cars?"}
    row |= {"Answer choices": ["(A) 1", "(B) 2", "(C) 3", "(D) 4", "(E) The image does not show it."]}
    row |= {"Ground truth": truth, "Category": "counting", "Subtask": "Monitoring", "Task": "Perception"}
    rows = [row, row | {"Question_id": "x", "Image": "../a.png"}]
    full = row | {"Image": "monitoring_images/b.jpg"}
    return {"data/MME-RealWorld-Lite.json": rows, "data/imgs": None, "MME_RealWorld.json": [full]}


@official("treebench", "C", "A")
def treebench(truth: str) -> Files:
    seen = base64.b64encode(png(100, 50)).decode()
    header = ["index", "image", "question", "multi-choice options", "answer", "category", "target_instances"]
    options, boxes = '"A. left \nB. right\nC. front"', "[[10.0, 10.0, 30.0, 40.0], [90, 40, 120, 60], [5, 5]]"
    row = ["0", seen, "Where is it?", options, truth, "Reasoning/Ordering", f'"{boxes}"']
    rows = [header, row, ["1", seen, "Where?", options, "A", "Perception/OCR", "nowhere"]]
    return {"TreeBench.tsv": lines(*("\t".join(row) for row in rows))}


@official("zoombench", "C", "B")
def zoombench(truth: str) -> Files:
    row = {"id": "z1", "query": "How many lamps?\n(A) 0\n(B) 2\n(C) 1", "response": truth}
    row |= {"image": picture(100, 50), "crop_image": picture(20), "question_type": "counting"}
    opened = row | {"id": "z2", "query": "What does it say?", "response": "Exit 7"}
    return {"data/test.parquet": parquet([row, opened])}


@official("o3bench", "D", "A")
def o3bench(truth: str) -> Files:
    row = {"file_name": "images/map/a.jpg", "subset": "map", "question": "Which exit?", "answer": truth}
    row |= {
        "options": "A. 1\nB. 2\nC. 3\nD. 4\nE. 5\nF. No right choice",
        "explanation": f"[layout 2] {truth}",
    }
    layouts = {str(i): {"layout_id": i, "bbox": [10.0 * i, 0.0, 50.0, 50.0]} for i in (1, 2)}
    row |= {"target_layouts": [2, 3], "layout_infos": layouts, "img_width": 100, "img_height": 50}
    return {"test/metadata.jsonl": lines(row, row | {"options": None})}


@official("tallyqa", "3", "7")
def tallyqa(truth: str) -> Files:
    row = {"image": "VG_100K/1.jpg", "question": "How many cups?", "question_id": 5, "issimple": False}
    return {"test.json": [{**row, "answer": int(truth)}, {**row, "question_id": 6, "answer": None}]}


@official("superclevr", "2", "red")
def superclevr(truth: str) -> Files:
    row = {"question_index": 0, "question": "How many?", "image_filename": "superCLEVR_new_000000.png"}
    rows = [
        {**row, "answer": int(truth) if truth == "2" else truth},
        {**row, "question_index": 1, "answer": "red"},
    ]
    return {"superCLEVR_questions_30k.json": {"info": {}, "questions": rows}, "images": None}


@official("pope?split=popular", "yes", "no")
def pope(truth: str) -> Files:
    row = {
        "question_id": 1,
        "image": "COCO_val2014_000000016631.jpg",
        "text": "Is there a person in the image?",
    }
    rows = [row | {"label": truth}, row | {"question_id": 2, "label": "maybe"}]
    return {"coco_pope_popular.json": lines(*rows), "val2014": None}


@official("vsibench?split=debiased", "B", "A")
def vsibench(truth: str) -> Files:
    row = {"id": 3, "dataset": "scannet", "scene_name": "scene0568_00", "ground_truth": truth}
    row |= {"question_type": "object_rel_direction_hard", "question": "Where is the sofa?"}
    row |= {"options": ["A. front-left", "B. back-right"]}
    counted = {"id": 4, "question_type": "object_counting", "question": "How many chairs?", "options": None}
    rows = [row, row | counted | {"ground_truth": "4"}, row | {"id": 5, "scene_name": "../x"}]
    return {"test_debiased.parquet": parquet(rows), "test.jsonl": lines(row)}


@official("mvbench?task=action_sequence", "Tidied.", "Ate.")
def mvbench(truth: str) -> Files:
    row = {"video": "ZS9XR.mp4", "question": "What then?", "candidates": ["Ate.", "Tidied."], "answer": truth}
    row |= {"start": 2.5, "end": 8.1}
    up = {**row, "video": "video_1.mp4", "candidates": ["Up", "Down"], "answer": "Up"}
    return {
        "json/action_sequence.json": [
            row,
            row | {"answer": "Slept."},
            row | {"end": 1},
            row | {"video": "../a"},
        ],
        "video/star/Charades_v1_480": None,
        "json/moving_count.json": [up],
        "video/clevrer/video_validation": None,
    }


@official("reason_rft_tests?split=structure_id", "7", "A")
def reason_rft_tests(truth: str) -> Files:
    row = {"id": "g1", "image": "a.png", "problem": "How long?", "answer": truth}
    return {"structure_perception/geomath.json": [row], "image/a.png": PICTURE}


def mmmu_row(number: int, subject: str = "Art_Theory", **changes: Any) -> dict[str, Any]:
    row = {"id": f"validation_{subject}_{number}", "question": "What is in <image 1>?"}
    row |= {"options": "['a cat', \"a dog's\"]", **{f"image_{i}": None for i in range(1, 8)}}
    row |= {"image_1": {"bytes": png(20, 10), "path": "1.png"}, "question_type": "multiple-choice"}
    return row | {"answer": "B", "topic_difficulty": "Easy", "explanation": ""} | changes


def mmmu_table(*rows: dict[str, Any]) -> bytes:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [(name, picture if name.startswith("image_") else pa.string()) for name in rows[0]]
    return parquet(list(rows), pa.schema(columns))


@official("mmmu", "B", "A")
def mmmu(truth: str) -> Files:
    second = {"image_2": {"bytes": png(30, 10), "path": "2.png"}}
    opened = {"options": "[]", "question_type": "open"}
    rows = [
        mmmu_row(1, answer=truth),
        mmmu_row(2, **second, question="Compare.", options="['<image 2>', '<image 1>']", answer="A"),
        mmmu_row(3, **second),
        mmmu_row(4, **opened, answer="['24/7', '3.429']"),
        mmmu_row(5, **opened, answer="?"),
        mmmu_row(6, answer="C"),
        mmmu_row(7, options="__import__('os')"),
        mmmu_row(8, image_1=None),
        mmmu_row(1),
    ]
    return {
        "Art_Theory/validation-00000-of-00001.parquet": mmmu_table(*rows),
        "Math/validation-00000-of-00001.parquet": mmmu_table(mmmu_row(1, "Math")),
    }


@official("scienceqa", "1", "2")
def scienceqa(truth: str) -> Files:
    plain = {"question": "Which?", "choices": ["red", "blue", "green"], "answer": int(truth), "hint": ""}
    plain |= {"image": None, "task": "closed choice", "grade": "grade6", "subject": "natural science"}
    plain |= {"topic": "physics", "skill": "s", "lecture": "l", "solution": truth, "split": "test"}
    shown = {
        "image": "image.png",
        "hint": "Look.",
        "grade": "grade7",
        "subject": "social science",
        "answer": 0,
    }
    problems = {"1": plain, "2": plain | shown, "3": plain | {"answer": 3}}
    problems |= {"4": plain | {"image": "../../image.png"}, "5": plain | {"split": "train"}}
    splits = {"train": ["5"], "test": ["1", "2", "3", "4", "9"], "minitest": ["2"]}
    return {"problems.json": problems, "pid_splits.json": splits, "images/test/2/image.png": png(8, 8)}


@official("mmvet", "-1<AND>-5", "7")
def mmvet(truth: str) -> Files:
    row = {"imagename": "v1_0.png", "question": "What is x?", "answer": truth, "capability": ["ocr", "math"]}
    return {"mm-vet.json": {"v1_0": row, "v1_1": {**row, "answer": ""}}, "images": None}


@official("mathvista", "1.5", "2.0")
def mathvista(truth: str) -> Files:
    about = {"task": "geometry problem solving", "skills": ["geometry reasoning"], "split": "testmini"}
    row = {"pid": "1", "question": "How long?", "decoded_image": picture(20), "choices": None, "unit": "cm"}
    row |= {"precision": 1.0, "answer": truth, "question_type": "free_form", "answer_type": "float"}
    row |= {"image": "images/1.jpg", "metadata": about, "query": "Hint: ..."}
    choice = {"question_type": "multi_choice", "answer_type": "text", "choices": ["Yes", "No"], "unit": None}
    rows = [
        row,
        row | choice | {"pid": "2", "answer": "No"},
        row | choice | {"pid": "3", "answer": "Maybe"},
        row | choice | {"pid": "4", "answer": ""},
        row | {"pid": "5", "answer_type": "integer", "unit": "", "precision": None, "answer": "7"},
        row | {"pid": "6", "answer_type": "float", "precision": None},
        row | {"pid": "7", "answer_type": "formula"},
    ]
    return {"data/testmini-00000-of-00001-725687bf7a18d64b.parquet": parquet(rows)}


@official("mathverse", "D", "A")
def mathverse(truth: str) -> Files:
    row = {"sample_index": "1", "problem_index": "1", "problem_version": "Text Dominant", "answer": truth}
    row |= {"question": "The angle is ()\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°", "image": picture(20)}
    row |= {"question_type": "multi-choice", "metadata": {"split": "testmini", "subject": "Plane Geometry"}}
    vision = {
        "sample_index": "5",
        "problem_version": "Vision Only",
        "question": "",
        "question_type": "free-form",
    }
    only = row | {"sample_index": "1", "problem_version": "Text Only", "image": None}
    rows = [row, row | vision | {"answer": "14"}, row | {"sample_index": "6", "image": None}]
    return {"testmini.parquet": parquet(rows), "testmini_text_only.parquet": parquet([only])}


@official("mathvision?split=testmini", "C", "A")
def mathvision(truth: str) -> Files:
    row = {
        "id": "4",
        "question": "<image1>\nWhich bike?",
        "options": ["1", "2", "3"],
        "image": "images/4.jpg",
    }
    row |= {"decoded_image": picture(20), "answer": truth, "solution": None, "level": 2, "subject": "logic"}
    opened = row | {"id": "9", "question": "How many?\n<image1>", "options": [], "answer": "28"}
    rows = [row, opened, row | {"id": "10", "answer": "D"}]
    return {"data/testmini-00000-of-00001-f8ff70fcb2f29b1d.parquet": parquet(rows)}


def referring(name: str) -> None:
    @official(f"{name}?split=validation", "[250.0, 200.0, 500.0, 800.0]", "[0.0, 200.0, 500.0, 800.0]")
    def refcoco(truth: str) -> Files:
        left = 25.0 if truth.startswith("[250") else 0.0
        row = {"image_path": "coco/train2014/COCO_train2014_000000000072.jpg", "ref_id": 1, "ann_id": 2}
        row |= {"raw_image_info": json.dumps({"width": 100, "height": 50, "id": 72}), "split": "val"}
        row |= {"bbox": [left, 10.0, 50.0, 40.0], "captions": ["the left cup", "cup"]}
        said = [
            {"raw": "The left cup", "sent": "the left cup", "sent_id": 8},
            {"raw": "", "sent": "", "sent_id": 9},
        ]
        rows = [row | {"sentences": said}, row | {"sentences": said[:1], "bbox": [5.0, 5.0, 5.0, 9.0]}]
        return {"data/validation-00000-of-00001-db1f654bae6b38ca.parquet": parquet(rows)}


for name in ("refcoco", "refcocoplus", "refcocog"):
    referring(name)
