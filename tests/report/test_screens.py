"""Every page in Chromium: at three widths, light and dark, sorted, clicked and downloaded."""

from __future__ import annotations

import csv
import io
import json
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, browser, needs_chromium
from torch import nn
from zoo import NETWORKS

from lipbound import Comparison, audit
from lipbound.report.certificates import certificate_page
from lipbound.report.page import page
from lipbound.robust import Plan, evaluate
from lipbound.robust.certification import certification
from lipbound.robust.training.trained import Trained

pytest.importorskip("jinja2", reason="the page is a template")
pytest.importorskip("matplotlib", reason="its pictures")
pytestmark = [pytest.mark.slow, needs_chromium]

LONG = "features.stage_three.residual_block_number_twelve.second_convolution.parametrized"
KEPT = os.environ.get("SCREENS")  # a folder in which the screenshots stay, to look at them


def classifier() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    for layer in (model[0], model[3]):
        layer.weight.data *= 2
    return model


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Name → file of each kind of page."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pages")
    build, shape = NETWORKS["resnet"]
    new = build()
    old = deepcopy(new)
    for layer in [m for m in old.modules() if isinstance(m, nn.Conv2d)]:
        layer.weight.data *= 0.7
    a, b = (audit(model, shape) for model in (new, old))
    a, b = (replace(x, layers=(replace(x.layers[0], name=LONG), *x.layers[1:])) for x in (a, b))
    (folder / "audit.html").write_text(page(a, f"resnet, {LONG}.safetensors"))
    names = ("resnet, new_and_better.safetensors", "resnet, old.safetensors")
    Comparison(a, b, names).save_html(folder / "comparison.html")

    model = classifier()
    images = torch.rand(80, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (255 * images).byte()
    labels = model(images / 255).argmax(1)
    network = Trained(Path("weights.pt"), None, model, (1, 8, 8), name="mine.py:build")
    record = certification(network, (images, labels), [0.02, 0.05], torch.device("cpu"),
                           attacked=20)  # fmt: skip
    record["data"] = "digits"
    (folder / "certify.html").write_text(certificate_page(record))
    plan = Plan(("pgd",), "l2", 0.05, iterations=5, restarts=2)
    bounds = audit(model, (1, 8, 8), search=0)
    found = evaluate(model, images / 255, labels, plan, audit=bounds, jacobians=20)
    found.save_html(folder / "attack.html")
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    assert CHROMIUM
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


NAMES = ("audit", "comparison", "certify", "attack")
WIDER = """[...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, .wide") &&
  e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map(e => e.tagName + " " + e.className + " " + e.textContent.trim().slice(0, 40))"""
BROKEN = """[...document.querySelectorAll("h1, h2, h3, td.name")].flatMap(cell => {
  const found = [], walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const range = document.createRange(); range.selectNodeContents(walker.currentNode);
    const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
    if (lines.size > 1) found.push(walker.currentNode.textContent);
  }
  return found; })"""
PALE = """(() => { const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
    return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255; };
  const style = getComputedStyle(document.body);
  return [light(style.color), light(style.backgroundColor)]; })()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 1100, 390])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaves_the_window(chromium, pages, name, width, dark):
    chromium.open(pages[name], width, dark=dark)
    if KEPT:
        chromium.screenshot(Path(KEPT) / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.run("window.innerWidth") == width, "the page shrank to show something wide"
    assert chromium.run(WIDER) == []
    if width >= 1100:
        assert chromium.run(BROKEN) == [], "a name breaks inside a word"
    ink, paper = chromium.run(PALE)
    assert (ink > 0.7 and paper < 0.3) if dark else (ink < 0.3 and paper > 0.7)
    assert chromium.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert chromium.said == []


@pytest.mark.parametrize("name", ["audit", "comparison"])
def test_the_layer_table_scrolls_on_a_phone(chromium, pages, name):
    chromium.open(pages[name], 390)
    card = "document.querySelector('#layers').closest('.scroll')"
    assert chromium.run(f"{card}.scrollWidth > {card}.clientWidth")
    assert chromium.run(f"getComputedStyle({card}).overflowX") == "auto"
    chromium.run(f"{card}.scrollLeft = 100")
    assert chromium.run(f"{card}.scrollLeft") == 100


@pytest.mark.parametrize("name", ["audit", "comparison"])
@pytest.mark.parametrize("width", [1400, 390])
def test_a_click_sorts(chromium, pages, name, width):
    chromium.open(pages[name], width)
    upper, cells = 5, "[...document.querySelectorAll('#layers tbody tr')]"
    numbers = f"{cells}.map(r => parseFloat(r.children[{upper - 1}].dataset.value))"
    for descending in (True, False):  # the audit begins sorted by the upper end
        chromium.click(f"#layers th:nth-child({upper}) button")
        if name == "audit":
            descending = not descending
        found = chromium.run(numbers)
        assert found == sorted(found, reverse=descending)
        order = chromium.run(f"document.querySelector('#layers th:nth-child({upper})').ariaSort")
        assert order == ("descending" if descending else "ascending")
    chromium.click("#layers th:nth-child(2) button")
    found = chromium.run(f"{cells}.map(r => r.children[1].textContent)")
    assert found == sorted(found)
    assert chromium.said == []


@pytest.mark.parametrize("width", [1400, 390])
def test_a_click_or_a_key_shows_a_layer(chromium, pages, width):
    chromium.open(pages["audit"], width)
    shown = "document.querySelector('#detail h3').textContent"
    selected = "document.querySelectorAll('#layers tr[aria-selected=true]').length"
    names = chromium.run(
        "[...document.querySelectorAll('#layers tbody tr')].map(r => r.children[1].textContent)"
    )
    assert chromium.run(f"{shown}") == names[0], "the largest layer is shown at first"
    chromium.click("#layers tbody tr:nth-child(2) td:nth-child(2)")
    assert chromium.run(shown) == names[1]
    assert chromium.run(selected) == 1
    chromium.run("document.querySelector('#layers tbody tr:nth-child(2)').focus()")
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown")
    assert chromium.run(shown) == names[2]


def test_the_histograms_of_the_classes_open(chromium, pages):
    chromium.open(pages["certify"], 1100)
    seen = "document.querySelector('details img').checkVisibility()"
    assert not chromium.run(seen)
    chromium.click("details summary")
    assert chromium.run(seen)


@pytest.mark.parametrize("name", NAMES)
def test_downloads_are_json_and_csv(chromium, pages, name):
    chromium.open(pages[name])
    links = chromium.run("[...document.querySelectorAll('a[download]')].map(a => a.download)")
    assert [Path(link).suffix for link in links] == [".json", ".csv"]
    found = [chromium.download(f"a[download='{link}']").decode() for link in links]
    assert json.loads(found[0])
    rows = list(csv.DictReader(io.StringIO(found[1])))
    assert rows
    assert all(None not in row for row in rows)
    if name == "audit":
        assert rows[0]["layer"] == LONG
        uppers = [one["upper"] for one in json.loads(found[0])["layers"]]
        assert [float(row["upper"]) for row in rows] == uppers
