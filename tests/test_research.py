"""The programs in research/, which make bundled weights."""

from __future__ import annotations

import torch
from fold_backbone import fold

from capvid.backbones.capvid_small import CapvidSmall


@torch.inference_mode()
def test_folded_weights_compute_what_timm_does() -> None:
    import timm

    torch.manual_seed(0)
    network = timm.create_model("tf_efficientnet_lite2", num_classes=0).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.6, 1.6)
    images = torch.rand(1, 3, 64, 128) * 2 - 1
    ours = CapvidSmall()
    ours.load_state_dict(fold(network.state_dict()))
    expected = network(images)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(images), expected, atol=0.03, rtol=0.03)  # half precision
