"""Checkpoints of the MART authors' code (``.chkpt``) for :mod:`capvid.captioners.authors_layout`.

Supported are MART, with and without recurrence, and Transformer-XL, if word and output weights are not
shared, and the masked transformer. ``model_cfg`` and ``opt`` of a checkpoint are an EasyDict and a Namespace;
an OrderedDict and an empty class stand in for them while the file is read, and nothing else but tensors and
plain values is unpickled. The vocabulary is not in the checkpoint but in their ``word2idx.json``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capvid.backbones.catalog import StreamHeader
from capvid.captioners.base import sketch
from capvid.captioners.checkpoint import Checkpoint
from capvid.errors import CapvidError, CheckpointError, UsageError
from capvid.features.feature_file import FeatureHeader
from capvid.text.vocabulary import Vocabulary
from capvid.utils.files import read_regular
from capvid.utils.tensor_files import load_plain
from capvid.utils.validation import MIB, parse_json
from capvid.version import __version__

PAD, CLS, SEP, VID, BOS, EOS, UNK = range(7)  # the authors' special tokens
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[VID]", "[BOS]", "[EOS]", "[UNK]")
SPECIAL_ROWS = (PAD, BOS, EOS, UNK)  # of these capvid has four, and the others are no words
_UNUSED = re.compile(
    r"loss_func\.one_hot|embeddings\.position_embeddings\.pe|encoder\.pos_emb\.inv_freq|.*\.memory_intermediate\..*"
)
_LAYER = r"^encoder\.layers?\.(\d+)\."
# parts of names to replace, in this order
_NAMES = {
    r"^encoder\.r_w_bias": "content_bias",
    r"^encoder\.r_r_bias": "position_bias",
    _LAYER + r"dec_attn\.o_net\.": r"layers.\1.attention.output.",
    _LAYER + r"dec_attn\.layer_norm\.": r"layers.\1.attention_norm.",
    _LAYER + r"pos_ff\.CoreNet\.": r"layers.\1.feed_forward.",
    _LAYER + r"pos_ff\.layer_norm\.": r"layers.\1.feed_forward_norm.",
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

# the same of the masked transformer, all of them
_MASKED_NAMES = {
    r"\.gamma$": ".weight",
    r"\.beta$": ".bias",
    r"^decoder\.out\.": "vocabulary.",
    r"^encoder\.video_embeddings\.": "frame.",
    r"coder\.layers\.": "coder.",
    r"\.feedforward\.layer\.linear1\.": ".feed_forward.0.",
    r"\.feedforward\.layer\.linear2\.": ".feed_forward.2.",
    r"\.feedforward\.layernorm\.": ".feed_forward_norm.",
    r"\.attention\.layernorm\.": ".cross_norm.",
    r"\.attention\.layer\.": ".cross_attention.",
    r"\.selfattn\.layernorm\.": ".attention_norm.",
    r"\.selfattn\.layer\.": ".attention.",
    r"\.wq\.": ".query.",
    r"\.wk\.": ".key.",
    r"\.wv\.": ".value.",
    r"\.wo\.": ".output.",
}


def from_authors(tensors: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors of our captioner, by its names.

    Args:
        tensors: ``state_dict`` of the authors' RecursiveTransformer, NonRecurTransformer,
            TransformerXL or MTransformer.
        rows: their number of each word of the vocabulary.

    Raises:
        KeyError: a tensor is missing.
        IndexError: a tensor has fewer rows than there are words.
        ValueError: an unknown tensor, or one without finite numbers.
    """
    left = {name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}
    for name, tensor in left.items():
        numbers = isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.is_meta
        if not numbers or not tensor.isfinite().all():
            raise ValueError(f"{name[:100]!r} does not hold finite numbers")
        left[name] = tensor.float()  # a checkpoint may be in half precision
    index = torch.tensor(rows)
    if "decoder.out.weight" in left:
        return _from_masked_transformer(left, index)
    words = left.pop("embeddings.word_embeddings.weight")
    result = {
        "embedding.weight": words[index],
        "mark_embedding": words[[CLS, SEP, VID]],
        "vocabulary.weight": left.pop("decoder.decoder.weight")[index],
        "vocabulary.bias": left.pop("decoder.bias")[index],
    }
    for name in [name for name in left if name.endswith("dec_attn.qkv_net.weight")]:
        layer = f"layers.{re.sub(r'[^0-9]', '', name)}.attention"
        for kind, part in zip(("query", "key", "value"), left.pop(name).chunk(3), strict=True):
            result[f"{layer}.{kind}.weight"] = part
        # their encodings are all sines, then all cosines; ours take turns
        halves = left.pop(name.replace("qkv_net", "r_net")).chunk(2, -1)
        result[f"{layer}.relative.weight"] = torch.stack(halves, -1).flatten(-2)
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


def _from_masked_transformer(tensors: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a vanilla transformer from those of their MTransformer."""
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _MASKED_NAMES.items():
            name = re.sub(pattern, replacement, name)
        result[name] = tensor[index] if name.startswith("vocabulary.") else tensor
    return result


class StandIn:
    """Values of a Namespace."""


_STAND_INS = {"easydict.EasyDict": OrderedDict, "argparse.Namespace": StandIn}
# our option by the name in model_cfg
_OPTIONS = {
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "intermediate_size": "feed_forward",
    "word_vec_size": "word_width",
    "hidden_dropout_prob": "dropout",
    "video_feature_size": "feature_width",
    "max_v_len": "text_start",
    "max_t_len": "text_length",
}
_FEATURES = {3072: (2048, 1024)}  # streams of the authors' features: ResNet-200, BN-Inception


def read_words(path: Path) -> tuple[Vocabulary, list[int]]:
    """Return the vocabulary of a ``word2idx.json``, and the authors' number of each word.

    Raises:
        UsageError: the file cannot be read or is no such file.
    """
    try:
        content = parse_json(read_regular(path, max_bytes=32 * MIB).decode("utf-8"))
        words = sorted(content, key=content.__getitem__)
        if [content[word] for word in words] != list(range(len(words))) or tuple(words[:7]) != _SPECIAL:
            raise ValueError(f"expected the numbers from 0 on, {', '.join(_SPECIAL)} first")
        vocabulary = Vocabulary.checked(Vocabulary(words[len(_SPECIAL) :]).words)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path}: not a word2idx.json of the MART authors ({error})") from error
    return vocabulary, [*SPECIAL_ROWS, *range(len(_SPECIAL), len(words))]


def read_authors_checkpoint(path: Path, words: Path) -> Checkpoint:
    """Read a checkpoint of the authors' code as a captioner.

    Args:
        path: the ``.chkpt`` file.
        words: their ``word2idx.json``.

    Raises:
        CheckpointError: another file, a model that is not supported, or one of other words.
        UsageError: ``words`` cannot be read.
    """
    vocabulary, rows = read_words(words)
    content = load_plain(path, _STAND_INS)
    try:
        tensors, stored = content["model"], content["model_cfg"]
        config: dict[str, Any] = {ours: stored[theirs] for theirs, ours in _OPTIONS.items()}
        masked = "decoder.out.weight" in tensors
        count = len(tensors["decoder.out.weight" if masked else "embeddings.word_embeddings.weight"])
        if len(rows) + 3 != count:
            raise ValueError(f"it has {count} words, and {words.name} {len(rows) + 3}")
        if min(config["text_start"], config["text_length"]) < 3:
            raise ValueError("no room for frames or words")
        config |= {"vocabulary_size": len(vocabulary)}
        if "encoder.r_w_bias" in tensors:
            own = {"recurrent_gradient": bool(stored["xl_grad"]), "feed_forward": config["hidden"]}
            name = "transformer-xl-authors"
        elif masked:
            own, name = {}, "vanilla-transformer-authors"
        else:
            own = {"recurrence": any("memory_updater" in name for name in tensors)}
            own, name = own | {"memory_length": stored["n_memory_cells"]}, "mart-authors"
        captioner = sketch(name, config | own)
        captioner.load_state_dict(from_authors(tensors, rows), assign=True)
    except (LookupError, ValueError, TypeError, RuntimeError, CapvidError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: not a checkpoint of the MART authors' code ({reason})",
            remedy="give one of their train.py, and the word2idx.json it was trained with",
        ) from error
    captioner.function_words = vocabulary.function_words
    widths = _FEATURES.get(config["feature_width"], (config["feature_width"],))
    streams = tuple([StreamHeader(backbone=None, layer=None, width=width) for width in widths])
    header = FeatureHeader(
        streams=streams, sampling=None, reader=None, dtype="float32", capvid_version=__version__
    )
    info = {
        "recipe": f"{name.removesuffix('-authors')}-activitynet-authors",
        "max_frames": config["text_start"] - (0 if masked else 2),
        "frames": "even",
        "max_segments": 10_000,
        "max_words": config["text_length"] - 2,
        "decoding": {"beam_size": 1, "max_length": config["text_length"] - 1},
    }
    return Checkpoint(captioner=captioner.eval(), vocabulary=vocabulary, header=header, name=name, info=info)
