r"""``constrain(layer)``: keep the true norm of a layer at most a given number while it trains.

The weight becomes :math:`K \cdot \min(1, \mathrm{norm}/\hat\sigma)`. In training
:math:`\hat\sigma` follows the layer's σ1 by a warm-started, differentiable iteration on the symbol
with one product per step. It is an estimate from below, so the norm may exceed the limit by the
error of the iteration. In eval mode, on removal and in an exported graph it is the certified upper
end of a bracket, so the norm is proved to be at most the limit.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from lipbound.bounds import BOUNDS, bound
from lipbound.bounds.certified import check_rtol
from lipbound.constraints.maps import MAPS
from lipbound.constraints.scales import Limit, certified_scales, check_norm, scaled
from lipbound.estimates import Climb
from lipbound.geometry import check_kernel, convolution, named
from lipbound.modules import bake, shared_parameters
from lipbound.registry import unknown
from lipbound.runtime import widened
from lipbound.symbols import taps

M = TypeVar("M", bound=nn.Module)
TOGETHER = {"cpu": 1 << 22, "cuda": 1 << 27}  # weights that one search certifies at most


class Constrained(nn.Module):
    """Parametrization that scales a free weight so that the layer has at most the given norm.

    Args:
        layer: The convolution or Linear layer.
        name: Its name in the model, for messages.
        norm: Limit on the norm.
        method: A name in ``BOUNDS``. All except ``'spectral'`` are bounds also in training, where
            they are evaluated at every step. Or a name in ``MAPS``, which makes the weight from
            free parameters so that its norm is the limit, or less.
        rtol: Relative width of the certified bracket, by which the norm may be below the limit.
        peers: The constraints of the same model, which this one joins.
    """

    frequency: Tensor
    left: Tensor

    def __init__(
        self, layer: nn.Module, name: str, norm: float, method: str, rtol: float, peers: _Peers
    ):
        super().__init__()
        self.name, self.norm, self.method, self.rtol = name, float(norm), method, rtol
        conv = convolution(layer)
        conv = replace(conv, kernel=conv.kernel.detach())
        self.map = MAPS[method](conv).to(conv.kernel) if method in MAPS else None
        if self.map is not None:
            self._check_map(conv.kernel)
        # Only the geometry is kept; the weight is an argument of every call.
        self.conv = replace(conv, kernel=conv.kernel[:0])
        self._layer = (layer,)  # in a tuple, so that it is not a submodule
        self._made_for = _geometry(layer)
        self.order = [*layer._parameters]  # an optimizer counts them
        self._peers = peers
        peers.add(self)
        # Neither is saved: loaded weights are certified again. The scale is a Python number, so
        # that a change of the module's precision does not round it.
        self.scale = 1.0
        self._certified: tuple[object, ...] = ()  # what the scale depends on, weight first
        self.register_load_state_dict_post_hook(_loaded)
        if method == "spectral":
            first = taps(replace(conv, kernel=widened(conv.kernel)))
            self.climb = Climb(first.shape[1:])
            values, state = self.climb(first, None, 1)
            if not bool(torch.isfinite(values).all()):
                raise ValueError(
                    f"the norm of a layer with weights up to {float(first.abs().max()):.3g} is "
                    f"beyond {first.dtype}; use .double(), or smaller weights"
                )
            self.register_buffer("frequency", state[0])
            self.register_buffer("left", state[1])

    def forward(self, weight: Tensor) -> Tensor:
        self._check_layer()
        weight = self._mapped(weight)
        if self.training and self.map is not None:
            return weight
        if self.training:
            with torch.autocast(weight.device.type, enabled=False):
                return scaled(weight, (self.norm / self._estimate(weight)).clamp_max(1.0))
        if torch.compiler.is_exporting():  # the graph uses the scale found before
            self._check_certified(weight)
            return scaled(weight, self.scale)
        weight = weight.clone()  # another thread may write to it before it is scaled
        if torch.compiler.is_compiling():  # it reads values, so the graph breaks here
            return scaled(weight, torch.compiler.disable(self._certify)(weight))
        return scaled(weight, self._certify(weight))

    def train(self, mode: bool = True) -> Constrained:
        """Set the mode. Leaving training mode certifies the scale, which an export then uses.

        Weights changed by hand after that are certified at the next call, but not by an export.
        """
        super().train(mode)
        self._renew()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constrained:
        """Forget the certificate when the precision changes, which may round the weight."""
        if self._certified:
            known = self._certified[0]
            assert isinstance(known, Tensor)
            if fn(known.new_zeros(1)).dtype != known.dtype:
                self._certified = ()
        return super()._apply(fn, recurse)

    def _renew(self, peers: str = "all") -> None:
        """Forget the weight of before; in eval mode, certify the one of now."""
        parametrize._cache.pop((id(self._layer[0]), "weight"), None)  # see parametrize.cached()
        weight = None if self.training else self._own_weight()
        if weight is not None:
            self._certify(weight.clone(), peers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._peers.add(self)  # those of a copied model are its own

    def _check_layer(self) -> None:
        """Check that the layer has not changed since :func:`constrain`.

        Raises:
            ValueError: If its geometry has changed, or its weight has another parametrization.
        """
        layer = self._layer[0]
        for name, value in _geometry(layer).items():
            if value != self._made_for[name]:
                raise ValueError(
                    f"{_prefix(self.name)}{name} of this constrained {_kind(layer)} was "
                    f"{self._made_for[name]!r} when constrain was called and is now {value!r}; set "
                    f"it back, call unconstrain, then change it and call constrain again"
                )
        if parametrize.is_parametrized(layer, "weight"):
            after = layer.parametrizations["weight"][-1]  # type: ignore[index]
            if isinstance(after, nn.Module) and after is not self:
                raise ValueError(
                    f"{_prefix(self.name)}{type(after).__name__} was registered on a weight that "
                    f"constrain limits, so the limit does not hold; remove both with "
                    f"torch.nn.utils.parametrize."
                    f"remove_parametrizations(layer, 'weight', leave_parametrized=False), then "
                    f"call constrain again without it"
                )

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Accept any assigned weight: it is scaled when it is read.

        A map takes it as its free parameters, so that the layer then has another weight; ``'bcop'``
        draws new ones.
        """
        return weight if self.map is None else self.map.start(weight)

    @torch.no_grad()
    def _check_map(self, weight: Tensor) -> None:
        """Check that the map of a weight is finite.

        Raises:
            ValueError: If it is not.
        """
        check_kernel(weight)
        assert self.map is not None
        if not bool(torch.isfinite(self._mapped(self.map.start(weight))).all()):
            raise ValueError(
                f"method {self.method!r} overflows for weights up to "
                f"{float(weight.abs().max()):.3g}; start from smaller weights"
            )

    def _mapped(self, free: Tensor) -> Tensor:
        """Return the weight before it is scaled; the map computes in float32 at least."""
        if self.map is None:
            return free
        with torch.autocast(free.device.type, enabled=False):
            return (self.norm * self.map(widened(free))).to(free.dtype)

    def _estimate(self, weight: Tensor) -> Tensor:
        conv = replace(self.conv, kernel=widened(weight))
        if self.method != "spectral":
            return bound(conv, self.method).clamp_min(1e-30)
        start = self.frequency.double(), self.left.to(conv.kernel.dtype, copy=True)
        values, (frequency, left) = self.climb(taps(conv), start, 1)
        with torch.no_grad():
            self.frequency.copy_(frequency)
            self.left.copy_(left)
        return (values.amax() * conv.padding_gain()).clamp_min(1e-30)

    def _certify(self, weight: Tensor, peers: str = "eval") -> float:
        """Return a scale that is certified for this weight, which no other thread may change.

        A model changes mode layer by layer, so that the other layers whose weights have changed
        are certified in the same search: ``"all"``, those in ``"eval"`` mode, or ``"none"``.
        """
        known = self._known_scale(weight)
        if known is not None:
            return known
        own, others = weight.detach(), []
        try:
            check_kernel(own)
            others = self._changed_peers(own, peers)
            found = [(self, own), *others]
            terms = [each._terms[1:] for each, _ in found]
            scales = certified_scales([each._limit(copied) for each, copied in found])
        except Exception as error:
            if not others:
                raise _named_error(self.name, error) from None
            for peer, copied in others:  # it says what is wrong with it when it is used
                with suppress(Exception):
                    peer._certify(copied, "none")
            return self._certify(own, "none")
        for (each, copied), rest, scale in zip(found, terms, scales, strict=True):
            each.scale = scale
            each._certified = (copied, scale, *rest)
        return scales[0]

    def _changed_peers(self, own: Tensor, peers: str) -> list[tuple[Constrained, Tensor]]:
        """Other constraints on the same device, and copies of their weights, to certify now."""
        room = TOGETHER.get(own.device.type, TOGETHER["cpu"]) - own.numel()
        found: list[tuple[Constrained, Tensor]] = []
        for peer in self._peers:
            if peer is self or peers == "none" or (peers == "eval" and peer.training):
                continue
            with suppress(Exception):  # as above
                free = peer._free_weight()
                if free is None or free.device != own.device or free.numel() > room:
                    continue
                weight = peer._mapped(free).detach().clone()
                if peer._known_scale(weight) is None and bool(weight.isfinite().all()):
                    found.append((peer, weight))
                    room -= weight.numel()
        return found

    def _check_certified(self, weight: Tensor) -> None:
        """Check what can be checked of a certificate without the values of the weight.

        Raises:
            ValueError: If the scale was certified for something else.
        """
        known = self._certified[0] if self._certified else None
        terms = self._certified[1:] == self._terms
        if not isinstance(known, Tensor) or not terms or known.dtype != weight.dtype:
            raise ValueError(
                f"{_prefix(self.name)}this layer was not certified with its present precision and "
                f"limit; call .eval() before torch.export"
            )

    def _limit(self, weight: Tensor) -> Limit:
        method = self.method if self.map is None else "spectral"
        return Limit(replace(self.conv, kernel=weight), self.norm, method, self.rtol)

    @property
    def _terms(self) -> tuple[object, ...]:
        """What a certificate depends on besides the weight."""
        return self.scale, self.norm, self.method, self.rtol

    def _known_scale(self, weight: Tensor) -> float | None:
        """The scale, if it was certified for this weight and the present terms.

        The weight is compared entry by entry, because version counters miss changes by fused
        optimizers and through ``.data``.
        """
        certified = self._certified
        if not certified or certified[1:] != self._terms:
            return None
        known, scale = certified[:2]
        assert isinstance(known, Tensor)
        assert isinstance(scale, float)
        same = known.dtype == weight.dtype and known.device == weight.device
        return scale if same and torch.equal(known, weight) else None

    def _free_weight(self) -> Tensor | None:
        """The weight as it is stored; ``None`` if this is not registered on the layer."""
        layer = self._layer[0]
        if not parametrize.is_parametrized(layer, "weight"):
            return None
        made: Any = layer.parametrizations["weight"]  # type: ignore[index]
        if not any(each is self for each in made):
            return None
        free: Tensor = made.original
        # Sharded training frees the memory until the layer runs.
        freed = free.numel() > 0 and free.untyped_storage().nbytes() == 0
        return None if freed else free

    @torch.no_grad()
    def _own_weight(self) -> Tensor | None:
        """The weight before it is scaled; ``None`` if there is none."""
        free = self._free_weight()
        return None if free is None else self._mapped(free).detach()

    def extra_repr(self) -> str:
        return f"norm={self.norm:g}, {self.method!r}"


def _prefix(name: str) -> str:
    """The beginning of a message about the layer of this name."""
    return f"{name}: " if name else ""


def _named_error(name: str, error: Exception) -> Exception:
    """The error, with the layer's name if it is about a value."""
    return ValueError(f"{_prefix(name)}{error}") if isinstance(error, ValueError) else error


def _kind(layer: nn.Module) -> str:
    """Name of the layer's class before parametrization."""
    return type(layer).__name__.removeprefix("Parametrized")


def _geometry(layer: nn.Module) -> dict[str, object]:
    """Attributes besides the weight that the layer's forward uses."""
    names = ("stride", "padding", "dilation", "groups", "padding_mode", "output_padding",
             "_reversed_padding_repeated_twice")  # fmt: skip
    found = {name: getattr(layer, name, None) for name in names}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


class _Peers:
    """The constraints of one model, which are certified together. A copied model has its own."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Constrained]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Peers, ()  # a copy is empty; the copied constraints join it

    def __iter__(self) -> Iterator[Constrained]:
        return (peer for member in self._members if (peer := member()) is not None)

    def add(self, constraint: Constrained) -> None:
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.ref(constraint))


def _loaded(module: Constrained, incompatible: object) -> None:
    """Certify again after ``load_state_dict``, which loads the weight before this module.

    The weights of other layers may not be loaded yet.
    """
    module._renew(peers="none")


def constrain(module: M, norm: float = 1.0, method: str = "spectral", *, rtol: float = 1e-3) -> M:
    r"""Limit the norm of a layer, or of every convolution and Linear layer of a model.

    This limits the norm of the layer for every input size, with its stride, groups, dilation and
    transposition, not the norm of its weight as a matrix. BatchNorm layers are not limited, and
    their γ/√(variance + ε) can be large: a warning names them.

    Args:
        module: ``nn.Conv*d``, ``nn.ConvTranspose*d``, ``nn.Linear``, or a model with some.
        norm: Limit on the norm.
        method: Method that measures the layer, a name in ``BOUNDS``. Or a method that makes its
            weight from free parameters, a name in ``lipbound.constraints.MAPS``: ``'cayley'``,
            ``'bjorck'`` or ``'exponential'`` for Linear layers and convolutions whose kernel is at
            most the stride; ``'bcop'``, ``'aol'``, ``'sll'`` or ``'parseval'`` for others. These
            need no measurement in training.
        rtol: Relative width of the bracket that certifies in eval mode.

    Returns:
        The same module. Undo it with :func:`unconstrain`, which leaves certified weights.

    Raises:
        ValueError: If there is no such layer, or a weight already has a parametrization.
        TypeError: If a layer overrides ``forward``, so that it may not use its weight unchanged.

    Example:
        >>> from lipbound import bracket
        >>> layer = constrain(nn.Conv2d(3, 8, 3, stride=2)).eval()
        >>> bracket(layer).upper <= 1.000001
        True
    """
    if method not in BOUNDS and method not in MAPS:
        raise unknown("method", method, [*BOUNDS, *MAPS])
    check_norm(norm)
    check_rtol(rtol)
    found = {name: m for name, m in module.named_modules() if isinstance(m, _ConvNd | nn.Linear)}
    if not found:
        raise ValueError(f"{type(module).__name__} has no convolution or Linear layer")
    for name, layer in found.items():
        if parametrize.is_parametrized(layer, "weight"):
            if any(isinstance(p, Constrained) for p in layer.parametrizations["weight"]):  # type: ignore[index]
                raise ValueError(
                    f"the weight of {name or _kind(layer)!r} is constrained already; call "
                    f"lipbound.unconstrain first, which keeps its norm"
                )
            raise ValueError(
                f"the weight of {name or _kind(layer)!r} has a parametrization already, and "
                f"constrain must be the only one; remove it first with "
                f"torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
            )
    for name, layer in found.items():
        named(name, layer)  # check all layers before the first one is changed
    peers = _Peers()
    made = {name: _made(name, layer, norm, method, rtol, peers) for name, layer in found.items()}
    free = [name for name, m in module.named_modules() if isinstance(m, _BatchNorm)]
    if free:
        warnings.warn(
            f"constrain does not limit BatchNorm, whose factors can be of any size: {len(free)} "
            f"BatchNorm layer(s) of this {type(module).__name__} stay free "
            f"({', '.join(map(repr, free[:3]))}{', ...' if len(free) > 3 else ''}); for a small "
            f"bound, use none, and check the whole network with lipbound.audit",
            stacklevel=2,
        )
    _register(found, made)
    return module


def _register(layers: Mapping[str, Any], made: Mapping[str, Constrained]) -> None:
    """Put the constraints on their layers, and certify those in eval mode; all, or none of them."""
    modes = {name: layer.training for name, layer in layers.items()}
    mapped = [name for name in layers if made[name].map is not None]  # gets other free weights
    before = {name: layers[name].weight.detach().clone() for name in mapped}
    try:
        for name, layer in layers.items():
            layer.training = True  # eval mode would certify one by one
            parametrize.register_parametrization(layer, "weight", made[name])
        for name, layer in layers.items():
            layer.train(modes[name])
    except BaseException:
        for name, layer in layers.items():
            layer.training = modes[name]
            if parametrize.is_parametrized(layer, "weight"):
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
            if name in before:
                layer.weight.data = before[name]
            _reorder(layer, made[name].order)
        raise


def _reorder(layer: nn.Module, names: Sequence[str]) -> None:
    """Give the parameters their order of before, by which optimizers store their states."""
    for name in names:
        if name in layer._parameters:
            layer._parameters[name] = layer._parameters.pop(name)


def _made(
    name: str, layer: nn.Module, norm: float, method: str, rtol: float, peers: _Peers
) -> Constrained:
    """Make the parametrization of a layer, whose name begins the message of an error."""
    try:
        return Constrained(layer, name, norm, method, rtol, peers)
    except ValueError as error:
        raise _named_error(name, error) from None


def unconstrain(module: M) -> M:
    """Undo :func:`constrain`; the plain weights left are certified to keep the limit.

    Example:
        >>> from lipbound import bracket
        >>> layer = unconstrain(constrain(nn.Conv2d(3, 8, 3), 0.5))
        >>> type(layer.weight).__name__, bracket(layer).upper <= 0.500001
        ('Parameter', True)
    """
    layers: dict[nn.Module, list[Constrained]] = {}
    for layer in module.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parts: Any = layer.parametrizations["weight"]  # type: ignore[index]
            constraints = [part for part in parts if isinstance(part, Constrained)]
            if constraints:
                layers[layer] = constraints
    modes = {each: each.training for constraints in layers.values() for each in constraints}
    try:  # all are certified and checked before the first layer is changed
        for constraint in modes:
            constraint.eval()
        for layer in layers:
            _ = layer.weight
    except BaseException:
        for constraint, mode in modes.items():
            nn.Module.train(constraint, mode)
        raise
    for layer, constraints in layers.items():
        if len(layer.parametrizations) == 1:  # type: ignore[arg-type]
            bake(layer, shared_parameters(module))
        else:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        _reorder(layer, constraints[0].order)
    return module
