"""The Lightning callback: its steps are those of a hand-written loop with the penalty."""

from __future__ import annotations

import math
import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lipbound import Penalty

lightning = pytest.importorskip("lightning", reason="needs pip install 'lipbound[lightning]'")

from lipbound.lightning import LipschitzPenalty  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's: few workers, no logger, ...
BATCH, COUNT = 4, 24


def network(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 3),
    ).to(dtype)


def samples(dtype=torch.float64) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(COUNT, 1, 8, 8, generator=draw, dtype=dtype)
    return TensorDataset(images, torch.arange(COUNT) % 3)


class Module(lightning.LightningModule):
    def __init__(self, net: nn.Module, optimizers: int = 1, skip: bool = False, **options):
        super().__init__()
        self.net, self.optimizers_count, self.skip, self.options = net, optimizers, skip, options
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        return None if self.skip else loss

    def configure_optimizers(self):
        made = [
            torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, **self.options)
            for _ in range(self.optimizers_count)
        ]
        return made[0] if len(made) == 1 else made


def fit(module, *callbacks, epochs=2, checkpoint=None, dtype=torch.float64, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(**{
            "max_epochs": epochs, "accelerator": "cpu", "devices": 1, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "callbacks": list(callbacks), **options,
        })  # fmt: skip
        trainer.fit(module, DataLoader(samples(dtype), BATCH), ckpt_path=checkpoint)
    return trainer


def by_hand(net, epochs=2, together=1, clip=None, **options) -> dict[str, float]:
    """The loop that the guide shows; returns the bounds at its end."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    penalty = Penalty(net, **options)
    for _ in range(epochs):
        for index, (images, labels) in enumerate(DataLoader(samples(), BATCH)):
            (nn.functional.cross_entropy(net(images), labels) / together).backward()
            if (index + 1) % together == 0:
                penalty.add_grad_()
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        bounds = penalty.bounds()  # as the callback, which logs them: 'spectral' takes a step
    return bounds


def assert_equal(one: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(
            tensor, other.state_dict()[name], rtol=0, atol=tolerance, msg=name
        )


LOOPS = {
    "plain": ({}, {}, {}),
    "folded, with a floor": ({"include_batchnorm": "folded", "floor": 1.0}, {}, {}),
    "spectral": ({"method": "spectral"}, {}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 3}, {"together": 3}),
    "clipped": ({}, {"gradient_clip_val": 0.1}, {"clip": 0.1}),
}


@pytest.mark.parametrize(("penalty", "trainer", "loop"), LOOPS.values(), ids=LOOPS)
def test_the_weights_are_those_of_a_loop_by_hand(penalty, trainer, loop):
    net, other = network(), network()
    callback = LipschitzPenalty(0.2, network="net", **penalty)
    fitted = fit(Module(net), callback, **trainer)
    bounds = by_hand(other, weight=0.2, **penalty, **loop)
    assert_equal(net, other)
    free = network()
    fit(Module(free), **trainer)
    assert (net[0].weight - free[0].weight).abs().max() > 1e-4, "the penalty did something"
    logged = fitted.callback_metrics
    product = sum(math.log10(bound) for bound in bounds.values())
    assert math.isclose(float(logged["log10_product/net"]), product, rel_tol=1e-6)
    assert float(logged["penalty/net"]) > 0


def test_a_resumed_fit_continues_the_states_of_the_penalty(tmp_path):
    whole, first, second = (network() for _ in range(3))
    options = {"network": "net", "method": "power_iteration", "input_shape": (1, 8, 8)}
    fit(Module(whole), LipschitzPenalty(**options), epochs=3)
    trainer = fit(Module(first), LipschitzPenalty(**options), epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    stored = torch.load(tmp_path / "one.ckpt", weights_only=False)["callbacks"]
    assert any("vector" in name for state in stored.values() for name in state)
    fit(Module(second), LipschitzPenalty(**options), epochs=3, checkpoint=tmp_path / "one.ckpt")
    assert_equal(whole, second)


def test_a_part_of_the_module_is_penalized():
    module = Module(network())
    module.spare = network()
    callback = LipschitzPenalty(0.1, network="spare")
    trainer = fit(module, callback, epochs=1)
    assert set(callback.penalty.bounds()) == {"0", "1", "3"}
    assert {"penalty/spare", "log10_product/spare"} <= {*trainer.callback_metrics}
    two = LipschitzPenalty(0.1, network="net")
    assert two.state_key != callback.state_key
    fit(module, callback, two, epochs=1)


class Zeroing(Module):
    def optimizer_zero_grad(self, epoch, index, optimizer):
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("kind", [Module, Zeroing])
def test_a_step_without_gradients_is_left_alone(kind):
    net = network()
    fit(kind(net, skip=True), LipschitzPenalty(0.5))
    for mine, before in zip(net.parameters(), network().parameters(), strict=True):
        assert torch.equal(mine, before)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision):
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    net = network(torch.float32)
    callback = LipschitzPenalty(0.2)
    fit(Module(net), callback, precision=precision, dtype=dtype)
    assert net[0].weight.dtype == dtype
    assert callback.penalty().isfinite()
    free = network(torch.float32)
    fit(Module(free), precision=precision, dtype=dtype)
    weaker = Penalty(free, 1.0)
    assert sum(math.log(b) for b in callback.penalty.bounds().values()) < float(weaker())


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_does_not_scale_the_penalty(fused):
    """A float16 scaler unscales before the callback, or inside a fused optimizer after it."""
    from lightning.pytorch.plugins import MixedPrecision

    nets = []
    for scale in (1.0, 2.0**10):
        net = network(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        options = {"plugins": [plugin], "dtype": torch.float32}
        fit(Module(net, fused=fused), LipschitzPenalty(0.5), **options)
        nets.append(net)
    assert (nets[0][0].weight - network()[0].weight).abs().max() > 1e-2
    assert_equal(*nets, tolerance=2e-3)


@pytest.mark.parametrize(
    ("module", "callback", "said"),
    [
        ({"optimizers": 2}, {}, r"needs one optimizer, but configure_optimizers returned 2; call"),
        ({}, {"network": "nett"}, r"network='nett' is no part of Module; its parts are net$"),
        ({}, {"method": "lipbond"}, r"method='lipbond' is not one of"),
    ],
)
def test_refused(module, callback, said):
    with pytest.raises(ValueError, match=said):
        fit(Module(network(), **module), LipschitzPenalty(0.1, **callback))


def test_strategies_that_split_the_weights_are_refused():
    strategy = lightning.pytorch.strategies.FSDPStrategy()
    trainer = types.SimpleNamespace(strategy=strategy, optimizers=[None])  # FSDP needs a GPU
    with pytest.raises(ValueError, match="but FSDPStrategy may split them; use strategy='ddp'"):
        LipschitzPenalty(0.1).on_fit_start(trainer, Module(network()))


class Apart(lightning.LightningModule):
    """Every process sees images of its own scale, so the running statistics differ."""

    def __init__(self, folder):
        super().__init__()
        self.net, self.folder = network(), folder

    def training_step(self, batch, index):
        images, labels = batch
        images = images * (1 + 5 * self.global_rank)
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self):
        torch.save(self.net.state_dict(), f"{self.folder}/{self.global_rank}.pt")


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights(tmp_path):
    callback = LipschitzPenalty(0.5, network="net", include_batchnorm="folded")
    fit(Apart(tmp_path), callback, strategy="ddp_spawn", devices=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, tensor in one.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(tensor, other[name]), name
