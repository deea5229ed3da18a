"""Write all pages that are made from records, with their figures."""

from __future__ import annotations

from tools.pages import DOCS, certified, flow, gan, imagenet, picture, results, robustness, trust

for page in (results, robustness, certified, flow, gan, imagenet, trust, picture):
    page.main(DOCS)
