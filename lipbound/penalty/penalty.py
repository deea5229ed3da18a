"""Penalty for training loops: Σ log of the layers' bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lipbound.penalty import plain
from lipbound.penalty.factors import Exclude, Factor, factors
from lipbound.penalty.gradients import add_autograd_
from lipbound.penalty.tracked import Followed

if TYPE_CHECKING:
    from lipbound.penalty.fused import Fused


DEVICES = ("cuda",)  # where the fused kernels run
ROWS = ("lipbound", "polygrid")
FOLLOWED = ("spectral", "power_iteration")
METHODS = (*ROWS, *FOLLOWED)


class Terms(Protocol):
    """Terms of a penalty: count · log max(constant, floor) of each factor."""

    def logs(self, log_floor: float) -> Tensor:
        """Return the terms, ``(factors,)``; differentiable."""

    def total(self, log_floor: float) -> Tensor:
        """Return the sum of the terms; differentiable."""

    def add_grad_(self, scale: float | Tensor, log_floor: float) -> Tensor:
        """Add ``scale`` times the gradient of the sum to ``.grad``; return the sum, detached."""


class Penalty:
    r"""The penalty :math:`\lambda \sum_\ell \log \mathrm{bound}(\ell)` of Araujo et al. (2021).

    Its sum runs over every convolution, every BatchNorm (max|γ|/√(var + ε), from the running
    statistics) and every Linear layer but the last, so the sum's exponential bounds the Lipschitz
    constant of the product of these layers.

    Two ways to use it, with the same gradient:

    * ``loss = criterion(model(x), y) + penalty()`` and ``loss.backward()``;
    * ``penalty.add_grad_()`` after ``loss.backward()``. This adds the closed-form gradient without
      autograd, as weight decay does. It is the cheapest way: on CUDA with Triton it takes a few
      launches for the whole network, replayed as a graph.

    With a ``GradScaler`` call ``add_grad_()`` after ``scaler.unscale_(optimizer)``, or pass
    ``scale=scaler.get_scale()``. Under DistributedDataParallel pass the inner module or the
    wrapper, and call it after ``backward``. Every rank then adds the same gradient only if the
    running statistics of its BatchNorm layers are the same, as with ``SyncBatchNorm``.

    Args:
        model: The network. Its weights are read at every call. Frozen weights count in the
            value, and parametrized weights pass the gradient on to their parameters.
        weight: λ; may be changed between calls.
        method: ``'lipbound'``: a certified bound, by fused kernels. ``'polygrid'``: the paper's
            Algorithm 1 on an unwidened grid of 10 points per axis with strides ignored, by fused
            kernels. ``'spectral'``: σ1 of the symbol, estimated from below by vectors and a
            frequency that are kept between calls. ``'power_iteration'``: σ1 at the input size,
            estimated likewise (the paper's AT+PM).
        include_batchnorm: ``True``: factors of their own, as in the paper. ``'folded'``: into
            the convolution before them, which is tighter. ``False``: left out.
        exclude: Layers to leave out: names (wildcards allowed; a module's name takes all inside),
            types, or functions of ``(name, module)``.
        floor: Layers with a bound below this are not penalized: log max(bound, floor). Without a
            floor and without BatchNorm, a large λ drives all weights to zero.
        samples: Grid points per axis; ``None``: 32 per unit of degree, or the paper's 10. Kernels
            from about 13×13 or 5×5×5 get fewer, which makes their bound a few percent larger.
        iterations: Iterations per call of ``'spectral'`` and ``'power_iteration'``.
        input_shape: Shape of one input, ``(channels, *spatial)``; for ``'power_iteration'``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> penalty = Penalty(model, weight=0.1)
        >>> penalty().backward()
        >>> first = model[0].weight.grad.clone()
        >>> _ = penalty.add_grad_()
        >>> torch.allclose(model[0].weight.grad, 2 * first)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        weight: float = 0.008,
        method: str = "lipbound",
        *,
        include_batchnorm: bool | str = True,
        exclude: Exclude | Iterable[Exclude] = (),
        floor: float | None = None,
        samples: int | None = None,
        iterations: int = 1,
        input_shape: Sequence[int] | None = None,
    ):
        if method not in METHODS:
            raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
        if floor is not None and not floor > 0:
            raise ValueError(f"floor={floor!r} must be positive, for example 1.0, or None")
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight={weight!r} must be finite and at least 0")
        self.model = model
        self.weight = weight
        self.method = method
        self.log_floor = -math.inf if floor is None else math.log(floor)
        layers = factors(
            model,
            method=method,
            samples=samples,
            include_batchnorm=include_batchnorm,
            exclude=exclude,
        )
        self.factors = layers
        self._terms: Terms = (
            Followed(model, layers, method, iterations, input_shape)
            if method in FOLLOWED
            else RowTerms(model, layers)
        )

    def __call__(self) -> Tensor:
        """Compute the penalty, a differentiable scalar."""
        with self._in_full():
            return self.weight * self._terms.total(self.log_floor)

    @torch.no_grad()
    def add_grad_(self, scale: float | Tensor = 1.0) -> Tensor:
        """Add ``scale`` times the penalty's gradient to ``.grad``; return the penalty, detached."""
        with self._in_full():
            return self.weight * self._terms.add_grad_(self.weight * scale, self.log_floor)

    def _in_full(self) -> AbstractContextManager[Any]:
        """Disable autocast, because a value computed in bfloat16 is not a bound."""
        layer = self.factors[0].layer
        kind = next(iter((*layer.parameters(), *layer.buffers()))).device.type
        return torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else nullcontext()

    @torch.no_grad()
    def bounds(self) -> dict[str, float]:
        """Return each factor's constant by the layer's name, without the floor.

        For ``'lipbound'`` it is proved to be at least the layer's Lipschitz constant for every
        input size. It is ∞ if squares of the weights overflow. Layers that share weights are
        listed once, under the first name.
        """
        with self._in_full():
            logs = self._terms.logs(-math.inf).double()
        counts = torch.tensor([f.count for f in self.factors], dtype=torch.float64)
        up = 1 + 4 * torch.finfo(torch.float32).eps * (1 + logs.abs().cpu())  # for a float32 log
        values = (logs.cpu() / counts).exp() * (up if self.method == "lipbound" else 1.0)
        values = torch.where(values.isnan(), math.inf, values)  # ∞ − ∞ in a transform
        return {f.name: v for f, v in zip(self.factors, values.tolist(), strict=True)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that ``'spectral'`` and ``'power_iteration'`` keep between calls."""
        return self._terms.state_dict() if isinstance(self._terms, Followed) else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state from :meth:`state_dict`."""
        if isinstance(self._terms, Followed):
            self._terms.load_state_dict(state)

    def __repr__(self) -> str:
        return f"Penalty({len(self.factors)} factors, weight={self.weight}, {self.method!r})"


class RowTerms:
    """Terms from row energies, by fused kernels where possible and plain PyTorch elsewhere.

    The tables of the fused kernels hold addresses. They are cached with ``_places``, which says
    what each weight, γ and running variance was when they were built: object, address, type, shape,
    strides and ε. Every call compares it, and builds the tables again if anything differs. New
    values in the same memory change nothing, as the kernels read the values at every call.
    """

    def __init__(self, model: nn.Module, found: Sequence[Factor]):
        self.model = model
        self.factors = list(found)
        norms = [f.norm for f in found if f.norm is not None]
        self._slots: list[tuple[dict[str, Any], str]] = [
            *((f.layer._parameters, "weight") for f in found if f.kind is not None),
            *((norm._parameters, "weight") for norm in norms),
            *((norm._buffers, "running_var") for norm in norms),
        ]
        self._places: list[object] = []
        self._fused: Fused | None = None
        self._rest: list[Factor] = []
        self._leaves: list[Tensor | None] = []

    def logs(self, log_floor: float) -> Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return plain.logs(self.factors, log_floor)
        self._look()
        found: dict[str, Tensor] = {}
        if self._rest:
            found |= _named(self._rest, plain.logs(self._rest, log_floor, torch.float64))
        if self._fused is not None:
            self._fused.value(log_floor)
            found |= _named(self._fused.factors, self._fused.logs.double())
        return torch.stack([found[f.name] for f in self.factors])

    def total(self, log_floor: float) -> Tensor:
        if torch.compiler.is_compiling():  # plain operations compile
            return self.logs(log_floor).sum()
        self._look()
        parts = [plain.logs(self._rest, log_floor).sum()] if self._rest else []
        if self._fused is not None and torch.is_grad_enabled():
            parts.append(_FusedTotal.apply(self._fused, log_floor, *self._leaves))
        elif self._fused is not None:
            parts.append(self._fused.value(log_floor))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def add_grad_(self, scale: float | Tensor, log_floor: float) -> Tensor:
        self._look()
        parts = [self._plain_add_grad(scale, log_floor)] if self._rest else []
        if self._fused is not None:
            parts.append(self._fused.value(log_floor))
            self._fused_add_gradient(self._fused, scale)
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _fused_add_gradient(self, fused: Fused, scale: float | Tensor) -> None:
        grads = [p.grad if p is not None and p.requires_grad else 0 for p in self._leaves]
        # `aimed` is what `seen` was when the table got its addresses. It does not fit any more if
        # a gradient was made, dropped, moved or laid out anew, or if a backward pass used `aim`.
        seen = [(id(g), g.data_ptr(), g.stride()) if isinstance(g, Tensor) else g for g in grads]
        late: list[tuple[Tensor, Tensor]] = []
        if seen != fused.aimed:
            targets = [_target(leaf, late) for leaf in self._leaves]
            fused.aim(targets[::2], targets[1::2])
            fused.aimed = None if late or None in seen else [*seen]
        fused.add_gradient(scale)
        for grad, part in late:
            grad.add_(part)

    def _look(self) -> None:
        """Build the tables of the fused kernels again if they no longer fit."""
        places: list[object] = [f.norm.eps for f in self.factors if f.norm is not None]
        for slots, name in self._slots:
            t = slots.get(name)
            places.append(t if t is None else (id(t), t.data_ptr(), t.dtype, t.shape, t.stride()))
        if places != self._places:
            self._fused, self._rest = _partition(self.factors)
            self._places = places
            self._leaves = _leaves(self._fused.factors) if self._fused else []

    def _plain_add_grad(self, scale: float | Tensor, log_floor: float) -> Tensor:
        logs: list[Tensor] = []
        outer: list[Tensor] = []
        inner: list[Tensor] = []
        for factor in self._rest:
            with torch.enable_grad():
                weight = factor.weight()  # parametrized: computed here, with its graph
            gamma = None if factor.norm is None else _grad(factor.norm.weight)
            into = None
            if factor.kind is not None and weight.requires_grad:
                into = _grad(weight) if weight.is_leaf else torch.zeros_like(weight)
                if into is not None and not weight.is_leaf:
                    outer.append(weight)
                    inner.append(into)
            share = factor.count * scale
            logs.append(plain.add_gradient_(factor, weight.detach(), into, gamma, share, log_floor))
        if outer:
            add_autograd_(self.model, outer, inner)
        return plain.combine(self._rest, logs, log_floor).sum()


def _partition(found: list[Factor]) -> tuple[Fused | None, list[Factor]]:
    """Split the factors into those for the fused kernels and the rest."""
    device = found[0].weight().device
    if device.type not in DEVICES:
        return None, found
    try:
        from lipbound.penalty import fused
    except ImportError:  # no Triton
        return None, found
    taken = [f.weight().device == device and fused.served(f) for f in found]
    served = [f for f, yes in zip(found, taken, strict=True) if yes]
    rest = [f for f, yes in zip(found, taken, strict=True) if not yes]
    return (fused.Fused(served) if served else None), rest


def _named(found: Sequence[Factor], logs: Tensor) -> dict[str, Tensor]:
    return dict(zip([f.name for f in found], logs, strict=True))


def _leaves(found: Sequence[Factor]) -> list[Tensor | None]:
    """For each factor, list its weight (``None`` for a BatchNorm) and its γ."""
    leaves: list[Tensor | None] = []
    for f in found:
        leaves.append(None if f.kind is None else f.layer._parameters["weight"])
        leaves.append(None if f.norm is None else f.norm._parameters["weight"])
    return leaves


class _FusedTotal(torch.autograd.Function):
    """Σ count · log bound by the fused kernels, with the closed-form gradient."""

    @staticmethod
    def forward(ctx: Any, fused: Fused, log_floor: float, *leaves: Tensor | None) -> Tensor:
        total = fused.value(log_floor).clone()
        ctx.fused, ctx.log_floor, ctx.stamp = fused, log_floor, fused.stamp
        ctx.save_for_backward(*leaves)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        fused, leaves = ctx.fused, ctx.saved_tensors
        if fused.stamp != ctx.stamp:  # its buffers hold the results of a later call
            fused.value(ctx.log_floor)
        needed = ctx.needs_input_grad[2:]
        parts = [
            torch.zeros_like(leaf) if wanted else None
            for leaf, wanted in zip(leaves, needed, strict=True)
        ]
        fused.aim(parts[::2], parts[1::2])
        fused.add_gradient(gradient)
        return None, None, *parts


def _grad(parameter: Tensor | None) -> Tensor | None:
    """Return ``.grad``, created as zeros if missing; ``None`` for a frozen parameter."""
    if parameter is None or not parameter.requires_grad:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _target(parameter: Tensor | None, late: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Tensor for the kernels: ``.grad``, or a buffer added to it later if its layout differs."""
    grad = _grad(parameter)
    if grad is None or parameter is None:
        return None
    same = grad.stride() == parameter.stride() and grad.dtype == parameter.dtype
    if same and grad.data_ptr() % 16 == 0:  # a view into a bucket may start anywhere
        return grad
    late.append((grad, torch.zeros_like(parameter)))
    return late[-1][1]
