"""InternVL: the tiles, prompts and file names of the published models."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_policy import Maker, check_log_probs, folder, policy, random_adapter, spec
from tiny_trainer import trainer
from transformers import InternVLConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pixelis.config import DialogueConfig, PolicyConfig
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadConfig, BadInput
from pixelis.families import FAMILIES
from pixelis.families.spec import load_tokenizer
from pixelis.policy.adapters import load_adapter
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_merged_model, write_peft
from pixelis.policy.model import load_model
from pixelis.records import ImageView, Question

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
"""Of the published `-HF` folders (transformers, models/internvl/convert_internvl_weights_to_hf.py)."""
TILES = [(rows, columns) for rows in range(1, 13) for columns in range(1, 13) if rows * columns <= 12]


@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_tiles_and_their_number_are_those_of_the_models_processor(rows: int, columns: int):
    own = spec("internvl")
    view = Maker("internvl").view(rows * own.multiple, columns * own.multiple)
    processor = GotOcr2ImageProcessorPil(
        crop_to_patches=True,
        size={"height": own.multiple, "width": own.multiple},
        image_mean=list(own.image_mean),
        image_std=list(own.image_std),
    )
    expected = processor([view], return_tensors="pt")["pixel_values"]
    assert own.image_tokens(*view.shape[:2]) == 16 * len(expected)
    difference = (FAMILIES["internvl"].pixel_values(own, [view]) - expected).abs()
    assert difference[: rows * columns].max() < 1e-6
    # PIL rounds a few pixels of a thumbnail to one of the next levels of 256
    assert difference.max() < 2.01 / 255 / min(own.image_std)
    assert (difference > 1e-6).float().mean() < 0.05


def test_more_tiles_than_the_model_reads_are_refused():
    with pytest.raises(BadInput, match="16 tiles") as error:
        spec("internvl").image_tokens(4 * 64, 4 * 64)
    assert str(12 * 64**2) in str(error.value.fix)


def test_a_prompt_is_that_of_the_chat_template():
    tokenizer, own = load_tokenizer(folder("internvl")), spec("internvl")
    tokenizer.chat_template = CHAT_TEMPLATE
    renderer = Renderer(tokenizer, own, DialogueConfig(dialect="plain"), [])
    size = 2 * own.multiple, own.multiple
    (turn,) = renderer.prompt(
        Question(id="q", question="Which digit?"), [ImageView(id="img0", view_size=size)]
    )
    content = [{"type": "image"}, {"type": "text", "text": turn.text}]
    chat = [{"role": "user", "content": content}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    text = text.replace("<IMG_CONTEXT>", f"<img>{'<IMG_CONTEXT>' * 3 * 16}</img>")
    assert turn.tokens == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>") in own.banned


def test_files_with_published_names_and_with_those_of_the_model_are_read_and_exported_alike(tmp_path: Path):
    published, renamed = folder("internvl"), tmp_path / "renamed"
    shutil.copytree(published, renamed)
    tensors = load_file(published / "model.safetensors")
    assert "language_model.lm_head.weight" in tensors
    own = {FAMILIES["internvl"].parameter_name(name): tensor for name, tensor in tensors.items()}
    assert own.keys() == load_model(policy("internvl"), "cpu")[0].state_dict().keys()
    save_file(own, renamed / "model.safetensors", {"format": "pt"})
    adapter, samples = random_adapter("internvl"), [Maker("internvl").sample()]
    with trainer("internvl", adapter=adapter) as learner:
        expected = learner.model.log_probs(samples)
    for base, names in ((published, tensors), (renamed, own)):
        target = tmp_path / f"merged_{base.name}"
        write_merged_model(adapter, base, target)
        assert load_file(target / "model.safetensors").keys() == names.keys()
        check_log_probs(load_model(policy(model=str(target)), "cpu")[0], samples, expected)


def test_adapters_of_the_vision_tower_are_saved_and_read(tmp_path: Path):
    settings = policy("internvl")
    settings = settings.model_copy(update={"lora": settings.lora.model_copy(update={"vision_tower": True})})
    samples = [Maker("internvl").sample()]
    with trainer("internvl", policy=settings) as learner:
        learner.update(samples, "sft")
        adapter = learner.adapter()
    names = {
        name for name in adapter.tensors if ".vision_tower." in name or ".multi_modal_projector." in name
    }
    assert all(np.abs(adapter.tensors[name]).max() > 0 for name in names)
    write_peft(adapter, tmp_path / "adapter")
    assert load_adapter(tmp_path / "adapter").tensors.keys() == adapter.tensors.keys() > names != set()


def test_the_sizes_of_a_published_folder_are_known_and_other_language_models_refused(tmp_path: Path):
    """InternVL3.5-8B: sizes of its model card."""
    qwen3 = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    text = {"model_type": "qwen3", "tie_word_embeddings": False, **qwen3, **heads}
    InternVLConfig(text_config=text, tie_word_embeddings=False).save_pretrained(tmp_path)
    arch = Architecture(PolicyConfig(model=str(tmp_path)))
    assert arch.parameters == pytest.approx(8.53e9, rel=0.01)
    assert arch.vision_parameters == pytest.approx(0.34e9, rel=0.02)
    assert [arch.image_tokens(n * 448**2) for n in (0, 1, 2, 12)] == [0, 256, 768, 13 * 256]
    assert arch.kv_token_bytes == 2 * 36 * 8 * 128 * 2
    model = load_model(policy("internvl"), "cpu")[0]
    model.config.text_config.model_type = "gpt_oss"
    with pytest.raises(BadConfig, match="gpt_oss"):
        FAMILIES["internvl"].prepare(model)
