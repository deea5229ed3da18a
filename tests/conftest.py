from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # before Triton is imported anywhere
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("lipbound", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("lipbound")

# A shell starts background jobs with SIGINT ignored; tests of ctrl-C need the usual handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BESIDE = Path(__file__).resolve().parents[2] / "shared"
SHARED = Path(os.environ.get("LIPBOUND_SHARED", BESIDE))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images and trained weights: LIPBOUND_SHARED, or ../shared."""
    if not SHARED.is_dir():
        pytest.skip(f"no trained weights in {SHARED}; set LIPBOUND_SHARED to their folder")
    return SHARED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
