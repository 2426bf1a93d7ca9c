"""Weights of the MART authors' code, named as the captioners of ``layout = "authors"`` name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PAD, CLS, SEP, VID, BOS, EOS, UNK = range(7)  # the authors' special tokens
SPECIAL_ROWS = (PAD, BOS, EOS, UNK)  # of these capvid has four, and the others are no words
_UNUSED = re.compile(
    r"loss_func\.one_hot|embeddings\.position_embeddings\.pe|encoder\.pos_emb\.inv_freq|.*\.memory_intermediate\..*"
)
_LAYER = r"^encoder\.layers?\.(\d+)\."
# parts of names to replace, in this order
_NAMES = {
    r"^embeddings\.word_fc\.": "word.",
    r"^embeddings\.video_embeddings\.": "frame.",
    r"^embeddings\.token_type_embeddings\.weight": "type_embedding",
    r"^embeddings\.LayerNorm\.": "token_norm.",
    r"^decoder\.transform\.dense\.": "transform.0.",
    r"^decoder\.transform\.LayerNorm\.": "transform.2.",
    _LAYER + r"attention\.self\.": r"layers.\1.attention.",
    _LAYER + r"attention\.output\.dense\.": r"layers.\1.attention.output.",
    _LAYER + r"attention\.output\.LayerNorm\.": r"layers.\1.attention_norm.",
    _LAYER + r"hidden_intermediate\.dense\.": r"layers.\1.feed_forward.0.",
    _LAYER + r"memory_initilizer\.init_memory_bias": r"layers.\1.slots",
    _LAYER + r"memory_initilizer\.init_memory_fc\.": r"layers.\1.first.",
    _LAYER + r"memory_updater\.memory_update_attention\.": r"layers.\1.updater.attention.",
    _LAYER + r"memory_augmented_attention\.": r"layers.\1.memory_attention.",
    _LAYER + r"memory_projection\.": r"layers.\1.memory_attention.output.",
    _LAYER + r"output\.dense\.": r"layers.\1.feed_forward.2.",
    _LAYER + r"output\.LayerNorm\.": r"layers.\1.feed_forward_norm.",
}


def from_authors(tensors: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors of MART, by the names of :mod:`capvid.captioners.mart`.

    Args:
        tensors: ``state_dict`` of the authors' RecursiveTransformer or NonRecurTransformer.
        rows: their number of each word of the vocabulary.

    Raises:
        KeyError: a tensor is missing.
        ValueError: an unknown tensor.
    """
    left = {name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}
    words, index = left.pop("embeddings.word_embeddings.weight"), torch.tensor(rows)
    result = {
        "embedding.weight": words[index],
        "mark_embedding": words[[CLS, SEP, VID]],
        "vocabulary.weight": left.pop("decoder.decoder.weight")[index],
        "vocabulary.bias": left.pop("decoder.bias")[index],
    }
    for prefix in sorted(
        {match[0] for name in left if (match := re.match(_LAYER + r"memory_updater\.", name))}
    ):
        name = f"layers.{re.sub(r'[^0-9]', '', prefix)}.updater"
        result[f"{name}.memory.weight"] = torch.cat([left.pop(f"{prefix}m{gate}.weight") for gate in "cz"])
        for kind in ("weight", "bias"):
            result[f"{name}.summary.{kind}"] = torch.cat(
                [left.pop(f"{prefix}s{gate}.{kind}") for gate in "cz"]
            )
    for name, tensor in left.items():
        for pattern, replacement in _NAMES.items():
            renamed, count = re.subn(pattern, replacement, name)
            if count:
                result[renamed] = tensor.squeeze(0) if renamed.endswith(".slots") else tensor
                break
        else:
            raise ValueError(f"unknown tensor {name[:100]!r}")
    return result
