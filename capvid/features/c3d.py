"""C3D, the 3D CNN of the papers' motion features ``fc6``, as its authors' Caffe computes it.

Tran et al., Learning Spatiotemporal Features with 3D Convolutional Networks, ICCV 2015 (arXiv:1412.0767),
Figure 3: eight convolutions 3 x 3 x 3, five max-poolings, two fully connected layers of 4096. What Caffe adds
to the figure: pooling sizes are rounded up, which only ``pool5`` feels (7 x 7 places become 4 x 4).

Notation for tensor shapes: N clips, C channels, T frames of a clip, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn import functional as F

# convolutions in their order: (channels in, channels out)
_CONVOLUTIONS: dict[str, tuple[int, int]] = {
    "conv1a": (3, 64),
    "conv2a": (64, 128),
    "conv3a": (128, 256),
    "conv3b": (256, 256),
    "conv4a": (256, 512),
    "conv4b": (512, 512),
    "conv5a": (512, 512),
    "conv5b": (512, 512),
}
_POOL_BEFORE = {"conv2a": (1, 2, 2), "conv3a": (2, 2, 2), "conv4a": (2, 2, 2), "conv5a": (2, 2, 2)}
LAYERS = ("conv5b", "fc6", "fc7")


class C3D(nn.Module):
    """C3D up to ``fc7``, its parameters named by the layers of the paper."""

    def __init__(self) -> None:
        super().__init__()
        for name, (width_in, width_out) in _CONVOLUTIONS.items():
            self.add_module(name, nn.Conv3d(width_in, width_out, 3, padding=1))
        self.fc6 = nn.Linear(512 * 4 * 4, 4096)
        self.fc7 = nn.Linear(4096, 4096)

    def forward(self, clips: Tensor, layers: Collection[str] = ("fc6",)) -> dict[str, Tensor]:
        """Compute the layers asked for, each after its ReLU.

        Args:
            clips: (N, 3, 16, 112, 112), BGR 0..255 minus the mean of Sports-1M.
            layers: names out of ``LAYERS``.

        Returns:
            By name: ``conv5b`` (N, 98, 512), 2 x 7 x 7 places, frame by frame and row by row; ``fc6`` and
            ``fc7`` (N, 4096).
        """
        x = clips
        for name in _CONVOLUTIONS:
            if name in _POOL_BEFORE:
                x = F.max_pool3d(x, _POOL_BEFORE[name])
            x = F.relu_(self.get_submodule(name)(x))
        found = {"conv5b": x.flatten(2).transpose(1, 2)}  # x (N, 512, 2, 7, 7)
        if set(layers) - {"conv5b"}:
            # a window that hangs over the edge counts, as in Caffe: (N, 512, 1, 4, 4)
            pooled = F.max_pool3d(x, 2, ceil_mode=True)
            found["fc6"] = F.relu(self.fc6(pooled.flatten(1)))
            if "fc7" in layers:
                found["fc7"] = F.relu(self.fc7(found["fc6"]))
        return {layer: found[layer] for layer in layers}
