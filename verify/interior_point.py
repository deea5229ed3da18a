"""LipSDP of small dense networks by an interior-point solver, a second way to its optimum."""

from __future__ import annotations

import math

import clarabel
import numpy as np
from scipy import sparse


def lipsdp(weights: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]]) -> float:
    """Return the bound of LipSDP (one multiplier per neuron, ReLU) by an interior-point solver.

    The variables are L² and the multipliers. The inequality is linear in them.
    """
    sizes = [weights[0].shape[1], *(w.shape[0] for w in weights[:-1])]
    starts = np.cumsum([0, *sizes])
    count = int(starts[-1])
    parts = [np.diag((np.arange(count) < sizes[0]).astype(float))]
    for layer, weight in enumerate(weights[:-1]):
        before = slice(starts[layer], starts[layer + 1])
        for i, row in enumerate(weight):
            part = np.zeros((count, count))
            part[starts[layer + 1] + i, before] = -row
            part += part.T
            part[starts[layer + 1] + i, starts[layer + 1] + i] = 2
            parts.append(part)
    result = np.zeros((count, count))
    result[starts[-2] :, starts[-2] :] = weights[-1].T @ weights[-1]
    below = np.tril_indices(count)
    scale = np.where(below[0] == below[1], 1.0, math.sqrt(2))
    columns = np.stack([scale * part[below] for part in parts], 1)
    free = len(parts)
    matrix = sparse.csc_matrix(np.vstack([-columns, -np.eye(free)]))
    limits = np.concatenate([-scale * result[below], np.zeros(free)])
    cones = [clarabel.PSDTriangleConeT(count), clarabel.NonnegativeConeT(free)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    goal = np.eye(free)[0]
    nothing = sparse.csc_matrix((free, free))
    solver = clarabel.DefaultSolver(nothing, goal, matrix, limits, cones, settings)
    return math.sqrt(solver.solve().x[0])
