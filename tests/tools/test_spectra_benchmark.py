"""Counts of singular values by inertia, held against dense SVDs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import inertia, spectra
from benchmarks.inertia import below
from lipbound.files import read
from lipbound.toeplitz import operator_matrix

CASES = {  # kernel, input size, stride
    "3x3": ((4, 5, 3, 3), 9, 1),
    "more outputs": ((5, 2, 3, 3), 7, 1),
    "1x1": ((3, 4, 1, 1), 5, 1),
    "5x5": ((3, 3, 5, 5), 8, 1),
    "3x5": ((2, 3, 3, 5), 8, 1),
    "even": ((3, 4, 4, 4), 9, 1),
    "strided": ((6, 3, 3, 3), 10, 2),
    "strided 5x5": ((4, 3, 5, 5), 11, 2),
    "stride above the kernel": ((4, 3, 1, 1), 9, 2),
    "one row": ((4, 4, 3, 3), 1, 1),
    "kernel above the image": ((3, 3, 7, 7), 2, 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("pivot", "panel"), [(7, 7), (8, 21), (128, 512)])
def test_counts_are_those_of_an_svd(name, pivot, panel, monkeypatch):
    shape, size, stride = CASES[name]
    monkeypatch.setattr(inertia, "PIVOT", pivot)
    monkeypatch.setattr(inertia, "PANEL", panel)
    monkeypatch.setattr(inertia, "STRIP", 3 * panel)
    monkeypatch.setattr(inertia, "LEAF", 4)
    kernel = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padding = tuple(m // 2 for m in shape[2:])
    matrix = operator_matrix(kernel, (size, size), padding=padding, stride=stride)
    squares = np.linalg.eigvalsh((matrix @ matrix.T).toarray())
    values = np.sqrt(np.maximum(squares, 0))
    thresholds = list(np.linspace(0.01, 1.01, 24) * values[-1])
    counts = below(kernel, size, thresholds, stride)
    assert counts.below == [int((values < t).sum()) for t in thresholds]
    assert counts.growth < 1e6


def test_counts_bracket_the_largest_deviation_of_an_svd(tmp_path, monkeypatch, capsys):
    kernel = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    save_file({"a.weight": kernel}, tmp_path / "net.safetensors")
    command = ["spectra", str(tmp_path / "net.safetensors"), "--sizes", "12", "--out"]
    exact, counts = tmp_path / "exact.jsonl", tmp_path / "counts.jsonl"
    monkeypatch.setattr("sys.argv", [*command, str(exact)])
    spectra.main()
    more = ["--most", "0", "--counts", "300", "--batch", "20"]
    monkeypatch.setattr("sys.argv", [*command, str(counts), *more])
    spectra.main()
    found, (truth,) = read(counts), read(exact)
    assert found[-1]["interval"][1] - found[-1]["interval"][0] <= spectra.NARROW
    assert len(found[-1]["thresholds"]) < 300
    for record in found:  # the SVD's record is divided by its own largest value, not the bound
        low, high = record["interval"]
        assert low * 0.99 <= truth["largest"] <= high * 1.05
    assert all(a["interval"][1] >= b["interval"][1] for a, b in pairwise(found))
    spectra.main()
    assert len(read(counts)) == len(found)
