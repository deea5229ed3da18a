"""The campaign in small: nothing is violated, and what is broken is found, shrunk and recorded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal, localcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController
from torch import nn

from lipbound import BOUNDS, audit, files
from lipbound.network.rules import RULES
from lipbound.network.rules.ranges import Range, Ranges
from lipbound.runtime import one_blas_thread
from lipbound.toeplitz import exact
from verify import campaign, layer_checks, network_checks
from verify.__main__ import main
from verify.layer_checks import CHECKS, check_layers
from verify.network_checks import check_networks, jacobians, searched_norm
from verify.oracles import Symbols, operator_norms
from verify.planted import FAULTS, planted, seen_after
from verify.random_layers import FAMILIES, random_stack, structured
from verify.random_networks import MIXED, MULTIPLIED
from verify.tally import Tally
from verify.worst_cases import search_kernels


def test_no_bound_is_violated_on_random_layers():
    tally = check_layers(range(12), 8)
    assert tally.violations == []
    assert set(BOUNDS) | {"bracket upper", "bracket lower", "penalty", "constrain"} <= set(
        tally.claims
    )
    assert {"sized bracket upper", "sized bracket lower", "gram, sized"} <= set(tally.claims)
    assert all(claim["margin"] > 0 for claim in tally.claims.values())
    assert sum(tally.counts["dtypes"].values()) == tally.count


@pytest.mark.parametrize("seed", range(20, 32))
def test_the_oracles_agree_with_the_library_that_is_tested_elsewhere(seed):
    stack = random_stack(seed, 3)
    if stack.size is None:
        return
    for kernel, norm in zip(stack.kernels, operator_norms(stack).tolist(), strict=True):
        assert norm == pytest.approx(exact(kernel.double(), stack.size, **stack.options), rel=1e-9)


def test_the_symbols_peak_is_found_off_the_grid():
    stack = random_stack(3, 1)
    kernel = torch.tensor([[[1.0, -0.3, 0.7, -1.1]]], dtype=torch.float64)
    stack = type(stack)(0, (kernel,), {"stride": (1,), "groups": 1}, None)
    waves = torch.linspace(0, math.pi, 100_001, dtype=torch.float64)
    truth = (kernel[0, 0] * torch.exp(1j * waves[:, None] * torch.arange(4))).sum(1).abs().max()
    assert float(Symbols(stack).peaks(torch.zeros(1, 1))) == pytest.approx(float(truth), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_shape_asked_for(family):
    for shape in ((2, 3), (3, 2, 4), (1, 1, 2, 3, 1)):
        kernel = structured(np.random.default_rng(0), family, shape)
        assert kernel.shape == shape
        assert np.isfinite(kernel).all()


def test_a_broken_bound_is_found_and_shrunk(monkeypatch, capsys):
    def broken(layer, samples=None, widening="best", **geometry):
        return 0.5 * BOUNDS["frobenius"](layer, **geometry)

    monkeypatch.setitem(BOUNDS, "lipbound", broken)
    tally = check_layers(range(2, 3), 4)
    found = [v for v in tally.violations if v["claim"].startswith("lipbound")]
    assert found
    code = found[0]["reproduction"]
    exec(compile(code, "reproduction", "exec"), {})  # what a reader would do with it
    said = capsys.readouterr().out.removeprefix(found[0]["claim"])
    value, truth = (json.loads(part) for part in said.split("truth"))
    assert value[0] < truth[0]
    kernel = eval(code.split("kernel = ")[1].split("\n")[0], {"torch": torch})
    assert kernel.numel() == 1, "half of |w| is still below |w|"


@pytest.mark.parametrize("fault", [f for f in FAULTS if "bracket" in f or "Gram" in f])
def test_planted_faults_are_seen(fault):
    with planted(fault):
        layers, claim = seen_after(600)
    assert claim.startswith(fault.split(":")[0].split()[0].lower()), layers


def test_an_error_is_a_violation(monkeypatch):
    def refuses(stack, layers, known):
        raise ValueError("no")

    monkeypatch.setitem(CHECKS, "gram", refuses)
    (violation,) = check_layers(range(1), 2).violations
    assert (violation["claim"], violation["message"]) == ("error", "ValueError: no")


def test_margins_are_one_sided():
    truth = torch.tensor([2.0, 2.0, 0.0, 2.0])
    upper = layer_checks.Claim("u", [2.1, 1.9, 0.0, math.nan], truth)
    lower = layer_checks.Claim("l", [1.9, 2.1, 0.0, math.nan], truth, upper=False)
    assert upper.wrong() == lower.wrong() == [1, 3]
    assert layer_checks.Claim("l", [0.1], torch.zeros(1), upper=False).wrong() == [0]
    assert upper.margins()[0] == pytest.approx(0.05)
    assert lower.margins()[0] == pytest.approx(0.05)


@pytest.mark.slow
def test_worst_kernels_stay_below_their_bounds():
    tally = search_kernels(range(6, 8), (), steps=12, tries=4)
    assert tally.violations == []
    assert {"lipbound", "gram", "bracket upper", "bracket lower"} <= set(tally.claims)
    assert dict(tally.counts["starts"]).get("trained") == 1
    assert tally.claims["fantastic_four"]["margin"] < 0.05, "it ends far from where it began"


@pytest.mark.slow
def test_no_random_network_exceeds_its_audit():
    tally = check_networks([1, 2, 3, 4, MIXED + 4, MIXED + 11, MIXED + 27])
    assert tally.violations == []
    assert tally.counts["modules"]["Mixed"] >= 3
    assert tally.counts["outcomes"]["bounded"] >= 3
    assert tally.claims["network"]["margin"] > 0


PRODUCTS = [MULTIPLIED + n for n in (7, 8, 14, 16, 31, 32)]


@pytest.mark.slow
def test_no_random_product_exceeds_its_bound():
    tally = check_networks(PRODUCTS)
    assert tally.violations == []
    assert tally.counts["modules"]["Multiplied"] == tally.counts["outcomes"]["bounded"] == 6
    assert tally.claims["network"]["margin"] < 0.01, "one of them is nearly attained"


@pytest.mark.slow
def test_ranges_that_are_too_small_are_found(monkeypatch):
    range_of = Ranges.__getitem__

    def smaller(self, name):
        found = range_of(self, name)
        return found and Range(0.2 * found.low, 0.2 * found.high, 0.2 * found.norm)

    monkeypatch.setattr(Ranges, "__getitem__", smaller)
    monkeypatch.setattr(network_checks, "shrink", lambda case, *_: case)
    assert check_networks(PRODUCTS).violations


@pytest.mark.slow
def test_no_random_network_exceeds_its_lipsdp_bound():
    tally = check_networks([60_000_030, 60_000_031, 60_000_055], effort="high")
    assert tally.violations == []
    assert tally.claims["lowered by LipSDP"]["count"] >= 1
    assert 0 < tally.claims["floor"]["margin"] < 1e-10, "a linear network is bounded exactly"


@pytest.mark.parametrize("seed", range(20))
def test_where_the_margin_is_rounding_the_bound_is_above_the_exact_truth(seed):
    """The campaign's smallest margin is -4.5e-14, of differences; in 50 digits it is positive.

    A float32 network has ε as float32, which is a little smaller here.
    """
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(1).eval()
    norm.weight.data.normal_()
    norm.running_var.uniform_(0.1, 2)
    values = norm.weight.item(), norm.running_var.item(), norm.eps
    weight, variance, *eps = map(Decimal, (*values, float(torch.tensor(norm.eps))))
    upper = Decimal(audit(nn.Sequential(norm, norm, norm), (1, 4, 6), search=0).upper)
    with localcontext(prec=50):
        truth = abs(weight / (variance + min(eps)).sqrt()) ** 3
        assert 0 <= upper / truth - 1 < Decimal("1e-13")


@pytest.mark.slow
def test_a_broken_rule_is_found_and_shrunk(monkeypatch):
    monkeypatch.setitem(RULES, "aten.relu", lambda step: 0.2)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten())
    given = model.eval(), (1, 2, 2)
    monkeypatch.setattr(network_checks, "random_network", lambda seed, blocks: given)
    (violation,) = check_networks(range(1)).violations
    assert "model = nn.Sequential(nn.ReLU())" in violation["reproduction"]


def test_jacobians_are_dense_and_searched():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.MaxPool1d(2, 1), nn.Flatten()).double()
    points = torch.randn(3, 2, 5, dtype=torch.float64)
    found = jacobians(model, points)
    for point, matrix in zip(points, found, strict=True):
        dense = torch.autograd.functional.jacobian(lambda x: model(x[None])[0], point)
        torch.testing.assert_close(matrix, dense.reshape(matrix.shape))
    linear = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    norm = torch.linalg.matrix_norm(linear[1].weight, 2).item()
    assert searched_norm(linear, (1, 4), 0) == pytest.approx(norm, rel=1e-12)


@pytest.fixture
def quick(monkeypatch):
    """Parts that take no time: a seed is a layer with the margin 1/(seed + 1)."""

    def run(task):
        tally = Tally()
        for seed in task.seeds:
            tally.count += 1
            tally.saw("claim", [1 / (seed + 1), math.inf], [seed])
        return tally

    for name, part in campaign.PARTS.items():
        monkeypatch.setitem(campaign.PARTS, name, campaign.Part(run, part.seeds, part.share))


def test_seeds_go_on_where_the_file_ends_and_records_merge(quick, tmp_path, capsys):
    path = tmp_path / "campaign.jsonl"
    for _ in range(2):
        schedule = campaign.Schedule(["layers", "networks"], files.read(path), 100)
        for _ in range(3):
            task = schedule.task("cpu", ())
            files.append(path, campaign.run_task(task))
            schedule.spent[task.part] += 1.0
    with path.open("a") as file:
        file.write('{"experiment": "camp')  # killed in the middle of a line
    seeds = sorted(s for r in files.read(path) if r["part"] == "layers" for s in r["seeds"])
    assert seeds[0][0] == 100
    assert all(a[1] == b[0] for a, b in pairwise(seeds)), "none twice, no gap"
    before = campaign.summary(files.read(path))
    assert main(["campaign", "--merge", "--out", str(path)]) == 0
    (line,) = [r for r in files.read(path) if r["part"] == "layers"]
    assert line["seeds"] == [[100, seeds[-1][1]]]
    assert line["count"] == seeds[-1][1] - 100
    assert line["claims"]["claim"]["margin"] == 1 / seeds[-1][1]
    assert line["claims"]["claim"]["at"] == [seeds[-1][1] - 1, 0]
    assert before.strip() in capsys.readouterr().out
    free = campaign.Schedule(["layers"], files.read(path), 0)
    assert free.task("cpu", ()).seeds.start == 0, "before what is used there is room"


def test_a_violation_decides_the_exit_code(monkeypatch, tmp_path, capsys):
    path = tmp_path / "campaign.jsonl"
    tally = Tally(violations=[{"claim": "gram", "at": [7, 3], "message": "1 against 2"}])
    line = {"part": "layers", "seeds": [[0, 8]], **tally.record(), "seconds": 1.0}
    files.append(path, {**line, **dict.fromkeys(campaign.PROVENANCE, "x")})
    assert main(["campaign", "--merge", "--out", str(path)]) == 1
    assert "VIOLATION gram at [7, 3]" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mistakes = {"--device": "cuda", "--parts": "laeyrs", "--workers": "0", "--weights": "no file"}
    for bad in mistakes.items():
        with pytest.raises(SystemExit, match="2"):
            main(["campaign", *bad])
        assert bad[1] in capsys.readouterr().err


@pytest.mark.slow
def test_workers_run_and_stop(monkeypatch, tmp_path, capsys):
    """One worker process, one task: the real thing, ended by its deadline."""
    path = tmp_path / "campaign.jsonl"
    monkeypatch.setitem(
        campaign.PARTS, "layers", replace(campaign.PARTS["layers"], seeds=1, share=1.0)
    )
    options = ["--minutes", "0", "--workers", "1", "--parts", "layers", "--seed", "4"]
    assert main(["campaign", *options, "--out", str(path)]) == 0
    (line,) = files.read(path)
    assert (line["seeds"], line["count"], line["threads"]) == ([[4, 5]], campaign.LAYERS, 1)
    assert "0 violations" in capsys.readouterr().out


def test_windows_of_padding_alone_are_no_violation():
    """torch's derivative of such a pool fails; random networks had six in 5,000."""
    pool = nn.MaxPool2d((2, 2), (2, 1), (1, 1), (1, 2))
    dead = nn.Sequential(nn.AdaptiveMaxPool2d((1, 1)), pool, nn.Flatten()).eval()
    reason = network_checks.margin(dead, (2, 3, 2), 3799).reason
    assert reason == "a pooling window lies in padding alone"
    assert not network_checks.empty_windows(nn.Sequential(nn.MaxPool2d(2, padding=1)), (2, 4, 4))


def test_the_blas_limit_goes_with_the_last_who_asked():
    def threads(torchs=False):
        return [lib.num_threads for lib in ThreadpoolController().lib_controllers
                if lib.user_api == "blas" and ("/torch/" in lib.filepath) == torchs]  # fmt: skip

    with one_blas_thread():
        pass  # all libraries are loaded now
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        before, one, two = threads(), one_blas_thread(), one_blas_thread()
        kept = threads(torchs=True)
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)  # in another order than they came
        assert set(threads()) == {1}
        assert threads(torchs=True) == kept
        two.__exit__(None, None, None)
        assert threads() == before
