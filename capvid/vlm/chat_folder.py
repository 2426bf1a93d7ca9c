"""Files of a chat model beside its weights: each error names the file that causes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from capvid.errors import CapvidError, CheckpointError
from capvid.utils.validation import short
from capvid.vlm.git import MAX_SIDE, PROCESSOR, first_line, read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
LOCAL: Mapping[str, Any] = {"local_files_only": True, "trust_remote_code": False}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", *TOKENIZER[1:], *PROCESSOR)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id")
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
_RANGES = {  # of the numbers in generation_config.json
    "repetition_penalty": (0.01, 100.0),
    "length_penalty": (-100.0, 100.0),
    "temperature": (0.0, 100.0),
    **dict.fromkeys(("top_p", "min_p", "typical_p"), (0.0, 1.0)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "max_length", "max_new_tokens"), (1, 2**31)),
    **dict.fromkeys(("top_k", "min_length", "min_new_tokens", "no_repeat_ngram_size"), (0, 2**31)),
}


@contextmanager
def blaming(folder: Path, *names: str) -> Iterator[None]:
    """Turn whatever the library raises for damaged files into one line that names those that there are."""
    try:
        yield
    except (CapvidError, ImportError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        files = [name for name in names if (folder / name).is_file()] or names[:1]
        problem = f"{folder / ' or '.join(files)}: damaged or incomplete ({first_line(error)})"
        raise CheckpointError(problem, remedy="download it again") from error


def load_processor(folder: Path) -> Any:
    """Load the processor.

    Raises:
        CheckpointError: one of its files is missing or damaged.
    """
    import transformers

    with blaming(folder, *PROCESSOR):
        try:
            processor = transformers.AutoProcessor.from_pretrained(folder, **LOCAL)
        except Exception:
            with blaming(folder, *TOKENIZER):  # raises if the tokenizer is the cause
                transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
            raise
        if not hasattr(processor, "tokenizer"):  # the library has fallen back to the tokenizer alone
            raise ValueError("there is no processor of images")
        for part in (getattr(processor, f"{kind}_processor", None) for kind in ("image", "video")):
            _check_edges(part)
    return processor


def _check_edges(part: Any) -> None:
    """Raise ValueError if a processor of images or videos makes small frames very large.

    ``shortest_edge`` and ``longest_edge`` are numbers of pixels for processors that resize "smartly".
    """
    default = getattr(type(part), "size", None) or {}
    areas = hasattr(sys.modules[type(part).__module__], "smart_resize")
    if areas or default.get("longest_edge", 0) > MAX_SIDE:
        return
    for edge in ("shortest_edge", "longest_edge"):
        pixels = (getattr(part, "size", None) or {}).get(edge) or 0
        if pixels > MAX_SIDE:
            raise ValueError(f"size.{edge} must be at most {MAX_SIDE}, got {pixels}")


def chat_template(folder: Path, processor: Any) -> tuple[Path, str]:
    """Return the chat template of a processor, and its file.

    Raises:
        CheckpointError: there is none.
    """
    template: Any = getattr(processor, "chat_template", None)
    template = template.get("default") if isinstance(template, dict) else template
    if not isinstance(template, str):
        remedy = "choose an instruction-tuned model"
        raise CheckpointError(f"{folder}: the processor has no chat template", remedy=remedy)
    if getattr(processor, "video_processor", None) is not None:  # SmolVLM replaces the template for videos
        template = getattr(sys.modules[type(processor).__module__], "DEFAULT_CHAT_TEMPLATE", template)
    files = [folder / name for name in _TEMPLATES if (folder / name).is_file()]
    named = [path for path in files if path.suffix == ".jinja" or "chat_template" in read_json(path)]
    return (named or files)[0], template


def generation_settings(folder: Path, model: Any) -> Any:
    """Return what capvid takes of the generation settings: token ids and the repetition penalty.

    Everything else that steers generation is an option of capvid.

    Args:
        folder: folder of the model.
        model: the model, whose configuration has token ids where there is no ``generation_config.json``.

    Raises:
        CheckpointError: a setting has the wrong type or is out of range.
    """
    from transformers import GenerationConfig

    values: dict[str, Any] = {name: getattr(model.generation_config, name, None) for name in _TOKENS}
    path = folder / CONFIG
    if (folder / GENERATION).is_file():
        path = folder / GENERATION
        values |= read_json(path)
    if (values["pad_token_id"] or 0) == -1:  # means none
        del values["pad_token_id"]
    vocabulary = model.config.get_text_config().vocab_size
    for name, value in values.items():
        ids = [value]
        while any(isinstance(each, list) for each in ids):
            ids = [each for group in ids for each in (group if isinstance(group, list) else [group])]
        low, high = _RANGES.get(name, (0, vocabulary - 1))
        kinds: tuple[type, ...] = (int, float) if isinstance(low, float) else (int,)
        known = name in _RANGES or name in (*_TOKENS, *_SUPPRESSED)
        fits = all(type(each) in kinds and low <= each <= high for each in ids)
        if known and value is not None and not fits:
            problem = f"{path}: {name} must be from {low:g} to {high}, got {short(value)}"
            raise CheckpointError(problem, remedy="ask who published it")
    kept = (*_TOKENS, *_SUPPRESSED, "repetition_penalty")
    with blaming(folder, path.name):
        return GenerationConfig(**{name: values[name] for name in kept if values.get(name) is not None})
