"""CLIP and SigLIP of transformers with random weights, two layers and a vocabulary of twenty words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = "a photo depicts man woman dog is running cooking the in on field kitchen fast"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}


def tokenizer(*, start: bool) -> Any:
    """Return a word-level tokenizer that adds the end, and with ``start`` the start, to each text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", *WORDS.split(), "<start>", "<end>"]
    model = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if start:  # as CLIP's; SigLIP's does not
        model.normalizer = normalizers.Lowercase()
    model.add_special_tokens(["<pad>", "<start>", "<end>"])
    numbers = [(word, words.index(word)) for word in ("<start>", "<end>")]
    single = "<start> $A <end>" if start else "$A <end>"
    model.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )


def clip(folder: Path) -> None:
    """Save a CLIP of at most 16 tokens."""
    from transformers import CLIPConfig, CLIPModel

    tokens = tokenizer(start=True)
    text = {
        **SIZES,
        "vocab_size": len(tokens),
        "max_position_embeddings": 16,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": 0,
        "bos_token_id": len(tokens) - 2,
    }
    config = CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24)
    crop = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}
    _save(folder, CLIPModel, config, tokens, {**crop, "resample": 3})


def siglip(folder: Path) -> None:
    """Save a SigLIP 2 of a fixed resolution and at most 12 tokens."""
    from transformers import SiglipConfig, SiglipModel

    tokens = tokenizer(start=False)
    text = {
        **SIZES,
        "vocab_size": len(tokens),
        "max_position_embeddings": 12,
        "projection_size": 32,
        "pad_token_id": 0,
        "eos_token_id": tokens.eos_token_id,
    }
    config = SiglipConfig(text_config=text, vision_config=VISION)
    _save(folder, SiglipModel, config, tokens, {"size": {"height": 32, "width": 32}, "resample": 2})


def _save(folder: Path, make: Any, config: Any, tokens: Any, preprocess: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = make(config).eval()
    with torch.no_grad():  # larger weights, so that embeddings differ
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    how = {"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.6], "rescale_factor": 1 / 255}
    (folder / "preprocessor_config.json").write_text(json.dumps({**preprocess, **how}))


ENCODERS = {"clip": clip, "siglip": siglip}
