"""The tokenizers of the embedded models: byte-level, with one token for each text piece that the agent writes often.

There are no merges: a piece in the word list is one token; other text becomes its bytes. Whole numbers on the
20/1000 grid are words, so that a coordinate is one token and a zoom a dozen; of `mini` all up to 1000 are.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
BINS = tuple(range(0, 1001, 20))
"""Coordinate values that are one token each."""
ZOOM_CALL = '{"name":"zoom_in","arguments":{"bbox_2d":['
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
)
PIECES = (
    *(
        ZOOM_CALL,
        '{"name":"',
        '","arguments":{"',
        '","arguments":{',
        'bbox_2d":[',
        "]}}",
        '"}}',
        "zoom_in",
        " = zoom_in(",
    ),
    *(
        "read_text",
        "segment_object_at",
        "track_object",
        "get_properties",
        "img0",
        *(f"obs{n}" for n in range(1, 9)),
    ),
    *("user\n", "assistant\n", "system\n", "error "),
)
_COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
_WORDS = """
    which what where digit number is are in on at of the a an this that here frame card box picture image colour color
    written read find point locate show give see zoom look closer around it I and to has have how many there its holds
    repeat say after me answer think question too small not no yes text word left right top bottom inside outside with for
    be can you please larger first second bad error must should between one two three as from name value region object
"""

_MINI_WORDS = """
    object shape corners percent share size tiny medium written say says upper lower middle centre up down goes go move way
    moves still end second cover covers whole stay stays colours black white grey orange brown pink beige lost completed
    line lines last next word words part parts over under before after then now here there where goes its it moving turn
    width height area brightness hue saturation path speed longer shorter larger smaller same more less frames seconds
    does or large view much gone called
"""
MINI_PIECES = (
    *(
        '{"name":"segment_object_at","arguments":{"point_2d":[',
        '{"name":"get_properties","arguments":{"object":"',
        '","groups":["',
        '"]}}',
        '{"name":"read_text","arguments":{"bbox_2d":[',
        '{"name":"select_frames","arguments":{"frames":[',
        '{"name":"track_object","arguments":{"bbox_2d":[',
        '],"target":"',
        "vid0",
        *(f" = {name}(" for name in ("segment_object_at", "get_properties", "read_text", "select_frames")),
        " = track_object(",
    ),
    *(", ", ": [", "]; ", "\nbox [", "] of img0\narea ", " % of the whole image (", " px)\nscore 0."),
    " (mobilenet, a small network: approximate)",
    "; unsure: check the outline, give a box, or zoom in",
    *("color: name ", ", dominant ", " RGB 0..255, dominant share ", ", mean "),
    *(" RGB 0..255, brightness ", ", saturation ", ", hue ", " deg"),
    *("size: area pixels ", " px^2, relative size ", ", bbox width ", " px, bbox height ", " px, diagonal "),
    *(" px, equivalent diameter ", " px, category ", "shape: aspect ratio ", ", rotated aspect ratio "),
    *(", rotated length ", " px, rotated width ", " px, perimeter ", " px, circularity ", ", solidity "),
    *(", eccentricity ", ", orientation ", " deg, corners ", ", holes "),
    *(": completed, frames ", ": lost, frames ", " of vid0 (", " s).\nBox by frame: "),
    *("].\nMotion in px of the full frame: path ", ", displacement ", ", average ", " per frame ("),
    *(
        " per second), maximum ",
        " per frame; direction ",
        " deg (0 right, 90 down).",
        " per frame; stationary.",
    ),
    *("\nThe object was not seen after frame ", "\nThe object was hidden in frames "),
    *("\nThe scene changes with frame ", "vid0 has 5 frames, 5.00 s. Shown: "),
)
"""What else `mini` writes in calls, and what the operations write."""

CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'tool' -%}{{- '<|im_start|>user\n<tool_response>' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\n' -}}{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or 'video' in part -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'tool' -%}{{- '</tool_response>' -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""Qwen's chat format without the default system turn."""


def words(mini: bool = False) -> list[str]:
    """All text pieces that are one token, in the order of their ids (after the bytes)."""
    pieces = [str(value) for value in (range(1001) if mini else BINS) if value > 9]
    for word in (*_COLOURS, *_WORDS.split(), *(_MINI_WORDS.split() if mini else ())):
        for form in dict.fromkeys((word, word[0].upper() + word[1:])):
            pieces += [form, " " + form]
    pieces += [" =", " [", " (", " {", "\n\n", "  "]
    return list(dict.fromkeys(pieces))


def build_tokenizer(max_length: int = 4096, mini: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of `nano`, or of `mini`, which knows the words of all operations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [piece for word in words(mini) for piece, _ in byte_level.pre_tokenize_str(word)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*SPECIAL, *alphabet, *pieces]))}
    # ignore_merges: a piece in the vocabulary is one token; without merges other text becomes bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = Regex(r"\p{N}+| ?\p{L}+|\s+(?=\s\S)|\s+| ?[^\s\p{L}\p{N}]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), byte_level])
    extra = MINI_PIECES if mini else ()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in (*TAGS, *PIECES, *extra)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
