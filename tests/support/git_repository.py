"""A tiny GIT with random weights in the files of transformers, and what transformers says by it."""

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
PREPROCESS = {  # of microsoft/git-base-vatex but for the sizes
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
    """Save the network, its tokenizer and how frames are prepared."""
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
    """The tensors under the names that another version of transformers has for them."""
    here, there = "temporal", "temperal"
    if not any(here in name for name in tensors):
        here, there = there, here
    return {name.replace(here, there): tensor for name, tensor in tensors.items()}


class Reference:
    """The same network as transformers runs it, on frames that PyAV reads and Pillow resizes."""

    def __init__(self, folder: Path) -> None:
        from transformers import BertTokenizerFast, GitForCausalLM

        self.network = GitForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer = BertTokenizerFast.from_pretrained(folder)

    @staticmethod
    def frames(path: Path) -> list[np.ndarray]:
        """All frames of a video."""
        import av

        with av.open(str(path)) as container:
            return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]

    @staticmethod
    def spread(frames: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The six frames that begin nearest to the middles of equal parts; of fewer some several times."""
        middles = [(number + 0.5) * len(frames) / FRAMES for number in range(FRAMES)]
        return [frames[int(middle + 0.5 * (len(frames) > FRAMES))] for middle in middles]

    @staticmethod
    def pixels(frames: Iterable[np.ndarray]) -> Any:
        """The network's input (1, 6, 3, 32, 32): the whole frame resized, its centre cut out."""
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
        """What transformers writes, as the tokenizer's numbers with start and end."""
        found = self.network.generate(
            pixel_values=pixels,
            num_beams=beams,
            do_sample=False,
            max_new_tokens=40,
            early_stopping=beams > 1,  # as soon as so many sentences have ended
            suppress_tokens=[0, 1, CLS],  # padding, unknown and start are never said
        )
        return [int(token) for token in found[0]]

    def text(self, tokens: Sequence[int]) -> str:
        """The sentence of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def logprobs(self, pixels: Any, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each token after the start, by a pass over all before it."""
        import torch

        found = []
        for length in range(1, len(tokens)):
            with torch.no_grad():
                logits = self.network(input_ids=torch.tensor([tokens[:length]]), pixel_values=pixels).logits
            found.append(float(logits[0, -1].double().log_softmax(-1)[tokens[length]]))
        return found

    def attention(self, pixels: Any, tokens: Sequence[int]) -> np.ndarray:
        """What each token but the last sees of the six frames: the last layer's weights, the heads' mean."""
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
