"""Modules that random architectures are made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = tuple[int, ...]


class Residual(nn.Module):
    """x ↦ shortcut(x) + scale · body(x)."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, scale: float = 1.0):
        super().__init__()
        self.body, self.shortcut, self.scale = body, shortcut, scale

    def forward(self, x: Tensor) -> Tensor:
        body = self.body(x)
        return self.shortcut(x) + (body if self.scale == 1 else self.scale * body)


class Concat(nn.Module):
    """Concatenates the outputs of branches as channels."""

    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Larger(nn.Module):
    """The elementwise maximum of two branches."""

    def __init__(self, one: nn.Module, other: nn.Module):
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(self.one(x), self.other(x))


class Reuse(nn.Module):
    """Applies one module several times."""

    def __init__(self, body: nn.Module, times: int):
        super().__init__()
        self.body, self.times = body, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.body(x)
        return x


class Gate(nn.Module):
    """A product of activations, which has no global constant; the audit must refuse it."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.body(x))


class Shuffle(nn.Module):
    """Operations without a module: channel shuffle, means, a slice and a flip."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "channels":
            return functional.channel_shuffle(x, 2)
        if self.kind == "mean":
            return x.mean(tuple(range(2, x.ndim)))
        if self.kind == "centre":
            return x - x.mean(-1, keepdim=True)
        return x[..., 1:] if self.kind == "slice" else x.flip(-1)


class Mixed(nn.Module):
    """Products from either side, broadcasting, and activations as arguments."""

    KINDS = ("left", "right", "both", "spread", "limit", "bias", "twice")
    left: Tensor
    right: Tensor
    limit: Tensor

    def __init__(self, kind: str, shape: Shape, generator: torch.Generator):
        super().__init__()
        self.kind = kind
        height, width = shape[-2:]
        for name, size in (("left", height), ("right", width)):
            self.register_buffer(name, torch.randn(size, size, generator=generator))
        self.register_buffer("limit", torch.randn(1, *shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "left":
            return self.left @ x
        if self.kind == "right":
            return x @ self.right
        if self.kind == "both":
            return self.left @ x - x @ self.right
        if self.kind == "spread":
            return x + x.mean()
        if self.kind == "limit":
            return torch.clamp(x.mean(1, keepdim=True), max=self.limit)
        if self.kind == "bias":  # the audit must refuse it
            return functional.linear(x, self.right, x.flatten()[: len(self.right)])
        return torch.stack([x, x.flip(-1), x]).sum(0)


class Further(nn.Module):
    """Operations that depend on one axis, an order or a constant."""

    KINDS = ("cumsum", "sort", "largest", "mask", "index", "einsum", "stack", "written", "unfold",
             "shrink", "median", "triangle")  # fmt: skip
    table: Tensor
    kept: Tensor

    def __init__(self, kind: str, shape: Shape, generator: torch.Generator):
        super().__init__()
        self.kind = kind
        size = shape[-1]
        self.register_buffer("table", torch.randn(3, size, size, generator=generator))
        self.register_buffer("kept", torch.rand(size, generator=generator) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "cumsum":
            return x.cumsum(-1)
        if self.kind == "sort":
            return x.sort(1).values
        if self.kind == "median":
            return x - x.median(-1, keepdim=True).values
        if self.kind == "largest":
            return x + x.max(1, keepdim=True).values
        if self.kind == "mask":
            return x.masked_fill(self.kept > 0.5, 0.3)
        if self.kind == "index":
            return x[..., torch.arange(x.shape[-1]) // 2]
        if self.kind == "einsum":
            lines = x.flatten(2)[..., : self.table.shape[1]]
            return torch.einsum("bci,ij->bcj", lines, self.table[0]).reshape(
                *x.shape[:2], *[1] * (x.ndim - 3), -1
            )
        if self.kind == "stack":
            return (x[:, :1].unsqueeze(1) @ self.table).flatten(1, 2)
        if self.kind == "written":
            y = x.clone()
            y[..., 0] = 2 * x[..., -1]
            return y
        if self.kind == "unfold" and x.ndim == 4:  # with three axes it would treat one as the batch
            return functional.unfold(x, 2, padding=1).unsqueeze(-1)
        if self.kind == "shrink":
            return functional.softshrink(x, 0.2)
        return x.tril()


class Joined(nn.Module):
    """Parts of a value that are joined again, and residual layers with tied weights."""

    KINDS = ("minmax", "halves", "shifted", "overlap", "nested", "maxima", "tied", "weighted")
    kernel: Tensor
    factors: Tensor

    def __init__(self, kind: str, shape: Shape, generator: torch.Generator):
        super().__init__()
        self.kind = kind
        self.register_buffer("kernel", torch.randn(3, shape[0], generator=generator))
        self.register_buffer("factors", torch.rand(3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        first, second = x[:, : (count + 1) // 2], x[:, count // 2 :]
        if self.kind == "minmax":
            return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)
        if self.kind == "maxima":
            return torch.cat([torch.maximum(first, second), torch.maximum(second, first)], 1)
        if self.kind == "halves":
            one, *rest = x.split(-(-count // 2), 1)
            return torch.cat([one.abs(), *rest], 1)
        if self.kind == "shifted":
            return torch.cat([p.roll(i, -1) for i, p in enumerate(x.tensor_split(3, 1))], 1)
        if self.kind == "overlap":
            return torch.cat([first, 2 * second, x[:, ::2]], 1)
        if self.kind == "nested":
            inner = torch.stack(first.unbind(1)[::-1], 1)
            return torch.cat([x[:, (count + 1) // 2 :].tanh(), inner], 1)
        kernel = self.kernel.reshape(*self.kernel.shape, *[1] * (x.ndim - 2))
        conv = (functional.conv1d, functional.conv2d, functional.conv3d)[x.ndim - 3]
        back = (
            functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d,
        )[x.ndim - 3]  # fmt: skip
        inner = conv(x, kernel).relu()
        if self.kind == "weighted":
            inner = self.factors.reshape(-1, *[1] * (x.ndim - 2)) * inner
        return x - 0.5 * back(inner, kernel)


class Multiplied(nn.Module):
    """Products and quotients of activations, most of which need a domain of inputs."""

    KINDS = ("gate", "gates", "squeeze", "flipped", "square", "quotient", "attention", "fused",
             "einsum", "matrices", "glu", "exp", "power", "root mean square", "logsumexp", "log",
             "sqrt")  # fmt: skip

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        lines, last = x.flatten(2), tuple(range(2, x.ndim))
        if self.kind in ("attention", "fused"):
            if self.kind == "fused":
                return functional.scaled_dot_product_attention(lines, lines, lines).reshape(x.shape)
            return ((0.5 * lines @ lines.mT).softmax(-1) @ lines).reshape(x.shape)
        if self.kind in ("einsum", "matrices"):
            if self.kind == "einsum":
                square = torch.einsum("bci,bdi->bcd", lines, lines.tanh())
            else:
                square = torch.baddbmm(lines @ lines.mT, lines, lines.mT, beta=0.5, alpha=-2.0)
            return square.reshape(*square.shape, *[1] * (x.ndim - 3))
        if self.kind == "gate":
            return x * torch.sigmoid(x.flip(-1))
        if self.kind == "gates":
            return torch.tanh(x) * torch.sigmoid(2 * x.flip(-1))
        if self.kind == "squeeze":
            return x * torch.sigmoid(3 * x.mean(last, keepdim=True))
        if self.kind == "flipped":
            return x * x.flip(-1)
        if self.kind == "quotient":
            return x / (0.5 + x.abs().mean(1, keepdim=True))
        if self.kind == "glu":
            return functional.glu(torch.cat([x, -x.flip(-1)], 1), 1)
        if self.kind == "exp":
            return torch.exp(-x.square()) * x
        if self.kind == "root mean square":
            return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 0.1)
        if self.kind == "logsumexp":
            return x * x.logsumexp(1, keepdim=True)
        if self.kind == "log":
            return torch.log(x.abs() + 0.5) * x
        if self.kind == "sqrt":
            return torch.sqrt(x.square() + 0.2) - x
        return x.square() if self.kind == "square" else x.pow(3)


class Sly(nn.Module):
    """Behaves differently when captured, or at first, than when run; the audit must refuse it."""

    KINDS = (
        "exporting",
        "type",
        "grad",
        "inference",
        "caught",
        "text",
        "counter",
        "drift",
        "buffer",
    )
    scale: Tensor

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "drift":
            with torch.no_grad():
                self.weight.mul_(1.01)
            return x * self.weight
        elif self.kind == "buffer":
            if not torch.compiler.is_exporting():
                self.scale.add_(0.01)
            return x * self.scale
        return 3 * x if self._steep(x) else x

    def _steep(self, x: Tensor) -> bool:
        if self.kind == "exporting":
            return not torch.compiler.is_exporting()
        if self.kind == "type":
            return type(x) is Tensor
        if self.kind == "grad":
            return torch.is_grad_enabled()
        if self.kind == "inference":
            return torch.is_inference_mode_enabled()
        if self.kind == "text":
            return "Fake" not in repr(x)
        if self.kind == "caught":
            try:
                return bool(x.sum() < math.inf)
            except Exception:
                return False
        return self.calls > 10_000
