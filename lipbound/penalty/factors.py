"""Factors of a network's Lipschitz product: the layers that a penalty sums over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lipbound.geometry import named, weight_of
from lipbound.row_energies import Lags, by_columns, lags

ALLOWED = 0.02  # relative allowance for rounding; larger ones call for float64

Exclude = str | type | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Factor:
    """One layer of the product.

    Attributes:
        name: Name as in ``model.named_modules()``.
        layer: The module. Its ``weight`` is read at every call, so it may be parametrized.
        kind: Lags of its taps; ``None`` for a BatchNorm.
        groups: Number of blocks of rows; the one with the largest sum counts.
        norm: For a BatchNorm the layer itself; for a convolution the BatchNorm folded into it.
        scale: Factor that turns the root of the energies into a bound: widening and padding.
        count: Number of times the product contains this factor (shared weights).
        across: Whether the rows are the weight's input channels, the shorter side.
    """

    name: str
    layer: nn.Module
    kind: Lags | None
    groups: int = 1
    norm: _BatchNorm | None = None
    scale: float = 1.0
    certified: bool = True
    count: int = 1
    across: bool = False

    def weight(self) -> Tensor:
        """Return the layer's weight, or the running variance of a BatchNorm without weight."""
        weight: Tensor | None = weight_of(self.layer)
        return weight if weight is not None else self.layer.running_var  # type: ignore[return-value]

    def rows(self, weight: Tensor) -> Tensor:
        """A view of the weight as ``(rows, channels, taps)``."""
        flat = weight.flatten(2) if weight.ndim > 2 else weight.unsqueeze(-1)
        return flat.transpose(0, 1) if self.across else flat

    def least(self, weight: Tensor, least: torch.dtype = torch.float32) -> torch.dtype:
        """Precision to compute in: float64 where the rounding of ``least`` would loosen the bound.

        In float32 the allowance for rounding grows with channels · taps²: it is 0.3 % for 512
        channels of 3×3 taps, and would exceed 100 % for 32 channels of 31×31.
        """
        if self.kind is None or not self.certified:
            return least
        rows = self.rows(weight.detach())
        return least if self.kind.relative_error(rows, least) < ALLOWED else torch.float64

    def constant(self, rows: Tensor) -> tuple[float, float]:
        """Factor of √Σp and term added to Σp that turn the computed value into a bound.

        The factor covers the rounding of p, see :meth:`Lags.relative_error`, and the term covers
        products that underflow.
        """
        assert self.kind is not None
        count, channels, taps = rows.shape
        tiny = float(torch.finfo(rows.dtype).tiny)
        if not self.certified:
            return self.scale, tiny
        relative = self.kind.relative_error(rows)
        return self.scale * math.sqrt((1 + relative) / (1 - relative)), (
            count * channels * taps**2 * tiny
        )


def factors(
    model: nn.Module,
    *,
    method: str = "lipbound",
    samples: int | None = None,
    include_batchnorm: bool | str = True,
    exclude: Exclude | Iterable[Exclude] = (),
) -> list[Factor]:
    """List every convolution and BatchNorm, and every Linear layer but the last, as factors.

    Args:
        model: The network.
        method: ``'lipbound'``: certified, strides split into phases.
            ``'polygrid'``: the paper's Algorithm 1, strides ignored, 10 samples, unwidened.
        samples: Grid points per axis.
        include_batchnorm: ``True``: factors of their own; ``'folded'``: into the convolution
            before them; ``False``: left out.
        exclude: Names (with wildcards), types, or functions of name and module.

    Raises:
        ValueError: If no layer is left, or an exclusion matches no layer.
    """
    if include_batchnorm not in (True, False, "folded"):
        raise ValueError(f"include_batchnorm={include_batchnorm!r} is not True, False or 'folded'")
    chosen = _chosen(model, exclude)
    if not include_batchnorm:
        chosen = {n: m for n, m in chosen.items() if not isinstance(m, _BatchNorm)}
    pairs = _followers(model) if include_batchnorm == "folded" else {}
    kept = {*chosen.values()}
    folded = {layer: norm for layer, norm in pairs.items() if {layer, norm} <= kept}
    inside = {*folded.values()}
    found: list[Factor] = []
    for name, layer in chosen.items():
        if not isinstance(layer, _BatchNorm):
            found.append(_row_factor(name, layer, method, samples, folded.get(layer)))
        elif layer not in inside:
            found.append(Factor(name, layer, None, norm=layer))
    for factor in found:
        if factor.norm is not None and factor.norm.running_var is None:
            raise ValueError(
                f"{factor.name}: its BatchNorm keeps no running statistics, so it has no constant "
                f"of its own; use track_running_stats=True, or exclude it"
            )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no convolution, BatchNorm or hidden Linear layer to "
            f"penalize"
        )
    return _counted(found)


def _row_factor(
    name: str, layer: nn.Module, method: str, samples: int | None, norm: _BatchNorm | None
) -> Factor:
    conv = named(name, layer)
    sizes = tuple(conv.kernel.shape[2:])
    if method == "polygrid":
        kind = lags(sizes, (1,) * conv.dims, samples or 10)
        return Factor(name, layer, kind, conv.groups, norm, certified=False)
    stride = tuple(min(t, s) for t, s in zip(conv.symbol_stride(), sizes, strict=True))
    kind = lags(sizes, stride, samples)
    scale = kind.widening() * conv.padding_gain()
    across = by_columns(conv.kernel.shape, stride, conv.groups, norm is not None)
    return Factor(name, layer, kind, conv.groups, norm, scale, across=across)


def _chosen(model: nn.Module, exclude: Exclude | Iterable[Exclude]) -> dict[str, nn.Module]:
    several = isinstance(exclude, Iterable) and not isinstance(exclude, str | type)
    rules = list(exclude) if several else [exclude]  # type: ignore[arg-type]
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _ConvNd | nn.Linear | _BatchNorm)
    }
    linear = [name for name, module in layers.items() if isinstance(module, nn.Linear)]
    for rule in rules:
        matched = [name for name, module in layers.items() if _matches(rule, name, module)]
        if not matched:
            raise ValueError(
                f"exclude={rule!r} matches no layer; the layers are {', '.join(layers) or 'none'}"
            )
        layers = {name: module for name, module in layers.items() if name not in matched}
    for classifier in linear[-1:]:  # the paper leaves it out
        layers.pop(classifier, None)
    return layers


def _matches(rule: object, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule) or name.startswith(f"{rule}.")
    if isinstance(rule, type):
        return isinstance(module, rule)
    if callable(rule):
        return bool(rule(name, module))
    raise TypeError(f"exclude={rule!r} is not a name, type or function of (name, module)")


def _followers(model: nn.Module) -> dict[nn.Module, _BatchNorm]:
    """Map each convolution to the BatchNorm that is the only reader of its output."""
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        raise ValueError(
            f"cannot trace which BatchNorm follows which convolution in {type(model).__name__} "
            f"({error}); use include_batchnorm=True, which needs no tracing"
        ) from error
    modules = dict(model.named_modules())
    pairs: dict[nn.Module, _BatchNorm] = {}
    calls: dict[nn.Module, int] = {}
    for node in graph.nodes:
        if node.op != "call_module":
            continue
        layer = modules[node.target]
        calls[layer] = calls.get(layer, 0) + 1
        readers = [user for user in node.users if user.op == "call_module"]
        if isinstance(layer, _ConvNd) and len(node.users) == 1 and readers:
            norm = modules[readers[0].target]
            if isinstance(norm, _BatchNorm) and not layer.transposed:
                pairs[layer] = norm
    return {c: n for c, n in pairs.items() if calls[c] == 1 and calls[n] == 1}


def _counted(found: list[Factor]) -> list[Factor]:
    """Merge equal factors of shared weights into one with a higher count."""
    seen: dict[object, int] = {}
    result: list[Factor] = []
    for factor in found:
        weight = factor.layer._parameters.get("weight")
        key = (
            id(weight) if weight is not None else id(factor.layer),
            id(factor.norm), factor.kind, factor.groups, factor.scale,
        )  # fmt: skip
        if key in seen:
            earlier = result[seen[key]]
            result[seen[key]] = replace(earlier, count=earlier.count + 1)
        else:
            seen[key] = len(result)
            result.append(factor)
    return result
