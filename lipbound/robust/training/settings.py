"""Settings of a training run; arms and presets are changes to the default settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_type_hints

import torch

from lipbound.registry import unknown
from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.training import margins

SCHEDULES = ("steps", "onecycle", "cosine", "constant")
LOSSES = ("cross-entropy", "trades", *margins.LOSSES)


@dataclass(frozen=True)
class Settings:
    """Settings of a training run. Lengths are in epochs, and radii are for pixels in [0, 1].

    Attributes:
        arm: Name of the arm in ``ARMS``; only a label once the fields below are set.
        model: A name in ``lipbound.robust.models.MODELS``.
        data: A name in ``lipbound.robust.data.DATA``.
        size: Side to which images are resized that are not held in memory.
        workers: Number of processes that decode such images, for each process of the training.
        first: Number of training images to use, from the first on; 0 uses all.
        held_out: Fraction of the training set that is held out to choose the best checkpoint.
        normalize: Whether the network first normalizes by the data's mean and deviation.
        epochs: Length of the run.
        minutes: Length of the run in minutes of training, instead of ``epochs``; 0 for epochs.
        batch: Number of images per step, over all processes.
        accumulate: Number of parts into which a process divides its images of a step. Gradients
            are summed over the parts, so memory is needed for one part only.
        lr: Largest learning rate.
        schedule: Learning rate schedule. ``steps`` multiplies by ``gamma`` at each milestone,
            ``onecycle`` rises for 40 % of the run and then falls to zero, ``cosine`` rises for 4 %
            and then falls along a cosine, ``constant`` is constant.
        warmup: Epochs over which the learning rate rises from almost 0 to its schedule. With
            ``minutes`` it is the share ``warmup / epochs`` of them.
        milestones: Epochs at which the ``steps`` schedule changes the learning rate.
        gamma: Factor of the learning rate at each milestone.
        momentum: Momentum of SGD, or the first of Adam's two decays.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: Weight decay λ1 of all parameters.
        label_smoothing: Label smoothing of the training loss.
        loss: ``cross-entropy``, ``trades``, or a name in
            :data:`lipbound.robust.training.margins.LOSSES`, which trains for certificates with
            Adam, and keeps orthogonal layers orthogonal.
        trades_weight: Weight β of the divergence between the predictions without and with attack,
            for the loss ``trades``.
        margin: L2 radius for which a margin loss asks at the end of the run.
        ramp: Share of the training over which this radius grows from almost 0.
        orthogonal_lr: Largest learning rate of orthogonal layers, with a margin loss.
        awp: γ of adversarial weight perturbation, which takes the gradient at weights moved uphill
            by γ of their norm. 0 for none; 0.005 to 0.01 reduces overfitting.
        ema: Decay of the averaged weights, which are then evaluated instead and have their own
            BatchNorm statistics; 0 for no averaging.
        dropout: Dropout rate between the convolutions of a block.
        bias: Whether convolutions followed by BatchNorm have biases.
        augment: Whether to use random crops and flips, if the data set allows them.
        border: What surrounds a cropped image: ``zeros``, or its reflection (``reflect``).
        colour: Largest random change of brightness, saturation and contrast.
        randaugment: Share of the images that get two random operations of RandAugment.
        attack: Number of PGD steps in training; 0 trains without attack.
        ball: Norm ball of the attack, a name in ``BALLS``.
        radius: Radius ε of the attack.
        step: Step length of the attack, as a fraction of ε.
        random_start: Whether an attack starts at a random point.
        attack_mode: BatchNorm statistics during the attack: ``eval`` or ``train``.
        penalty: Method of :class:`lipbound.Penalty`; empty for no penalty.
        penalty_weight: Weight λ2 of the penalty.
        samples: Grid points per axis of the penalty; 0 for its default.
        iterations: Number of power iterations per step.
        batchnorm: BatchNorm in the penalty: ``apart``, ``folded`` or ``left out``.
        floor: Bound below which the penalty ignores a layer; 0 for none.
        check: Number of held-out images to attack at a check.
        check_every: Number of epochs between checks, each of which writes a checkpoint.
        check_attack: Number of PGD steps on these images, and on the test set at the end.
        certify: L2 radius at which the certified accuracy is reported; 0 for none. It is estimated
            while a margin loss trains, and proved on the test set at the end of any run.
        precision: Precision of training: ``float32``, ``bfloat16`` (autocast), or ``float64``,
            which is slow and made for comparisons.
        compile: Whether to ``torch.compile`` the attack and the training step.
        cuda_graphs: Whether to replay the attack as a CUDA graph on a GPU.
        sync_batchnorm: Whether BatchNorm uses statistics over all processes (GPUs only).
        seed: Seed for weights, order, augmentation and attacks.
    """

    arm: str = "at+lipreg"
    model: str = "cnn"
    data: str = "digits"
    size: int = 224
    workers: int = 8
    first: int = 0
    held_out: float = 0.1
    normalize: bool = True
    epochs: int = 10
    minutes: float = 0.0
    batch: int = 64
    accumulate: int = 1
    lr: float = 0.1
    schedule: str = "onecycle"
    warmup: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    loss: str = "cross-entropy"
    trades_weight: float = 6.0
    margin: float = 3 * 36 / 255
    ramp: float = 0.5
    orthogonal_lr: float = 5e-4
    awp: float = 0.0
    ema: float = 0.0
    dropout: float = 0.0
    bias: bool = False
    augment: bool = True
    border: str = "zeros"
    colour: float = 0.0
    randaugment: float = 0.0
    attack: int = 10
    ball: str = "linf"
    radius: float = 8 / 255
    step: float = 0.2
    random_start: bool = True
    attack_mode: str = "eval"
    penalty: str = "lipbound"
    penalty_weight: float = 0.008
    samples: int = 0
    iterations: int = 1
    batchnorm: str = "apart"
    floor: float = 0.0
    check: int = 1000
    check_every: int = 1
    check_attack: int = 10
    certify: float = 0.0
    precision: str = "float32"
    compile: bool = False
    cuda_graphs: bool = True
    sync_batchnorm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "schedule": SCHEDULES,
            "loss": LOSSES,
            "border": ("zeros", "reflect"),
            "attack_mode": ("eval", "train"),
            "batchnorm": ("apart", "folded", "left out"),
            "precision": ("float32", "bfloat16", "float64"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {allowed}")
        for name in ("epochs", "batch", "accumulate", "check_every", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name in ("lr", "orthogonal_lr", "radius", "margin", "ramp", "step", "gamma",
                     "trades_weight"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive and finite")
        for name in ("first", "attack", "check", "check_attack", "samples", "weight_decay",
                     "penalty_weight", "floor", "seed", "minutes", "certify",
                     "warmup", "workers"):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be a finite number, at least 0"
                )
        if self.ball not in BALLS:
            raise ValueError(f"ball={self.ball!r} is not one of {', '.join(BALLS)}")
        if self.loss == "trades" and not (self.attack and self.random_start):
            raise ValueError(
                "loss='trades' requires attack > 0 and random_start=True: "
                "without them the attacked image stays equal to the image"
            )
        if self.ramp > 1:
            raise ValueError(f"ramp={self.ramp!r} must be at most 1, the whole training")
        for name in ("colour", "randaugment"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie in [0, 1]")
        for name in ("held_out", "awp", "ema", "dropout", "momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie in [0, 1)")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and the pixels."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate at a step of ``steps``; it depends on nothing else."""
        warm = self.warmup * steps / self.epochs
        return self._scheduled(step, steps) * min(1.0, (step + 1) / max(warm, 1.0))

    def _scheduled(self, step: int, steps: int) -> float:
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "onecycle":
            at, top = (step + 1) / steps, 0.4
            return self.lr * min(1.0, at / top, (1 - at) / (1 - top) + 1 / steps)
        if self.schedule == "cosine":
            at, top = (step + 1) / steps, 0.04
            fall = math.pi * min(1.0, max(0.0, at - top) / (1 - top))
            return self.lr * max(1e-4, min(at / top, 0.5 * (1 + math.cos(fall))))
        epoch = step * self.epochs / steps
        return self.lr * self.gamma ** sum(epoch >= m for m in self.milestones)


ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"attack": 0, "penalty": ""},
    "lipreg": {"attack": 0},
    "at": {"penalty": ""},
    "at+pm": {"penalty": "power_iteration", "iterations": 10},
    "at+lipreg": {},
    "at+spectral": {"penalty": "spectral"},
    "trades": {"penalty": "", "loss": "trades"},
    "certified": {"attack": 0, "penalty": "", "loss": "emma", "normalize": False},
}
"""Name → settings that the arm changes. ``lipreg`` and ``at+lipreg`` use the preset's penalty."""
PAPER_ARMS = tuple(name for name in ARMS if name not in ("trades", "certified"))

PAPER: dict[str, Any] = {
    "model": "wrn-28-10", "data": "cifar10", "epochs": 200, "batch": 200, "lr": 0.1,
    "schedule": "steps", "milestones": (60, 120, 160), "momentum": 0.9, "weight_decay": 3e-4,
    "attack": 10, "radius": 8 / 255, "step": 0.2, "penalty": "polygrid", "penalty_weight": 0.008,
    "samples": 10, "held_out": 0.02, "precision": "bfloat16", "compile": True,
}  # fmt: skip
FAST: dict[str, Any] = {
    "data": "cifar10", "epochs": 30, "batch": 128, "lr": 0.2, "schedule": "onecycle",
    "precision": "bfloat16", "compile": True,
}  # fmt: skip

# Choices made on 5,000 held-out training images; then trained on all of them.
CERTIFIED: dict[str, Any] = {
    "model": "shift-512x12", "data": "cifar10", "held_out": 0.0, "epochs": 400, "batch": 512,
    "lr": 2e-3, "schedule": "cosine", "border": "reflect", "colour": 0.1, "randaugment": 0.5,
    "precision": "bfloat16", "compile": True, "check": 5000, "check_every": 50, "check_attack": 0,
    "certify": 36 / 255,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    # Small enough for two cores: all arms together take two minutes.
    "digits": {
        "model": "cnn", "data": "digits", "epochs": 20, "batch": 64, "lr": 0.2, "radius": 0.1,
        "attack": 5, "step": 0.25, "penalty_weight": 0.05, "check": 200, "certify": 36 / 255,
    },
    # The text of the paper. It gives no λ1 for CIFAR; 3e-4 is from the authors' code.
    "paper-cifar": PAPER,
    "paper-imagenet": {
        **PAPER, "model": "resnet101", "data": "folder", "epochs": 80, "batch": 4096,
        "milestones": (30, 60), "weight_decay": 1e-4, "label_smoothing": 0.1, "ema": 0.999,
        "attack": 5, "penalty_weight": 0.0010,  # its table also has 0.0006
    },
    # The authors' training code where it differs from their text. It also chose its checkpoint by
    # clean test accuracy, which we do not.
    "authors-code": {
        **PAPER, "nesterov": True, "dropout": 0.3, "bias": True, "radius": 0.031,
        "normalize": False, "attack_mode": "train",
    },
    "fast": {**FAST, "model": "preact-resnet18"},
    "fast-wrn": {**FAST, "model": "wrn-28-4"},
    "certified-digits": {
        "model": "shift-digits", "data": "digits", "epochs": 20, "batch": 64, "lr": 5e-3,
        "schedule": "cosine", "radius": 0.1, "step": 0.25, "check": 200, "certify": 36 / 255,
    },
    "certified-fast": {**CERTIFIED, "minutes": 8.5},
    "certified-large": {
        **CERTIFIED, "minutes": 8.5, "loss": "emma+annealing", "margin": 5 * 36 / 255,
    },
    # Twice as wide; a matrix of twice the size turns by the same angle at lr / √2.
    "certified-cifar": {
        **CERTIFIED, "minutes": 25.0, "model": "shift-1024x12", "orthogonal_lr": 3.5e-4,
        "randaugment": 0.75,
    },
}  # fmt: skip
"""Name → settings that differ from the defaults."""


def settings(arm: str = "at+lipreg", preset: str | None = None, **changes: Any) -> Settings:
    """Return the settings of a preset, changed by the arm and then by ``changes``.

    For the arm ``certified`` the presets ``digits``, ``fast``, ``large`` and ``cifar`` mean
    ``certified-digits``, ``certified-fast``, ``certified-large`` and ``certified-cifar``.

    Raises:
        ValueError: If a name is unknown, or a value is out of range or contradicts the arm.

    Example:
        >>> settings("at", "paper-cifar", epochs=3).penalty
        ''
    """
    own = f"certified-{preset}"
    if arm == "certified" and own in PRESETS:
        preset = own
    meant = preset if preset in PRESETS else own
    if arm in ARMS and arm != "certified" and meant in PRESETS and meant.startswith("certified-"):
        raise ValueError(f"preset {preset!r} is for the arm 'certified'; add --arm certified")
    if arm == "certified" and preset is not None and not preset.startswith("certified-"):
        offered = [name.removeprefix("certified-") for name in PRESETS if "certified-" in name]
        raise unknown("preset of the arm 'certified'", preset, offered)
    presets = [name for name in PRESETS if arm == "certified" or "certified-" not in name]
    for kind, name, table in (("arm", arm, list(ARMS)), ("preset", preset, presets)):
        if name is not None and name not in table:
            raise unknown(kind, name, table)
    chosen = {**(PRESETS[preset] if preset else {}), **ARMS[arm], "arm": arm, **changes}
    names = {f.name for f in dataclasses.fields(Settings)}
    for name in chosen:
        if name not in names:
            raise unknown("setting", name, sorted(names))
    result = Settings(**chosen)
    for name in ("attack", "penalty"):
        value = getattr(result, name)
        fixed = ARMS[arm].get(name, value)
        if value != fixed or (name not in ARMS[arm] and not value):
            need = "attack > 0" if name == "attack" else "a penalty"
            need = need if value == fixed else f"{name}={fixed!r}"
            fit = [repr(a) for a, c in ARMS.items() if c.get(name, value or None) == value]
            use = " or ".join(fit)
            raise ValueError(f"arm {arm!r} requires {need}; use {use} for {name}={value!r}")
    return result


def parse(text: str) -> tuple[str, Any]:
    """Parse ``name=value``, and convert the value to the setting's type.

    Example:
        >>> parse("milestones=30,60"), parse("compile=no"), parse("margin=51/255")
        (('milestones', (30, 60)), ('compile', False), ('margin', 0.2))
    """
    name, equals, value = text.partition("=")
    kinds = get_type_hints(Settings)
    if not equals:
        raise ValueError(f"--set {text!r} is not NAME=VALUE")
    if name not in kinds:
        raise ValueError(f"--set {text!r}: {unknown('setting', name, sorted(kinds))}")
    kind = kinds[name]
    try:
        if kind is bool:
            return name, {"yes": True, "true": True, "no": False, "false": False}[value.lower()]
        if kind is float and "/" in value:
            return name, float(Fraction(value))
        if kind in (int, float, str):
            return name, kind(value)
        return name, tuple(int(part) for part in value.split(",") if part)
    except (ValueError, KeyError, ZeroDivisionError):
        names = {bool: "bool (yes or no)", int: "int", float: "float (0.25 or 36/255)", str: "str"}
        shown = names.get(kind, "integers (a,b,c)")
        raise ValueError(f"--set {text!r}: {value!r} is not of type {shown}") from None


def as_dict(chosen: Settings) -> dict[str, Any]:
    """Convert settings for JSON, with tuples as lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(chosen).items()}


def decisive(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the settings on which the result depends: all but the number of workers."""
    return {name: value for name, value in stored.items() if name != "workers"}


def filled(stored: dict[str, Any]) -> dict[str, Any]:
    """Add defaults for settings that the version which wrote the record did not have."""
    return {**as_dict(Settings()), **stored}


def from_dict(stored: dict[str, Any]) -> Settings:
    """Convert settings from JSON.

    Raises:
        ValueError: If the record has unknown settings or wrong values.
    """
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
    try:
        return Settings(**values)
    except TypeError as error:
        raise ValueError(f"the settings are from another version of lipbound: {error}") from None
