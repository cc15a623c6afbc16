"""Annotated data sets: tiny files in each official schema, written here."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pixelis.datasets import readers
from pixelis.datasets.annotation_geometry import box_xywh, box_xyxy, mask_rle, polygon_points, time_span
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import RowError
from pixelis.datasets.questions import read_rows
from pixelis.errors import BadInput, MissingFile
from pixelis.operations.masks import decode
from pixelis.records import Question

SQUARE = [10, 10, 30, 10, 30, 30, 10, 30]
"""A polygon of 20 x 20 pixels; in a picture of 100 x 50 its box is (.1, .2, .3, .6)."""
BOX = (0.1, 0.2, 0.3, 0.6)


def put(root: Path, name: str, content: Any) -> Path:
    """A file: text as it is, an array as a picture, anything else as JSON; None makes a folder."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir(exist_ok=True)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, np.ndarray):
        Image.fromarray(content).save(path)
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    return path


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def read(source: str) -> tuple[list[Question], list[BadRow]]:
    rows = list(read_rows(source))
    return [row for row in rows if isinstance(row, Question)], [
        row for row in rows if isinstance(row, BadRow)
    ]


def only(source: str) -> Question:
    questions, bad = read(source)
    assert not bad
    assert len(questions) == 1
    return Question.model_validate_json(questions[0].model_dump_json())


def known(question: Question):
    assert question.annotations is not None
    return question.annotations


# -- segmentation --------------------------------------------------------------------------------------------


def thing(number: int = 1, **changes: Any) -> dict[str, Any]:
    row = {
        "id": number,
        "image_id": 7,
        "category_id": 3,
        "bbox": [10, 10, 20, 20],
        "segmentation": [SQUARE],
        "area": 400,
        "iscrowd": 0,
    }
    return {**row, **changes}


def coco_set(root: Path, *annotations: dict, **picture: Any) -> str:
    image = {"id": 7, "file_name": "000000000007.jpg", "width": 100, "height": 50, **picture}
    categories = [{"id": 3, "name": "cup", "supercategory": "kitchen"}]
    put(root, "val2017", None)
    data = {"info": {}, "images": [image], "categories": categories, "annotations": list(annotations)}
    put(root, "annotations/instances_val2017.json", data)
    return f"coco:{root}?split=val2017"


def test_coco(tmp_path: Path) -> None:
    crowd = {"size": [50, 100], "counts": [0, 50, 4950]}  # the first column
    question = only(
        coco_set(tmp_path, thing(), thing(2, bbox=[90, 40, 20, 20], iscrowd=1, segmentation=crowd))
    )
    assert (question.id, question.question, question.answers) == ("coco-val2017-7", "", None)
    media = question.media[0]
    expected = ("img0", str(tmp_path / "val2017/000000000007.jpg"), 100, 50)
    assert (media.id, media.uri, media.width, media.height) == expected
    cup, rest = known(question).regions
    expected = ("1", "cup", pytest.approx(BOX), {"supercategory": "kitchen"})
    assert (cup.id, cup.label, cup.box, cup.attributes) == expected
    assert rest.box == pytest.approx((0.9, 0.8, 1, 1))  # clipped
    assert rest.attributes["iscrowd"] is True
    assert rest.mask is not None
    assert decode(rest.mask).full().sum() == 50
    assert question.meta == {"source": "coco", "original_id": "7"}  # exhaustive, nothing dropped


BAD_THINGS = {
    "empty_box": thing(bbox=[10, 10, 0, 20]),
    "outside": thing(bbox=[100, 0, 5, 5]),
    "not_a_number": thing(bbox=[math.nan, 1, 2, 2]),
    "wrong_type": thing(bbox="10,10"),
    "missing_column": {key: value for key, value in thing().items() if key != "bbox"},
    "unknown_id": thing(category_id=9),
    "bad_polygon": thing(segmentation=[[1, 2, 3, 4]]),
    "bad_mask": thing(segmentation={"size": [50, 100], "counts": [10]}),
    "empty_mask": thing(segmentation={"size": [50, 100], "counts": [5000]}),
}


@pytest.mark.parametrize("code", BAD_THINGS)
def test_a_bad_annotation_is_named_and_the_picture_says_that_it_is_missing(code: str, tmp_path: Path) -> None:
    questions, bad = read(coco_set(tmp_path, BAD_THINGS[code], thing(2)))
    assert [(row.code, row.row) for row in bad] == [(code, "annotation 1")]
    assert bad[0].file.endswith("instances_val2017.json")
    assert [region.id for region in known(questions[0]).regions] == ["2"]
    assert questions[0].meta["dropped"] == 1
    assert str(bad[0].error().code) == code


@pytest.mark.parametrize(
    ("picture", "column", "code"),
    [
        ({"width": 0}, "width", "bad_size"),
        ({"height": "50"}, "height", "bad_size"),
        ({"width": 90_000, "height": 90_000}, "width", "bad_size"),
        ({"file_name": "../../secret.jpg"}, "file_name", "media_traversal"),
        ({"file_name": 5}, "file_name", "wrong_type"),
    ],
)
def test_a_bad_picture_row_is_no_question(picture: dict, column: str, code: str, tmp_path: Path) -> None:
    questions, bad = read(coco_set(tmp_path, thing(), **picture))
    assert not questions
    assert [(row.row, row.column, row.code) for row in bad] == [("images[0]", column, code)]


def test_annotations_of_unknown_pictures_and_repeated_pictures(tmp_path: Path) -> None:
    source = coco_set(tmp_path, thing(image_id=8))
    file = tmp_path / "annotations/instances_val2017.json"
    data = json.loads(file.read_text())
    data["images"] *= 2
    file.write_text(json.dumps(data))
    questions, bad = read(source)
    assert len(questions) == 1
    assert [row.code for row in bad] == ["unknown_id", "duplicate_id"]


def test_lvis(tmp_path: Path) -> None:
    image = {
        "id": 7,
        "coco_url": "http://images.cocodataset.org/train2017/000000000007.jpg",
        "width": 100,
        "height": 50,
    }
    image |= {"neg_category_ids": [4], "not_exhaustive_category_ids": [3]}
    categories = [{"id": 3, "name": "tea_cup", "frequency": "r"}, {"id": 4, "name": "goat", "frequency": "f"}]
    data = {"images": [image], "categories": categories, "annotations": [thing()]}
    put(tmp_path, "annotations/lvis_v1_train.json", data)
    question = only(f"lvis:{tmp_path}")
    assert question.media[0].uri == str(tmp_path / "train2017/000000000007.jpg")
    assert known(question).regions[0].label == "tea cup"
    assert known(question).regions[0].attributes == {"frequency": "r"}
    assert (question.meta["absent"], question.meta["not_exhaustive"]) == (["goat"], ["tea cup"])


def test_partimagenet(tmp_path: Path) -> None:
    data = {
        "images": [{"id": 7, "file_name": "n01440764_1.JPEG", "width": 100, "height": 50}],
        "categories": [{"id": 3, "name": "Fish Head", "supercategory": "Fish"}],
        "annotations": [thing()],
    }
    put(tmp_path, "annotations/val/val.json", data)
    put(tmp_path, "images/val", None)
    question = only(f"partimagenet:{tmp_path}?split=val")
    assert question.media[0].uri.endswith("images/val/n01440764_1.JPEG")
    assert known(question).regions[0].label == "Fish Head"


def masklet(number: int, **changes: Any) -> dict[str, Any]:
    code = mask_rle([SQUARE], 100, 50)
    scores = {"area": 400, "predicted_iou": 0.9, "stability_score": 0.95}
    return {
        "id": number,
        "segmentation": code,
        "bbox": [10, 10, 20, 20],
        "point_coords": [[20, 20]],
        **scores,
        **changes,
    }


def sa1b_file(root: Path, number: int, *annotations: dict) -> None:
    image = {"image_id": number, "width": 100, "height": 50, "file_name": f"sa_{number}.jpg"}
    put(root, f"sa_000000/sa_{number}.json", {"image": image, "annotations": list(annotations)})


def test_sa1b(tmp_path: Path) -> None:
    weak = (masklet(2, area=99), masklet(3, predicted_iou=0.4), masklet(4, stability_score=0.1))
    sa1b_file(tmp_path, 1, masklet(1), *weak, masklet(5, area=100, predicted_iou=0.5, stability_score=0.5))
    question = only(f"sa1b:{tmp_path}")
    assert question.id == "sa1b-1"
    assert question.media[0].uri == str(tmp_path / "sa_000000/sa_1.jpg")
    assert (question.meta["left_out"], question.meta["not_exhaustive"]) == (3, ["object"])
    region, least = known(question).regions
    assert (least.id, region.box) == ("5", pytest.approx(BOX))
    assert region.attributes["points"] == [[0.2, 0.4]]
    assert region.mask is not None
    assert decode(region.mask).area == 400
    assert len(known(only(f"sa1b:{tmp_path}?area=0&iou=0&stability=0")).regions) == 5


def test_sa1b_reads_no_further_than_asked(tmp_path: Path) -> None:
    sa1b_file(tmp_path, 1, masklet(1))
    put(tmp_path, "sa_000001/sa_2.json", "{ not JSON")
    first = next(readers.read(f"sa1b:{tmp_path}"))
    assert isinstance(first, Question)
    questions, bad = read(f"sa1b:{tmp_path}")
    assert len(questions) == 1
    assert [(row.code, Path(row.file).name) for row in bad] == [("not_json", "sa_2.json")]


# -- writing -------------------------------------------------------------------------------------------------


def corners(x: int, y: int, width: int, height: int) -> list[int]:
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def docvqa(root: Path, **changes: Any) -> str:
    words = [
        {"boundingBox": corners(10, 10, 20, 10), "text": "Total:"},
        {"boundingBox": corners(40, 10, 20, 10), "text": "$ 5"},
    ]
    line = {"boundingBox": corners(10, 10, 50, 10), "text": "Total: $ 5", "words": words}
    put(
        root,
        "spdocvqa_ocr/xn_1.json",
        {"recognitionResults": [{"page": 1, "width": 100, "height": 50, "lines": [line]}]},
    )
    row = {
        "questionId": 337,
        "question": "How much?",
        "image": "documents/xn_1.png",
        "answers": ["$ 5", "$5"],
    }
    row |= {"question_types": ["form"], **changes}
    put(root, "spdocvqa_qas/val_v1.0_withQT.json", {"dataset_name": "SP-DocVQA", "data": [row]})
    put(root, "spdocvqa_images", None)
    return f"docvqa:{root}?split=val"


def test_docvqa(tmp_path: Path) -> None:
    question = only(docvqa(tmp_path))
    expected = ("docvqa-val-337", "How much?", ["$ 5", "$5"])
    assert (question.id, question.question, question.answers) == expected
    assert (question.scorer, question.meta["types"]) == ("anls", ["form"])
    media = question.media[0]
    assert (media.uri, media.width, media.height) == (str(tmp_path / "spdocvqa_images/xn_1.png"), 100, 50)
    line, total, five = known(question).lines
    assert (line.level, total.level, five.text) == ("line", "word", "$ 5")
    assert line.box == pytest.approx((0.1, 0.2, 0.6, 0.4))
    assert question.meta["answer_boxes"] == [list(five.box or ())]  # one place, though two ways to write it


def test_docvqa_without_labels_texts_or_with_bad_ones(tmp_path: Path) -> None:
    assert only(docvqa(tmp_path, answers=None)).answers is None
    assert read(docvqa(tmp_path, answers=["", " "]))[1][0].code == "no_label"
    (tmp_path / "spdocvqa_ocr/xn_1.json").unlink()
    questions, bad = read(f"docvqa:{tmp_path}?split=val")
    assert (questions, [row.code for row in bad]) == ([], ["no_label"])
    assert only(docvqa(tmp_path / "other") + "&ocr=no").annotations is not None


def test_a_missing_file_of_texts_costs_the_texts_not_the_question(tmp_path: Path) -> None:
    source = docvqa(tmp_path, ocr_output_file="gone.json")
    questions, bad = read(source)
    assert questions[0].answers == ["$ 5", "$5"]
    assert questions[0].meta["dropped"] == 1
    assert [(row.row, row.code) for row in bad] == [("question 337, texts", "missing_file")]


def test_infographicsvqa(tmp_path: Path) -> None:
    def block(kind: str, text: str, left: float) -> dict:
        return {
            "BlockType": kind,
            "Text": text,
            "Geometry": {"BoundingBox": {"Left": left, "Top": 0.1, "Width": 0.2, "Height": 0.1}},
        }

    words = [block("WORD", "41", 0.1), block("WORD", "percent", 0.4)]
    put(
        tmp_path,
        "infographicsvqa_ocr/20471.json",
        {"PAGE": [], "LINE": [block("LINE", "41 percent", 0.1)], "WORD": words},
    )
    row = {
        "questionId": 1,
        "question": "Share?",
        "image_local_name": "20471.jpeg",
        "ocr_output_file": "20471.json",
    }
    row |= {"answers": ["41 Percent"], "answer_type": ["single span"], "operation/reasoning": [""]}
    put(tmp_path, "infographicsvqa_qas/infographicsVQA_train_v1.0.json", {"data": [row]})
    put(tmp_path, "infographicsvqa_images", None)
    question = only(f"infographicsvqa:{tmp_path}")
    assert question.media[0].uri.endswith("infographicsvqa_images/20471.jpeg")
    assert [line.text for line in known(question).lines] == ["41 percent", "41", "percent"]
    assert question.meta["answer_boxes"] == [pytest.approx([0.1, 0.1, 0.6, 0.2])]  # both words of the answer


def test_textcaps(tmp_path: Path) -> None:
    rows = [
        {"image_id": "ab", "caption_str": text, "image_width": 100, "image_height": 50}
        for text in ("A sign.", "It says go.")
    ]
    put(tmp_path, "TextCaps_0.1_val.json", {"data": rows})
    sizes = {"top_left_x": 0.9, "top_left_y": 0.2, "width": 0.2, "height": 0.1, "rotation": 0, "yaw": 0}
    put(
        tmp_path,
        "TextVQA_Rosetta_OCR_v0.2_val.json",
        {
            "data": [
                {"image_id": "ab", "ocr_info": [{"word": "GO", "bounding_box": sizes}]},
                {"ocr_info": []},
                "nothing",
            ]
        },
    )
    put(tmp_path, "train_images", None)
    (question,), bad = read(f"textcaps:{tmp_path}?split=val")
    assert [(row.row, row.code) for row in bad] == [("data[1]", "missing_column"), ("data[2]", "wrong_type")]
    assert known(question).captions == ["A sign.", "It says go."]
    assert known(question).lines[0].box == pytest.approx((0.9, 0.2, 1, 0.3))
    assert question.media[0].uri.endswith("train_images/ab.jpg")


def test_hiertext(tmp_path: Path) -> None:
    def square(x: int) -> list[list[int]]:
        return [[x, 10], [x + 10, 10], [x + 10, 20], [x, 20]]

    words = [
        {"vertices": square(10), "text": "No", "legible": True},
        {"vertices": square(30), "text": "exit", "legible": True},
        {"vertices": square(50), "text": "", "legible": False},
    ]
    line = {
        "vertices": [[10, 10], [40, 10], [40, 20], [10, 20]],
        "text": "No exit",
        "legible": True,
        "words": words,
    }
    paragraph = {"vertices": [[0, 0], [50, 0], [50, 25], [0, 25]], "legible": True, "lines": [line]}
    image = {"image_id": "0001", "image_width": 100, "image_height": 50, "paragraphs": [paragraph]}
    (tmp_path / "gt").mkdir()
    with gzip.open(tmp_path / "gt/validation.jsonl.gz", "wt") as file:
        json.dump({"info": {}, "annotations": [image]}, file)
    put(tmp_path, "validation", None)
    question = only(f"hiertext:{tmp_path}?split=validation")
    output = [(item.level, item.text) for item in known(question).lines]
    assert output == [("paragraph", "No exit"), ("line", "No exit"), ("word", "No"), ("word", "exit")]
    assert known(question).lines[3].box == pytest.approx((0.3, 0.2, 0.4, 0.4))
    assert question.meta["unreadable"] == 1


def test_art(tmp_path: Path) -> None:
    points = [[10, 10], [30, 10], [30, 30], [10, 30]]
    items = [
        {"transcription": "CAFÉ", "points": points, "language": "Latin", "illegibility": False},
        {"transcription": "###", "points": points, "language": "Chinese", "illegibility": True},
    ]
    put(tmp_path, "train_labels.json", {"gt_0": items, "gt_1": items})
    put(tmp_path, "train_images/gt_0.jpg", np.zeros((50, 100, 3), np.uint8))
    questions, bad = read(f"art:{tmp_path}")
    assert [(row.row, row.code) for row in bad] == [("gt_1", "media_not_found")]
    assert (questions[0].media[0].width, questions[0].media[0].height) == (100, 50)  # from the header
    assert [(line.text, line.level) for line in known(questions[0]).lines] == [("CAFÉ", "word")]
    sign, dark = known(questions[0]).regions
    assert sign.box == pytest.approx(BOX)
    assert sign.outline[0][0] == pytest.approx((0.1, 0.2))
    assert (sign.label, sign.attributes["text"], dark.label) == ("text", "CAFÉ", "unreadable text")


# -- captions ------------------------------------------------------------------------------------------------

ENTITIES = """<annotation><filename>10.jpg</filename><size><width>100</width><height>50</height><depth>3</depth></size>
<object><name>5</name><name>6</name><bndbox><xmin>11</xmin><ymin>11</ymin><xmax>30</xmax><ymax>30</ymax></bndbox></object>
<object><name>7</name><scene>1</scene><nobndbox>1</nobndbox></object></annotation>"""


def test_flickr30k(tmp_path: Path) -> None:
    lines = ["10.jpg#0\tA man with a hat .", "10.jpg#1\tA person .", "11.jpg#0\tA dog .", "no caption"]
    put(tmp_path, "results_20130124.token", "\n".join(lines))
    put(tmp_path, "flickr30k-images", None)
    put(tmp_path, "Annotations/10.xml", ENTITIES)
    put(
        tmp_path,
        "Sentences/10.txt",
        "[/EN#5/people A man] with [/EN#8/clothing a hat] .\n[/EN#5/people A person] .",
    )
    put(tmp_path, "val.txt", "10\n")
    questions, bad = read(f"flickr30k:{tmp_path}")
    expected = [["A man with a hat .", "A person ."], ["A dog ."]]
    assert [known(question).captions for question in questions] == expected
    assert [(row.row, row.code) for row in bad] == [("line 4", "wrong_type")]
    questions, _ = read(f"flickr30k:{tmp_path}?split=val&boxes=yes")
    (question,) = questions
    (region,) = known(question).regions
    # Pixels are counted from 1, the last one is inside
    assert (region.label, region.box) == ("A man", pytest.approx(BOX))
    assert (question.media[0].width, question.media[0].height) == (100, 50)


def test_what_fuzzing_found_is_a_bad_row_or_names_the_file(tmp_path: Path) -> None:
    """Half a surrogate pair as a name, which no file can store, and a file whose ``videos`` are no object."""
    (tmp_path / "train/JPEGImages").mkdir(parents=True)
    (tmp_path / "train/Annotations").mkdir()
    (tmp_path / "train/JPEGImages/v").mkdir()
    mask = Image.new("P", (4, 2))
    mask.putdata([1, 1, 0, 0, 1, 1, 0, 0])
    mask.putpalette([0, 0, 0, 255, 0, 0])
    (tmp_path / "train/Annotations/v").mkdir()
    mask.save(tmp_path / "train/Annotations/v/00000.png")
    videos = {"v": {"objects": {"1": {"category": "\ud800", "frames": ["00000"]}}}}
    put(tmp_path, "train/meta.json", {"videos": videos})
    questions, bad = read(f"youtube_vos:{tmp_path}")
    assert (questions, [row.code for row in bad]) == ([], ["wrong_type"])
    put(tmp_path, "train/meta.json", {"videos": True})
    with pytest.raises(BadInput, match="no dict of videos"):
        read(f"youtube_vos:{tmp_path}")


def test_a_caption_that_is_no_utf8_is_read_with_replaced_characters(tmp_path: Path) -> None:
    """Found by fuzzing: one wrong byte ended the reader with a UnicodeDecodeError."""
    put(tmp_path, "flickr30k-images", None)
    (tmp_path / "results_20130124.token").write_bytes(b"10.jpg#0\tA m\xffn .\n11.jpg#0\tA dog .\n\xff\n")
    questions, bad = read(f"flickr30k:{tmp_path}")
    assert [known(question).captions for question in questions] == [["A m\ufffdn ."], ["A dog ."]]
    assert [(row.row, row.code) for row in bad] == [("line 3", "wrong_type")]


def test_an_annotation_with_entities_is_refused_before_they_expand(tmp_path: Path) -> None:
    """Nine levels of ten entities are ten characters times 10^9."""
    levels = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 10))
    bomb = (
        "<!DOCTYPE annotation [<!ENTITY e0 "
        f'"0123456789">{levels}]><annotation><size><width>&e9;</width></size></annotation>'
    )
    put(tmp_path, "results_20130124.token", "10.jpg#0\tA man .")
    put(tmp_path, "flickr30k-images", None)
    put(tmp_path, "Annotations/10.xml", bomb)
    put(tmp_path, "Sentences/10.txt", "[/EN#5/people A man] .")
    _, bad = read(f"flickr30k:{tmp_path}?boxes=yes")
    assert "document type" in next(row.message for row in bad if row.code == "not_xml")


def test_unsplash(tmp_path: Path) -> None:
    header = "photo_id\tphoto_image_url\tphoto_width\tphoto_height\tphoto_description\tai_description"
    lines = [
        header,
        "XMy\thttps://images.unsplash.com/p\t4272\t2848\t\tgreen grass",
        "Bad\thttps://x\twide\t1\t\t",
    ]
    put(tmp_path, "photos.tsv000", "\n".join(lines))
    put(tmp_path, "photos", None)
    (question,), bad = read(f"unsplash:{tmp_path}")
    assert (question.media[0].width, known(question).captions) == (4272, ["green grass"])
    assert question.media[0].uri == str(tmp_path / "photos/XMy.jpg")
    assert [(row.row, row.column, row.code) for row in bad] == [("line 3", "photo_width", "not_a_number")]


def test_msrvtt(tmp_path: Path) -> None:
    videos = [
        {"video_id": f"video{i}", "category": 9, "split": split}
        for i, split in enumerate(("train", "validate"))
    ]
    sentences = [
        {"video_id": "video1", "caption": text, "sen_id": i}
        for i, text in enumerate(("a man sings", "a song"))
    ]
    put(tmp_path, "train_val_videodatainfo.json", {"videos": videos, "sentences": sentences})
    put(tmp_path, "TrainValVideo", None)
    question = only(f"msrvtt:{tmp_path}?split=validate")
    assert (question.media[0].id, question.media[0].kind) == ("vid0", "video")
    assert question.media[0].uri.endswith("TrainValVideo/video1.mp4")
    assert known(question).captions == ["a man sings", "a song"]


# -- tracking ------------------------------------------------------------------------------------------------


def mot(root: Path, length: int, lines: list[str], name: str = "MOT17-02-FRCNN") -> None:
    info = f"[Sequence]\nname={name}\nimDir=img1\nframeRate=30\nseqLength={length}\nimWidth=100\nimHeight=50\nimExt=.jpg\n"
    put(root, f"train/{name}/seqinfo.ini", info)
    put(root, f"train/{name}/gt/gt.txt", "\n".join(lines))


def test_mot(tmp_path: Path) -> None:
    mot(tmp_path, 3, ["1,4,11,11,20,20,1,1,0.5", "3,4,91,41,20,20,1,1,1", "2,9,11,11,20,20,0,8,1"])
    mot(tmp_path, 3, [], "MOT17-02-DPM")  # the same sequence again
    question = only(f"mot17:{tmp_path}")
    assert question.id == "mot17-train-MOT17-02-FRCNN"
    media = question.media[0]
    assert media.frames == [str(tmp_path / f"train/MOT17-02-FRCNN/img1/{n:06d}.jpg") for n in (1, 2, 3)]
    assert (media.fps, media.width) == (30, 100)
    first, last = known(question).regions
    assert (first.label, first.frame, first.track, first.box) == ("pedestrian", 0, "4", pytest.approx(BOX))
    assert (last.frame, last.track, last.box) == (2, "4", pytest.approx((0.9, 0.8, 1, 1)))
    assert first.attributes == {"visibility": 0.5}
    expected = ["pedestrian", "distractor", "pedestrian"]
    assert [region.label for region in known(only(f"mot17:{tmp_path}?ignored=yes")).regions] == expected


def test_mot_windows(tmp_path: Path) -> None:
    mot(tmp_path, 270, [f"{frame},1,11,11,20,20,1,1,1" for frame in range(1, 271)], "MOT20-01")
    questions, _ = read(f"mot20:{tmp_path}?window=120&stride=100")
    # The last one ends with the sequence
    assert [question.meta["first_frame"] for question in questions] == [0, 100, 150]
    assert {len(question.media[0].frames or []) for question in questions} == {120}
    assert all(
        [region.frame for region in known(question).regions] == list(range(120)) for question in questions
    )
    assert questions[1].media[0].frames[0].endswith("000101.jpg")  # type: ignore[index]
    assert len(read(f"mot20:{tmp_path}?window=0")[0][0].media[0].frames or []) == 270
    with pytest.raises(BadInput, match="window=99"):
        read(f"mot20:{tmp_path}?window=99")


def test_mot_bad_lines(tmp_path: Path) -> None:
    lines = [
        "1,1,11,11,20,20,1,1,1",
        "1,1,11,11,20,20,1,1,1",
        "1,2,11,11",
        "9,1,11,11,20,20,1,1,1",
        "2,1,nan,11,20,20,1,1,1",
    ]
    mot(tmp_path, 3, [*lines, "2,2,500,11,20,20,1,1,1", "2,3,11,11,-4,20,1,1,1"])
    put(tmp_path, "train/MOT17-03-FRCNN", None)
    mot(tmp_path, 3, [], "MOT17-04-FRCNN")
    (tmp_path / "train/MOT17-04-FRCNN/gt/gt.txt").unlink()  # as in a test split
    questions, bad = read(f"mot17:{tmp_path}")
    told = [(row.row, row.code) for row in bad]
    faults = ["duplicate_id", "wrong_type", "outside", "not_a_number", "outside", "empty_box"]
    missing = [(f"MOT17-0{n}-FRCNN", "missing_file") for n in (3, 4)]
    assert told == [*((f"line {n}", code) for n, code in enumerate(faults, 2)), *missing]
    assert [len(known(question).regions) for question in questions] == [1]


def test_youtube_vis(tmp_path: Path) -> None:
    video = {
        "id": 1,
        "width": 100,
        "height": 50,
        "length": 3,
        "file_names": [f"00f8/0000{i}.jpg" for i in (0, 5, 7)],
    }
    code = {"size": [50, 100], "counts": [10 * 50 + 10, 20, 4470]}
    track = {"id": 5, "video_id": 1, "category_id": 2, "iscrowd": 0, "segmentations": [code, None, code]}
    track |= {"bboxes": [[10, 10, 20, 20], None, [10, 10, math.inf, 20]]}
    data = {"videos": [video], "categories": [{"id": 2, "name": "giant_panda"}], "annotations": [track]}
    put(tmp_path, "train.json", data)
    put(tmp_path, "train/JPEGImages", None)
    (question,), bad = read(f"youtube_vis:{tmp_path}")
    assert question.media[0].frames == [
        str(tmp_path / f"train/JPEGImages/00f8/0000{i}.jpg") for i in (0, 5, 7)
    ]
    (region,) = known(question).regions
    expected = (0, "5", "giant panda", pytest.approx(BOX))
    assert (region.frame, region.track, region.label, region.box) == expected
    assert region.mask is not None
    assert decode(region.mask).area == 20
    assert [(row.row, row.code) for row in bad] == [("annotation 5, frame 2", "not_a_number")]


def test_uvo(tmp_path: Path) -> None:
    video = {
        "id": 1,
        "width": 100,
        "height": 50,
        "length": 3,
        "ytid": "abc",
        "file_names": [f"abc/{i}.png" for i in range(3)],
    }
    track = {
        "id": 5,
        "video_id": 1,
        "category_id": 1,
        "start_idx": 2,
        "length": 1,
        "segmentations": [[SQUARE]],
    }
    track["bboxes"] = [[10, 10, 20, 20]]
    data = {"videos": [video], "categories": [{"id": 1, "name": "object"}], "annotations": [track]}
    put(tmp_path, "VideoDenseSet/UVO_video_val_dense.json", data)
    put(tmp_path, "uvo_videos_dense_frames", None)
    question = only(f"uvo:{tmp_path}?split=val")
    assert (known(question).regions[0].frame, question.media[0].fps) == (2, 30)


def test_youtube_vos(tmp_path: Path) -> None:
    thing = {"category": "sea_lion", "frames": ["00000", "00005"]}
    put(
        tmp_path,
        "train/meta.json",
        {"videos": {"0032": {"objects": {"1": thing, "2": {"category": "duck", "frames": ["00005"]}}}}},
    )
    put(tmp_path, "train/JPEGImages", None)
    numbers = np.zeros((50, 100), np.uint8)
    numbers[10:30, 10:30] = 1
    put(tmp_path, "train/Annotations/0032/00000.png", numbers)
    (question,), bad = read(f"youtube_vos:{tmp_path}")
    (region,) = known(question).regions
    assert (region.label, region.frame, region.track, region.box) == ("sea lion", 0, "1", pytest.approx(BOX))
    assert region.mask is not None
    assert np.array_equal(decode(region.mask).full(), numbers == 1)
    assert question.media[0].frames == [
        str(tmp_path / f"train/JPEGImages/0032/{name}.jpg") for name in ("00000", "00005")
    ]
    assert [(row.row, row.code) for row in bad] == [("0032, frame 00005", "missing_file")]


def test_visor(tmp_path: Path) -> None:
    def frame(number: int, *annotations: dict) -> dict:
        name = f"P01_01_frame_{number:010d}.jpg"
        image = {
            "image_path": f"P01_01/{name}",
            "name": name,
            "subsequence": "P01_01_seq_00001",
            "video": "P01_01",
        }
        return {"image": image, "annotations": list(annotations)}

    square = [[[192, 108], [384, 108], [384, 216], [192, 216]]]
    hand = {
        "id": "h",
        "name": "left hand",
        "class_id": 300,
        "exhaustive": "y",
        "segments": square,
        "in_contact_object": "c",
    }
    cup = {"id": "c", "name": "cup", "class_id": 13, "exhaustive": "y", "segments": square}
    away = {**hand, "id": "h2", "in_contact_object": "hand-not-in-contact"}
    data = {
        "info": {},
        "video_annotations": [frame(20, away, {**cup, "id": "c2", "segments": []}), frame(3, hand, cup)],
    }
    put(tmp_path, "GroundTruth-SparseAnnotations/annotations/val/P01_01.json", data)
    put(tmp_path, "GroundTruth-SparseAnnotations/rgb_frames/val", None)
    (question,), bad = read(f"visor:{tmp_path}?split=val")
    assert [row.code for row in bad] == ["bad_polygon"]
    assert [Path(uri).name for uri in question.media[0].frames or []] == [
        f"P01_01_frame_{n:010d}.jpg" for n in (3, 20)
    ]
    left, right, later = known(question).regions
    assert (left.id, right.label, later.frame, later.track) == ("h", "cup", 1, "left hand")
    assert left.box == pytest.approx((0.1, 0.1, 0.2, 0.2), abs=1 / 1000)
    assert [(r.subject, r.predicate, r.object) for r in known(question).relations] == [
        ("h", "in contact with", "c")
    ]


# -- what happens --------------------------------------------------------------------------------------------


def test_didemo(tmp_path: Path) -> None:
    row = {"annotation_id": 1, "description": "a cat jumps", "video": "9@N0_1.avi", "num_segments": 5}
    rows = [
        {**row, "times": [[1, 2], [0, 0], [1, 2]]},
        {**row, "description": "it sits", "times": [[4, 4]]},
        {**row, "times": [[3]]},
    ]
    put(tmp_path, "val_data.json", rows)
    put(tmp_path, "videos", None)
    (question,), bad = read(f"didemo:{tmp_path}?split=val&suffix=.mp4")
    assert question.media[0].uri == str(tmp_path / "videos/9@N0_1.avi.mp4")
    expected = [("a cat jumps", 5, 15), ("it sits", 20, 25)]
    assert [(e.text, e.start, e.end) for e in known(question).events] == expected
    assert [(row.row, row.column) for row in bad] == [("[2]", "all")]


def test_activitynet(tmp_path: Path) -> None:
    spans, sentences = [[0.5, 10], [40, 60], [9, 3], [51, 60]], ["He runs.", " He stops. ", "x", "y"]
    put(tmp_path, "val_1.json", {"v_ab": {"duration": 50.5, "timestamps": spans, "sentences": sentences}})
    put(tmp_path, "videos", None)
    (question,), bad = read(f"activitynet:{tmp_path}?split=val_1")
    expected = [("He runs.", 0.5, 10), ("He stops.", 40, 50.5)]
    assert [(e.text, e.start, e.end) for e in known(question).events] == expected
    assert [(row.row, row.code) for row in bad] == [("v_ab[2]", "empty_span"), ("v_ab[3]", "outside")]
    assert question.media[0].uri.endswith("videos/v_ab.mp4")


def test_assembly101(tmp_path: Path) -> None:
    lines = [
        "id,video,start_frame,end_frame,action_id,action_cls",
        "0,s/C1.mp4,90,120,1,clap hand",
        "1,s/C2.mp4,0,30,1,clap hand",
    ]
    put(
        tmp_path,
        "fine-grained-annotations/train.csv",
        "\n".join([*lines, "2,s/C1.mp4,30,60,2,pick up wheel", "3,s/C1.mp4,a,6,2,x"]),
    )
    put(tmp_path, "recordings", None)
    (first, second), bad = read(f"assembly101:{tmp_path}")
    expected = [("pick up wheel", 1, 2), ("clap hand", 3, 4)]
    assert [(e.text, e.start, e.end) for e in known(first).events] == expected
    assert second.media[0].uri == str(tmp_path / "recordings/s/C2.mp4")
    assert [(row.row, row.column, row.code) for row in bad] == [("line 5", "start_frame", "not_a_number")]


def star(root: Path, **changes: Any) -> str:
    graph = {
        "actions": ["a059"],
        "bbox": [[10, 10, 30, 30], None, [0, 0, 50, 50]],
        "bbox_labels": ["o000", "o001", "o002"],
    }
    graph |= {"rel_pairs": [["o000", "o002"], ["o000", "o001"]], "rel_labels": ["r007", "r001"]}
    row = {
        "question_id": "Interaction_T1_13",
        "question": "Which object did the person sit at?",
        "video_id": "6H78U",
    }
    row |= {
        "start": 11.1,
        "end": 19.6,
        "answer": "The table.",
        "question_program": [{"function": "Situations"}],
    }
    row |= {
        "choices": [{"choice_id": i, "choice": c} for i, c in enumerate(("The sofa.", "The table."))],
        "situations": {"000012": graph},
    }
    put(root, "STAR_val.json", [{**row, **changes}])
    put(root, "Charades_v1_480", None)
    put(root, "STAR_classes/object_classes.txt", "o000 person\no001 broom\no002 table\n")
    put(root, "STAR_classes/relationship_classes.txt", "r007 sitting_on\n")
    put(root, "frames/6H78U.mp4/000012.png", np.zeros((50, 100, 3), np.uint8))
    return f"star:{root}?split=val"


def test_star(tmp_path: Path) -> None:
    question = only(star(tmp_path) + "&situations=yes")
    assert question.question == "Which object did the person sit at?\nA. The sofa.\nB. The table."
    expected = (["B"], "mc_letter", ["The sofa.", "The table."])
    assert (question.answers, question.scorer, question.meta["options"]) == expected
    (span,) = known(question).events
    assert (span.text, span.start, span.end) == ("Which object did the person sit at? The table.", 11.1, 19.6)
    person, table = known(question).regions
    expected = ("person", pytest.approx(BOX), 11, "table")
    assert (person.label, person.box, person.frame, table.label) == expected
    assert [(r.subject, r.predicate, r.object) for r in known(question).relations] == [
        ("000012.o000", "sitting on", "000012.o002")
    ]
    assert question.meta["program"] == [{"function": "Situations"}]
    assert question.media[0].uri.endswith("Charades_v1_480/6H78U.mp4")
    assert not known(only(f"star:{tmp_path}?split=val")).regions
    assert only(star(tmp_path, answer=None)).answers is None
    assert read(star(tmp_path, answer="The cat."))[1][0].code == "no_label"


def test_tvqa(tmp_path: Path) -> None:
    row = {
        "qid": 1,
        "q": "Who enters?",
        "vid_name": "friends_s01e01_seg01_clip_00",
        "ts": "1.5-4",
        "show_name": "Friends",
    }
    row |= {"answer_idx": 2, **{f"a{i}": f"Name {i}" for i in range(5)}}
    rows = [
        row,
        {**row, "qid": 2, "ts": "nan-nan"},
        {**row, "qid": 3, "answer_idx": 5},
        {**row, "qid": 4, "vid_name": "s01e01_x"},
    ]
    put(tmp_path, "tvqa_val.jsonl", "\n".join(map(json.dumps, rows)) + "\nnot JSON\n")
    for n in (1, 2):
        put(tmp_path, f"frames_hq/friends_frames/friends_s01e01_seg01_clip_00/0000{n}.jpg", "")
    questions, bad = read(f"tvqa:{tmp_path}?split=val")
    assert (questions[0].answers, questions[0].media[0].fps, len(questions[0].media[0].frames or [])) == (
        ["C"],
        3,
        2,
    )
    assert [(e.text, e.start, e.end) for e in known(questions[0]).events] == [("Who enters? Name 2", 1.5, 4)]
    assert (questions[1].answers, known(questions[1]).events) == (["C"], [])
    told = [("2, span", "not_a_number"), ("3", "no_label"), ("4", "media_not_found"), ("5", "not_json")]
    assert [(row.row, row.code) for row in bad] == told


# -- agents, benchmarks --------------------------------------------------------------------------------------


def test_mind2web(tmp_path: Path) -> None:
    def element(rect: str, target: bool = True) -> str:
        return json.dumps(
            {
                "tag": "button",
                "attributes": json.dumps({"bounding_box_rect": rect}),
                "is_original_target": target,
            }
        )

    row = {
        "action_uid": "u1",
        "raw_html": "x" * 1000,
        "operation": '{"op": "CLICK", "original_op": "CLICK", "value": ""}',
    }
    row |= {
        "pos_candidates": [element("10,10,20,20"), element("-1,-1,-1,-1", False)],
        "website": "united",
        "domain": "Travel",
    }
    row |= {
        "subdomain": "Airlines",
        "annotation_id": "t1",
        "confirmed_task": "Rent a car",
        "target_action_index": "1",
    }
    row |= {
        "screenshot": {"bytes": png(100, 50), "path": None},
        "action_reprs": ["[link]  Home -> CLICK", "[button]  Find -> CLICK"],
    }
    broken = {**row, "action_uid": "u2", "screenshot": {"bytes": b"no picture", "path": None}}
    (tmp_path / "data").mkdir()
    path, table = tmp_path / "data/train-00000-of-00027-ab.parquet", pa.Table.from_pylist([row, broken])
    place, damaged = table.column_names.index("website"), pa.array([b"united", b"\xff"]).view(pa.string())
    pq.write_table(table.set_column(place, "website", damaged), path)
    with pytest.raises(BadInput, match="cannot be read"):  # found by fuzzing
        read(f"mind2web:{tmp_path}")
    pq.write_table(table, path)
    (question,), bad = read(f"mind2web:{tmp_path}?cache={tmp_path / 'cache'}")
    assert Path(question.media[0].uri).read_bytes() == png(100, 50)
    (region,) = known(question).regions
    expected = ("Find", pytest.approx(BOX), {"tag": "button", "target": True})
    assert (region.label, region.box, region.attributes) == expected
    assert (question.meta["goal"], question.meta["step"], question.meta["hidden"]) == ("Rent a car", 1, 1)
    assert question.meta["operation"]["op"] == "CLICK"
    assert [(row.row, row.code) for row in bad] == [("2", "bad_media")]


def test_vstar(tmp_path: Path) -> None:
    row = {
        "image": "direct_attributes/sa_1.jpg",
        "text": "Colour?\n(A) red\n(B) blue",
        "label": "A",
        "question_id": 0,
    }
    put(tmp_path, "test_questions.jsonl", json.dumps({**row, "category": "direct_attributes"}))
    put(tmp_path, "direct_attributes/sa_1.jpg", np.zeros((50, 100, 3), np.uint8))
    put(
        tmp_path,
        "direct_attributes/sa_1.json",
        {"target_object": ["cup"], "bbox": [[10, 10, 20, 20]], "question": "", "options": []},
    )
    question = only(f"vstar:{tmp_path}")
    expected = (["A"], "mc_letter", "direct_attributes")
    assert (question.answers, question.scorer, question.meta["category"]) == expected
    assert known(question).regions[0].box == pytest.approx(BOX)


def test_hrbench(tmp_path: Path) -> None:
    picture = base64.b64encode(png(100, 50)).decode()
    rows = [
        ["0", "What?", picture, "B", "cat", "dog"],
        ["1", "What?", "0", "A", "dog", "cat"],
        ["2", "What?", "7", "A", "a", "b"],
    ]
    put(
        tmp_path,
        "hr_bench_4k.tsv",
        "\n".join("\t".join(row) for row in [["index", "question", "image", "answer", "A", "B"], *rows]),
    )
    (first, second), bad = read(f"hrbench:{tmp_path}?cache={tmp_path / 'cache'}")
    assert (first.question, first.answers, first.media[0].width) == ("What?\nA. cat\nB. dog", ["B"], 100)
    assert first.media[0].uri == second.media[0].uri
    assert [(row.row, row.code) for row in bad] == [("line 4", "unknown_id")]


def test_tallyqa_and_superclevr(tmp_path: Path) -> None:
    row = {
        "image": "VG_100K/1.jpg",
        "answer": 3,
        "question": "How many cups?",
        "question_id": 5,
        "issimple": False,
    }
    put(tmp_path, "test.json", [row, {**row, "question_id": 6, "answer": None}])
    (question,), bad = read(f"tallyqa:{tmp_path}")
    assert (question.answers, question.scorer, question.meta["category"]) == (["3"], "count", "complex")
    assert [(row.row, row.column) for row in bad] == [("2", "answer")]
    row = {
        "question_index": 0,
        "question": "How many buses?",
        "image_filename": "superCLEVR_new_000000.png",
        "answer": 2,
    }
    put(
        tmp_path,
        "superCLEVR_questions_30k.json",
        {"info": {}, "questions": [row, {**row, "question_index": 1, "answer": "red"}]},
    )
    put(tmp_path, "images", None)
    questions, _ = read(f"superclevr:{tmp_path}")
    assert [(q.answers, q.scorer) for q in questions] == [(["2"], "count"), (["red"], "exact")]


# -- sources -------------------------------------------------------------------------------------------------


def mvbench(root: Path, task: str, folder: str, *rows: dict[str, Any], **options: str) -> str:
    put(root, f"json/{task}.json", list(rows))
    put(root, f"video/{folder}", None)
    return f"mvbench:{root}?" + "&".join(f"{k}={v}" for k, v in {"task": task, **options}.items())


def test_mvbench(tmp_path: Path) -> None:
    row = {
        "video": "ZS9XR.mp4",
        "question": "What happened after?",
        "candidates": ["Ate.", "Tidied."],
        "answer": "Tidied.",
    }
    row |= {"start": 2.5, "end": 8.1}
    rows = [row, {**row, "answer": "Slept."}, {**row, "end": 1}, {**row, "video": "../a.mp4"}]
    questions, bad = read(mvbench(tmp_path, "action_sequence", "star/Charades_v1_480", *rows))
    (question,) = questions
    expected = ("mvbench-action_sequence-0", "What happened after?\nA. Ate.\nB. Tidied.")
    assert (question.id, question.question) == expected
    expected = (["B"], "mc_letter", "action_sequence")
    assert (question.answers, question.scorer, question.meta["category"]) == expected
    assert question.media[0].uri.endswith("video/star/Charades_v1_480/ZS9XR.mp4")
    assert question.media[0].spans == [(2.5, 8.1)]
    codes = [("[1]", "no_label"), ("[2]", "empty_span"), ("[3]", "media_traversal")]
    assert [(item.row, item.code) for item in bad] == codes
    moving = {
        "video": "video_1.mp4",
        "question": "Whither?",
        "candidates": ["Up", "Down"],
        "answer": "Up",
        "start": 1,
        "end": 2,
    }
    whole = only(mvbench(tmp_path, "moving_count", "clevrer/video_validation", moving))
    assert whole.media[0].spans is None
    seeds = [{"shuffle_options": str(seed)} for seed in range(8)]
    shuffled = [
        only(mvbench(tmp_path, "moving_count", "clevrer/video_validation", moving, **seed)) for seed in seeds
    ]
    assert {(q.answers or [""])[0] for q in shuffled} == {"A", "B"}
    assert all(q.meta["options"][ord((q.answers or [""])[0]) - ord("A")] == "Up" for q in shuffled)
    with pytest.raises(BadInput, match="action_sequence"):
        read(f"mvbench:{tmp_path}?task=none")


def test_sources() -> None:
    assert readers.is_dataset("coco:/data/coco?split=val2017")
    assert not any(
        readers.is_dataset(source)
        for source in ("coco", "cards:?split=train", "coco.jsonl", "s3://coco/rows.jsonl")
    )
    with pytest.raises(BadInput, match="did you mean 'coco'"):
        readers.read("cocoo:/data")
    with pytest.raises(BadInput, match="did you mean 'stride'"):
        readers.read("mot17:/data?strides=5")
    with pytest.raises(BadInput, match="names no folder"):
        readers.read("coco:?split=val2017")
    with pytest.raises(BadInput, match="local folder"):
        readers.read("coco:s3://bucket/coco")


@pytest.mark.parametrize("name", readers.READERS)
def test_a_missing_folder_tells_the_official_layout(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingFile) as caught:
        list(islice(readers.read(f"{name}:{tmp_path}/nothing"), 1))
    assert readers.READERS[name].layout in str(caught.value)
    assert str(tmp_path / "nothing") in str(caught.value)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    source = coco_set(tmp_path, thing())
    for content, told in (
        ("{", "not JSON"),
        ("[]", "expected a dict"),
        ('{"images": []}', "no list of categories"),
    ):
        put(tmp_path, "annotations/instances_val2017.json", content)
        with pytest.raises(BadInput, match=told):
            read(source)


def test_an_option_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="leads out"):
        read(f"mot20:{tmp_path / 'inner'}?split={tmp_path}")
    put(tmp_path, "annotations/instances_x.json", {})
    with pytest.raises(BadInput, match="leads out"):
        read(f"coco:{tmp_path / 'inner'}?split=/../../annotations/instances_x")
    with pytest.raises(BadInput, match="leads out"):
        read(f"mind2web:{tmp_path / 'inner'}?split=../../x")


# -- places --------------------------------------------------------------------------------------------------

anything = st.one_of(st.floats(), st.integers(-(10**6), 10**6), st.none(), st.text(max_size=3), st.booleans())


numbers_or_worse = st.one_of(
    st.lists(st.floats(-200, 1200), min_size=4, max_size=4), st.lists(anything, min_size=3, max_size=5)
)


@given(numbers_or_worse, st.integers(1, 1000), st.integers(1, 1000))
def test_boxes_lie_in_the_picture_or_are_faults(numbers: list, width: int, height: int) -> None:
    for make in (box_xyxy, box_xywh):
        try:
            x0, y0, x1, y1 = make(numbers, width, height)
        except RowError as problem:
            assert problem.code in ("not_a_number", "wrong_type", "empty_box", "outside")  # noqa: PT017
        else:
            assert 0 <= x0 < x1 <= 1
            assert 0 <= y0 < y1 <= 1


@given(st.lists(st.floats(-1e9, 1e9), min_size=6, max_size=12), st.integers(1, 60), st.integers(1, 60))
def test_masks_of_any_polygon_are_of_the_picture(numbers: list[float], width: int, height: int) -> None:
    try:
        points = polygon_points(numbers, width, height, "p")
        code = mask_rle([numbers], width, height)
    except RowError as problem:
        assert problem.code in ("bad_polygon", "empty_mask")  # noqa: PT017
    else:
        assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in points)
        assert 0 < decode(code, height, width).area <= width * height


@given(anything, anything, st.one_of(st.none(), st.floats(0.1, 1e4)))
def test_events_lie_in_the_clip_or_are_faults(start: Any, end: Any, duration: float | None) -> None:
    try:
        result = time_span("x", start, end, duration)
    except RowError as problem:
        assert problem.code in ("not_a_number", "empty_span", "outside")  # noqa: PT017
    else:
        assert 0 <= result.start < result.end
        assert duration is None or result.end <= duration


def test_the_page_on_data_tells_every_set_and_option() -> None:
    page = (Path(__file__).parents[3] / "docs/data.md").read_text(encoding="utf-8")
    for reader in readers.READERS.values():
        (row,) = [
            line
            for line in page.splitlines()
            if line.startswith("| `") and f"`{reader.name}`" in line.split("|")[1]
        ]
        assert all(
            option in row
            for option, default in reader.options.items()
            if option != "split" or default == "train"
        )
