"""The network of the packaged segmenter: MobileNetV2 features and a small decoder that is told where the
object is.

The encoder sees the picture alone, so its features serve many prompts. The decoder compares them with those
at the prompt, goes from coarse to fine (as in Lin et al. 2017, feature pyramids), and returns three masks,
since a point is ambiguous between a part and the whole, each with its expected IoU (both as in Kirillov et
al. 2023, Segment Anything).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = 24, 32, 96, 320
"""Channels of the encoder's features at strides 4, 8, 16 and 32."""
MASKS = 3

_BLOCKS = [
    # (expansion, channels, stride) of MobileNetV2 (Sandler et al. 2018)
    (1, 16, 1), (6, 24, 2), (6, 24, 1), (6, 32, 2), (6, 32, 1), (6, 32, 1), (6, 64, 2), (6, 64, 1), (6, 64, 1), (6, 64, 1),
    (6, 96, 1), (6, 96, 1), (6, 96, 1), (6, 160, 2), (6, 160, 1), (6, 160, 1), (6, 320, 1),
]  # fmt: skip
_TAPS = 2, 5, 12, 16
"""Blocks whose output is a feature."""


class Conv(nn.Module):
    """A convolution as Keras pads it: strides of two pad at the right and bottom only.

    With ``relu6``, the activation follows.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, relu6: bool = True
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            inputs, outputs, kernel, stride, 0 if stride == 2 else kernel // 2, groups=groups
        )
        self.stride, self.relu6 = stride, relu6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve float32 [N, C, H, W]."""
        x = self.conv(F.pad(x, (0, 1, 0, 1)) if self.stride == 2 else x)
        return F.relu6(x) if self.relu6 else x


class Encoder(nn.Module):
    """MobileNetV2 without its classifier, batch normalisation folded: float32 [N, 3, H, W] in -1..1 to
    features of CHANNELS.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = Conv(3, 32, 3, 2)
        self.blocks = nn.ModuleList()
        inputs = 32
        for expansion, outputs, stride in _BLOCKS:
            inner = inputs * expansion
            layers = [] if expansion == 1 else [Conv(inputs, inner, 1)]
            layers += [Conv(inner, inner, 3, stride, groups=inner), Conv(inner, outputs, 1, relu6=False)]
            self.blocks.append(nn.Sequential(*layers))
            inputs = outputs

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Features at strides 4, 8, 16 and 32."""
        features = []
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = x + y if x.shape == y.shape else y
            if number in _TAPS:
                features.append(x)
        return features


def load(path: Path) -> Segmenter:
    """Load the network from an exported graph, to train it further."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    model = Segmenter(Encoder(), Decoder())
    state = {
        name: torch.tensor(values)
        for name, values in tensors.items()
        if name.startswith(("encoder.", "decoder."))
    }
    for node in graph.node:
        # An exporter that folded a batch normalisation renamed the weights of the convolution, but not its
        # node.
        if node.op_type == "Conv" and node.input[1] not in state:
            parts = node.name.strip("/").split("/")
            module = ".".join(a for a, b in itertools.pairwise(parts) if not b.startswith(f"{a}."))
            state[f"{module}.weight"], state[f"{module}.bias"] = (
                torch.tensor(tensors[name]) for name in node.input[1:3]
            )
    first = state["decoder.score.0.weight"]
    missing = model.decoder.state_dict()["score.0.weight"].shape[1] - first.shape[1]
    # Older weights knew fewer numbers: what is new has no influence at first.
    state["decoder.score.0.weight"] = F.pad(first, (0, missing))
    model.load_state_dict(state)
    return model


class Separable(nn.Module):
    """A residual depthwise-separable block."""

    def __init__(self, width: int, kernel: int, expansion: int = 1):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.expand = nn.Conv2d(width, expansion * width, 1)
        self.project = nn.Conv2d(expansion * width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps the shape."""
        return x + self.project(F.relu(self.expand(self.depthwise(x))))


class Decoder(nn.Module):
    """From features, picture and prompt to masks and their expected IoU."""

    WIDTHS = 32, 48, 64, 64
    """Channels of each level."""

    def __init__(self, compare: int = 32, fine: int = 12):
        super().__init__()
        widths = self.WIDTHS
        query, extra = sum(widths), 3 + len(CHANNELS)
        self.lateral = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, w, 1)) for c, w in zip(CHANNELS, widths, strict=True)
        )
        self.compare = nn.ModuleList(nn.Conv2d(c, compare, 1) for c in CHANNELS)
        self.film = nn.ModuleList(
            nn.Sequential(nn.Linear(query, 64), nn.ReLU(), nn.Linear(64, 2 * w)) for w in widths
        )
        self.enter = nn.ModuleList(
            nn.Conv2d(w + above + extra, w, 1) for w, above in zip(widths, (*widths[1:], 0), strict=True)
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Separable(w, 5, min(level + 1, 2)) for _ in range(2 if level > 1 else 1)))
            for level, w in enumerate(widths)
        )
        self.stem = nn.Sequential(nn.Conv2d(3, fine, 3, 2, 1), nn.ReLU())
        self.narrow = nn.Conv2d(widths[0], fine, 1)
        self.last = nn.Sequential(
            nn.Conv2d(2 * fine + 1, 16, 1), nn.ReLU(), Separable(16, 3), nn.ReLU(), nn.Conv2d(16, MASKS, 1)
        )
        self.score = nn.Sequential(
            nn.Linear(3 * widths[0] + 7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(
        self, picture: torch.Tensor, features: list[torch.Tensor], prompt: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masks and scores: logits [N, MASKS, S/2, S/2] and expected IoU [N, MASKS] before the sigmoid.

        ``picture``: [N, 3, S, S] in -1..1; ``prompt``: [N, 3, S/4, S/4], see
        ``pixelis.operations.mobilenet.prompt``.
        """
        prompts = [prompt]
        for _ in features[1:]:
            prompts.append(F.avg_pool2d(prompts[-1], 2))
        lateral = [layer(f) for layer, f in zip(self.lateral, features, strict=True)]
        query = torch.cat([_pooled(x, p[:, :1]) for x, p in zip(lateral, prompts, strict=True)], 1)
        similar = []
        for layer, feature, p in zip(self.compare, features, prompts, strict=True):
            x = layer(feature)
            x = x / (x.square().mean(1, keepdim=True) + 1e-4).sqrt()
            reference = _pooled(x, p[:, :1])
            similar.append((x * reference[:, :, None, None]).mean(1, keepdim=True))
        x = lateral[-1]
        for level in reversed(range(len(features))):
            height, width = features[level].shape[-2:]
            scale, shift = self.film[level](query)[:, :, None, None].chunk(2, 1)
            maps = [F.interpolate(s, (height, width), mode="bilinear", align_corners=False) for s in similar]
            parts = [lateral[level] * (1 + scale) + shift, prompts[level], *maps]
            if level < len(features) - 1:
                parts.append(F.interpolate(x, (height, width), mode="bilinear", align_corners=False))
            x = self.blocks[level](F.relu(self.enter[level](torch.cat(parts, 1))))
        side = (2 * x.shape[-2], 2 * x.shape[-1])
        colours = F.avg_pool2d(picture, 2)
        reference = _pooled(F.avg_pool2d(colours, 2), prompt[:, :1])
        distance = (colours - reference[:, :, None, None]).square().sum(1, keepdim=True).add(1e-4).sqrt()
        parts = [
            F.interpolate(self.narrow(x), side, mode="bilinear", align_corners=False),
            self.stem(picture),
            distance,
        ]
        logits = self.last(torch.cat(parts, 1))
        return logits, self._scores(x.detach(), query.detach(), logits.detach(), prompt[:, 2:])

    def _scores(
        self, x: torch.Tensor, query: torch.Tensor, logits: torch.Tensor, box: torch.Tensor
    ) -> torch.Tensor:
        scores = []
        size = box.mean((2, 3))
        fine = torch.sigmoid(logits)
        coarse = F.avg_pool2d(fine, 2)
        width = x.shape[1]
        for k in range(MASKS):
            inside, p = coarse[:, k : k + 1], fine[:, k : k + 1]
            area = p.mean((2, 3))
            doubt = (p * (1 - p)).mean((2, 3))
            hard = torch.sigmoid(20 * (p - 0.5))
            agreement = (p * hard).sum((2, 3)) / (torch.maximum(p, hard).sum((2, 3)) + 1)
            # How much of the mask is in the box, and of the box in the mask: a box may hold no object.
            # Without a box all are 0.
            both = (inside * box).mean((2, 3))
            fit = [both / (area + 1e-3), both / (size + 1e-3), size]
            numbers = [area.add(1e-4).log(), doubt / (area + 1e-3), agreement, area, *fit]
            pooled = [_pooled(x, inside), _pooled(x, 1 - inside), query[:, :width]]
            scores.append(self.score(torch.cat([*pooled, *numbers], 1)))
        return torch.cat(scores, 1)


class Segmenter(nn.Module):
    """Encoder and decoder as one graph, for export: uint8-valued float [1, S, S, 3] and prompt to
    probabilities and scores.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, picture: torch.Tensor, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities [1, MASKS, S/2, S/2] and expected IoU [1, MASKS]."""
        x = picture.permute(0, 3, 1, 2) / 127.5 - 1
        logits, scores = self.decoder(x, self.encoder(x), prompt)
        return torch.sigmoid(logits), torch.sigmoid(scores)


def _pooled(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of [N, C, H, W] weighted by [N, 1, H, W]: [N, C]."""
    return (x * weights).sum((2, 3)) / (weights.sum((2, 3)) + 1e-4)
