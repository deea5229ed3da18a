"""Write docs/TRUST.md from the records in benchmarks/records: ``make trust``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lipbound.experiments.campaign import merged
from lipbound.experiments.tally import Tally
from lipbound.records import read, table

sys.path.insert(0, str(Path(__file__).parent))
from trust_chapters import CHAPTERS

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
CLAIMS = {
    "bracket upper": "`bracket(layer).upper` ≥ σ1, every input size",
    "bracket lower": "`bracket(layer).lower` ≤ σ1 at its own frequency",
    "sized bracket upper": "`bracket(layer, input_shape=…).upper` ≥ σ1 at that size",
    "sized bracket lower": "`bracket(layer, input_shape=…).lower` ≤ σ1 at that size",
    "spectral": "`bound(layer)`, differentiable, ≥ σ1",
    "lipbound": "`bound(layer, 'lipbound')` ≥ σ1",
    "lipbound, sized": "the same with `input_shape`",
    "frobenius": "`bound(layer, 'frobenius')` ≥ σ1",
    "frobenius, sized": "the same with `input_shape`",
    "fantastic_four": "`bound(layer, 'fantastic_four')` ≥ σ1",
    "fantastic_four, sized": "the same with `input_shape`",
    "gram": "`bound(layer, 'gram')` ≥ σ1",
    "gram, sized": "the same with `input_shape`",
    "penalty": "`Penalty(model).bounds()` ≥ σ1 of each layer, in the weights' own precision",
    "constrain": "σ1 of a layer in `constrain(layer, norm).eval()` ≤ norm",
    "network": "`audit(model, shape).upper` ≥ every Jacobian norm found",
}


def runs(part: str) -> tuple[list[dict[str, Any]], Tally]:
    """The records of one part of the campaign, and all of them together."""
    found = [r for r in merged(read(RECORDS / "campaign.jsonl")) if r["part"] == part]
    total = Tally()
    for record in found:
        total.add(Tally.of(record))
    return found, total


def claims(total: Tally) -> str:
    rows = []
    for name, text in CLAIMS.items():
        if name in total.claims:
            claim = total.claims[name]
            wrong = sum(v["claim"] == name for v in total.violations)
            margin = f"{claim['margin']:.1e}" if claim["margin"] is not None else "–"
            at = ", ".join(map(str, claim["at"] or []))
            rows.append([text, f"{claim['count']:,}", str(wrong), margin, at])
    return table(["claim", "checked", "violations", "smallest margin", "at seed, layer"], rows)


def machines(found: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["device"],
            r["torch"],
            f"{r['count']:,}",
            f"{r['seconds'] / 60:,.0f}",
            ", ".join(f"{a:,}–{b - 1:,}" for a, b in r["seeds"]),
        ]
        for r in found
    ]
    return table(["device", "torch", "count", "worker minutes", "seeds"], rows)


def listed(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered)


def promises() -> str:
    return """# Trust

Made by `make trust` from the records in `benchmarks/records`. What lipbound promises, how each
promise was attacked, and what came of it.

## What is promised

- A **bound** is at least σ1 of the layer in real arithmetic with exactly the stored weights: for every
  input size, or for the one it was given. Rounding is part of the proof, whatever the precision.
- A **bracket** holds on both sides: its lower end is attained.
- A **network's bound** is at least the L2 Lipschitz constant of the network in eval mode, for all inputs;
  where there is none it says ∞, and why. Where an operation jumps a little, as softplus does, the network is within
  the audit's `error` of a function with that constant, and certificates subtract it.
- A **constrained** layer in eval mode keeps its limit.
- **Estimates** (`lipbound.ESTIMATES`) promise nothing and are not tested here.

Not promised: what the device makes of the network when it runs it in float32 or bfloat16, and anything
under `torch.set_flush_denormal(True)`, which takes subnormal weights for zeros before they are read.
"""


def layers() -> str:
    found, total = runs("layers")
    return f"""## Random layers

`make campaign MINUTES=10`, or `python -m lipbound.experiments.campaign --parts layers`. A seed is a
geometry (0 to 3 axes, odd and even kernels, stride, dilation, groups, four padding modes, transposed
with output padding, up to 60 channels) with 64 kernels (8 where they are wide) of {len(total.counts.get("families", {}))} families, four precisions and
scales from 1e-20 to 1e18. Bounds on a grid are called with grids as coarse as they allow, both widenings,
one to eight Gram iterations. The truth is attained, never assumed: σ1 of the symbol where ascent from a
grid finds it largest, and σ1 of the matrix that PyTorch's own module has at a small input, both by dense
float64 spectra. Margin: bound/σ1 − 1, for lower ends 1 − bound/σ1; below −1e-12, the truth's own
rounding, it is a violation, and so is NaN or an error.

**{total.count:,} layers, {len(total.violations)} violations.**

{claims(total)}

{machines(found)}

Layers by kind: {listed(total.counts["kinds"])}.
By precision: {listed(total.counts["dtypes"])}.
By family: {listed(total.counts["families"])}.

A seed's layer again: `random_stack(seed, 64)` of `lipbound.experiments.random_layers`, and `claims` of
`lipbound.experiments.layer_checks`. A violation is shrunk (fewer groups, channels, taps, options, digits) while it still
fails, and recorded as a program.
"""


def search() -> str:
    found, total = runs("search")
    return f"""## Adversarial kernels

The same bounds, on kernels made to break them: Adam on truth/bound, {listed(total.counts["starts"])}
to begin with; for the two ends of a bracket, which follow the truth within rtol, random steps kept when
they help. What is left of the margin at the worst kernel of all:

{claims(total)}

{machines(found)}
"""


def networks() -> str:
    found, total = runs("networks")
    outcomes, modules = total.counts["outcomes"], total.counts["modules"]
    newest = sum(stop - start for r in found for start, stop in r["seeds"] if start >= 30_000_000)
    sly = modules.get("Sly", 0)
    return f"""## Random networks

A grammar draws networks of one to three axes: convolutions with all their options, normalization,
activations, pooling, resizing, padding, residual sums, concatenation, maxima, reused modules, Linear
heads, in float32, float64 and bfloat16, a third of them with positive weights so that the layers' largest
directions meet. Every bound's method takes its turn, and `effort="high"` where there is a chain of residual
blocks. The other side is the largest norm of a dense float64 Jacobian (at random points of many scales,
then uphill from the best), or quotient of differences. A refusal is counted; an error is a violation.
Seeds below 10,000,000 ran before the rules were made stricter (see what a sceptic found, below); from there on the
grammar also has products from either side, spread numbers, and arguments that are activations. From 30,000,000 on it
also has sums along an axis, order statistics, masks, constant indices, einsum, assignments and unfolding, and modules
that do something else while they are captured, keep hidden state or change themselves: each network with one of these
must be refused. Only these seeds ran under the rules as they are. A few of them are missing in the table: there the hunt
itself failed, since its unfolding took the batch axis for another one, which was mended. A margin between −1e-12 and 0 is the rounding of the other side; for the smallest of
them, a BatchNorm used three times, a test computes the truth exactly (`tests/test_campaign.py`).

**{total.count:,} networks, {len(total.violations)} violations**; {outcomes["bounded"]:,} bounded, {outcomes["refused"]:,} refused.
Of these {newest:,} under the rules as they are, {sly:,} of them with a module that must be refused.

{claims(total)}

{machines(found)}

Networks that contain: {listed(modules)}.
"""


def planted() -> str:
    record = json.loads((RECORDS / "planted.json").read_text())
    rows = [
        [name, f"`{fault['claim']}`" if fault["claim"] else "missed", f"{fault['layers']:,}"]
        for name, fault in record["faults"].items()
    ]
    return f"""## Planted faults

A check that finds nothing is worth what it would have found. `python -m lipbound.experiments.planted`
breaks the library on purpose, one fault at a time, and counts the layers until a claim is wrong, whole
stacks of 64:

{table(["fault", "seen by", "after layers"], rows)}

({record["device"]}, torch {record["torch"]}.)
"""


def findings() -> str:
    return f"""## What the campaign found

Each is fixed, with a test.

- `Penalty.bounds()` fell below σ1, silently, in the fused kernels where the weights of one group of several were above
  1e19: their squares overflow float32, ∞ − ∞ is no number, and Triton's maximum skips what is none. In plain PyTorch
  it was NaN, which is no bound either. Both say ∞ now.
- `constrain(layer, 1.0).eval()` let σ1 = 1 + 5e-8 pass: it compared with the limit times 1 + 1e-7.
- `audit(model, shape, effort="high")` ended in a TypeError for chains of residual blocks with one axis.
- `bound(kernel, "spectral")` of a kernel with gradients ended in a LinAlgError where the symbol is largest along a line
  and the second derivatives are singular there (once among 22,000 such bounds).
- On a GPU, audits of x + conv(x), `effort="high"`, networks without parameters, and `certify` mixed CPU tensors with
  the network's; these were read in the code while the campaign was made ready for one.

## What a sceptic found

Random layers and networks are drawn from a grammar, and a grammar has blind spots. A reader who was asked to break the
claims by hand, three times, tried layers of unusual geometry, without a violation, and networks made for the purpose, with
these. Each is counted or refused now, and is a test that failed before (`tests/test_attacked.py`):

- Network bounds were too low where a bias, a BatchNorm's mean or the limit of a clamp depends on the input; where a
  matrix multiplies from the left (`A @ x`) and a BatchNorm, a sum or a classifier's rows were folded into it; where a
  number that depends on the input (`x.mean()`) is spread by broadcasting; where entries are repeated unequally or
  copied into a larger tensor; where `x / (|x| + 1)` was recognised in what only looks like it; where the rounding of a
  sum meets a large BatchNorm weight; and for slopes that are NaN. Noise without the input in it was drawn once and
  taken for a constant.
- `certify` without a Linear head had radii 1e-8 too large: √2 was rounded in float32.
- `Penalty.bounds()` fell up to 1 % below σ1 under autocast, or with reduced float32 products.
- `bracket`, `constrain` and `Penalty` took the weight of a convolution with a forward of its own for its kernel.
- The lower end of a BatchNorm alone lay 1e-7 above the truth.
- `audit(..., effort="high")` took positions for channels where a network drops its batch axis, and came out 700 times
  too low. Rounding of a sum was lost in a second sum; biases of normalized constants, further results of a
  normalization, complex outputs and buffers that a network changes as it runs were passed over.
- A number read out of a tensor (`x.sum().item()`, a count, a size) and added was taken for a constant, and a network
  with a counter or Python's random numbers in it for one map. A Python factor was read in float32: the bound of
  `0.7 * x` lay 2e-8 below 0.7, and that of `1e-46 * x` was 0. `F.interpolate`'s nearest pixels were chosen in float64,
  where a float32 network may choose others: up to 1 %.
- `certify` took inputs of another size than the audit's, and inputs that change each other's answers: radii 20 times
  too large. A first check looked at the first input alone, and a network that tells places in a batch apart passed it.
- `bracket` and `Penalty` read the weight that the hooks of `weight_norm`, `spectral_norm` and `prune` had set in the last
  forward, not the one they will set in the next.
- A BatchNorm that has diverged (NaN or negative variance) after a convolution kept `audit` busy for ever.
- `audit` wrote to the caller's inputs where the network does, and ended in tracebacks for arguments a rule did not know.

The rule behind these: a rule answers for the activations it has looked at; any other among its arguments makes the
result unbounded, and so does an error inside a rule. The grammar of random networks has such operations too, from seed
10,000,000 on.

{CAPTURE}"""


CAPTURE = """## What the promise about networks had missed

Tests on two million layers found no violation, but these holes in `audit`, `certify` and `constrain` were found by hand. Each is closed, with tests that failed before (`tests/test_faithful.py`, `tests/test_network.py`,
`tests/test_constrain.py`, `tests/test_layers.py`, `tests/test_security.py`).

- **The captured graph was never compared with the network that runs.** A forward that noticed that it was being captured
  was audited as something else: an upper end of 1 beside a Jacobian of 50. Now operations, numbers, constants, values and
  state are compared (`lipbound/faithful.py`). Ways in which a forward can tell, all refused in the tests:
  `is_compiling()`, `is_exporting()`, the tensor's type, `isinstance(x, FakeTensor)`, the fake mode, a dispatch mode, the
  parameter's type, the frames of the call stack, gradients switched on or off, inference mode, an input that requires
  gradients, a caught `bool`, `item`, `float`, `int`, `tolist`, `numpy` or `numpy.asarray`, the address of the data, the
  text of the tensor; and another number or another constant in the same operation.
- **Softplus jumps.** In float64 its difference quotient reaches 580,162 at the threshold, where the bound said 1. A value
  now carries how far it may be from a function with its constant, and certificates subtract that. The other operations
  were looked at for the same thought: `hardswish` on a GPU multiplies with float32's 1/6 (3e-8 too small), `CELU` with
  α·(1/α), `SELU`, GELU, SiLU, Mish and erf with constants in float32, a division with the rounded reciprocal, a mean with
  the rounded 1/n, normalizations with ε in float32; bilinear and bicubic weights depend on the precision like nearest
  pixels do. All of these are counted. Log-softmax, log-sum-exp, ELU and the exponentials near overflow are the textbook's
  functions.
- **Squares underflow.** Rows of a classifier that differ by less than 1e-162 had distance 0, hence an infinite radius, and
  a product with such a vector was bounded by 5e-154 where the gain is 2. Every norm in the package was looked at: the
  layers' searches work on scaled kernels; certificates, products with vectors, rounding of sums, weighted blocks and
  the comparison of answers alone and together did not. A tie between equal rows had an infinite radius too.
- **`constrain` after a change of precision** kept a rounded scale: certified lower ends of 1.0019 for the limit 1. The
  scale is a Python number now. A stride that changes later, another parametrization on top, and a changed limit are
  noticed or refused.
- **Parameters and attributes that a forward changes** are refused as buffers were.
- **`bracket` read `layer.padding`** where PyTorch's forward pads by another attribute: 1.001 for a true 3.
- **Casts to 8 bits** counted as 1. They are refused.
- **Python numbers** in `alpha=`, LeakyReLU, ELU, RReLU and ε were taken in double where the network has them in float32:
  2e-8 too small. Every rule that reads a number now takes the larger of both.
- **Damaged archives** ended in a traceback with the exit code of `--fail-above`. They are refused by one line, and a
  traceback has an exit code of its own, 3.
- A network without parameters was audited in float32 though its inputs were float64.

A second sceptic then had half an hour with the mended code, and found more of the same kind. These are closed too:

- The comparison of operations did not look at which earlier results an operation reads, at views, at constant indices,
  or at the last bits of constants, and each could hide another network far from the inputs that were tried.
- An operation whose result nobody reads can still fail for some inputs, and a forward can catch that: `table[x.long()]`
  in a `try`. Such operations are refused. The shape of what was counted (`nonzero`, `unique`, a mask) is a value too.
- The rule for `einsum`, new in this round, was too small where an axis of size 1 is spread. That is refused.
- Folding a BatchNorm into the last layer rounds its rows: two rows that became equal had an infinite radius. So did
  `effort="high"`. What rounding may have done to the rows is part of their distance now.
- Folded kernels could underflow. `bracket` read layers whose `_conv_forward` or `_call_impl` was replaced, and
  `parametrize.cached()` kept a weight from training mode for eval mode.

Not seen by any of this: reads that a forward hides on purpose (in another thread, through ctypes or `to_dlpack`), and a
network that behaves well until later, by a counter in a global variable or by the clock. An audit is of one precision:
a forward that branches on its input's dtype is another network in each.
"""


SECTIONS = (promises, layers, search, networks, planted, *CHAPTERS, findings)
"""In the order of the page."""


def main(folder: Path = ROOT / "docs") -> None:
    (folder / "TRUST.md").write_text("\n".join(section() for section in SECTIONS))
    print(f"wrote {folder / 'TRUST.md'}")


if __name__ == "__main__":
    main()
