"""On a GPU: the fused kernels for real, captured, replayed and in a training loop."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from helpers import blobs, chosen
from torch import nn

import lipbound
from lipbound import Penalty
from lipbound.bounds import certified
from lipbound.bounds.supremum import levels
from lipbound.cuda_graphs import Repeated, captured, graph_pool
from lipbound.paper.table1 import METHODS
from lipbound.penalty import plain
from lipbound.robust.attacks.evaluate import evaluate, outcomes
from lipbound.robust.attacks.plan import Plan
from lipbound.robust.models import WideResNet
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.loop import train
from lipbound.robust.training.run import Run
from lipbound.robust.training.trained import load_model
from verify import network_checks
from verify.layer_checks import check_layers
from verify.network_checks import check_networks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model() -> nn.Module:
    torch.manual_seed(0)
    network = WideResNet(10, 2).cuda()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            module.running_var.uniform_(0.2, 3)
    return network


def twin(penalty: Penalty) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    total = penalty.weight * plain.logs(penalty.factors, penalty.log_floor).sum()
    leaves = list(penalty.model.parameters())
    return total.detach(), torch.autograd.grad(total, leaves, allow_unused=True)


def assert_gradients(network: nn.Module, expected: list[torch.Tensor | None], rtol: float = 1e-4):
    for parameter, grad in zip(network.parameters(), expected, strict=True):
        if grad is not None:
            scale = float(grad.abs().amax())
            torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=rtol * scale + 1e-30)


@pytest.mark.parametrize("norms", [True, False, "folded"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_equal_the_twin(layout, norms):
    network = model().to(memory_format=layout)
    penalty = Penalty(network, 0.1, include_batchnorm=norms)
    expected, gradients = twin(penalty)
    for _ in range(5):  # launched, captured, replayed
        network.zero_grad()
        torch.testing.assert_close(penalty.add_grad_(), expected, rtol=1e-5, atol=0)
        assert_gradients(network, gradients)
    assert penalty._terms._fused is not None
    network.zero_grad()
    penalty().backward()
    assert_gradients(network, gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    network = nn.Sequential(nn.Conv2d(16, 24, 3), nn.Conv2d(24, 8, 5), nn.Conv2d(8, 8, 1))
    network = network.cuda().to(dtype)
    penalty = Penalty(network, 1.0)
    expected, gradients = twin(penalty)
    torch.testing.assert_close(penalty.add_grad_(), expected, rtol=1e-5, atol=0)
    assert_gradients(network, gradients, 1e-2)


def test_follows_the_weights_through_training():
    network = model().train()
    penalty = Penalty(network, 0.5)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, fused=True)
    images, labels = torch.rand(16, 3, 32, 32).cuda(), torch.arange(16).cuda() % 10
    for step in range(6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        before = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
        expected, gradients = twin(penalty)
        torch.testing.assert_close(penalty.add_grad_(), expected, rtol=1e-5, atol=1e-5)
        sums = [
            None if g is None else g + b
            for g, b in zip(gradients, before, strict=True)
        ]  # fmt: skip
        assert_gradients(network, sums)
        optimizer.step()
        if step == 3:
            network.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("method", ["spectral", "power_iteration"])
def test_followed_terms_replay(method, monkeypatch):
    """As launched one by one, through moving weights, fresh gradients and a change of layout."""
    networks = [model(), model()]
    options = {"input_shape": (3, 32, 32), "iterations": 3}
    penalties = [Penalty(network, 0.5, method, **options) for network in networks]
    for layer in penalties[1]._terms.layers:
        monkeypatch.setattr(layer, "repeats", lambda: False)
    for step in range(9):
        for network in networks:
            network.zero_grad(set_to_none=step % 2 == 0)
            if step == 6:
                network.to(memory_format=torch.channels_last)
        found, expected = (penalty.add_grad_(1 + step) for penalty in penalties)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert_gradients(networks[0], [p.grad for p in networks[1].parameters()], 1e-3)
        with torch.no_grad():
            for ours, theirs in zip(*(n.parameters() for n in networks), strict=True):
                ours.mul_(1.02).add_(0.01 * torch.randn_like(ours))
                theirs.copy_(ours)
    assert penalties[0]._terms._add._graph._captured is not None
    assert penalties[1]._terms._add._graph is None
    copied = copy.deepcopy(penalties[0])  # its state, not its graph
    torch.testing.assert_close(copied.add_grad_(), penalties[0].add_grad_(), rtol=1e-4, atol=1e-4)


def test_inside_a_graph_of_the_users_own():
    network = model()
    penalty = Penalty(network, 1.0)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            penalty.add_grad_()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for parameter in network.parameters():
            parameter.grad.zero_()
        value = penalty.add_grad_()
    for _ in range(3):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1.1).add_(0.01 * torch.randn_like(parameter))
        graph.replay()
        expected, gradients = twin(penalty)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        assert_gradients(network, gradients)


def test_autograd_inside_a_graph():
    network = model()
    penalty = Penalty(network, 1.0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            network.zero_grad()
            penalty().backward()
    torch.cuda.current_stream().wait_stream(side)
    network.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        penalty().backward()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.9)
    graph.replay()
    _, gradients = twin(penalty)
    assert_gradients(network, gradients)


def test_bounds_hold():
    layer = nn.Conv2d(64, 48, 3, stride=2).cuda()
    (value,) = Penalty(nn.Sequential(layer)).bounds().values()
    truth = lipbound.bracket(layer.cpu())
    assert truth.lower <= value <= 20 * truth.upper


@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
@pytest.mark.parametrize("channels", [(24, 32), (130, 150), (512, 512)], ids=str)
def test_brackets_are_those_of_the_processor(channels, rtol):
    torch.manual_seed(0)
    layer = nn.Conv2d(*channels, 3)
    truth, found = lipbound.bracket(layer, rtol), lipbound.bracket(layer.cuda(), rtol)
    assert found.upper <= found.lower * (1 + rtol)
    assert truth.lower <= found.upper * (1 + 1e-12)
    assert found.lower <= truth.upper * (1 + 1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_brackets_by_levels_are_those_of_the_processor(monkeypatch, seed):
    """Levels are launched in the first call, captured in the second and replayed in the others."""
    monkeypatch.setattr(certified, "BY_LEVELS", {"cuda"})
    torch.manual_seed(seed)
    shapes = [(24, 32, 3), (24, 32, 3), (200, 210, 3), (24, 32, 1), (400, 300, 1), (3, 64, 7)]
    shapes += [(16 + i, 20, 3) for i in range(12)]  # many graphs at the same time
    layers = nn.ModuleDict({str(i): nn.Conv2d(*shape) for i, shape in enumerate(shapes)})
    for call in range(6):
        for layer in layers.values():
            nn.init.normal_(layer.weight)
        truth, found = lipbound.brackets(layers, device="cpu"), lipbound.brackets(layers.cuda())
        for name, mine in found.items():
            assert mine.upper <= mine.lower * (1 + 1e-3), (name, call)
            assert truth[name].lower <= mine.upper * (1 + 1e-12), (name, call)
            assert mine.lower <= truth[name].upper * (1 + 1e-12), (name, call)
    assert any(stack.pool is not None for alike in levels._kept.values() for stack in alike)


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_of_table1(method):
    torch.manual_seed(0)
    kernel, (_, measure) = torch.randn(32, 24, 3, 3), METHODS[method]
    assert measure(kernel.cuda(), 16) == pytest.approx(measure(kernel, 16), rel=2e-3)


def test_floor_and_gradient_scaler():
    network = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).cuda()
    with torch.no_grad():
        network[0].weight.mul_(1e-3)
    penalty = Penalty(network, 1.0, floor=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    scaler.scale(torch.ones((), device="cuda"))
    penalty.add_grad_(scaler._scale)
    expected, gradients = twin(penalty)
    assert float(expected) == pytest.approx(math.log(penalty.bounds()["1"]), rel=1e-4)
    assert not network[0].weight.grad.any()
    assert_gradients(network, [None if g is None else 64 * g for g in gradients])


def test_compiled():
    network = model()
    penalty = Penalty(network, 1.0)
    torch.compile(lambda: penalty())().backward()
    _, gradients = twin(penalty)
    assert_gradients(network, gradients, 1e-3)


@pytest.mark.parametrize("arm", ["at+lipreg", "at+spectral", "at+pm"])
def test_training_and_going_on(tmp_path, arm):
    awp = 0.01 if arm == "at+spectral" else 0.0
    wanted = chosen(arm, model="wrn-10-1", precision="bfloat16", ema=0.9, awp=awp,
                    compile=arm != "at+pm")  # fmt: skip
    data = blobs(channels=3)
    whole = train(wanted, data, tmp_path / "whole", device="cuda")
    assert whole["final"]["test_accuracy"] > 0.3
    part = train(wanted, data, tmp_path / "part", device="cuda", time_limit=0)
    assert part["stopped"]
    again = train(wanted, data, tmp_path / "part", device="cuda", resume=True)
    assert again["final"]["log10_product"] == pytest.approx(
        whole["final"]["log10_product"], abs=0.05
    )
    model, shape = load_model(tmp_path / "part" / "final.safetensors")
    assert model(torch.zeros(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_graphs_find_what_plain_searches_find(precision):
    network = model().eval()
    torch.manual_seed(1)
    images = torch.rand(70, 3, 32, 32, device="cuda")
    with torch.no_grad():
        labels = network(images).argmax(1)
    plan = Plan(("pgd", "cw"), iterations=20, restarts=2, searches=3, search_steps=30, batch=32,
                precision=precision)  # fmt: skip
    shares = []
    for radius in (0.01, 0.03, 0.1):
        graphs, plain = (
            evaluate(network, images, labels, p, doubts=False)
            for p in (replace(plan, radius=radius), replace(plan, radius=radius, graphs=False))
        )
        shares.append(plain["pgd"]["accuracy"])
        for entry in (lambda r: r["pgd"], lambda r: r["cw"]["0.6"]):
            assert int((outcomes(entry(graphs)) ^ outcomes(entry(plain))).sum()) <= 3
    assert min(shares) < max(shares)


def test_the_campaign_in_small(monkeypatch):
    """Every bound computed here, the truth in float64 here too."""
    monkeypatch.setattr(network_checks, "FEW", 10)  # a step is hundreds of small launches
    found = check_layers(range(6), 8, "cuda")
    found.add(check_layers(range(6), 8, "cuda", ["levels"]))
    found.add(check_networks(range(6), "cuda"))
    found.add(check_networks(range(1), "cuda", "high"))
    assert found.violations == []


class Doubled(nn.Conv2d):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(2, affine=False), Doubled(2, 2, 3, padding=1)])
def test_audits_stay_on_the_device(layer):
    """Buffers alone; an identity that is added to a convolution."""
    assert lipbound.audit(nn.Sequential(layer, nn.ReLU()).cuda(), (2, 3, 3)).upper < math.inf


def test_radii_of_a_network_audited_here():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).cuda()
    inputs = torch.randn(5, 3, device="cuda")
    assert (lipbound.certify(network, lipbound.audit(network, (3,)), inputs) > 0).all()


def test_a_captured_certified_step_is_the_one_launched_kernel_by_kernel():
    """The same losses and constants over several steps, the tracked norm included."""
    data = blobs(channels=3)
    runs = []
    for graphs in (True, False):
        wanted = chosen(
            "certified", model="shift-digits", certify=0.1, cuda_graphs=graphs, epochs=4
        )
        runs.append(Run(wanted, data, Team(torch.device("cuda"))))
    for _ in range(12):
        for run in runs:
            run.advance()
    one, two = (run.sums.tolist() for run in runs)
    assert one == pytest.approx(two, rel=1e-2)  # Adam's first steps enlarge the rounding of TF32
    assert runs[0].descent.repeated._captured is not None
    norms = [float(run.descent.constant().detach()) for run in runs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("fault", ["a value is read", "the pool has ended"])
def test_random_numbers_can_be_drawn_after_a_capture_that_fails(fault):
    given = torch.ones(3, device="cuda")
    pool = graph_pool(given.device)
    graph, results = captured(lambda: 2 * given, pool)
    graph.replay()
    del graph
    if fault == "the pool has ended":
        with pytest.raises(RuntimeError):
            captured(lambda: 2 * given, pool)
    else:
        with pytest.raises(RuntimeError):
            captured(lambda: given * given.sum().item())
    assert torch.rand_like(given).shape == given.shape
    graph, results = captured(lambda: 3 * given)
    graph.replay()
    assert results.tolist() == [3, 3, 3]


def test_a_graph_that_holds_a_tracked_penalty_follows_the_weights():
    layer = nn.Conv2d(3, 4, 3, device="cuda")
    penalty = Penalty(nn.Sequential(layer), 1.0, "spectral")
    repeated = Repeated(torch.device("cuda"))
    with torch.no_grad():
        for _ in range(30):
            repeated(penalty)
        layer.weight.mul_(3)
        for _ in range(30):
            value = repeated(penalty)
    assert float(value.exp()) == pytest.approx(lipbound.bracket(layer).upper, rel=1e-2)
