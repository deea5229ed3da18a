"""The examples: as the page shows them, and running where their packages are."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from lipbound.files import read

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("plain_loop", "lightning_module", "factory_model", "gan", "flow")


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_every_example_as_it_is():
    page = ROOT / "docs" / "guides" / "examples.md"
    shown = re.findall(r"```python\n(.*?)```\n", page.read_text(), re.S)
    assert shown == [(ROOT / "examples" / f"{name}.py").read_text() for name in NAMES]
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} == set(NAMES)


def test_a_plain_loop():
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    import lipbound

    example = load(ROOT / "examples" / "plain_loop.py")
    networks = [example.train(weight, epochs=2) for weight in (0.0, 0.2)]
    free, held = (lipbound.audit(model, (1, 8, 8), search=0).upper for model, _ in networks)
    assert held < 0.8 * free
    assert min(accuracy for _, accuracy in networks) > 0.8


GAN = {"steps": 3, "every": 2, "minutes": 1e9, "width": 4, "lr": 1e-3, "scale": 5.0}


def gan(arm: str, out: Path, **options):
    """Train a small GAN on random 8×8 images; return the records and the generator."""
    example = load(ROOT / "examples" / "gan.py")
    images = torch.randint(0, 256, (70, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    made = example.train(arm, 0, images.byte(), out, torch.device("cpu"), **{**GAN, **options})
    return read(out / "steps.jsonl"), made, example


@pytest.mark.parametrize("arm", ["lipbound", "spectral_norm", "wgan-gp"])
def test_a_gan(arm, tmp_path):
    found, generator, example = gan(arm, tmp_path)
    assert [one["step"] for one in found] == [2, 3]
    for one in found:
        gain = 1.0 if arm == "wgan-gp" else 5.0
        assert one["product"] == pytest.approx(gain * math.prod(one["layers"]))
        assert one["gradient"] <= one["constant"] <= one["product"] * 1.001
        if arm == "lipbound":
            assert max(one["layers"]) <= 1
        else:
            assert max(one["layers"]) > 1.3, "the true norms of convolutions are larger"
    images = example.sample(generator, 4)
    assert images.dtype == torch.uint8
    assert images.shape == (4, 1, 8, 8)
    kept = torch.load(tmp_path / "generator-3.pt", weights_only=True)
    same = example.generator_network((1, 8, 8), GAN["width"]).eval()
    same.load_state_dict(kept)
    assert torch.equal(example.sample(same, 4), images)
    again = tmp_path / "again"
    again.mkdir()
    (stopped,) = gan(arm, again, steps=999, minutes=0.0)[0]
    assert (stopped["step"], stopped["losses"]) == (2, found[0]["losses"])


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["lipbound", "spectral_norm", "wgan-gp"])
def test_a_gan_learns_the_brightness_of_its_images(arm, tmp_path):
    example = load(ROOT / "examples" / "gan.py")
    example.AVERAGE = 0.0  # the newest weights
    images = torch.full((64, 1, 8, 8), 230, dtype=torch.uint8)
    options = {**GAN, "steps": 60, "every": 60, "lr": 5e-3, "scale": 10.0}
    generator = example.train(arm, 0, images, tmp_path, torch.device("cpu"), **options)
    assert abs(float(example.sample(generator, 64).float().mean()) - 230) < 40, "it began near 127"


@pytest.fixture(scope="module")
def flow():
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    torch.manual_seed(0)
    example = load(ROOT / "examples" / "flow.py")
    pixels, _, held = example.images()
    blocks = [example.Gaussian(pixels), example.Residual(16), example.Coupling(16)]
    for block in blocks[1:]:
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, 0, 0.1)
    return example, [block.double().eval() for block in blocks], held[:5].double()


def total(block, x):
    """Values summed over the images: the Jacobian has one block for each image."""
    return block(x, True)[0].sum(0)


@torch.no_grad()
def test_log_determinants_of_a_flow_are_those_of_its_jacobians(flow):
    _, blocks, held = flow
    x = held + 0.5
    for block in blocks:
        y, logdet = block(x, True)
        dense = torch.autograd.functional.jacobian(partial(total, block), x).transpose(0, 1)
        torch.testing.assert_close(logdet, torch.linalg.slogdet(dense).logabsdet)
        x = y


@torch.no_grad()
def test_the_power_series_of_a_flow_is_right_on_average(flow):
    example, (_, block, _), _ = flow
    torch.manual_seed(0)
    x = torch.randn(1, example.PIXELS, dtype=torch.float64)
    (exact,), drawn = block(x, True)[1], block(x.expand(4000, -1), False)[1]
    assert abs(drawn.mean() - exact) < 4 * drawn.std() / 4000**0.5
    assert drawn.std() > 1e-3


@torch.no_grad()
def test_the_inverse_of_a_flow(flow):
    example, (start, block, _), held = flow
    x = held + torch.rand_like(held)
    z, _ = start(x, True)
    torch.testing.assert_close(start.inverse(z), x, rtol=0, atol=1e-8)
    y, _ = block(z, True)
    torch.testing.assert_close(block.inverse(y), z, rtol=0, atol=2 * example.TOLERANCE)


def test_a_flow_from_its_command(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    pytest.importorskip("matplotlib", reason="the picture")
    out, picture = tmp_path / "flow.jsonl", tmp_path / "flow.png"
    example = load(ROOT / "examples" / "flow.py")
    example.main(["--steps", "4", "--blocks", "2", "--out", str(out), "--picture", str(picture)])
    (record,) = read(out)
    assert record["bits"]["i-ResNet"] < record["bits"]["Gaussian"]
    assert record["inverse_error"] < 1e-5
    assert max(record["rates"]) < example.CONTRACTION * 1.001
    assert all(a <= b for a, b in zip(record["iterations"], record["promised"], strict=True))
    assert picture.stat().st_size > 1000
    assert "contractions, proved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "option"),
    [("flow", "steps"), ("flow", "blocks"), ("gan", "steps"), ("gan", "every"), ("gan", "width")],
)
def test_nothing_to_train_is_refused(name, option, monkeypatch, capsys, tmp_path):
    if name == "flow":
        pytest.importorskip("sklearn", reason="scikit-learn's digits")
    example = load(ROOT / "examples" / f"{name}.py")
    place = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [name, f"--{option}", "0", "--out", str(place)])
    with pytest.raises(SystemExit) as stop:
        example.main()
    assert (stop.value.code, capsys.readouterr().err) == (2, f"--{option} 0 must be at least 1\n")
    assert not place.exists()


@pytest.mark.parametrize(
    ("name", "packages"),
    [("lightning_module", ["lightning"]), ("factory_model", ["timm", "pytorchcv.models"])],
)
def test_with_other_libraries(name, packages, capsys):
    for package in packages:
        try:
            importlib.import_module(package)
            break
        except (ImportError, RuntimeError):
            continue
    else:
        pytest.skip(f"none of {', '.join(packages)} imports here; `make outside` installs them")
    load(ROOT / "examples" / f"{name}.py").main()
    assert "network at most" in capsys.readouterr().out


def test_dependencies_have_ranges_and_the_lock_lies_in_them():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    (dev,) = (Requirement(r) for r in extras["dev"] if r.startswith("lipbound["))
    installed = {"", "dev", *dev.extras}  # by make test, so the lock file has them
    wanted = [(Requirement(r), extra) for extra, found in extras.items() for r in found]
    wanted = [(r, extra) for r, extra in wanted if r.name != "lipbound"]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {name.lower().replace("_", "-"): version for name, version in locked.items()}
    assert len(pinned) == len(locked)
    for requirement, extra in wanted:
        assert {s.operator for s in requirement.specifier} == {">=", "<"}, requirement
        if extra in installed:
            assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_an_audit_of_dependencies_never_passes_in_silence(capsys, monkeypatch):
    tool = load(ROOT / "tools" / "audit_deps.py")
    clean = {"name": "a", "version": "1", "vulns": []}
    listed = {"name": "b", "version": "2", "vulns": [{"id": "X-1", "fix_versions": ["3"]}]}
    skipped = {"name": "c", "skip_reason": "not found"}
    cases = {0: [[clean]], 1: [[clean, listed], [listed, skipped]], 2: [[clean, skipped], []]}
    for code, lists in cases.items():
        assert [tool.verdict(found) for found in lists] == [code] * len(lists)
    out, err = capsys.readouterr()
    assert "b 2: X-1, fixed in 3" in out
    assert "NOT audited" in err
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda _: None)
    assert tool.main("requirements.lock") == 2
    assert "pip install pip-audit" in capsys.readouterr().err
