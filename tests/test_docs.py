"""The examples in README and docs run, and name files that exist."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run_and_links_exist(page):
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert failed == 0
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("name", ["results", "trust"])
def test_pages_come_from_the_records(name, tmp_path):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    committed = ROOT / "docs" / f"{name.upper()}.md"
    assert (tmp_path / committed.name).read_bytes() == committed.read_bytes(), f"run: make {name}"
    for figure in re.findall(r"!\[[^]]*\]\((\w+\.\w+)\)", committed.read_text()):
        assert (tmp_path / figure).stat().st_size > 1000
