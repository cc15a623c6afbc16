"""A Qwen3-VL that was fine-tuned to point in pixels of the view, under a `model_type` of its own."""

from dataclasses import replace

from pixelis.families.qwen3_vl import FAMILY as QWEN3_VL

FAMILY = replace(QWEN3_VL, coordinates="pixels")
