"""A tiny GIT model with random weights in transformers' files, and its outputs in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = "a man woman dog is are run cook play guitar the in on park ball cat two bird sing"
PIECES = "##ning ##s ##ing ##er . ' s"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP = 2, 3
SIDE, FRAMES = 32, 6
PREPROCESS = {  # as in microsoft/git-base-vatex, except for the sizes
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_center_crop": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "VideoMAEImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": SIDE},
}


def save_git(folder: Path, *, seed: int = 11) -> Path:
    """Save the network, its tokenizer and its preprocessing."""
    import torch
    from safetensors.torch import save_file
    from transformers import GitConfig, GitForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *WORDS.split(), *PIECES.split()]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESS))
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GitConfig(
        vision_config=vision | {"image_size": SIDE, "patch_size": 16},
        vocab_size=len(words),
        max_position_embeddings=64,
        bos_token_id=CLS,
        eos_token_id=SEP,
        num_image_with_embedding=FRAMES,
        **sizes,
    )
    generator = torch.Generator().manual_seed(seed)
    network = GitForCausalLM(config)
    with torch.no_grad():  # large weights, so that videos differ in their captions
        for name, parameter in sorted(network.named_parameters()):
            if "orm" not in name.split(".")[-2]:
                parameter.normal_(std=0.4, generator=generator)
        network.output.bias[SEP] += 3
    (folder / "config.json").write_text(config.to_json_string())
    save_file(network.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def respelled(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors to the names of another version of transformers."""
    old, new = "temporal", "temperal"
    if not any(old in name for name in tensors):
        old, new = new, old
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


class Reference:
    """The network run by transformers, on frames read by PyAV and resized by Pillow."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertTokenizerFast, GitForCausalLM

        self.network = GitForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer = BertTokenizerFast.from_pretrained(folder)

    @staticmethod
    def frames(path: Path) -> list[np.ndarray]:
        """Return all frames of a video."""
        import av

        with av.open(str(path)) as container:
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

    @staticmethod
    def spread(frames: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the frames nearest to the centres of six equal parts, repeated if there are fewer."""
        middles = [(number + 0.5) * len(frames) / FRAMES for number in range(FRAMES)]
        return [frames[int(middle + 0.5 * (len(frames) > FRAMES))] for middle in middles]

    @staticmethod
    def pixels(frames: Iterable[np.ndarray]) -> Any:
        """Return the network's input (1, 6, 3, 32, 32): centre crops of the resized frames."""
        import torch
        from PIL import Image

        crops = []
        for frame in frames:
            height, width = frame.shape[:2]
            short = min(height, width)
            size = (int(SIDE * width / short), int(SIDE * height / short))
            picture = np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BILINEAR))
            top, left = (size[1] - SIDE) // 2, (size[0] - SIDE) // 2
            crops.append((picture[top : top + SIDE, left : left + SIDE] / 255 - 0.5) / 0.5)
        return torch.tensor(np.stack(crops).transpose(0, 3, 1, 2)[None], dtype=torch.float32)

    def generate(self, pixels: Any, *, beams: int) -> list[int]:
        """Return the generated token ids, with start and end."""
        output = self.network.generate(
            pixel_values=pixels,
            num_beams=beams,
            do_sample=False,
            max_new_tokens=40,
            early_stopping=beams > 1,  # stops once ``beams`` sentences have ended
            suppress_tokens=[0, 1, CLS],  # never generates padding, unknown and start
        )
        return [int(token) for token in output[0]]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def logprobs(self, pixels: Any, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the start, by one pass per prefix."""
        import torch

        output = []
        for length in range(1, len(tokens)):
            with torch.no_grad():
                logits = self.network(input_ids=torch.tensor([tokens[:length]]), pixel_values=pixels).logits
            output.append(float(logits[0, -1].double().log_softmax(-1)[tokens[length]]))
        return output

    def attention(self, pixels: Any, tokens: Sequence[int]) -> np.ndarray:
        """Return the last layer's attention of each token to the six frames, averaged over the heads."""
        import torch

        with torch.no_grad():
            out = self.network(
                input_ids=torch.tensor([tokens[:-1]]),
                pixel_values=pixels,
                output_attentions=True,
                use_cache=False,
            )
        weights = out.attentions[-1][0].mean(0)  # (S + n, S + n)
        images = weights.shape[1] - len(tokens) + 1
        return weights[images:, :images].reshape(len(tokens) - 1, FRAMES, -1).sum(-1).numpy()
