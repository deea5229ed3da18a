"""The tutorial: every command runs, and the page shows what they print."""

from __future__ import annotations

import pytest

from tools import tutorial

TEXT = tutorial.PAGE.read_text()


def test_the_page_is_put_together_again():
    outputs = tutorial.shown(TEXT)
    assert tutorial.renewed(TEXT, outputs) == TEXT
    assert tutorial.MADE.search(TEXT)
    assert {name for name, _ in tutorial.FILE.findall(TEXT)} >= {"mynet.py", "train.py"}
    wrong = ["other\n" for _ in outputs]
    assert tutorial.shown(tutorial.renewed(TEXT, wrong)) == [o and "other\n" for o in outputs]


def test_an_output_without_its_numbers():
    one = "layer  upper\n0      4.4214  a 3×3\nepoch 1  0.5\nepoch 2  -1e-10\n"
    assert tutorial.stable(one) == "layer upper # # a #×# epoch # #"


@pytest.mark.slow
def test_every_command_runs_and_prints_what_the_page_shows(tmp_path):
    pytest.importorskip("sklearn", reason="the digits")
    assert "\nEPOCHS=10 " in TEXT
    printed = tutorial.run(TEXT.replace("\nEPOCHS=10 ", "\nEPOCHS=2 "), tmp_path)
    for output, recorded in zip(printed, tutorial.shown(TEXT), strict=True):
        if recorded:
            assert tutorial.stable(output) == tutorial.stable(recorded), "run: make tutorial"
    for name in tutorial.SHOTS:
        assert (tmp_path / f"{name}.html").stat().st_size > 10_000
