"""Chat models of transformers with random weights, two layers and a vocabulary of twenty words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = (
    "a man woman dog is are running cooking the in on describe this video one sentence user assistant system"
)
TEMPLATE = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}VIDEO {% elif c['type'] == 'image' %}IMAGE "
    "{% else %}{{ c['text'] }} {% endif %}"
    "{% endfor %}<|end|> {% endfor %}{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
VISION = {"hidden_size": 32, "intermediate_size": 48}
SIGLIP = {**VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
SQUARE = {"size": {"height": 56, "width": 56}}
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def tokenizer(special: tuple[str, ...], **names: str) -> Any:
    """Return a word-level tokenizer; ``names`` are the attributes that a processor reads from it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "<|start|>", "<|end|>", *special, *WORDS.split()]
    model = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<pad>", "<eos>", "<|start|>", "<|end|>", *special])
    extra: dict[str, Any] = {"extra_special_tokens": names} if names else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        **extra,
    )


def save(folder: Path, make: Callable[[], Any], processor: Any, *, video: str = "", image: str) -> None:
    """Save a processor and a model that generates words, at least one, and an end, but no special tokens."""
    torch.manual_seed(0)
    processor.chat_template = TEMPLATE.replace("VIDEO", video).replace("IMAGE", image)
    model = make().eval()
    tokens = processor.tokenizer
    special = {number for number, token in tokens.added_tokens_decoder.items() if token.special}
    model.generation_config.suppress_tokens = sorted(special - {tokens.eos_token_id})
    model.generation_config.begin_suppress_tokens = [tokens.eos_token_id]
    model.generation_config.forced_eos_token_id = tokens.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def qwen2_5_vl(folder: Path) -> None:
    import transformers as tr

    tokens = tokenizer(QWEN)
    start, end, image, video = tokens.convert_tokens_to_ids(list(QWEN))
    config = tr.Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "vocab_size": len(tokens),
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **VISION,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 32,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    pixels = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64}
    processor = tr.Qwen2_5_VLProcessor(
        tr.Qwen2VLImageProcessor(**pixels), tokens, tr.Qwen2VLVideoProcessor(**pixels)
    )
    save(
        folder,
        lambda: tr.Qwen2_5_VLForConditionalGeneration(config),
        processor,
        video=f"{QWEN[0]} {QWEN[3]} {QWEN[1]}",
        image=f"{QWEN[0]} {QWEN[2]} {QWEN[1]}",
    )


def qwen3_vl(folder: Path) -> None:
    import transformers as tr

    tokens = tokenizer(QWEN)
    start, end, image, video = tokens.convert_tokens_to_ids(list(QWEN))
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = tr.Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": len(tokens), "head_dim": 8, "rope_scaling": rope},
        vision_config={
            **VISION,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    size = {"size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 64}, "patch_size": 16}
    processor = tr.Qwen3VLProcessor(
        tr.Qwen2VLImageProcessor(**size), tokens, tr.Qwen3VLVideoProcessor(**size)
    )
    save(
        folder,
        lambda: tr.Qwen3VLForConditionalGeneration(config),
        processor,
        video=f"{QWEN[0]} {QWEN[3]} {QWEN[1]}",
        image=f"{QWEN[0]} {QWEN[2]} {QWEN[1]}",
    )


def llava_onevision(folder: Path) -> None:
    import transformers as tr

    tokens = tokenizer(("<image>", "<video>"))
    image, video = tokens.convert_tokens_to_ids(["<image>", "<video>"])
    config = tr.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)},
        vision_config={**SIGLIP, "model_type": "siglip_vision_model"},
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=[[56, 56]],
    )
    processor = tr.LlavaOnevisionProcessor(
        tr.LlavaOnevisionImageProcessor(**SQUARE, image_grid_pinpoints=[[56, 56]]),
        tokens,
        tr.LlavaOnevisionVideoProcessor(**SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    make = tr.LlavaOnevisionForConditionalGeneration
    save(folder, lambda: make(config), processor, video="<video>", image="<image>")


def internvl(folder: Path) -> None:
    import transformers as tr

    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<context>", "video": "<video>"}
    tokens = tokenizer(tuple(names.values()), **{f"{name}_token": token for name, token in names.items()})
    config = tr.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokens)},
        vision_config={**SIGLIP, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokens.convert_tokens_to_ids("<context>"),
        downsample_ratio=0.5,
        image_seq_length=4,
    )
    processor = tr.InternVLProcessor(
        tr.GotOcr2ImageProcessor(**SQUARE, max_patches=1),
        tokens,
        tr.InternVLVideoProcessor(**SQUARE),
        image_seq_length=4,
    )
    make = tr.InternVLForConditionalGeneration
    save(folder, lambda: make(config), processor, video="<video>", image="<context>")


def smolvlm(folder: Path) -> None:
    import transformers as tr

    marks = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    tokens = tokenizer(
        marks, fake_image_token=marks[0], image_token=marks[1], end_of_utterance_token=marks[2]
    )
    config = tr.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": len(tokens)},
        vision_config={**SIGLIP, "model_type": "smolvlm_vision"},
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    processor = tr.SmolVLMProcessor(
        tr.SmolVLMImageProcessor(**sizes, do_image_splitting=False),
        tokens,
        tr.SmolVLMVideoProcessor(
            **sizes, video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 56}}
        ),
        image_seq_len=4,
    )
    make = tr.SmolVLMForConditionalGeneration
    save(folder, lambda: make(config), processor, video="<video>", image="<image>")


def gemma3(folder: Path) -> None:
    """Save a model that takes images only."""
    import transformers as tr

    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    tokens = tokenizer(tuple(names.values()), **names)
    begin, end, image = tokens.convert_tokens_to_ids(list(names.values()))
    config = tr.Gemma3Config(
        text_config={**TEXT, "vocab_size": len(tokens), "head_dim": 8, "sliding_window": 64},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
    )
    processor = tr.Gemma3Processor(tr.Gemma3ImageProcessor(**SQUARE), tokens, image_seq_length=4)
    save(folder, lambda: tr.Gemma3ForConditionalGeneration(config), processor, image="<boi>")


CHAT_MODELS = {
    make.__name__: make for make in (qwen2_5_vl, qwen3_vl, llava_onevision, internvl, smolvlm, gemma3)
}
