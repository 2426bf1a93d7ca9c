"""Score each frame by how well words describe it: values for the key-value memory.

    python examples/concept_scores.py features/ concepts.txt concepts.safetensors

reads CLIP embeddings that ``capvid extract --backbone clip-vit-l14`` wrote, and words, one per line. The text
side of the same CLIP embeds "a photo of WORD"; the scores of a frame are the softmax over the words of 100
times the cosine similarities, as in Radford et al., ICML 2021. It writes a tensor (frames, words) per video.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPTextModelWithProjection, CLIPTokenizer


@torch.inference_mode()
def embed_words(words: list[str], model: str) -> Tensor:
    """Return the embeddings (C, D) of C words, of length 1."""
    texts = [f"a photo of {word}" for word in words]
    tokens = CLIPTokenizer.from_pretrained(model)(texts, padding=True, return_tensors="pt")
    return normalize(CLIPTextModelWithProjection.from_pretrained(model)(**tokens).text_embeds, dim=-1)


def score_frames(images: Tensor, words: Tensor) -> Tensor:
    """Return the scores (T, C) of the words with embeddings (C, D) for frames with embeddings (T, D)."""
    return (100 * normalize(images.float(), dim=-1) @ words.T).softmax(-1)


def main(features: Path, concepts: Path, output: Path, model: str) -> None:
    """Write the scores of all videos with features in a folder."""
    words = embed_words(concepts.read_text(encoding="utf-8").splitlines(), model)
    paths = sorted(features.rglob("*.safetensors"))
    ids = [path.relative_to(features).with_suffix("").as_posix() for path in paths]
    scores = {
        name: score_frames(load_file(path)["stream0"], words) for name, path in zip(ids, paths, strict=True)
    }
    save_file(scores, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("features", "concepts", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument(
        "--model", default="openai/clip-vit-large-patch14", help="the same CLIP, or its folder"
    )
    main(**vars(parser.parse_args()))
