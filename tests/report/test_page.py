"""The page: self-contained and safe with any name. What a browser makes of it: test_screens."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from zoo import NETWORKS, UNBOUNDED

from lipbound import audit, bracket, spectrum, symbol
from lipbound.network.audits import audit_weights
from lipbound.network.portraits import portrait
from lipbound.report.page import page

pytest.importorskip("jinja2", reason="the page is a template")
pytest.importorskip("matplotlib", reason="its pictures")


def test_is_one_file_with_every_layer():
    build, shape = NETWORKS["plain"]
    found = audit(build(), shape)
    text = page(found, "plain")
    for row in found.layers:
        assert f">{row.name}</td>" in text.replace("<wbr>", "")
    assert not re.findall(r'(?:src|href)="(?!data:)', text), "nothing is fetched"
    assert text.count("data:image/png;base64,") == 2
    assert len(text.encode()) < 2_000_000


def test_names_are_escaped():
    evil = "<script>alert(1)</script>\"'&"
    text = page(audit_weights({evil: torch.randn(2, 2, 3, 3)}), evil)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_downloads_hold_the_numbers():
    build, shape = NETWORKS["resnet"]
    found = audit(build(), shape, search=0)
    found = replace(found, layers=(replace(found.layers[0], name="=1+1"), *found.layers[1:]))
    text = page(found, "resnet")
    files = {
        name: base64.b64decode(content).decode()
        for name, content in re.findall(r'download="([^"]*)" href="data:[^,]*,([^"]*)"', text)
    }
    assert json.loads(files["audit.json"])["upper"] == found.upper
    rows = list(csv.DictReader(io.StringIO(files["layers.csv"])))
    assert [float(row["upper"]) for row in rows] == [r.bracket.upper for r in found.layers]
    assert rows[0]["layer"] == "'=1+1"


def test_layers_are_ranked_and_blocks_have_gains():
    build, shape = NETWORKS["resnet"]
    found = audit(build(), shape, search=0)
    text = page(found, "resnet")
    places = [text.index(f'<td class="n" data-value="{r.bracket.upper}">')
              for r in sorted(found.layers, key=lambda r: -r.bracket.upper)]  # fmt: skip
    assert places == sorted(places)
    assert "What to do" in text
    assert "Residual blocks" in text


def test_refusals_are_on_the_page():
    build, shape, reason = UNBOUNDED["squeeze and excitation"]
    text = page(audit(build(), shape), "se")
    assert text.count(f'class="reason">{"a " + reason}') <= 1
    assert reason in text
    assert "∞" in text


def test_many_layers_stay_small(monkeypatch):
    monkeypatch.setattr("lipbound.report.page.DRAWN", 8)
    weights = {f"layer{i}": (1 + i) * torch.ones(1, 1, 3, 3) for i in range(1_200)}
    found = audit_weights(weights, method="frobenius")
    text = page(found, "many")
    assert len(text.encode()) < 2_000_000
    assert text.count("data:image/png") == 8
    assert ">layer1199</td>" in text
    assert ">layer199</td>" not in text
    assert "200 more" in text


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, stride=2), nn.Conv1d(2, 3, 5), nn.Conv3d(2, 2, 3)],
    ids=str,
)
def test_portraits_are_samples_of_the_symbol(layer):
    found = bracket(layer)
    shown = portrait(layer, found)
    assert shown.heights.max() <= found.upper * (1 + 1e-5)
    assert shown.heights.max() >= 0.95 * found.lower
    if layer.weight.ndim < 5:
        assert shown.spectrum.quantile(1.0) == shown.heights.max()
    dims = min(2, layer.weight.ndim - 2)
    index = (3, 5)[:dims]
    point = [shown.axis[i] for i in index] + list(found.frequency[dims:])
    matrix = symbol(layer, torch.tensor([point], dtype=torch.float64)).detach()
    assert shown.heights[index] == pytest.approx(
        float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4
    )
    if layer.weight.ndim < 5:
        np.testing.assert_allclose(shown.heights, np.flip(shown.heights), rtol=1e-4)
    assert portrait(nn.Conv2d(3, 3, 1), found) is None


@pytest.mark.parametrize("work", [1 << 32, 1], ids=["full", "coarsest"])
@pytest.mark.parametrize("stride", [1, 2])
def test_numbers_under_a_picture_are_those_of_the_spectrum(stride, work, monkeypatch):
    """Two digits of the page hold on the coarsest grid too; the condition is that of its grid."""
    torch.manual_seed(0)
    layer = nn.Conv2d(24, 24, 3, stride, padding=1)
    monkeypatch.setattr("lipbound.network.portraits.WORK", work)
    shown, fine = portrait(layer, bracket(layer)).spectrum, spectrum(layer, 64)
    assert shown.samples == ((8, 8) if work == 1 else (32, 32))
    assert shown.quantile(0.5) == pytest.approx(fine.quantile(0.5), rel=0.01)
    assert shown.effective_rank == pytest.approx(fine.effective_rank, abs=0.005)
    assert shown.share_above(1.0) == pytest.approx(fine.share_above(1.0), abs=0.005)
    same = spectrum(layer, shown.samples[0])
    text = page(audit(nn.Sequential(layer), (24, 8, 8)), "numbers")
    assert (
        f"most about {same.quantile(0.5):.2g}, and about {100 * same.share_above(1):.0f} %" in text
    )
    grid = " × ".join(map(str, shown.samples))
    assert f"grid of {grid} frequencies, the condition number is {same.condition:.2g}." in text
