"""GIT: a generative image-to-text transformer (Wang et al., TMLR 2022, arXiv:2205.14100), as published.

One transformer for the frames' tokens and the text: the frames see each other, a word sees all frames and the
words before it (section 3.1, the seq2seq mask). The frames' tokens come from GIT's image encoder, to which a
vector for the frame's place in the video is added. The layers are those of transformers; here they are gone
through word by word, so that the frames' keys and values are computed once for a video and are shared by all
of its captions.

Notation for tensor shapes: B captions, V videos of K captions each, T frames, F frames that the network was
trained on, L locations, S = F * L tokens of the frames, n words, H heads, d width of a head, Z of the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from capvid.captioners.base import Captioner, CaptionerConfig, State, Trace
from capvid.captioners.layers import at_least_one_frame

FRAME_PLACES = ("img_temporal_embedding", "img_temperal_embedding")  # versions of transformers spell it so


class GIT(Captioner):
    """GIT of transformers as a captioner of the tokens (T, L, D) of frames.

    Args:
        config: the vocabulary's size, and L and D of the frames' tokens.
        network: ``GitForCausalLM`` of transformers.
        frames: F; of more the middles of F equal slices are taken, and of fewer some several times.
        order: the network's number for each token of the vocabulary.
    """

    name = "git"
    config_class = CaptionerConfig
    order: Tensor

    def __init__(self, config: CaptionerConfig, network: Any, *, frames: int, order: list[int]) -> None:
        super().__init__(config)
        self.network = network
        self.frames = frames
        self.register_buffer("order", torch.tensor(order), persistent=False)

    @classmethod
    def needs_maps(cls, config: Any) -> bool:
        """It looks at the tokens of each frame."""
        return True

    def encode(self, features: Tensor, mask: Tensor) -> State:
        """Features (B, T, L, D) and mask (B, T) of real frames -> the state, with their keys and values."""
        features, mask = at_least_one_frame(features, mask)
        git, (locations, width) = self.network.git, features.shape[2:]
        places = torch.arange(self.frames, device=features.device)
        chosen = (2 * places + 1) * mask.sum(1, keepdim=True) // (2 * self.frames)  # (B, F) middles of slices
        index = chosen[..., None, None].expand(-1, -1, locations, width)
        tokens = features.gather(1, index)  # (B, F, L, D)
        added = [getattr(git, name) for name in FRAME_PLACES if hasattr(git, name)]
        if added:
            tokens = tokens + torch.cat(list(added[0]))  # (F, 1, D)
        x = git.visual_projection(tokens.flatten(1, 2))  # (B, S, Z)
        # Which of the frames given each frame taken is: (B, F, T).
        video = {"frames": F.one_hot(chosen, features.shape[1]).to(features.dtype)}
        layers = list(enumerate(git.encoder.layer))
        for number, layer in layers:
            query, keys, values = self._heads(layer, x)
            video |= {f"keys.{number}": keys, f"values.{number}": values}
            if number < len(layers) - 1:  # nothing sees what the last layer makes of the frames
                x = _finished(layer, F.scaled_dot_product_attention(query, keys, values), x)
        return State(video, {})

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        """Read one word per caption; the trace has the last layer's weights of the frames."""
        hidden, memory, weights = self._read(tokens.unsqueeze(1), state)
        # the mean of the heads, and the sum of a frame's tokens
        on_frames = weights[:, :, 0].mean(1).unflatten(-1, (self.frames, -1)).sum(-1)  # (B, F)
        frames = state.video["frames"]  # (V, F, T)
        attention = (on_frames.unflatten(0, (len(frames), -1)) @ frames).flatten(0, 1)  # (B, T)
        return self.logits(hidden.squeeze(1)), state.after(memory), {"attention": attention}

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        """(B, L, Z) after each of ``tokens`` (B, L); each video serves as many captions in a row."""
        state = self.encode(features, mask).expand(len(tokens) // len(features))
        return self._read(tokens, state)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the vocabulary in its own order: (..., Z) -> (..., V)."""
        logits: Tensor = self.network.output(hidden)[..., self.order]
        return logits

    def _read(self, tokens: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Read words ``tokens`` (B, n), each of which sees the frames and the words before it.

        Returns:
            what the vocabulary layer sees (B, n, Z), the keys and values of all words so far, and the last
            layer's weights of the frames' tokens (B, H, n, S).
        """
        git, count = self.network.git, tokens.shape[1]
        positions = torch.arange(state.words, state.words + count, device=tokens.device)
        x = git.embeddings(input_ids=self.order[tokens], position_ids=positions.unsqueeze(0))  # (B, n, Z)
        later = torch.ones(count, state.words + count, dtype=torch.bool, device=x.device)
        later = later.triu(state.words + 1)  # (n, words so far)
        captions = len(tokens) // len(state.video["frames"])
        memory: dict[str, Tensor] = {}
        weights = x
        for number, layer in enumerate(git.encoder.layer):
            query, keys, values = self._heads(layer, x)  # (B, H, n, d)
            if state.memory:
                keys = torch.cat([state.memory[f"keys.{number}"], keys], 2)
                values = torch.cat([state.memory[f"values.{number}"], values], 2)
            memory |= {f"keys.{number}": keys, f"values.{number}": values}
            seen, shown = (state.video[f"{what}.{number}"] for what in ("keys", "values"))
            query = query * query.shape[-1] ** -0.5
            on_frames = _apart(_together(query, captions) @ seen.transpose(-1, -2), captions)  # (B, H, n, S)
            on_words = (query @ keys.transpose(-1, -2)).masked_fill(later, float("-inf"))
            weights, among = (
                torch.cat([on_frames, on_words], -1)
                .softmax(-1)
                .split([on_frames.shape[-1], on_words.shape[-1]], -1)
            )
            context = _apart(_together(weights, captions) @ shown, captions) + among @ values
            x = _finished(layer, context, x)
        return x, memory, weights

    @staticmethod
    def _heads(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, n, d) of a layer for what it sees (B, n, Z)."""
        attention = layer.attention.self
        query, keys, values = (
            part(x).unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        return query, keys, values


def _finished(layer: Any, context: Tensor, x: Tensor) -> Tensor:
    """The rest of a layer after its attention: (B, H, n, d) and what went in (B, n, Z) -> (B, n, Z)."""
    x = layer.attention.output(context.transpose(1, 2).flatten(2), x)
    finished: Tensor = layer.output(layer.intermediate(x), x)
    return finished


def _together(tensor: Tensor, captions: int) -> Tensor:
    """Captions of a video behind each other: (V K, H, n, d) -> (V, H, K n, d)."""
    return tensor.unflatten(0, (-1, captions)).transpose(1, 2).flatten(2, 3)


def _apart(tensor: Tensor, captions: int) -> Tensor:
    """Captions of a video in rows of their own again: (V, H, K n, d) -> (V K, H, n, d)."""
    return tensor.unflatten(2, (captions, -1)).transpose(1, 2).flatten(0, 1)
