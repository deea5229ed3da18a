"""Cholesky factorizations of many matrices by SciPy's LAPACK.

The routine is called by its address. It releases Python's global lock, so threads run in parallel.
It copies nothing and leaves the other triangle alone; ``torch.linalg.cholesky`` clears it, which
takes as long again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUTINES = {np.dtype(np.complex64): "cpotrf", np.dtype(np.complex128): "zpotrf"}


@cache
def _routine(name: str) -> Callable[..., None]:
    from scipy.linalg import cython_lapack  # imported only when needed

    capsule = cython_lapack.__pyx_capi__[name]
    tell, take = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    tell.restype, tell.argtypes = ctypes.c_char_p, [ctypes.py_object]
    take.restype, take.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    number = ctypes.POINTER(ctypes.c_int)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, number, ctypes.c_void_p, number, number)
    return kind(take(capsule, tell(capsule)))


def factor(matrices: NDArray[Any]) -> NDArray[np.bool_]:
    """Test which matrices have a Cholesky factor L in floating point: ``(P,)``.

    Args:
        matrices: ``(P, n, n)`` complex, C order. Only the upper triangle is read. It is
            overwritten by the transpose of L, the factor of the conjugate matrix.
    """
    count, size, _ = matrices.shape
    if not matrices.flags.c_contiguous:
        raise ValueError(f"matrices with strides {matrices.strides} are not contiguous; copy them")
    routine, step = _routine(ROUTINES[matrices.dtype]), matrices.strides[0]
    start = matrices.ctypes.data
    found = np.empty(count, dtype=bool)
    order, info = ctypes.c_int(size), ctypes.c_int()
    for place in range(count):
        routine(b"L", order, start + place * step, order, info)
        found[place] = info.value == 0
    # Some libraries do not detect a NaN pivot; every pivot after it is NaN as well.
    return found & (matrices[:, -1, -1].real > 0)
