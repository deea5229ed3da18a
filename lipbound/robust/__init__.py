"""Train, attack and evaluate networks that should resist adversarial examples."""

from lipbound.robust.attacks.autoattack import autoattack
from lipbound.robust.attacks.balls import BALLS
from lipbound.robust.attacks.carlini_wagner import carlini_wagner
from lipbound.robust.attacks.evaluate import evaluate
from lipbound.robust.attacks.evaluation import Evaluation
from lipbound.robust.attacks.pgd import pgd
from lipbound.robust.attacks.pgd_restarts import strongest_pgd
from lipbound.robust.attacks.plan import ATTACKS, Plan
from lipbound.robust.certification import certification
from lipbound.robust.data import DATA, Data, data_set
from lipbound.robust.export import export
from lipbound.robust.models import MODELS
from lipbound.robust.training.loop import train
from lipbound.robust.training.margins import LOSSES as MARGIN_LOSSES
from lipbound.robust.training.margins import pair_constants
from lipbound.robust.training.settings import ARMS, PRESETS, Settings, settings
from lipbound.robust.training.trained import Trained, load_model, load_trained

__all__ = [
    "ARMS",
    "ATTACKS",
    "BALLS",
    "DATA",
    "MARGIN_LOSSES",
    "MODELS",
    "PRESETS",
    "Data",
    "Evaluation",
    "Plan",
    "Settings",
    "Trained",
    "autoattack",
    "carlini_wagner",
    "certification",
    "data_set",
    "evaluate",
    "export",
    "load_model",
    "load_trained",
    "pair_constants",
    "pgd",
    "settings",
    "strongest_pgd",
    "train",
]
