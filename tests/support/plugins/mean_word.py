"""A toy: the next word from the mean frame and the last word."""

from dataclasses import dataclass

from torch import Tensor, nn

from capvid.captioners.base import CAPTIONERS, Captioner, CaptionerConfig, State, Trace
from capvid.captioners.layers import mean_frame


@dataclass(frozen=True, kw_only=True)
class ToyConfig(CaptionerConfig):
    width: int = 16


@CAPTIONERS.register("mean-word")
class MeanWord(Captioner):
    name = "mean-word"
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.frame = nn.Linear(config.feature_width, config.width)
        self.word = nn.Embedding(config.vocabulary_size, config.width)
        self.vocabulary = nn.Linear(config.width, config.vocabulary_size)

    def encode(self, features: Tensor, mask: Tensor) -> State:
        frames = self.standardise(features) * mask.unsqueeze(-1)
        return State({"mean": self.frame(mean_frame(frames, mask))}, {})

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State, Trace]:
        mean = state.video["mean"]
        mean = mean.repeat_interleave(len(tokens) // len(mean), 0)
        return self.logits(mean + self.word(tokens)), state, {}

    def teacher_forced(self, features: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        mean = self.encode(features, mask).video["mean"]
        return mean.repeat_interleave(len(tokens) // len(mean), 0).unsqueeze(1) + self.word(tokens)
