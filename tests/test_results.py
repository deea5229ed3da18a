"""Results print as tables, show in a notebook and convert to plain data."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lipbound import Comparison, audit, bracket, certified_accuracy
from lipbound.network.findings import Audit, LayerReport
from lipbound.report import figures
from lipbound.report.certificates import _without
from lipbound.report.html import number, power
from lipbound.report.terminal import training_table
from lipbound.results import digits, exponent_of_ten, fixed, key, percent, shown
from lipbound.robust import Evaluation, Plan, evaluate
from lipbound.robust.attacks.evaluate import CERTIFIED_RADII
from lipbound.robust.attacks.evaluation import in_balls
from lipbound.robust.certification import _accuracies

EVIL = "<script>alert(1)</script>\x1b[2J"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)).eval()


def results():
    model = network()
    found = audit(model, (1, 8, 8), search=1)
    images, labels = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    plan = Plan(("pgd", "cw-projected"), radius=0.1, iterations=2, restarts=1)
    return {
        "audit": found,
        "without a shape": audit(model),
        "bracket": bracket(model[0]),
        "comparison": Comparison(found, audit(model), ("with a shape", "without")),
        "accuracy": certified_accuracy(model, found, [(images, labels)], [0.001, 0.1]),
        "attack": evaluate(model, images, labels, plan, audit=found, jacobians=2),
    }


RESULTS = results()


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_prints_shows_and_converts(name, tmp_path):
    result = RESULTS[name]
    assert all(len(line) <= 100 for line in str(result).splitlines())
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert result._repr_html_().count("<tr>") == len(result.rows()) + 1
    assert "tensor(" not in str(result)
    result.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "http-equiv" in page


def test_an_audit_prints_its_layers_and_its_bound():
    lines = str(RESULTS["audit"]).splitlines()
    assert lines[1].split() == ["layer", "geometry", "lower", "upper", "LipBound"]
    assert lines[2].split()[:3] == ["0", "1→2", "3×3"]
    assert "network: certified Lipschitz constant at most" in str(RESULTS["audit"])
    assert repr(RESULTS["audit"]).startswith("Audit(upper=")
    assert "certified, relative width" in str(RESULTS["bracket"])


def test_an_evaluation_is_the_record_and_a_table():
    found = RESULTS["attack"]
    assert Evaluation(json.loads(json.dumps(found.to_dict()))).rows() == found.rows()
    by_attack = {row["attack"]: row for row in found.rows()}
    assert by_attack["pgd linf 0.1, 2×1"]["accuracy"] == found["pgd"]["accuracy"]
    assert by_attack["cw-projected l2 0.8"]["low"] == found["cw-projected"]["0.8"]["interval"][0]
    said = [line for line in str(found).splitlines() if line.startswith("doubt: ")]
    assert [line.removeprefix("doubt: ") for line in said] == found["doubts"]
    assert repr(found).startswith("Evaluation(clean=")


@pytest.mark.parametrize("value", [0.3, 1 / 3, 0.29, 2e-9, 0.999999, 123456.7, 1e300])
def test_a_shown_number_is_on_the_right_side_and_as_short_as_it_is(value):
    assert float(shown(value, "down")) <= value <= float(shown(value, "up"))
    assert shown(0.3, "down") == shown(0.3, "up") == "0.3"


@pytest.mark.parametrize("value", [0.0, 0.29, 0.3, 1 / 3, 0.99999, 1.0])
def test_a_share_is_shown_on_the_right_side(value):
    low, high = (float(percent(value, side).removesuffix(" %")) for side in ("down", "up"))
    assert low <= 100 * value * (1 + 1e-15)
    assert high >= 100 * value * (1 - 1e-15)
    assert percent(0.29, "down") == percent(0.29, "up") == "29.0 %"


def test_what_bounds_from_above_is_rounded_up_and_from_below_down():
    found = replace(RESULTS["audit"], upper=10**0.301, lower=1.23456, product=10**1.001)
    said = "\n".join(found.summary())
    assert "at most 2 (10^0.31)" in said
    assert "norm found: 1.234" in said
    assert "for comparison: 10.03 (10^1.01)" in said


def test_a_long_table_is_cut_and_says_so():
    one = LayerReport("conv", network()[0], RESULTS["bracket"], None)
    found = Audit((one,) * 30, 1.0, 0.0, "", (), 1.0, None)
    assert "... and 10 more rows; rows() returns all" in str(found)
    assert "10 more rows are not shown" in found._repr_html_()


def test_names_from_a_model_are_text():
    one = LayerReport(EVIL, network()[0], RESULTS["bracket"], None)
    found = Audit((one,), 1.0, 0.0, EVIL, (), 1.0, None, note=EVIL)
    assert "\x1b" not in str(found) + found._repr_html_()
    assert "<script>" not in found._repr_html_()


def test_a_frame_has_the_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert RESULTS["audit"].to_frame() == RESULTS["audit"].rows()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        RESULTS["audit"].to_frame()


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="it is a folder"):
        RESULTS["bracket"].save_html(tmp_path)


@pytest.mark.parametrize("value", [5e-324, 1e-323, 2.5e-320, 1.7976931348623157e308, 0.99996, 1e27])
def test_the_smallest_and_the_largest_numbers_round_to_their_safe_side(value):
    exact = Decimal(repr(value))
    for text in (digits(value, 4, "up"), shown(value, "up"), number(value, "up")):
        assert Decimal(text) >= exact, text
    for text in (digits(value, 4, "down"), shown(value, "down"), number(value, "down")):
        assert 0 < Decimal(text) <= exact, text
    shown_power = str(power(value)).replace(" · 10<sup>", "e").removesuffix("</sup>")
    assert Decimal(shown_power) >= exact
    assert Decimal(fixed(value, 2, "up")) >= exact >= Decimal(fixed(value, 2, "down"))


@pytest.mark.parametrize("exponent", range(-8, 9))
def test_a_power_of_ten_is_on_the_safe_side_of_its_number(exponent):
    whole = float(f"1e{exponent}")
    above, below = math.nextafter(whole, math.inf), math.nextafter(whole, 0)
    assert exponent_of_ten(whole, 2, "up") == exponent_of_ten(whole, 2, "down") == f"{exponent}.00"
    assert Fraction(exponent_of_ten(above, 2, "up")) == exponent + Fraction(1, 100)
    assert Fraction(exponent_of_ten(below, 2, "down")) == exponent - Fraction(1, 100)


def test_the_powers_of_an_audit_are_not_below_its_numbers():
    value = math.nextafter(100, math.inf)
    found = replace(RESULTS["audit"], product=value, upper=value, lower=50.0)
    assert str(found).count("(10^2.01)") == 2
    assert "bound 10<sup>2.1</sup>" in found._page()
    assert "product 10<sup>2.1</sup>" in found._page()


def constant(bias):
    """A network with the same logits everywhere, and its audit."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor(bias))
    return model, audit(model, (1, 2, 2), search=0)


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 1, 1], [0, 2, 0]])
def test_infinite_radii_are_plain_data_and_drawn(labels):
    model, bounds = constant([0.0, 1.0, 0.0])
    images, labels = torch.rand(3, 1, 2, 2), torch.tensor(labels)
    share = float((labels == 1).double().mean())
    proved = certified_accuracy(model, bounds, [(images, labels)], (0.1,))
    assert proved.accuracy == (share,)
    assert [proved.curve()[0], proved.curve()[-1]] == [[0.0, share], [1.0, share]]
    assert proved.histogram()["infinite"] == 3 * share
    record = _accuracies(proved)
    assert json.loads(json.dumps(record, allow_nan=False))
    figures.radii_axes(record)
    figures.class_radii_axes(record)
    plan = Plan(radius=0.1, iterations=2, restarts=1)
    found = evaluate(model, images, labels, plan, audit=bounds)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["median_certified_radius"] == (None if share else 0)
    line = figures.attack_axes([plain]).axes[1].lines[-1]
    assert {*line.get_ydata()} == {share}


def test_finite_and_infinite_radii_together():
    radii = torch.tensor([0.0, 2.0, 1.0, math.inf], dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.long)
    found = replace(
        RESULTS["accuracy"], certified=radii, labels=zeros, predictions=zeros, classes=1
    )
    assert found.curve(2) == [[0.0, 0.75], [1.0, 0.5], [2.0, 0.25]]
    counts = found.histogram(2)
    assert counts == {"edges": [0.0, 1.0, 2.0], "by_class": [[1, 1]], "infinite": 1}
    record = {"images": 4, "histogram": counts}
    assert "2 images with a finite radius above 0; 1 have an infinite" in _without(record)


def test_a_certificate_above_the_clean_accuracy_is_a_contradiction():
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2)).eval()
    with torch.no_grad():  # a tie in float32, which 1e8 + 1 is not in float64
        model[1].weight.zero_()[1, 0] = 1
        model[1].bias.fill_(1e8)
    images, labels = torch.ones(1, 1, 2, 4), torch.tensor([1])
    plan = Plan(ball="l2", radius=3.0, iterations=3, restarts=1)
    bounds = audit(model, (1, 2, 4), search=0)
    found = evaluate(model, images, labels, plan, audit=bounds, curves=False, doubts=False)
    assert found["clean"]["accuracy"] == 0
    assert found["certified"][key(36 / 255)]["accuracy"] == 1
    said = "1 images are certified with an L2 radius above 0.1411, but the network misclassifies"
    assert said in found["contradictions"][0]
    assert "arithmetic='float32'" in found["contradictions"][0]


@pytest.mark.parametrize("radii", [(1e-7, 2e-7), (0.3, 0.3000001), (72 / 255, 72 / 255 + 1e-12)])
def test_close_radii_have_different_names_that_are_read_back_exactly(radii):
    model, bounds = constant([0.0, 1.0, 0.0])
    batch = torch.rand(2, 1, 2, 2), torch.tensor([1, 0])
    proved = _accuracies(certified_accuracy(model, bounds, [batch], radii))
    assert tuple(map(float, proved["certified"])) == radii
    plan = Plan(("cw-projected",), "l2", radii=radii, searches=1, search_steps=1)
    found = evaluate(model, *batch, plan, audit=bounds, curves=False, doubts=False)
    assert [r for _, _, r, _ in in_balls(found)] == [*radii]


def test_certified_radii_are_shown_rounded_down(capsys):
    proved = replace(RESULTS["accuracy"], radii=(36 / 255, 72 / 255))
    assert [row["L2 radius"] for row in proved.texts(proved.rows())][1:] == ["0.14117", "0.28235"]
    attacked = RESULTS["attack"]
    names = [row["attack"] for row in attacked.rows()]
    assert {"no attack, l2 0.1411", "no attack, l2 0.2823", "no attack, l2 1.0000"} <= {*names}
    assert tuple(map(float, attacked["certified"])) == CERTIFIED_RADII
    shares = {"test_accuracy": 0.5, "test_pgd_accuracy": None, "log10_product": 1.0}
    shares |= {"certified_accuracy": 0.99996, "certified_radius": 72 / 255}
    training_table([{"arm": "a", "stopped": "", "step_ms": 1.0, "best": shares, "final": shares}])
    text = " ".join(capsys.readouterr().out.split())
    assert "99.9 %" in text
    assert "100.0 %" not in text
    assert "the L2 radius 0.2823. PGD" in text
