"""The section on the speed of brackets, on records that were made up."""

from __future__ import annotations

import pytest

from tools.pages import brackets


def made(network, search="plain", seconds=0.5, gram=0.2, **more):
    return {
        "network": network, "weights": "he-normal, seed 0", "layers": 9, "device": "NVIDIA H200",
        "search": search, "bracket_seconds": seconds, "gram_seconds": gram,
        "gram_over_bracket": gram / seconds, "median_evaluations": 7,
        "first_bracket_seconds": 1.5, **more,
    }  # fmt: skip


@pytest.fixture
def records(monkeypatch):
    found = {"brackets-cpu": [made("slow net", gram=2.0)], "brackets-gpu": []}
    monkeypatch.setattr(brackets, "lines", found.__getitem__)
    return found


@pytest.mark.parametrize(
    ("seconds", "told"), [((0.5, 0.5), "none of 2"), ((0.1, 0.5), "1 of 2"), ((0.1, 0.1), "all 2")]
)
def test_the_faster_search_counts(records, seconds, told):
    for network, own in zip("ab", seconds, strict=True):
        records["brackets-gpu"] += [made(network), made(network, "levels", own)]
    assert f"in all 1 cases on a CPU, and in {told} cases on a GPU" in brackets.summary()
    assert brackets.summary() in brackets.section()
    assert brackets.claim()[0] == brackets.summary()


def test_later_records_replace_earlier_ones(records):
    records["brackets-gpu"] += [made("a", seconds=9.0, sound_gram_seconds=5.0)]
    records["brackets-gpu"] += [made("a", seconds=0.25)]
    row, _ = (line for line in brackets.section().splitlines() if line.startswith("| a, initial |"))
    assert "0.250" in row
    assert "9.000" not in row
    assert "5.00 | 20.0" in row  # measured only by the earlier one
    assert "by levels" not in brackets.section()


def test_iteration_with_the_same_guarantee(records):
    records["brackets-gpu"] += [
        made("a", "levels", 0.1, sound_gram_seconds=2.0, bracket_range=[0.09, 0.2]),
        made("b", "levels", 0.2, sound_gram_seconds=9.0, bracket_range=[0.19, 0.3]),
    ]
    found = brackets.section()
    assert "takes 20 to 45 times as long as the faster search, in the 2 cases" in found
    assert "0.090 to 0.200 | 0.200 | 2.00 | 2.00 | 20.0 |" in found
