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
from lipbound.report.html import number, power
from lipbound.results import digits, exponent_of_ten, fixed, percent, shown
from lipbound.robust import Evaluation, Plan, evaluate

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
