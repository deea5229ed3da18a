"""Small networks of every build, and every operation that has a rule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lipbound.robust.models import ResNet, WideResNet


class Run(nn.Module):
    """Layers by name and a function of them and the input."""

    def __init__(self, forward, **layers: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._run = forward

    def forward(self, x: Tensor):
        return self._run(self, x)


def conv(i: int, o: int, k: int = 3, **options) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=options.pop("padding", k // 2), **options)


def unit(i: int, o: int, k: int = 3, **options) -> nn.Sequential:
    return nn.Sequential(conv(i, o, k, bias=False, **options), nn.BatchNorm2d(o), nn.ReLU())


def head(n: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 5))


def squeeze_excite(m, x):
    x = m.conv(x)
    return x * torch.sigmoid(m.gate(x.mean((2, 3), keepdim=True)))


def dense(m, x):
    for layer in (m.a, m.b, m.c):
        x = torch.cat([x, layer(x)], 1)
    return m.head(x)


def unet(m, x):
    one = m.one(x)
    two = m.two(F.max_pool2d(one, 2))
    return m.out(torch.cat([one, m.up(two)], 1))


def shuffle(m, x):
    left, right = m.stem(x).chunk(2, 1)
    return m.head(F.channel_shuffle(torch.cat([left, m.branch(right)], 1), 2))


def normalized(m, x):
    mean = torch.tensor([0.48, 0.45, 0.4]).reshape(1, 3, 1, 1)
    return m.net((x - mean) / 0.25)


def assigned(x, column):
    y = x.clone()
    y[:, 0] = column
    return y


def stack(*shape):
    return CONSTANTS[: math.prod(shape)].reshape(shape)


CONSTANTS = torch.randn(64, generator=torch.Generator().manual_seed(1))  # float32


def attention(m, x):
    tokens = m.conv(x).flatten(2).transpose(1, 2)
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


IMAGE = (3, 8, 8)
NETWORKS: dict[str, tuple] = {
    "plain": (lambda: nn.Sequential(unit(3, 6), unit(6, 8, stride=2), head(8)), IMAGE),
    "no norm": (lambda: nn.Sequential(conv(3, 6), nn.ReLU(), conv(6, 4), nn.Tanh()), IMAGE),
    "resnet": (lambda: ResNet(8), IMAGE),
    "pre-activation": (lambda: WideResNet(10, 1), IMAGE),
    "bottleneck": (
        lambda: Run(
            lambda m, x: F.relu(m.skip(x) + m.body(x)),
            skip=conv(3, 8, 1),
            body=nn.Sequential(unit(3, 4, 1), unit(4, 4), conv(4, 8, 1), nn.BatchNorm2d(8)),
        ), IMAGE,
    ),
    "dense": (lambda: Run(dense, a=unit(3, 4), b=unit(7, 4), c=unit(11, 4), head=head(15)), IMAGE),
    "inception": (
        lambda: Run(
            lambda m, x: torch.cat([m.a(x), m.b(x), m.c(F.avg_pool2d(x, 3, 1, 1))], 1),
            a=unit(3, 4, 1), b=nn.Sequential(unit(3, 2, 1), unit(2, 4, 5)), c=unit(3, 4, 1),
        ), IMAGE,
    ),
    "squeezenet": (
        lambda: Run(
            lambda m, x: m.head(torch.cat([m.one(m.squeeze(x)), m.three(m.squeeze(x))], 1)),
            squeeze=unit(3, 2, 1), one=unit(2, 4, 1), three=unit(2, 4), head=head(8),
        ), IMAGE,
    ),
    "mobilenet": (
        lambda: Run(
            lambda m, x: x + m.body(x),
            body=nn.Sequential(
                conv(3, 12, 1), nn.BatchNorm2d(12), nn.ReLU6(),
                conv(12, 12, groups=12), nn.BatchNorm2d(12), nn.Hardswish(), conv(12, 3, 1),
            ),
        ), IMAGE,
    ),
    "shufflenet": (
        lambda: Run(shuffle, stem=unit(3, 8), branch=unit(4, 4), head=head(8)), IMAGE,
    ),
    "unet": (
        lambda: Run(
            unet, one=unit(3, 4), two=unit(4, 8), up=nn.ConvTranspose2d(8, 4, 2, 2), out=conv(8, 2)
        ), IMAGE,
    ),
    "decoder": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.BatchNorm2d(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1, groups=2), nn.BatchNorm2d(4),
        ), IMAGE,
    ),
    "upsampling": (
        lambda: nn.Sequential(
            conv(3, 4), nn.Upsample(scale_factor=2), conv(4, 4),
            nn.Upsample(scale_factor=1.5, mode="bilinear"), conv(4, 8), nn.PixelShuffle(2),
        ), IMAGE,
    ),
    "audio": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 4, 9, stride=4), nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(3, 2),
            nn.Conv1d(4, 6, 3, dilation=2, padding=2), nn.ELU(), nn.AdaptiveAvgPool1d(2),
            nn.Flatten(), nn.Linear(12, 4),
        ), (1, 64),
    ),
    "video": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(4, 4, (1, 3, 3)), nn.GELU(), nn.AvgPool3d((2, 1, 1)),
        ), (2, 4, 6, 6),
    ),
    "reused module": (
        lambda: Run(lambda m, x: m.same(F.relu(m.same(F.relu(m.same(x))))), same=conv(3, 3)), IMAGE,
    ),
    "functional": (
        lambda: Run(
            lambda m, x: m.l(F.silu(F.conv2d(x, m.w.weight, padding=1)).flatten(1)),
            w=conv(3, 4), l=nn.Linear(256, 3),
        ), IMAGE,
    ),
    "dict output": (
        lambda: Run(
            lambda m, x: {"a": m.a(x), "more": (m.b(x), m.a(x).mean())}, a=unit(3, 4), b=conv(3, 2)
        ), IMAGE,
    ),
    "linear residual": (
        lambda: Run(lambda m, x: x + m.conv(x), conv=conv(3, 3, bias=False)), IMAGE,
    ),
    "repvgg": (
        lambda: Run(
            lambda m, x: F.relu(m.three(x) + m.one(x) + m.norm(x)),
            three=nn.Sequential(conv(3, 3), nn.BatchNorm2d(3)),
            one=nn.Sequential(conv(3, 3, 1), nn.BatchNorm2d(3)), norm=nn.BatchNorm2d(3),
        ), IMAGE,
    ),
    "padding modes": (
        lambda: nn.Sequential(
            conv(3, 4, padding_mode="circular"), nn.ReLU(), conv(4, 4, padding_mode="reflect"),
            nn.LeakyReLU(0.3), conv(4, 3, padding_mode="replicate"), nn.ZeroPad2d(1),
            nn.ReflectionPad2d(1), nn.Conv2d(3, 2, 3),
        ), IMAGE,
    ),
    "normalized input": (lambda: Run(normalized, net=nn.Sequential(unit(3, 4), head(4))), IMAGE),
    "mlp": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Mish(), nn.Dropout(),
            nn.Linear(9, 4), nn.LogSoftmax(1),
        ), (3, 2, 2),
    ),
    "layer norm": (
        lambda: nn.Sequential(conv(3, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
                              nn.LayerNorm(256), nn.Linear(256, 3)), IMAGE,
    ),
    "parametrized": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(conv(3, 4)), nn.PReLU(4),
            nn.utils.parametrizations.spectral_norm(conv(4, 4)), nn.SELU(),
        ), IMAGE,
    ),
    "slices": (
        lambda: Run(
            lambda m, x: m.a(x)[:, 1:, ::2] - 2 * F.pad(m.a(x), (0, 0, -4, 0))[:, :3], a=conv(3, 4)
        ), IMAGE,
    ),
    "strided circular": (
        lambda: nn.Sequential(conv(3, 4, stride=2, padding_mode="circular"), nn.Softplus()), IMAGE,
    ),
    "extremes": (
        lambda: Run(lambda m, x: torch.maximum(m.a(x), m.b(x)).clamp(-1, 1).amax((2, 3)),
                    a=conv(3, 4), b=conv(3, 4)), IMAGE,
    ),
}  # fmt: skip

UNBOUNDED: dict[str, tuple] = {
    "squeeze and excitation": (
        lambda: Run(squeeze_excite, conv=conv(3, 4), gate=nn.Conv2d(4, 4, 1)), IMAGE,
        "no global Lipschitz constant",
    ),
    "attention": (lambda: Run(attention, conv=conv(3, 4)), IMAGE, "attention"),
    "square": (lambda: Run(lambda m, x: m.c(x) ** 2, c=conv(3, 2)), IMAGE, "no global"),
    "jump": (lambda: Run(lambda m, x: torch.sign(m.c(x)), c=conv(3, 2)), IMAGE, "discontinuous"),
    "active dropout": (
        lambda: Run(lambda m, x: F.dropout(m.c(x), 0.5), c=conv(3, 2)), IMAGE,
        "active even in eval",
    ),
    "integers": (
        lambda: Run(lambda m, x: m.c(x).to(torch.int64).to(x.dtype), c=conv(3, 2)), IMAGE, "jumps",
    ),
    "indices": (
        lambda: Run(
            lambda m, x: F.max_pool2d(m.c(x), 2, return_indices=True)[1].to(x.dtype), c=conv(3, 2)
        ), IMAGE, "integers jump",
    ),
    "negative celu": (
        lambda: Run(lambda m, x: F.celu(m.c(x), -1.0), c=conv(3, 2)), IMAGE, "exponentially",
    ),
    "negative elu": (
        lambda: Run(lambda m, x: torch.ops.aten.elu(m.c(x), 1.0, 1.0, -1.0), c=conv(3, 2)), IMAGE,
        "exponentially",
    ),
    "jumping softplus": (
        lambda: Run(lambda m, x: F.softplus(m.c(x), -1.0, 0.0), c=conv(3, 2)), IMAGE, "threshold",
    ),
    "no epsilon": (
        lambda: nn.Sequential(conv(3, 2), nn.LayerNorm(8, eps=0.0)), IMAGE, "eps=0",
    ),
    "not a number": (
        lambda: Run(lambda m, x: m.c(x) * math.nan, c=conv(3, 2)), IMAGE, "not a number",
    ),
    "many parts": (
        lambda: Run(lambda m, x: sum(torch.unsafe_chunk(m.c(x), 16, 1)), c=conv(3, 16)), IMAGE,
        "no rule for aten.unsafe_split",
    ),
    "float8": (
        lambda: Run(lambda m, x: m.c(x).to(torch.float8_e4m3fn).to(x.dtype), c=conv(3, 2)), IMAGE,
        "float8_e4m3fn rounds so coarsely that it jumps",
    ),
    "copied integers": (
        lambda: Run(lambda m, x: torch.zeros(1, 3, 8, 8, dtype=torch.int8).copy_(m.c(x)) * 1.0,
                    c=conv(3, 3)), IMAGE, "jumps",
    ),
    "mask of the input": (
        lambda: Run(lambda m, x: m.c(x).masked_fill(m.c(x) > 0, 0.0), c=conv(3, 2)), IMAGE, "jumps",
    ),
    "index of the input": (
        lambda: Run(lambda m, x: torch.ones(9)[m.c(x).argmax(1)], c=conv(3, 2)), IMAGE, "argmax",
    ),
    "hard shrink": (
        lambda: Run(lambda m, x: F.hardshrink(m.c(x)), c=conv(3, 2)), IMAGE, "jumps",
    ),
    "threshold": (
        lambda: Run(lambda m, x: F.threshold(m.c(x), 0.1, 0.0), c=conv(3, 2)), IMAGE,
        "discontinuous",
    ),
    "einsum of two": (
        lambda: Run(lambda m, x: torch.einsum("bchw,bchw->b", m.c(x), x), c=conv(3, 3)), IMAGE,
        "einsum",
    ),
    "gate": (lambda: Run(lambda m, x: F.glu(m.c(x), 1), c=conv(3, 2)), IMAGE, "aten.glu"),
}  # fmt: skip

OPERATIONS: dict[str, tuple] = {
    **{
        kind.__name__: (kind(), (7,))
        for kind in (
            nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.CELU, nn.Softsign, nn.LogSigmoid, nn.SELU,
            nn.SiLU, nn.GELU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Softplus,
            nn.LeakyReLU, nn.ELU, nn.RReLU, nn.PReLU,
        )
    },
    "gelu tanh": (nn.GELU(approximate="tanh"), (7,)),
    "elu steep": (nn.ELU(alpha=3.0), (7,)),
    "leaky steep": (nn.LeakyReLU(-2.5), (7,)),
    "softmax": (nn.Softmax(1), (3,)),
    "log softmax": (nn.LogSoftmax(1), (4,)),
    "max pool": (nn.MaxPool2d(3, 2, 1), (1, 6, 6)),
    "max pool dilated": (nn.MaxPool2d(2, 1, dilation=2), (1, 7, 7)),
    "max pool ceil": (nn.MaxPool2d(3, 2, ceil_mode=True), (1, 6, 6)),
    "max pool indices": (nn.MaxPool2d(3, 1, return_indices=True), (1, 5, 5)),
    "adaptive max pool": (nn.AdaptiveMaxPool2d((3, 2)), (1, 7, 5)),
    "average pool": (nn.AvgPool2d(3, 2, 1), (1, 7, 6)),
    "average pool counted": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 7, 6)),
    "average pool divisor": (nn.AvgPool2d(2, 1, divisor_override=1), (1, 5, 5)),
    "average pool 1d": (nn.AvgPool1d(3, 1), (1, 9)),
    "average pool 3d": (nn.AvgPool3d(2, 1), (1, 3, 4, 3)),
    "adaptive average pool": (nn.AdaptiveAvgPool2d((3, 2)), (1, 7, 5)),
    "nearest": (nn.Upsample(size=(5, 9)), (1, 4, 3)),
    "bilinear": (nn.Upsample(size=(5, 9), mode="bilinear"), (1, 4, 3)),
    "bilinear corners": (nn.Upsample(size=(5, 9), mode="bilinear", align_corners=True), (1, 4, 3)),
    "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), (1, 4, 5)),
    "linear 1d": (nn.Upsample(scale_factor=3, mode="linear"), (1, 5)),
    "trilinear": (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 3, 2)),
    "shrinking": (nn.Upsample(size=(2, 2), mode="bilinear"), (1, 7, 7)),
    "pixel unshuffle": (nn.PixelUnshuffle(2), (1, 4, 4)),
    "circular pad": (nn.CircularPad2d((3, 2, 1, 0)), (1, 4, 4)),
    "reflection pad": (nn.ReflectionPad2d(2), (1, 3, 4)),
    "replication pad": (nn.ReplicationPad1d((3, 1)), (1, 4)),
    "constant pad": (nn.ConstantPad2d(1, 3.0), (1, 3, 3)),
    "mean": (Run(lambda m, x: x.mean((2, 3))), (2, 3, 4)),
    "sum": (Run(lambda m, x: x.sum(1)), (3, 2, 2)),
    "max": (Run(lambda m, x: x.amax((2, 3))), (2, 3, 3)),
    "norm": (Run(lambda m, x: torch.linalg.vector_norm(x, dim=1)), (3, 2)),
    "logsumexp": (Run(lambda m, x: torch.logsumexp(x, 1)), (4,)),
    "expand": (Run(lambda m, x: x[:, :, None].expand(-1, -1, 4)), (3,)),
    "repeat": (Run(lambda m, x: x.repeat(1, 2, 3)), (2, 2)),
    "broadcast add": (Run(lambda m, x: x + x.mean(2, keepdim=True)), (2, 5)),
    "broadcast constant": (Run(lambda m, x: x[:, :, None] + torch.ones(4)), (3,)),
    "scale": (Run(lambda m, x: x * torch.tensor([[1.0, -3.0, 2.0]])), (3,)),
    "divide": (Run(lambda m, x: x / torch.tensor([[1.0, -0.1, 2.0]])), (3,)),
    "reverse subtract": (Run(lambda m, x: 1 - 2 * x), (3,)),
    "alpha": (Run(lambda m, x: torch.sub(x, x.flip(1), alpha=2)), (4,)),
    "roll": (Run(lambda m, x: torch.roll(x, 1, 1) + x), (5,)),
    "index select": (Run(lambda m, x: x.index_select(1, torch.tensor([0, 2, 2, 2]))), (3,)),
    "stack": (Run(lambda m, x: torch.stack([x, 2 * x], 1)), (3,)),
    "split": (Run(lambda m, x: 2 * x.split([1, 3], 1)[1]), (4,)),
    "chunks added": (Run(lambda m, x: x.chunk(2, 1)[0] + x.chunk(2, 1)[1]), (4,)),
    "minimum": (Run(lambda m, x: torch.minimum(x, x.flip(1))), (4,)),
    "where": (Run(lambda m, x: torch.where(torch.tensor([[True, False]]), x, 3 * x)), (2,)),
    "matmul": (Run(lambda m, x: x @ torch.tensor([[1.0, 2], [0, -1], [4, 0.5]]).to(x)), (3,)),
    "matmul left": (Run(lambda m, x: torch.tensor([[1.0, 2.0, 3.0]]).to(x) @ x), (3, 2)),
    "addmm": (
        Run(lambda m, x: torch.addmm(torch.zeros(3).to(x), x, torch.eye(3).to(x), alpha=5)), (3,),
    ),
    "softshrink": (nn.Softshrink(0.3), (5,)),
    "threshold of itself": (nn.Threshold(0.2, 0.2), (5,)),
    "clip": (Run(lambda m, x: x.clip(-1, 1)), (4,)),
    "unfold": (nn.Unfold(3, dilation=2, padding=1, stride=(1, 2)), (2, 7, 6)),
    "fold": (nn.Fold((5, 4), 2, padding=1), (8, 30)),
    "instance norm kept": (nn.InstanceNorm2d(2, affine=True, track_running_stats=True), (2, 3, 3)),
    "assigned": (Run(lambda m, x: assigned(x, 2 * x[:, 1])), (3,)),
    "assigned slice": (Run(lambda m, x: torch.slice_scatter(x, 3 * x[:, :2], 1, 2, 4)), (4,)),
    "cumsum": (Run(lambda m, x: x.cumsum(2)), (2, 7)),
    "max of an axis": (Run(lambda m, x: x.max(1).values), (3, 4)),
    "min of an axis": (Run(lambda m, x: x.min(2, keepdim=True)[0]), (2, 5)),
    "max with a constant": (Run(lambda m, x: torch.max(x[:, :1], torch.zeros(4).to(x))), (2,)),
    "median": (Run(lambda m, x: x.median(1).values), (5,)),
    "sort": (Run(lambda m, x: x.sort(1, descending=True).values), (5,)),
    "topk": (Run(lambda m, x: x.topk(2, 1).values), (5,)),
    "masked fill": (
        Run(lambda m, x: x.masked_fill(torch.tensor([True, False, False]), 0.0)), (3,),
    ),
    "index": (Run(lambda m, x: x[:, [0, 2, 2]]), (3,)),
    "lower triangle": (Run(lambda m, x: x.tril()), (3, 3)),
    "batched product": (
        Run(lambda m, x: torch.bmm(x, stack(1, 3, 4).to(x).expand(len(x), 3, 4))), (2, 3),
    ),
    "product with a stack": (Run(lambda m, x: x[:, None, None] @ stack(5, 3, 2).to(x)), (3,)),
    "stack times a value": (Run(lambda m, x: stack(1, 5, 2, 3).to(x) @ x), (1, 3, 2)),
    "einsum matrix": (Run(lambda m, x: torch.einsum("bi,ij->bj", x, stack(3, 2).to(x))), (3,)),
    "einsum stack": (Run(lambda m, x: torch.einsum("bi,kij->bkj", x, stack(4, 3, 2).to(x))), (3,)),
    "einsum batch": (
        Run(lambda m, x: torch.einsum("bki,kij->bkj", x, stack(2, 3, 2).to(x))), (2, 3),
    ),
    "einsum diagonal": (Run(lambda m, x: torch.einsum("bi,i->bi", x, stack(3).to(x))), (3,)),
    "einsum sum": (Run(lambda m, x: torch.einsum("bij,j->b", x, stack(3).to(x))), (4, 3)),
    "einsum alone": (Run(lambda m, x: torch.einsum("bij->bji", x)), (4, 3)),
    "token residual": (Run(lambda m, x: x + m.l(x), l=nn.Linear(4, 4)), (5, 4)),
    "max pool ceil indices": (nn.MaxPool2d(3, 2, ceil_mode=True, return_indices=True), (1, 6, 6)),
    "negative leaky prelu": (nn.PReLU(init=-3.0), (4,)),
    "inactive dropout": (nn.Dropout(0.9), (4,)),
    "bias": (nn.Linear(4, 3), (4,)),
    "batch norm": (nn.BatchNorm1d(3), (3, 4)),
    "layer norm": (nn.LayerNorm(4), (4,)),
    "group norm": (nn.GroupNorm(2, 4), (4, 3)),
    "instance norm": (nn.InstanceNorm2d(2, affine=True), (2, 3, 3)),
}  # fmt: skip
EXACT = (
    "max pool", "average", "adaptive average", "nearest", "bilinear", "bicubic", "linear", "tri",
    "shrinking", "pixel", "circular", "reflection", "replication", "constant pad", "mean", "sum",
    "expand", "repeat", "scale", "divide", "reverse", "index", "stack", "matmul", "bias", "batch",
    "softmax", "ReLU", "Tanh", "Sigmoid", "GELU", "SiLU", "Mish", "elu", "leaky",
)  # fmt: skip
