"""``lipbound certify``: its table, record, figure and page, and what it says about wrong input."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import TINY_SHIFT, run
from safetensors.torch import save_file

from lipbound.files import read
from lipbound.report.certificates import certificate_words, radius_name
from lipbound.robust.data import data_set
from lipbound.robust.models import MODELS
from lipbound.robust.training.loop import train
from lipbound.robust.training.settings import settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two epochs on a part of the digits."""
    out = tmp_path_factory.mktemp("certified") / "run"
    small = {"model": "tiny", "epochs": 2, "first": 300, "check": 20, "check_attack": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", TINY_SHIFT)
        chosen = settings("certified", "digits", **small)
        yield out, train(chosen, data_set("digits"), out, device="cpu")


def test_the_table_says_what_the_training_proved(trained, monkeypatch, capsys):
    out, summary = trained
    code, text, _ = run(monkeypatch, capsys, "certify", str(out), "--attacked", "0")
    assert code == 0
    share = f"{100 * summary['final']['certified_accuracy']:.1f} %"
    line = next(line for line in text.splitlines() if line.strip().startswith("36/255"))
    assert line.split()[1] == "(0.1411)"
    assert share in line
    assert "real arithmetic, after subtracting the rounding of float64 logits" in text


@pytest.mark.parametrize("arithmetic", ["float64", "float32"])
def test_the_network_as_it_runs(trained, monkeypatch, capsys, arithmetic):
    given = ["certify", str(trained[0]), "--attacked", "0", "--count", "50", "--json"]
    records = []
    for kind in ("real", arithmetic):
        code, text, _ = run(monkeypatch, capsys, *given, "--arithmetic", kind)
        assert code == 0
        records.append(json.loads(text))
    real, running = records
    assert running["arithmetic"] == f"the network as it runs in {arithmetic}"
    assert real["rounding"] < 2 * running["rounding"]  # it counts at two points of the ball
    assert running["median_radius"] < real["median_radius"]
    for radius, found in running["certified"].items():
        assert found["accuracy"] <= real["certified"][radius]["accuracy"]


def test_less_effort_gives_a_larger_bound(trained, monkeypatch, capsys):
    given = ("certify", str(trained[0]), "--count", "20", "--attacked", "0", "--json")
    found = {}
    for effort in ("low", "normal"):
        code, text, _ = run(monkeypatch, capsys, *given, "--effort", effort)
        assert code == 0
        found[effort] = json.loads(text)
        assert found[effort]["effort"] == effort
    assert found["low"]["lipschitz"] >= found["normal"]["lipschitz"]


def test_an_unknown_effort_is_named(trained, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "certify", str(trained[0]), "--effort", "hgh")
    assert code == 2
    assert "--effort 'hgh' is not one of low, normal, high" in err


def test_an_unknown_arithmetic_is_named(trained, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "certify", str(trained[0]), "--arithmetic", "fp64")
    assert code == 2
    assert "unknown arithmetic 'fp64'" in err


def test_other_data_is_named(trained, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, "certify", str(trained[0]), "--data", "digts")
    assert code == 2
    assert "unknown data 'digts'; did you mean 'digits'?" in err


def test_record_figure_and_page(trained, monkeypatch, capsys, tmp_path):
    files = {name: str(tmp_path / name) for name in ("record.jsonl", "curve.svg", "page.html")}
    code, text, _ = run(
        monkeypatch, capsys, "certify", str(trained[0] / "final.safetensors"), "--json",
        "--radius", "51/255", "--radius", "1e-3", "--count", "60", "--attacked", "30",
        "--out", files["record.jsonl"], "--plot", files["curve.svg"], "--html", files["page.html"],
    )  # fmt: skip
    assert code == 0
    record = json.loads(text)
    assert [record] == list(read(tmp_path / "record.jsonl"))
    assert list(record["certified"]) == ["0.2", "0.001"]
    for radius, found in record["certified"].items():
        assert len(found["by_class"]) == 10
        assert found["accuracy"] <= record["clean"]["accuracy"]
        attacked = record["attacked"][radius]
        assert attacked["images"] == 30
        assert attacked["proved"] <= attacked["accuracy"]
    shares = [share for _, share in record["curve"]]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    page = (tmp_path / "page.html").read_text()
    assert "Certified accuracy" in page
    assert page.count("data:image/svg+xml") == 3
    counts = torch.tensor(record["histogram"]["by_class"])
    assert counts.shape == (10, 30)
    edges = torch.tensor(record["histogram"]["edges"])
    assert (edges[1:] > edges[:-1]).all()
    assert f"show the {counts.sum()} images with a radius above 0" in page
    attacked = record["attacked"]["0.2"]
    said = " ".join(certificate_words(record))
    assert "contradiction" not in said
    attacked["accuracy"] = attacked["proved"] - 0.01
    assert "contradiction: at the radius 0.2 the attack left" in " ".join(certificate_words(record))


def test_classes_without_images_are_null(trained, monkeypatch, capsys, tmp_path):
    few = ("certify", str(trained[0]), "--count", "3", "--attacked", "0")
    code, text, _ = run(monkeypatch, capsys, *few, "--json")
    assert code == 0
    record = json.loads(text, parse_constant=pytest.fail)
    assert None in record["certified"][str(36 / 255)]["by_class"]
    assert run(monkeypatch, capsys, *few, "--html", str(tmp_path / "page.html"))[0] == 0


@pytest.mark.parametrize(
    ("radius", "name"),
    [
        (36 / 255, "36/255 (0.1411)"),
        (72 / 255, "72/255 (0.2823)"),
        (0.141176, "0.1411"),
        (0.141176470, "0.1411"),
        (1.0, "255/255 (1.0000)"),
        (1e-7, "1e-07"),
        (2e-7, "2e-07"),
    ],
)
def test_radii_are_named_as_they_are_asked_for(radius, name):
    assert radius_name(radius) == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--radius", "x"), "--radius 'x' is not a positive number; write 0.25 or 36/255"),
        (("--radius", "-1"), "--radius '-1' is not a positive number"),
        (("--radius", "1/0"), "--radius '1/0' is not a positive number"),
        (("--batch", "0"), "--batch 0 must be 1 or larger"),
        (("--count", "-3"), "--count -3 must be 0 or larger"),
        (("--plot", "x.pdf"), "--plot 'x.pdf' must end in .svg or .png"),
    ],
)
def test_wrong_options_end_with_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    code, _, err = run(monkeypatch, capsys, "certify", str(tmp_path), *arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_folder_without_a_run(monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "certify", str(tmp_path))
    assert code == 2
    assert "is not the folder of a training run" in err


def test_a_run_without_a_network(monkeypatch, capsys, tmp_path):
    train(settings("certified", "digits"), data_set("digits"), tmp_path, device="cpu", time_limit=0)
    code, _, err = run(monkeypatch, capsys, "certify", str(tmp_path))
    assert code == 2
    assert "stopped before its first check; repeat its command with --resume" in err


def test_a_file_that_is_not_a_network(trained, monkeypatch, capsys, tmp_path):
    whole, advice = trained[0] / "final.safetensors", "use an intact best.safetensors or final"
    cut, foreign = tmp_path / "cut.safetensors", tmp_path / "foreign.safetensors"
    cut.write_bytes(whole.read_bytes()[:-8])
    save_file({"weight": torch.ones(2)}, foreign)
    for path, missing in (
        (cut, "is not a complete safetensors file"),
        (foreign, "holds weights, but not the settings"),
    ):
        code, _, err = run(monkeypatch, capsys, "certify", str(path))
        assert code == 2
        assert missing in err
        assert advice in err


def test_images_of_another_size_are_named_before_training(monkeypatch, capsys, tmp_path):
    out = tmp_path / "run"
    wrong = ("train", "--arm", "certified", "--preset", "fast", "--data", "digits")
    code, _, err = run(monkeypatch, capsys, *wrong, "--out", str(out))
    assert code == 2
    assert "takes 32×32 images of 3 channels, but the data has 8×8 images of 1 channel" in err
    assert "use --preset certified-digits or --model shift-digits" in err
    assert not out.exists()
