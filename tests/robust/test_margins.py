"""Losses on margins, augmentation, certified training and certified accuracy."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers import TINY_SHIFT, blobs, chosen
from torch import Tensor, nn

from lipbound import audit, certify, constrain, exact
from lipbound.constraints import OrthogonalLinear
from lipbound.modules import in_float64
from lipbound.network.accuracy import certified_accuracy
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.models import MODELS, LiResNet, ShiftNetwork
from lipbound.robust.training.augment import DRAWS, augmented
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.loop import train
from lipbound.robust.training.margins import LOSSES, certified_radii, pair_constants
from lipbound.robust.training.run import Run
from lipbound.robust.training.settings import settings
from lipbound.robust.training.trained import load_trained

CPU = Team(torch.device("cpu"))
SHIFT = {"arm": "certified", "model": "tiny", "certify": 0.1}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A network that takes a second to export."""
    monkeypatch.setitem(MODELS, "tiny", TINY_SHIFT)
    small = {"size": 8, "width": 8, "depth": 1, "kernel": 3, "stride": 1, "cells": 2, "dense": 1}
    monkeypatch.setitem(MODELS, "liresnet", partial(LiResNet, **small, dense_width=16))


def plain(name: str, logits: Tensor, labels: Tensor, constants: Tensor, radius: float) -> float:
    """The losses image by image, as their papers define them."""
    total = 0.0
    for y, i in zip(logits.tolist(), labels.tolist(), strict=True):
        z = [*y]
        if name == "lipschitz-margin":
            z = [v + (j != i) * radius * constants[i, j].item() for j, v in enumerate(y)]
        if name == "gloro":
            best = max(range(len(y)), key=lambda j: y[j])
            rivals = [v + radius * constants[best, j].item() for j, v in enumerate(y) if j != best]
            z = [*y, max(rivals)]
        if name.startswith("emma"):
            for j, v in enumerate(y):
                gain = radius * constants[i, j].item()
                if j != i:
                    z[j] = v + min(gain, max(0.01 * gain, y[i] - v))
        if name.endswith("annealing"):
            z = [(v - 2.0 * (j == i)) / 0.75 for j, v in enumerate(z)]
        loss = -z[i] + math.log(sum(math.exp(v) for v in z))
        if name.endswith("annealing"):
            loss = 0.75 * (1 - math.exp(-loss)) ** 5 * loss
        total += loss / len(labels)
    return total


def example() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(12, 4, generator=draw, dtype=torch.float64)
    head = torch.randn(4, 7, generator=draw, dtype=torch.float64)
    return logits, torch.arange(12) % 4, pair_constants(torch.tensor(1.5).double(), head)


@pytest.mark.parametrize("radius", [0.01, 0.3])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_the_papers(name, radius):
    logits, labels, constants = example()
    found = LOSSES[name](logits, labels, constants, torch.tensor(radius).double())
    assert float(found) == pytest.approx(plain(name, logits, labels, constants, radius))
    logits.requires_grad_()
    LOSSES[name](logits, labels, constants, torch.tensor(radius).double()).backward()
    assert logits.grad.isfinite().all()


def test_estimated_radii_are_those_of_certify():
    """With the audit's constants instead of estimates, and 0 where the prediction is wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    inputs, labels = torch.randn(20, 6).double(), torch.arange(20) % 4
    found = audit(model, (6,), search=0)
    constants = pair_constants(torch.tensor(found.features).double(), model[2].weight.detach())
    logits = model(inputs).detach()
    right = logits.argmax(1) == labels
    radii = certified_radii(logits, labels, constants)
    assert torch.allclose(radii, certify(logits, found).where(right, 0.0), rtol=1e-9)


def test_augmented_images_stay_images_and_depend_on_the_draws_alone():
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(200, 3, 16, 16, generator=draw)
    draws = torch.rand(DRAWS, 200, generator=draw)
    found = augmented(images, draws, 0.1, 0.5)
    assert torch.equal(found, augmented(images, draws, 0.1, 0.5))
    assert 0 <= found.min() <= found.max() <= 1
    alone = augmented(images[7:8], draws[:, 7:8], 0.1, 0.5)
    assert torch.allclose(alone, found[7:8], atol=1e-6)
    assert torch.equal(augmented(images, draws, 0.0, 0.0), images)
    only = augmented(images, draws, 0.0, 0.5)
    changed = (only - images).abs().flatten(1).amax(1) > 1e-3
    assert not changed[draws[3] >= 0.5].any(), "only a share of the images"
    assert changed[draws[3] < 0.5].double().mean() > 0.7


def test_training_raises_the_certified_accuracy_and_proves_it(tmp_path):
    """The record's proved accuracy is that of the stored network, and no attack contradicts it."""
    wanted = chosen(**SHIFT, epochs=15, lr=2e-2, schedule="cosine", held_out=0.2)
    data = blobs(240, channels=3)
    summary = train(wanted, data, tmp_path, device="cpu")
    final = summary["final"]
    assert final["certified_accuracy"] > 0.8
    model = load_trained(tmp_path / "final.safetensors").model
    pixels, labels = data.test.images.float() / 255, data.test.labels
    found = audit(model, data.input_shape, search=0)
    assert final["lipschitz"] == pytest.approx(found.upper)
    proved = certified_accuracy(model, found, [(pixels, labels)], [0.1])
    assert proved.accuracy == (final["certified_accuracy"],)
    assert summary["held_out_certified_estimate"] == pytest.approx(proved.accuracy[0], abs=0.15)
    kept = proved.certified > 0.1
    broken = strongest_pgd(
        model, pixels, labels, radius=0.1, step=0.02, iterations=20, ball="l2", restarts=2
    ).broken
    assert not broken[kept].any()


def test_the_tracked_constant_is_the_norm_at_the_input_size():
    """An estimate from below of σ1 at that size, which is at most the proved bound for all."""
    run = Run(chosen(**SHIFT, epochs=2), blobs(channels=3), CPU)
    for _ in range(8):
        run.advance()
    model = run.descent.settled()
    head = model.head.weight.detach()
    estimate = float(run.descent.constants(model).max() / torch.cdist(head, head).max())
    assert estimate == pytest.approx(exact(model.trunk[0].conv, (3, 8, 8)), rel=1e-3)
    assert estimate <= audit(model, (3, 8, 8), search=0).features
    tracked = float(run.descent.constant().detach().exp())
    assert tracked == pytest.approx(estimate, rel=0.05)


def test_averaged_weights_are_the_ones_that_are_saved():
    """The mean of orthogonal matrices is made orthogonal again; other weights are the mean."""
    run = Run(chosen(**SHIFT, ema=0.5), blobs(channels=3), CPU)
    stem, head = run.model.trunk[0].conv.weight, run.model.head.weight
    means = [weight.detach().clone() for weight in (stem, head)]
    means[1] = run.networks.average.head.weight.detach().clone()
    for _ in range(6):
        run.advance()
        means = [mean.lerp(weight, 0.5) for mean, weight in zip(means, (stem, head), strict=True)]
    model = run.descent.settled()
    torch.testing.assert_close(model.trunk[0].conv.weight, means[0])
    torch.testing.assert_close(model.head.weight, means[1])
    assert not torch.allclose(model.head.weight, head, rtol=1e-3)
    for layer in (m for m in model.modules() if isinstance(m, OrthogonalLinear)):
        square = layer.weight @ layer.weight.T
        torch.testing.assert_close(square, torch.eye(len(square)), atol=1e-5, rtol=0)


def test_the_radius_of_the_margin_grows_over_the_ramp():
    run = Run(chosen(**SHIFT, ramp=0.25, margin=0.4), blobs(channels=3), CPU)
    images, labels = run.feed.batch(0)
    for progress, radius in [(0.0, 0.4 / 30), (0.125, 0.4 * 31 / 60), (0.25, 0.4), (1.0, 0.4)]:
        run.descent.take([(images, labels)], 1e-6, progress)
        assert float(run.descent.radius) == pytest.approx(radius)


def test_a_liresnet_trains_too():
    """All of its convolutions are tracked; the proved bound is their product."""
    run = Run(chosen(**{**SHIFT, "model": "liresnet"}, lr=1e-3), blobs(channels=3), CPU)
    before = run.descent.settled()
    for _ in range(12):
        run.advance()
    model = run.descent.settled()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model.trunk[2].weight, before.trunk[2].weight)
    found = audit(model, (3, 8, 8), search=0)
    assert found.upper == pytest.approx(found.product, rel=1e-2)


def test_minutes_end_a_run_and_set_its_schedule(tmp_path):
    wanted = chosen(**SHIFT, minutes=0.01, schedule="cosine")
    summary = train(wanted, blobs(channels=3), tmp_path, device="cpu")
    assert summary["stopped"] == ""
    assert summary["seconds"] >= 0.6
    assert summary["steps"] == summary["step"] > 4
    assert summary["lr"] == pytest.approx(wanted.lr * 1e-4)
    again = train(wanted, blobs(channels=3), tmp_path, device="cpu", resume=True)
    assert again == summary


class HeadFirst(ShiftNetwork):
    def __init__(self, **options):
        super().__init__(**options)
        self.late = OrthogonalLinear(16, 16)

    def features(self, x: Tensor) -> Tensor:
        return self.late(super().features(x))


class Unbounded(ShiftNetwork):
    def features(self, x: Tensor) -> Tensor:
        inner = super().features(x)
        return inner * inner


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "cnn"}, "cannot be trained with loss='emma': a margin needs .* called head"),
        ({"model": "unbounded"}, "no finite Lipschitz bound: .* no global Lipschitz constant"),
        ({"model": "head first"}, "the head must be the last Linear layer"),
        ({"normalize": True}, "normalize=yes does not work with loss='emma'"),
        ({"ramp": 1.5}, "ramp=1.5 must be at most 1"),
        ({"loss": "ema"}, "loss='ema' is not one of"),
        ({"penalty": "lipbound"}, "arm 'certified' requires penalty=''"),
    ],
)
def test_networks_without_a_margin_are_refused_before_training(
    tmp_path, monkeypatch, changes, said
):
    small = TINY_SHIFT.keywords
    monkeypatch.setitem(MODELS, "unbounded", lambda **o: Unbounded(**o, **small))
    monkeypatch.setitem(MODELS, "head first", lambda **o: HeadFirst(**o, **small))
    with pytest.raises(ValueError, match=said):
        train(chosen(**{**SHIFT, **changes}), blobs(channels=3), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["cifar", "certified-digits"])
def test_presets_of_the_certified_arm_are_refused_by_others(preset):
    with pytest.raises(ValueError, match=f"preset '{preset}' is for the arm 'certified'"):
        settings("at", preset)


def test_a_batch_that_is_not_in_a_list_is_named():
    model, inputs, labels = line(4)
    with pytest.raises(ValueError, match="must yield pairs"):
        certified_accuracy(model, audit(model, (1,)), (inputs, labels))


@pytest.mark.parametrize("preset", ["digits", "fast", "cifar"])
def test_presets_of_the_certified_arm_may_be_shortened(preset):
    assert settings("certified", preset) == settings("certified", f"certified-{preset}")


def line(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """f(x) = (x, −x): the radius of an input is its absolute value."""
    model = nn.Linear(1, 2, bias=False).double()
    model.weight.data = torch.tensor([[1.0], [-1.0]]).double()
    inputs = torch.linspace(-1, 1, count, dtype=torch.float64)[:, None]
    return model, inputs, (inputs[:, 0] < 0).long()


def test_certified_accuracy_counts_right_images_with_a_larger_radius():
    model, inputs, labels = line(8)
    labels[0] = 0  # its prediction is wrong
    found = certified_accuracy(
        model, audit(model, (1,)), [(inputs[:3], labels[:3]), (inputs[3:], labels[3:])], [0.5, 2.0]
    )
    assert found.clean == 7 / 8
    assert found.accuracy == (3 / 8, 0.0)
    assert torch.allclose(found.certified[1:], inputs[1:, 0].abs(), rtol=1e-9)
    assert found.certified[0] == 0
    assert found.by_class(0.5) == [2 / 5, 1 / 3]


def test_a_copy_in_float64_has_the_weights_that_run():
    torch.manual_seed(0)
    model = constrain(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 2))).eval()
    wide = in_float64(model)
    assert all(p.dtype == torch.float64 for p in wide.parameters())
    assert torch.equal(wide[0].weight, model[0].weight.double())
    assert not hasattr(wide[0], "parametrizations")


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], 1) - x.mean(0)


@pytest.mark.parametrize(
    ("model", "batches", "said"),
    [
        (line(4)[0], [], "there are no images to certify"),
        (Mixing(), [(line(4)[1], line(4)[2])], "mixes the inputs of a batch"),
    ],
)
def test_certified_accuracy_names_wrong_batches(model, batches, said):
    with pytest.raises(ValueError, match=said):
        certified_accuracy(model, audit(model, (1,), search=0), batches)


@pytest.mark.parametrize(
    ("labels", "radii", "said"),
    [
        (torch.zeros(4, 1).long(), [0.1], r"got torch.int64 of shape \(4, 1\)"),
        (torch.zeros(4), [0.1], "got torch.float32"),
        (torch.zeros(4).long(), 0.1, "radii=0.1 must be a list"),
        (torch.zeros(4).long(), [-0.1], r"radii=\[-0.1\] must be finite numbers, 0 or larger"),
    ],
)
def test_certified_accuracy_names_wrong_labels_and_radii(labels, radii, said):
    model, inputs, _ = line(4)
    with pytest.raises(ValueError, match=said):
        certified_accuracy(model, audit(model, (1,)), [(inputs, labels)], radii)
