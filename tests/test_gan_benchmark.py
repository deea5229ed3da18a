"""The Fréchet distance, the choice of settings and the picture of benchmarks/gan.py."""

from __future__ import annotations

import argparse

import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

from benchmarks import gan
from lipbound.files import append


def test_the_distance_equals_the_formula_with_a_matrix_root():
    draw = torch.Generator().manual_seed(0)
    moments = []
    for count in (40, 9):
        points = torch.randn(count, 6, generator=draw, dtype=torch.float64)
        moments.append((points.mean(0), torch.cov(points.mT)))
    (m, c), (n, d) = moments
    mixed = torch.from_numpy(sqrtm((c @ d).numpy()).real)
    expected = (m - n).square().sum() + (c + d - 2 * mixed).trace()
    assert gan.frechet(*moments) == pytest.approx(float(expected), rel=1e-6)
    assert gan.frechet(*moments[::-1]) == pytest.approx(float(expected), rel=1e-6)
    assert gan.frechet(moments[0], moments[0]) == pytest.approx(0, abs=1e-12)
    shifted = m + 2, c
    assert gan.frechet(moments[0], shifted) == pytest.approx(24)


def test_features_are_those_before_the_last_layer():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    images = torch.randint(0, 256, (1003, 1, 2, 2), generator=torch.Generator().manual_seed(0))
    mean, covariance = gan.Features(network, torch.device("cpu")).moments(images.byte())
    with torch.no_grad():
        expected = network[:3](images.float() / 255).double()
    torch.testing.assert_close(mean, expected.mean(0))
    torch.testing.assert_close(covariance, torch.cov(expected.mT))


def test_the_setting_with_the_smallest_distance_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(gan, "CHOICES", {"lipbound": [(1e-4, 1.0), (1e-4, 3.0), (1e-3, 1.0)]})
    for name, steps in (("1e-4-1", 2), ("1e-4-3", 4)):  # the third training failed
        text = name.replace("1e-4", f"{1e-4:g}")
        for step in range(1, steps + 1):
            append(tmp_path / "tuning" / f"lipbound-{text}" / "steps.jsonl", {"step": step})

    class Measure:
        train = "training images"

        def distance(self, place, step, reference):
            assert reference == "training images"
            return 10.0 - step

    chosen = gan.tuned(argparse.Namespace(out=tmp_path), Measure())
    assert (chosen["lipbound"]["lr"], chosen["lipbound"]["scale"]) == (1e-4, 3.0)
    assert [one["step"] for one in chosen["lipbound"]["tried"]] == [2, 4]
    with pytest.raises(SystemExit, match="no training of lipbound succeeded"):
        gan.tuned(argparse.Namespace(out=tmp_path / "empty"), Measure())


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_has_a_row_for_each_tensor(channels, tmp_path):
    from PIL import Image

    black = torch.zeros(gan.COLUMNS, channels, 4, 6, dtype=torch.uint8)
    gan.picture(tmp_path / "gan.png", [black, black + 200])
    found = Image.open(tmp_path / "gan.png").convert("RGB")
    assert found.size == (8 * gan.COLUMNS, 12)
    assert [found.getpixel(place)[0] for place in ((0, 0), (1, 1), (1, 7))] == [255, 0, 200]
    assert [path.name for path in tmp_path.iterdir()] == ["gan.png"]
