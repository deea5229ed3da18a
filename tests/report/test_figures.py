"""The figure of an attack shows what its record holds, and the proved curve below the attacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lipbound import audit
from lipbound.robust import Plan, evaluate

pytest.importorskip("matplotlib", reason="the figures")


@pytest.mark.parametrize(
    ("attacks", "ball", "panels"),
    [(("pgd",), "l2", 2), (("pgd", "cw-projected"), "linf", 3), (("cw-projected",), "l2", 1)],
)
def test_the_proved_curve_is_below_the_attacked_one(attacks, ball, panels):
    from lipbound.report.figures import attack_axes, canvas

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    images = torch.rand(60, 1, 4, 4)
    labels = model(images).argmax(1)
    plan = Plan(attacks, ball, 0.05, iterations=10, restarts=2, radii=(0.05, 0.2))
    bounds = audit(model, (1, 4, 4), search=0)
    found = evaluate(model, images, labels, plan, audit=bounds, doubts=False)
    figure = attack_axes([found])
    assert len(figure.axes) == panels
    for axes in figure.axes[1 if "pgd" in attacks else 0 :]:
        attacked, proved = axes.lines
        assert proved.get_linestyle() == "--"
        right = attacked.get_xdata()[-1]
        assert proved.get_xdata()[-1] >= right, "the curve reaches to the end of the window"
        below = np.interp(attacked.get_xdata(), proved.get_xdata(), proved.get_ydata())
        assert (below <= attacked.get_ydata()).all()
    canvas().close(figure)
