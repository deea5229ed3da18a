from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # before Triton is imported anywhere
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("lipbound", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("lipbound")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real images and trained weights beside a checkout, where there is one."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared with trained weights beside this checkout")
    return SHARED


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
