"""The check of public networks' brackets would see a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lipbound
from benchmarks.public_networks import PUBLIC, arpack, as_layer, compared, size_of
from lipbound.files import read
from tools.pages import RECORDS

LAYERS = {
    "stride": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "groups, dilation": lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1),
    "1d": lambda: nn.Conv1d(2, 3, 9),
    "1x1, one row": lambda: nn.Conv2d(16, 1, 1),
    "linear": lambda: nn.Linear(12, 7),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_arpack_is_the_largest_singular_value(kind):
    torch.manual_seed(0)
    layer = as_layer(LAYERS[kind]())
    shape = size_of(layer)
    wanted = (
        torch.linalg.matrix_norm(layer.weight, 2)
        if isinstance(layer, nn.Linear)
        else lipbound.exact(layer, shape)
    )
    assert arpack(layer, shape) == pytest.approx(float(wanted), rel=1e-9)


def test_a_wrong_bracket_would_be_seen():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3))
    for report in lipbound.audit(network).layers:
        assert not compared(report, report.layer)["wrong"]
        low = replace(report, bracket=replace(report.bracket, upper=0.8 * report.bracket.lower))
        assert compared(low, low.layer)["wrong"]


def test_the_record_is_of_the_listed_networks():
    found = read(RECORDS / "public-networks.jsonl")
    assert [one["network"] for one in found] == list(PUBLIC)
    assert all(one["file"] == PUBLIC[one["network"]].path for one in found)
    assert {len(one["sha256"]) for one in found} == {64}
