"""Annotated data sets: what becomes of the tiny sets of `official_sets`, and of other ones of their kind."""

from __future__ import annotations

import math
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from official_sets import SETS, coco_file, mot, parquet, picture, thing, write
from PIL import Image

from pixelis.datasets import readers
from pixelis.datasets.annotation_geometry import box_xywh, box_xyxy, mask_rle, polygon_points, time_span
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.fields import RowError
from pixelis.datasets.questions import read_rows
from pixelis.errors import BadInput, MissingFile
from pixelis.operations.masks import decode
from pixelis.records import Annotations, Question


def read(source: str) -> tuple[list[Question], list[BadRow]]:
    rows = list(read_rows(source))
    questions = [row for row in rows if isinstance(row, Question)]
    return questions, [row for row in rows if isinstance(row, BadRow)]


def only(source: str) -> Question:
    questions, bad = read(source)
    assert not bad
    assert len(questions) == 1
    return questions[0]


def known(question: Question) -> Annotations:
    assert question.annotations is not None
    return question.annotations


def codes(bad: list[BadRow]) -> list[str]:
    return [row.code for row in bad]


# -- official layouts ----------------------------------------------------------------------------------------

EXPECTED = r"""
coco
coco-val2017-7:
img0 val2017/000000000007.jpg 100x50
region 1 cup 0.1 0.2 0.3 0.6, mask of 400 {'supercategory': 'kitchen'}
region 2 cup 0.9 0.8 1 1, mask of 50 {'supercategory': 'kitchen', 'iscrowd': True}

lvis
lvis-train-7:
img0 train2017/000000000007.jpg 100x50
region 1 tea cup 0.1 0.2 0.3 0.6, mask of 400 {'frequency': 'r'}
meta {'absent': ['goat'], 'not_exhaustive': ['tea cup']}

partimagenet
partimagenet-val-7:
img0 images/val/n01440764_1.JPEG 100x50
region 1 Fish Head 0.1 0.2 0.3 0.6, mask of 400 {'supercategory': 'Fish'}

sa1b
sa1b-1:
img0 sa_000000/sa_1.jpg 100x50
region 1 object 0.1 0.2 0.3 0.6, mask of 400 {'area': 400.0, 'predicted_iou': 0.9, 'stability_score': 0.95,
'points': [[0.2, 0.4]]}
region 5 object 0.1 0.2 0.3 0.6, mask of 400 {'area': 100.0, 'predicted_iou': 0.5, 'stability_score': 0.5,
'points': [[0.2, 0.4]]}
meta {'left_out': 3, 'not_exhaustive': ['object']}
bad image | file | not_json

docvqa
docvqa-val-337: How much? -> $ 5 | $5 by anls
img0 spdocvqa_images/xn_1.png 100x50
line Total: $ 5 0.1 0.2 0.6 0.4
word Total: 0.1 0.2 0.3 0.4
word $ 5 0.4 0.2 0.6 0.4
meta {'answer_boxes': [[0.4, 0.2, 0.6, 0.4]], 'types': ['form']}
bad data[1] | answers | no_label
bad question 339, texts | file | missing_file
docvqa-val-339: How much?
img0 spdocvqa_images/xn_1.png
meta {'dropped': 1, 'types': ['form']}

infographicsvqa
infographicsvqa-train-1: Share? -> 41 Percent by anls
img0 infographicsvqa_images/20471.jpeg
line 41 percent 0.1 0.1 0.3 0.2
word 41 0.1 0.1 0.3 0.2
word percent 0.4 0.1 0.6 0.2
meta {'answer_boxes': [[0.1, 0.1, 0.6000000000000001, 0.2]], 'types': ['single span'], 'operations': ['']}

textcaps
bad data[1] | image_id | missing_column
bad data[2] | image_id | wrong_type
textcaps-val-ab:
img0 train_images/ab.jpg 100x50
word GO 0.9 0.2 1 0.3
caption A sign.
caption It says go.

hiertext
hiertext-validation-0001:
img0 validation/0001.jpg 100x50
paragraph No exit 0 0.2 0.5 0.4
line No exit 0.1 0.2 0.4 0.4
word No 0.1 0.2 0.2 0.4
word exit 0.3 0.2 0.4 0.4
meta {'unreadable': 1}

art
art-train-gt_0:
img0 train_images/gt_0.jpg 100x50
region text0 text 0.1 0.2 0.3 0.6, outline of 4 points {'readable': True, 'language': 'Latin', 'text':
'CAFÉ'}
region text1 unreadable text 0.1 0.2 0.3 0.6, outline of 4 points {'readable': False, 'language': 'Chinese'}
word CAFÉ 0.1 0.2 0.3 0.6
meta {'not_exhaustive': ['text', 'unreadable text']}
bad gt_1 | picture | media_not_found

flickr30k
flickr30k-val-10:
img0 flickr30k-images/10.jpg 100x50
region 5.0 A man 0.1 0.2 0.3 0.6 {'entity': '5', 'kinds': ['people']}
caption A man with a hat .
caption A person .
meta {'not_exhaustive': ['A man']}
bad line 4 | all | wrong_type

unsplash
unsplash-XMy:
img0 photos/XMy.jpg 4272x2848
caption green grass
meta {'url': 'https://images.unsplash.com/p'}
bad line 3 | photo_width | not_a_number

msrvtt
msrvtt-validate-video1:
vid0 TrainValVideo/video1.mp4
caption a man sings
caption a song
meta {'category': 9}

mot17
bad line 4 | id | duplicate_id
bad line 5 | all | wrong_type
bad line 6 | frame | outside
bad line 7 | bbox | not_a_number
bad line 8 | bbox | outside
bad line 9 | bbox | empty_box
mot17-train-MOT17-02-FRCNN:
vid0 train/MOT17-02-FRCNN/img1/000001.jpg to 000003.jpg, 3 frames, 30 fps 100x50
region 4.0 pedestrian 0.1 0.2 0.3 0.6 in frame 0 of track 4 {'visibility': 0.5}
region 4.2 pedestrian 0.9 0.8 1 1 in frame 2 of track 4 {'visibility': 1.0}
meta {'dropped': 6, 'sequence': 'MOT17-02-FRCNN', 'first_frame': 0, 'not_exhaustive': ['pedestrian']}
bad MOT17-03-FRCNN | file | missing_file
bad MOT17-04-FRCNN | gt | missing_file

mot20
mot20-train-MOT20-01-000001:
vid0 train/MOT20-01/img1/000001.jpg to 000120.jpg, 120 frames, 30 fps 100x50
region 1.0 pedestrian 0.1 0.2 0.3 0.6 in frame 0 of track 1 {'visibility': 1.0}
meta {'sequence': 'MOT20-01', 'first_frame': 0, 'not_exhaustive': ['pedestrian']}
mot20-train-MOT20-01-000011:
vid0 train/MOT20-01/img1/000011.jpg to 000130.jpg, 120 frames, 30 fps 100x50
region 1.119 pedestrian 0.1 0.2 0.3 0.6 in frame 119 of track 1 {'visibility': 1.0}
meta {'sequence': 'MOT20-01', 'first_frame': 10, 'not_exhaustive': ['pedestrian']}

youtube_vis
bad annotation 5, frame 2 | bboxes | not_a_number
youtube_vis-train-1:
vid0 train/JPEGImages/00f8/00000.jpg to 00007.jpg, 3 frames, 6 fps 100x50
region 5.0 giant panda 0.1 0.2 0.3 0.6 in frame 0 of track 5, mask of 20
meta {'dropped': 1, 'not_exhaustive': ['giant panda']}

uvo
uvo-val-1:
vid0 uvo_videos_dense_frames/abc/0.png to 2.png, 3 frames, 30 fps 100x50
region 5.2 object 0.1 0.2 0.3 0.6 in frame 2 of track 5, mask of 400
meta {'not_exhaustive': ['object']}

youtube_vos
bad 0032, frame 00005 | Annotations | missing_file
youtube_vos-train-0032:
vid0 train/JPEGImages/0032/00000.jpg to 00005.jpg, 2 frames, 6 fps 100x50
region 1.0 sea lion 0.1 0.2 0.3 0.6 in frame 0 of track 1, mask of 400
meta {'dropped': 1, 'not_exhaustive': ['sea lion']}
bad v | all | wrong_type

visor
bad P01_01_frame_0000000020.jpg, annotations[1] | segments | bad_polygon
visor-val-P01_01-seq_00001:
vid0 GroundTruth-SparseAnnotations/rgb_frames/val/P01/P01_01/P01_01_frame_0000000003.jpg to
P01_01_frame_0000000020.jpg, 2 frames, 1 fps 1920x1080
region h left hand 0.1 0.1 0.2 0.2 in frame 0 of track left hand, mask of 20736 {'class_id': 300,
'exhaustive': 'y'}
region c cup 0.1 0.1 0.2 0.2 in frame 0 of track cup, mask of 20736 {'class_id': 13, 'exhaustive': 'y'}
region h2 left hand 0.1 0.1 0.2 0.2 in frame 1 of track left hand, mask of 20736 {'class_id': 300,
'exhaustive': 'y'}
relation h in contact with c
meta {'dropped': 1, 'video': 'P01_01', 'even': False, 'not_exhaustive': ['cup', 'left hand']}

didemo
bad [2] | all | wrong_type
didemo-val-9@N0_1.avi:
vid0 videos/9@N0_1.avi.mp4
event a cat jumps 5-15
event it sits 20-25
meta {'dropped': 1}

activitynet
bad v_ab[2] | timestamps | empty_span
bad v_ab[3] | timestamps | outside
activitynet-val_1-v_ab:
vid0 videos/v_ab.mp4
event He runs. 0.5-10
event He stops. 40-50.5
meta {'dropped': 2, 'duration': 50.5}

assembly101
bad line 5 | start_frame | not_a_number
assembly101-train-s/C1.mp4:
vid0 recordings/s/C1.mp4
event pick up wheel 1-2
event clap hand 3-4
assembly101-train-s/C2.mp4:
vid0 recordings/s/C2.mp4
event clap hand 0-1

star
star-val-T1_13: What did they sit at? / A. The sofa. / B. The table. -> B by mc_letter
vid0 Charades_v1_480/6H78U.mp4
region 000012.o000 person 0.1 0.2 0.3 0.6 in frame 11 of track None
region 000012.o002 table 0 0 0.5 1 in frame 11 of track None
event What did they sit at? The table. 11.1-19.6
relation 000012.o000 sitting on 000012.o002
meta {'program': [{'function': 'Situations'}], 'not_exhaustive': ['person', 'table']}
bad 2 | answer | no_label
star-val-c: What did they sit at? / A. The sofa. / B. The table.
vid0 Charades_v1_480/6H78U.mp4
event What did they sit at? 11.1-19.6
meta {'program': [{'function': 'Situations'}]}

tvqa
tvqa-val-1: Who enters? / A. Name 0 / B. Name 1 / C. Name 2 / D. Name 3 / E. Name 4 -> C by mc_letter
vid0 frames_hq/friends_frames/friends_s01e01_seg01_clip_00/00001.jpg to 00002.jpg, 2 frames, 3 fps
event Who enters? Name 2 1.5-4
meta {'show': 'Friends'}
bad 2, span | ts | not_a_number
tvqa-val-2: Who enters? / A. Name 0 / B. Name 1 / C. Name 2 / D. Name 3 / E. Name 4 -> C by mc_letter
vid0 frames_hq/friends_frames/friends_s01e01_seg01_clip_00/00001.jpg to 00002.jpg, 2 frames, 3 fps
meta {'dropped': 1, 'show': 'Friends'}
bad 3 | answer_idx | no_label
bad 4 | vid_name | media_not_found
bad 5 | all | not_json

mind2web
mind2web-train-u1:
img0 kept picture of (100, 50) 100x50
region element0 Find 0.1 0.2 0.3 0.6 {'tag': 'button', 'target': True}
caption Rent a car
meta {'goal': 'Rent a car', 'actions': ['[link]  Home -> CLICK', '[button]  Find -> CLICK'], 'step': 1,
'operation': {'op': 'CLICK', 'original_op': 'CLICK', 'value': ''}, 'hidden': 1, 'annotation_id': 't1',
'website': 'united', 'domain': 'Travel', 'subdomain': 'Airlines', 'not_exhaustive': ['Find']}
bad 2 | picture | bad_media

vstar
vstar-test-direct_attributes-0: Colour? / (A) red / (B) blue -> A by mc_letter
img0 direct_attributes/sa_1.jpg 100x50
region target0 cup 0.1 0.2 0.3 0.6
meta {'category': 'direct_attributes', 'not_exhaustive': ['cup']}

hrbench
hrbench-4k-0: What? / A. cat / B. dog -> B by mc_letter
img0 kept picture of (100, 50) 100x50
hrbench-4k-1: What? / A. dog / B. cat -> A by mc_letter
img0 kept picture of (100, 50) 100x50
bad line 4 | image | unknown_id

cvbench
cvbench-3d-7: Which is nearer? / (A) the cup / (B) the pen -> B by mc_letter
img0 kept picture of (20, 10)
meta {'category': ['Depth', 'Omni3D']}
bad 2 | answer | missing_column

mme_realworld
mme_realworld-lite-perception/monitoring/counting/0310: How many cars? / (A) 1 / (B) 2 / (C) 3 / (D) 4 / (E)
The image does not show it. -> B by mc_letter
img0 data/imgs/a.png
meta {'category': ['Perception', 'Monitoring', 'counting']}
bad 2 | Image | media_traversal

treebench
bad question 0, box 2 | bbox | wrong_type
treebench-0: Where is it? / A. left  / B. right / C. front -> C by mc_letter
img0 kept picture of (100, 50) 100x50
region target0 target 0.1 0.2 0.3 0.8
region target1 target 0.9 0.8 1 1
meta {'dropped': 1, 'category': ['Reasoning', 'Ordering'], 'not_exhaustive': ['target']}
bad line 7 | target_instances | not_json

zoombench
zoombench-z1: How many lamps? / (A) 0 / (B) 2 / (C) 1 -> C by mc_letter
img0 kept picture of (100, 50)
meta {'category': 'counting'}
zoombench-z2: What does it say? -> Exit 7 by judge
img0 kept picture of (100, 50)
meta {'category': 'counting'}

o3bench
bad question 0, box 1 | bbox | wrong_type
o3bench-0: Which exit? / A. 1 / B. 2 / C. 3 / D. 4 / E. 5 / F. No right choice -> D by mc_letter
img0 test/images/map/a.jpg 100x50
region target0 target 0.2 0 0.5 1
meta {'dropped': 1, 'category': 'map', 'not_exhaustive': ['target']}
bad question 1, box 1 | bbox | wrong_type
bad 2 | options | missing_column

tallyqa
tallyqa-test-5: How many cups? -> 3 by count
img0 VG_100K/1.jpg
meta {'category': 'complex'}
bad 2 | answer | not_a_number

superclevr
superclevr-test-0: How many? -> 2 by count
img0 images/superCLEVR_new_000000.png
superclevr-test-1: How many? -> red by exact
img0 images/superCLEVR_new_000000.png

pope
pope-popular-1: Is there a person in the image? Answer yes or no. -> yes by exact
img0 val2014/COCO_val2014_000000016631.jpg
meta {'category': 'yes'}
bad 2 | label | no_label

mvbench
mvbench-action_sequence-0: What then? / A. Ate. / B. Tidied. -> B by mc_letter
vid0 video/star/Charades_v1_480/ZS9XR.mp4 of [(2.5, 8.1)]
meta {'category': 'action_sequence'}
bad [1] | answer | no_label
bad [2] | start | empty_span
bad [3] | video | media_traversal

vsibench
vsibench-debiased-3: Where is the sofa? / A. front-left / B. back-right -> B by mc_letter
vid0 scannet/scene0568_00.mp4
meta {'category': 'object_rel_direction'}
vsibench-debiased-4: How many chairs? -> 4 by mean_relative_accuracy
vid0 scannet/scene0568_00.mp4
meta {'category': 'object_counting'}
bad 3 | scene_name | media_traversal

reason_rft_tests
reason_rft_tests-structure_id-g1: How long? -> 7 by math
img0 image/a.png

mmmu
mmmu-validation-validation_Art_Theory_1: What is in <image>? / A. a cat / B. a dog's -> B by mmmu_choice
img0 kept picture of (20, 10)
meta {'category': ['Art and Design', 'Art_Theory'], 'difficulty': 'Easy'}
mmmu-validation-validation_Art_Theory_2: Compare. / A. <image> / B. <image> -> A by mmmu_choice
img0 kept picture of (30, 10)
img1 kept picture of (20, 10)
meta {'category': ['Art and Design', 'Art_Theory'], 'difficulty': 'Easy'}
mmmu-validation-validation_Art_Theory_3: What is in <image 1>? / A. a cat / B. a dog's -> B by mmmu_choice
img0 kept picture of (20, 10)
img1 kept picture of (30, 10)
meta {'category': ['Art and Design', 'Art_Theory'], 'difficulty': 'Easy'}
mmmu-validation-validation_Art_Theory_4: What is in <image>? -> 24/7 | 3.429 by mmmu_open
img0 kept picture of (20, 10)
meta {'category': ['Art and Design', 'Art_Theory'], 'difficulty': 'Easy'}
mmmu-validation-validation_Art_Theory_5: What is in <image>?
img0 kept picture of (20, 10)
meta {'category': ['Art and Design', 'Art_Theory'], 'difficulty': 'Easy'}
bad 6 | answer | no_label
bad 7 | options | wrong_type
bad 8 | image_1 | no_media
bad mmmu-validation-validation_Art_Theory_1 | id | duplicate_id
mmmu-validation-validation_Math_1: What is in <image>? / A. a cat / B. a dog's -> B by mmmu_choice
img0 kept picture of (20, 10)
meta {'category': ['Science', 'Math'], 'difficulty': 'Easy'}

scienceqa
scienceqa-test-1: Which? / A. red / B. blue / C. green -> B by mc_letter
meta {'category': ['NAT', 'NO', 'G1-6'], 'topic': 'physics', 'skill': 's', 'lecture': 'l', 'solution': '1'}
scienceqa-test-2: Context: Look. / Which? / A. red / B. blue / C. green -> A by mc_letter
img0 images/test/2/image.png
meta {'category': ['SOC', 'TXT', 'IMG', 'G7-12'], 'topic': 'physics', 'skill': 's', 'lecture': 'l',
'solution': '1'}
bad 3 | answer | no_label
bad 4 | image | media_traversal
bad 9 | 9 | missing_column

mmvet
mmvet-v1_0: What is x? -> -1<AND>-5 by mm_vet
img0 images/v1_0.png
meta {'category': ['math', 'ocr']}
bad v1_1 | answer | empty

mathvista
mathvista-testmini-1: How long? (Unit: cm) Round to 1 decimal place. -> 1.5 by math
img0 kept picture of (20, 10)
meta {'category': ['geometry problem solving', 'geometry reasoning']}
mathvista-testmini-2: How long? / A. Yes / B. No -> B by mc_letter
img0 kept picture of (20, 10)
meta {'category': ['geometry problem solving', 'geometry reasoning']}
bad 3 | answer | no_label
mathvista-testmini-4: How long? / A. Yes / B. No
img0 kept picture of (20, 10)
meta {'category': ['geometry problem solving', 'geometry reasoning']}
mathvista-testmini-5: How long? -> 7 by count
img0 kept picture of (20, 10)
meta {'category': ['geometry problem solving', 'geometry reasoning']}
bad 6 | precision | not_a_number
bad 7 | answer_type | wrong_type

mathverse
mathverse-testmini-1: The angle is () / Choices: / A:40° / B:60° / C:120° / D:140° -> D by mc_letter
img0 kept picture of (20, 10)
meta {'category': ['Text Dominant', 'Plane Geometry']}
mathverse-testmini-5: Answer the question in the picture. -> 14 by math
img0 kept picture of (20, 10)
meta {'category': ['Vision Only', 'Plane Geometry']}
bad 3 | image | no_media

mathvision
mathvision-testmini-4: Which bike? / A. 1 / B. 2 / C. 3 -> C by mc_letter
img0 kept picture of (20, 10)
meta {'category': ['logic', 'level 2']}
mathvision-testmini-9: How many? -> 28 by math
img0 kept picture of (20, 10)
meta {'category': ['logic', 'level 2']}
bad 3 | answer | no_label

refcoco
refcoco-validation-8: Where is "the left cup"? Answer with its box [x0, y0, x1, y1], from 0 to 1000 of the
picture's width and height. -> [250.0, 200.0, 500.0, 800.0] by iou_50
img0 coco/train2014/COCO_train2014_000000000072.jpg 100x50
region target0 the left cup 0.25 0.2 0.5 0.8
meta {'not_exhaustive': ['the left cup']}
bad 1 | sent | empty
bad 2 | bbox | empty_box

refcocoplus
refcocoplus-validation-8: Where is "the left cup"? Answer with its box [x0, y0, x1, y1], from 0 to 1000 of
the picture's width and height. -> [250.0, 200.0, 500.0, 800.0] by iou_50
img0 coco/train2014/COCO_train2014_000000000072.jpg 100x50
region target0 the left cup 0.25 0.2 0.5 0.8
meta {'not_exhaustive': ['the left cup']}
bad 1 | sent | empty
bad 2 | bbox | empty_box

refcocog
refcocog-validation-8: Where is "the left cup"? Answer with its box [x0, y0, x1, y1], from 0 to 1000 of the
picture's width and height. -> [250.0, 200.0, 500.0, 800.0] by iou_50
img0 coco/train2014/COCO_train2014_000000000072.jpg 100x50
region target0 the left cup 0.25 0.2 0.5 0.8
meta {'not_exhaustive': ['the left cup']}
bad 1 | sent | empty
bad 2 | bbox | empty_box
"""
"""Name of a set, then its rows one fact a line: boxes of SQUARE are .1 .2 .3 .6."""


def facts(row: Question | BadRow, root: Path) -> list[str]:
    if isinstance(row, BadRow):
        return [f"bad {row.row} | {row.column} | {row.code}"]

    def place(uri: str) -> str:
        if uri.startswith(f"{root}/cache/"):
            return f"kept picture of {Image.open(uri).size}"
        return uri.removeprefix(f"{root}/")

    def box(sides: Any) -> str:
        return " ".join(f"{v:.3g}" for v in sides)

    question = Question.model_validate_json(row.model_dump_json())
    notes, text = known(question), question.question.replace("\n", " / ")
    answer = f" -> {' | '.join(question.answers)} by {question.scorer}" if question.answers else ""
    told = [f"{question.id}: {text}{answer}"]
    for media in question.media:
        size = f" {media.width}x{media.height}" if media.width else ""
        span = f" of {media.spans}" if media.spans else ""
        frames = [place(frame) for frame in media.frames or []]
        first = frames[0] if frames else place(media.uri)
        rest = f" to {Path(frames[-1]).name}, {len(frames)} frames, {media.fps:g} fps" if frames else ""
        told.append(f"{media.id} {first}{rest}{size}{span}")
    for r in notes.regions:
        when = "" if r.frame is None else f" in frame {r.frame} of track {r.track}"
        area = f", mask of {decode(r.mask).area}" if r.mask else ""
        outline = f", outline of {len(r.outline[0])} points" if r.outline else ""
        told.append(
            f"region {r.id} {r.label} {box(r.box)}{when}{area}{outline} {r.attributes or ''}".rstrip()
        )
    told += [f"{line.level} {line.text} {box(line.box)}" for line in notes.lines]
    told += [f"caption {text}" for text in notes.captions]
    told += [f"event {event.text} {event.start:g}-{event.end:g}" for event in notes.events]
    told += [f"relation {r.subject} {r.predicate} {r.object}" for r in notes.relations]
    told_elsewhere = ("source", "original_id", "options")
    if meta := {key: value for key, value in question.meta.items() if key not in told_elsewhere}:
        told.append(f"meta {meta}")
    return [part for fact in told for part in textwrap.wrap(fact, 108)]


@pytest.mark.parametrize("name", readers.READERS)
def test_an_official_layout_is_read(name: str, tmp_path: Path) -> None:
    expected = {block.partition("\n")[0]: block for block in EXPECTED.strip().split("\n\n")}
    rows = list(read_rows(SETS[name].write(tmp_path)))
    assert bool(SETS[name].truths) == any(isinstance(row, Question) and row.answers for row in rows)
    assert [name, *(fact for row in rows for fact in facts(row, tmp_path))] == expected[name].splitlines()


def source(root: Path, name: str, options: str = "") -> str:
    """A tiny set with other options than its own."""
    return f"{SETS[name].write(root).partition('?')[0]}?{options}"


def test_options_choose_what_is_read(tmp_path: Path) -> None:
    everything = read(source(tmp_path / "a", "sa1b", "area=0&iou=0&stability=0"))[0][0]
    assert len(known(everything).regions) == 5
    assert not known(read(source(tmp_path / "b", "star", "split=val"))[0][0]).regions
    docvqa = source(tmp_path / "c", "docvqa", "split=val")
    (tmp_path / "c/spdocvqa_ocr/xn_1.json").unlink()
    assert read(docvqa)[1][0].code == "missing_file"
    assert codes(read(f"{docvqa}&ocr=no")[1]) == ["no_label"]
    (question, *_), _ = read(source(tmp_path / "d", "mot17", "ignored=yes"))
    assert [r.label for r in known(question).regions] == ["pedestrian", "distractor", "pedestrian"]
    mot20 = source(tmp_path / "e", "mot20")
    assert len(read(f"{mot20}window=0")[0][0].media[0].frames or []) == 130
    with pytest.raises(BadInput, match="window=99"):
        read(f"{mot20}window=99")
    questions, _ = read(source(tmp_path / "f", "flickr30k"))
    assert [known(q).captions[0] for q in questions] == ["A man with a hat .", "A dog ."]


def seen(question: Question) -> tuple[int, int]:
    return Image.open(question.media[0].uri).size


def test_options_of_benchmarks(tmp_path: Path) -> None:
    refcoco = source(tmp_path / "a", "refcoco", "split=validation")
    written = [
        read(f"{refcoco}&coordinates={scale}")[0][0].answers for scale in ("thousand", "unit", "pixels")
    ]
    assert written == [
        ["[250.0, 200.0, 500.0, 800.0]"],
        ["[0.25, 0.2, 0.5, 0.8]"],
        ["[25.0, 10.0, 50.0, 40.0]"],
    ]
    with pytest.raises(BadInput, match="coordinates=percent"):
        read(f"{refcoco}&coordinates=percent")
    zoombench = SETS["zoombench"].write(tmp_path / "b")
    assert [seen(question) for question in read(f"{zoombench}&crop=yes")[0]] == [(20, 10), (20, 10)]
    text_only = SETS["mathverse"].write(tmp_path / "c")
    assert only(f"{text_only}&split=testmini_text_only").media == []
    assert only(source(tmp_path / "d", "vsibench", "split=full")).id == "vsibench-full-3"
    full = only(source(tmp_path / "e", "mme_realworld", "split=en"))
    assert full.media[0].uri == f"{tmp_path}/e/monitoring_images/b.jpg"
    with pytest.raises(BadInput, match="no split 'train'"):
        read(source(tmp_path / "f", "mme_realworld", "split=train"))


def test_zoombench_is_read_as_first_released(tmp_path: Path) -> None:
    row = {"prompt": "How many?\n(A) 0\n(B) 2", "answer": "B", "image": picture(20), "crop_image": picture(9)}
    write(tmp_path, {"data/test.parquet": parquet([row, row])})
    questions, _ = read(f"zoombench:{tmp_path}?cache={tmp_path / 'cache'}")
    assert [(q.id, q.answers, q.scorer) for q in questions] == [
        ("zoombench-0", ["B"], "mc_letter"),
        ("zoombench-1", ["B"], "mc_letter"),
    ]


def test_shuffled_options_keep_the_right_one(tmp_path: Path) -> None:
    mvbench = source(tmp_path, "mvbench", "task=moving_count")
    assert only(mvbench).media[0].spans is None
    shuffled = [only(f"{mvbench}&shuffle_options={seed}") for seed in range(8)]
    letters = [(q.answers or [""])[0] for q in shuffled]
    assert set(letters) == {"A", "B"}
    options = [q.meta["options"]["AB".index(letter)] for q, letter in zip(shuffled, letters, strict=True)]
    assert set(options) == {"Up"}
    with pytest.raises(BadInput, match="action_sequence"):
        read(mvbench.replace("moving_count", "none"))


def test_windows_of_a_long_sequence_end_with_it(tmp_path: Path) -> None:
    write(tmp_path, mot("MOT20-01", 270, *(f"{frame},1,11,11,20,20,1,1,1" for frame in range(1, 271))))
    questions, _ = read(f"mot20:{tmp_path}?window=120&stride=100")
    assert [question.meta["first_frame"] for question in questions] == [0, 100, 150]
    assert all([r.frame for r in known(question).regions] == list(range(120)) for question in questions)


def test_a_set_is_read_no_further_than_asked(tmp_path: Path) -> None:
    assert isinstance(next(readers.read(SETS["sa1b"].write(tmp_path))), Question)


# -- faults --------------------------------------------------------------------------------------------------


def coco_set(root: Path, *annotations: dict, **picture: Any) -> str:
    data = coco_file(*annotations, **picture)
    write(root, {"val2017": None, "annotations/instances_val2017.json": data})
    return f"coco:{root}?split=val2017"


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
    data = coco_file(thing(image_id=8))
    data["images"] *= 2
    write(tmp_path, {"val2017": None, "annotations/instances_val2017.json": data})
    questions, bad = read(f"coco:{tmp_path}?split=val2017")
    assert (len(questions), codes(bad)) == (1, ["unknown_id", "duplicate_id"])


def test_damaged_files_cost_their_rows_or_are_named(tmp_path: Path) -> None:
    """Found by fuzzing: text that is no UTF-8, and a list where an object is due."""
    flickr30k = source(tmp_path / "a", "flickr30k")
    captions = b"10.jpg#0\tA m\xffn .\n11.jpg#0\tA dog .\n\xff\n"
    (tmp_path / "a/results_20130124.token").write_bytes(captions)
    questions, bad = read(flickr30k)
    assert [known(question).captions for question in questions] == [["A m\ufffdn ."], ["A dog ."]]
    assert [(row.row, row.code) for row in bad] == [("line 3", "wrong_type")]

    mind2web = SETS["mind2web"].write(tmp_path / "b")
    (path,) = (tmp_path / "b/data").iterdir()
    table = pq.read_table(path)
    place, damaged = table.column_names.index("website"), pa.array([b"united", b"\xff"]).view(pa.string())
    pq.write_table(table.set_column(place, "website", damaged), path)
    with pytest.raises(BadInput, match="cannot be read"):
        read(mind2web)

    write(tmp_path / "c", SETS["youtube_vos"].files("") | {"train/meta.json": {"videos": True}})
    with pytest.raises(BadInput, match="no dict of videos"):
        read(f"youtube_vos:{tmp_path / 'c'}")


def test_an_annotation_with_entities_is_refused_before_they_expand(tmp_path: Path) -> None:
    """Nine levels of ten entities are ten characters times 10^9."""
    levels = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 10))
    kind = f'<!DOCTYPE annotation [<!ENTITY e0 "0123456789">{levels}]>'
    bomb = f"{kind}<annotation><size><width>&e9;</width></size></annotation>"
    write(tmp_path, SETS["flickr30k"].files("") | {"Annotations/10.xml": bomb})
    _, bad = read(f"flickr30k:{tmp_path}?boxes=yes")
    assert "document type" in next(row.message for row in bad if row.code == "not_xml")


# -- sources -------------------------------------------------------------------------------------------------


def test_sources() -> None:
    assert readers.is_dataset("coco:/data/coco?split=val2017")
    others = ("coco", "cards:?split=train", "coco.jsonl", "s3://coco/rows.jsonl")
    assert not any(readers.is_dataset(other) for other in others)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("cocoo:/data", "did you mean 'coco'"),
        ("mot17:/data?strides=5", "did you mean 'stride'"),
        ("coco:?split=val2017", "names no folder"),
        ("coco:s3://bucket/coco", "local folder"),
    ],
)
def test_a_wrong_source_is_named(wrong: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        readers.read(wrong)


@pytest.mark.parametrize("name", readers.READERS)
def test_a_missing_folder_tells_the_official_layout(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingFile) as caught:
        list(islice(readers.read(f"{name}:{tmp_path}/nothing"), 1))
    assert readers.READERS[name].layout in str(caught.value)
    assert str(tmp_path / "nothing") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "expected a dict"), ('{"images": []}', "no list of categories")],
)
def test_a_file_of_something_else_is_refused(content: str, message: str, tmp_path: Path) -> None:
    coco = coco_set(tmp_path, thing())
    write(tmp_path, {"annotations/instances_val2017.json": content})
    with pytest.raises(BadInput, match=message):
        read(coco)


@pytest.mark.parametrize(
    ("name", "split"),
    [("mot20", "/"), ("coco", "/../../annotations/instances_x"), ("mind2web", "../../x")],
)
def test_an_option_does_not_lead_out_of_the_folder(name: str, split: str, tmp_path: Path) -> None:
    write(tmp_path, {"annotations/instances_x.json": {}})
    with pytest.raises(BadInput, match="leads out"):
        read(f"{name}:{tmp_path / 'inner'}?split={split}")


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
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for reader in readers.READERS.values():
        (row,) = [row for row in rows if f"`{reader.name}`" in row.split("|")[1]]
        told = [name for name, default in reader.options.items() if name != "split" or default == "train"]
        assert [option for option in told if option not in row] == []
