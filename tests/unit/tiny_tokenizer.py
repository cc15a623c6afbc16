"""A tokenizer of a few words, for checkpoints of random weights."""

from __future__ import annotations

from pathlib import Path


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "</s>": 1, "<s>": 2, "a": 3, "bike": 4, "red": 5, "cup": 6, ".": 7}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="</s>", eos_token="</s>", bos_token="<s>"
    )
    fast.save_pretrained(path)
