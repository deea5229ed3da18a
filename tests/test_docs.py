"""The examples in README and docs run, and name files that exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tools.pages import certified, flow, results, robustness, trust

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BUILT = {ROOT / "docs" / "gallery" / "audit-demo.html"}  # by tools/docs_hooks.py


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run_and_links_exist(page):
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert failed == 0
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        path = (page.parent / link).resolve()
        assert path.exists() or path in BUILT, link


PAGES = [results, pytest.param(robustness, marks=pytest.mark.slow), certified, flow, trust]


@pytest.mark.parametrize("module", PAGES, ids=lambda module: module.__name__)
def test_pages_come_from_the_records(module, tmp_path):
    module.main(tmp_path)
    written = [*tmp_path.rglob("*.md")]
    assert written
    for page in written:
        committed = ROOT / "docs" / page.relative_to(tmp_path)
        assert page.read_bytes() == committed.read_bytes(), "run: make pages"
        for figure in re.findall(r"!\[[^]]*\]\((\w+\.\w+)\)", page.read_text()):
            assert (page.parent / figure).stat().st_size > 1000
            assert (committed.parent / figure).stat().st_size > 1000
