"""The page on the GAN: its words follow the numbers of the record."""

from __future__ import annotations

import pytest

from lipbound.files import append
from tools import pages
from tools.pages import gan


def run(arm, seed, *distances):
    """A run with these distances after 100, 200, ... steps."""
    steps = [
        {"step": 100 * i, "seconds": 1.0, "distance": distance, "layers": [0.5, 1.0],
         "product": 5.0, "constant": 4.0, "gradient": 0.2}
        for i, distance in enumerate(distances, 1)
    ]  # fmt: skip
    about = {"lr": 1e-4, "scale": 1.0, "critic_steps": 2, "batch": 64}
    return {"kind": "run", "arm": arm, "seed": seed, "steps": steps, **about}


REFERENCE = {
    "kind": "reference", "train_to_test": 0.5, "images": 10_000, "features": 256, "accuracy": 0.9,
    "tuning": {arm: {"lr": 1e-4, "scale": 1.0,
                     "tried": [{"lr": 1e-4, "scale": 1.0, "step": 9, "distance": 7.5}]}
               for arm in gan.ARMS},
    "tuning_minutes": 2.5, "minutes": 7.0, "wall_seconds": 700.0, "device": "GPU", "torch": "2",
}  # fmt: skip


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Write a record whose arms have these last distances, one for each seed."""
    monkeypatch.setattr(pages, "RECORDS", tmp_path)

    def write(**last):
        (tmp_path / "gan.jsonl").unlink(missing_ok=True)
        for record in (REFERENCE, *(
            run(arm.replace("_gp", "-gp"), seed, 30.0, distance)
            for arm, distances in last.items() for seed, distance in enumerate(distances)
        )):  # fmt: skip
            append(tmp_path / "gan.jsonl", record)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ((8.0, 9.0), "better than with `spectral_norm` (distance lower by 4.00, in every seed)"),
        ((14.0, 15.0), "worse than with `spectral_norm` (distance higher by 2.00, in every seed)"),
        ((11.0, 13.5), "the ranges over seeds overlap; the mean distance is lower by 0.25"),
    ],
)
def test_the_first_sentence_follows_the_seeds(ours, said, recorded):
    recorded(lipbound=ours, spectral_norm=(12.0, 13.0), wgan_gp=(20.0, 20.0))
    shown = gan.verdict(gan.runs(), 200)
    assert said in shown
    assert shown.endswith("and better than with WGAN-GP (distance lower by "
                          f"{20 - sum(ours) / 2:.2f}, in every seed).")  # fmt: skip


def test_the_page_compares_equal_steps(recorded):
    folder = recorded(lipbound=(8.0, 10.0), spectral_norm=(12.0,), wgan_gp=(20.0,))
    append(folder / "gan.jsonl", run("wgan-gp", 1, 40.0, 22.0, 21.0))
    gan.main(folder)
    shown = (folder / "results" / "gan.md").read_text()
    assert (
        "| `lipbound.constrain` | 9.00 [8.00, 10.00] | 9.00 [8.00, 10.00] | 200 to 200 |" in shown
    )
    assert "| WGAN-GP | 21.00 [20.00, 22.00] | 20.50 [20.00, 21.00] | 200 to 300 |" in shown
    assert "| 100 | 4 | 4 | 4 |" in shown
    assert "| 5 % |" in shown.replace("5 [5, 5] %", "5 %")
    (claim,) = gan.claims()
    assert claim[0].startswith("Limiting the true norms of a GAN's critic gives the best samples")
    assert (folder / "results" / "gan.svg").is_file()


def test_without_records_there_is_no_page(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RECORDS", tmp_path)
    gan.main(tmp_path)
    assert gan.claims() == []
    assert not (tmp_path / "results").exists()
