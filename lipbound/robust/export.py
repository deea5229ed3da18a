"""Write a trained network in the form that RobustBench asks for: weights, definition and card."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipbound import __version__
from lipbound.files import write
from lipbound.robust.models import MODELS, normalized
from lipbound.robust.training.trained import Trained, extras

THREATS = {"linf": "Linf", "l2": "L2"}  # names of folders in RobustBench
WHOLE = 10_000  # images of the test sets of CIFAR, all of which RobustBench asks for


def export(
    trained: Trained,
    folder: Path,
    name: str,
    record: Mapping[str, Any] | None = None,
    about: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a network of ``lipbound train`` in RobustBench's form; return the files.

    ``NAME.pt`` is the state dict, in float32. ``NAME.py`` builds the network without lipbound where
    its code needs PyTorch alone, else with it. The card ``model_info/DATA/THREAT/NAME.json`` has
    the fields of RobustBench's cards.

    Args:
        trained: The network.
        folder: Folder for the files.
        name: Name of the entry, for example ``Ours2026Lipschitz``.
        record: An evaluation under attack of this network, whose accuracies the card states.
        about: The fields ``name`` (title of the paper), ``authors``, ``venue`` and ``link``.

    Raises:
        ValueError: If the name is not an identifier, the network is not of ``lipbound train``, its
            model cannot be written as code, or the record is of another network.
    """
    if not name.isidentifier():
        raise ValueError(f"name {name!r} must consist of letters, digits and _, as in 'Me2026Work'")
    if trained.settings is None:
        raise ValueError(f"{str(trained.path)!r} is not a network of lipbound train")
    card = _card(trained, record, dict(about or {}))
    threat = THREATS[record["plan"]["ball"] if record else trained.settings.ball]
    place = folder / "model_info" / card["dataset"] / threat / f"{name}.json"
    tensors = trained.model.state_dict().items()
    state = {k: (t.float() if t.is_floating_point() else t).cpu().contiguous() for k, t in tensors}
    weights = io.BytesIO()
    torch.save(state, weights)
    made = {
        folder / f"{name}.pt": weights.getvalue(),
        folder / f"{name}.py": definition(trained, name).encode(),
        place: (json.dumps(card, indent=2) + "\n").encode(),
    }
    for path, content in made.items():
        write(path, content)
    return list(made)


def definition(trained: Trained, name: str) -> str:
    """Return the source of a module whose function ``build`` returns the network."""
    chosen = trained.settings
    assert chosen is not None
    maker = MODELS[chosen.model]
    linear = [module for module in trained.model.modules() if isinstance(module, nn.Linear)]
    options: dict[str, Any] = {"classes": linear[-1].out_features, "inputs": trained.input_shape[0]}
    options |= extras(chosen)
    kind: Any = maker
    values: tuple[Any, ...] = ()
    if isinstance(maker, partial):
        kind, values, options = maker.func, maker.args, {**maker.keywords, **options}
    shown = [*map(repr, values), *(f"{key}={value!r}" for key, value in options.items())]
    if not (_importable(kind) and all(map(_literal, (*values, *options.values())))):
        raise ValueError(
            f"model {chosen.model!r} is made by {maker!r}, which cannot be written as code; set "
            f"MODELS[{chosen.model!r}] to a named class or function of an imported module, or to a "
            f"functools.partial of one with numbers and strings"
        )
    built = f"{kind.__name__}({', '.join(shown)})"
    needed = [kind]
    if chosen.normalize:
        mean, std = (trained.model.get_buffer(f"normalize.{n}").flatten().tolist()
                     for n in ("mean", "std"))  # fmt: skip
        built, needed = f"normalized({built}, {mean!r}, {std!r})", [kind, normalized]
    texts = [inspect.getsource(sys.modules[each.__module__]) for each in needed]
    if any(re.search(r"^\s*(from|import) lipbound", text, re.MULTILINE) for text in texts):
        imports = "\n".join(f"from {each.__module__} import {each.__name__}" for each in needed)
        body = f"from torch import nn\n\n{imports}\n"
    else:
        future = "from __future__ import annotations\n"
        body = future + "".join(text.replace(future, "") for text in texts)
    return (
        f'{body}\n\ndef build() -> nn.Module:\n    """Return {name}, without weights."""\n'
        f"    return {built}\n"
    )


def _importable(kind: Any) -> bool:
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__name__", "")
    return module != "__main__" and getattr(sys.modules.get(module), name, None) is kind


def _literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _card(
    trained: Trained, record: Mapping[str, Any] | None, about: dict[str, str]
) -> dict[str, Any]:
    chosen = trained.settings
    assert chosen is not None
    radius = float(record["plan"]["radius"]) if record else chosen.radius
    card: dict[str, Any] = {
        "link": about.get("link", ""),
        "name": about.get("name", ""),
        "authors": about.get("authors", ""),
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": chosen.data.removeprefix("packed-"),
        "venue": about.get("venue", "Unpublished"),
        "architecture": chosen.model,
        "eps": _fraction(radius),
    }
    if record is None:
        return card
    mine = {"model": chosen.model, "arm": chosen.arm, "checkpoint": trained.path.name}
    for key, value in mine.items():
        if record.get(key) != value:
            raise ValueError(f"the record is of the {key} {record.get(key)!r}, not of {value!r}")
    if "autoattack" not in record:
        raise ValueError("the record has no AutoAttack; make one with lipbound attack --attack all")
    clean, robust = (100 * float(record[kind]["accuracy"]) for kind in ("clean", "autoattack"))
    card |= {"clean_acc": f"{clean:.2f}", "autoattack_acc": f"{robust:.2f}"}
    card["reported"] = card["autoattack_acc"]
    count = int(record["clean"]["images"])
    if count < WHOLE:
        card["footnote"] = f"Evaluated by lipbound {__version__} on {count:,} test images."
    return card


def _fraction(radius: float) -> str:
    """Write a radius as RobustBench does, for example 8/255.

    Example:
        >>> _fraction(8 / 255), _fraction(0.5)
        ('8/255', '0.5')
    """
    share = Fraction(round(255 * radius, 6)).limit_denominator(1000)
    whole = share.denominator == 1 and abs(share / 255 - Fraction(radius)) < Fraction(1, 10**9)
    return f"{share.numerator}/255" if whole else f"{radius:g}"
