"""Write docs/trust.md: what lipbound promises, how each promise was tested, what was found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lipbound.bounds.certified import BY_LEVELS
from lipbound.report.markdown import table
from tools.pages import DOCS, lines, record, write
from tools.pages.trust_chapters import CHAPTERS
from verify.campaign import merged
from verify.random_networks import MULTIPLIED
from verify.tally import Tally

CLAIMS = {
    "bracket upper": "`bracket(layer).upper` ≥ σ1 for every input size",
    "bracket lower": "`bracket(layer).lower` ≤ σ1 at its own frequency",
    "levels upper": "the upper end by levels ≥ σ1 for every input size",
    "levels lower": "the lower end by levels ≤ σ1 at its own frequency",
    "levels, plain upper": "the upper end by levels ≥ the lower end of the search cell by cell",
    "levels, plain lower": "the lower end by levels ≤ the upper end of the search cell by cell",
    "levels, width": "the width by levels ≤ `rtol`, or twice that of the search cell by cell",
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
    "penalty": "`Penalty(model).bounds()` ≥ σ1 of each layer, in the precision of the weights",
    "constrain": "σ1 of a layer in `constrain(layer, norm).eval()` ≤ norm",
    "network": "`audit(model, shape).upper` ≥ every Jacobian norm found",
    "lowered by LipSDP": "the same where LipSDP lowered the bound",
    "differences of outputs": '`audit(model, shape, effort="high").pairs` ≥ every difference of two rows of a Jacobian found',
    "floor": '`audit(model, shape, effort="high").upper` ≥ `floor`',
    "rounding, float32": "rounding of every value of a float32 network ≤ its bound",
    "rounding, float64": "rounding of every value of a float64 network ≤ its bound",
    "rounding, large": "float32 and float64 of every value of a large network differ by at most both bounds",
}
STRICTER, CURRENT = 30_000_000, MULTIPLIED
"""The first seeds of random networks that ran under stricter rules, and under those of today."""


def runs(part: str) -> tuple[list[dict[str, Any]], Tally]:
    """The records of one part of the campaign, and all of them together."""
    found = [r for r in merged(lines("campaign")) if r["part"] == part]
    total = Tally()
    for one in found:
        total.add(Tally.of(one))
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
            one["device"],
            one["torch"],
            f"{one['count']:,}",
            f"{one['seconds'] / 60:,.0f}",
            seeds(one["seeds"]),
        ]
        for one in found
    ]
    return table(["device", "torch", "count", "worker minutes", "seeds"], rows)


def seeds(ranges: list[list[int]]) -> str:
    """Ranges of seeds, or their ends if there are many."""
    if len(ranges) > 6:
        return f"{len(ranges)} ranges from {ranges[0][0]:,} to {ranges[-1][1] - 1:,}"
    return ", ".join(f"{first:,}–{stop - 1:,}" for first, stop in ranges)


def listed(counts: dict[str, int], most: int | None = None) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{name} {count:,}" for name, count in ordered[:most])
    return text if most is None else f"{text}, and {len(ordered) - most} other kinds"


def promises() -> str:
    layers, networks = runs("layers")[1], runs("networks")[1]
    neighbours = record("neighbours")["operations"].values()
    pairs = sum(one["pairs"] for one in neighbours)
    hostile = [text for row in record("hostile")["outcomes"].values() for text in row.values()]
    trained = record("trained")
    wrong = [
        len(layers.violations), len(networks.violations), len(trained["violations"]),
        sum(one["violations"] for one in neighbours),
        sum(text.startswith("wrong") for text in hostile),
    ]  # fmt: skip
    rows = [
        ["layers drawn at random", f"{layers.count:,}", str(wrong[0])],
        ["networks drawn at random", f"{networks.count:,}", str(wrong[1])],
        [
            "[kernels of trained networks](results/bounds.md#trained-kernels)",
            f"{trained['kernels']:,}",
            str(wrong[2]),
        ],
        ["pairs of neighbouring floats", f"{pairs:,}", str(wrong[3])],
        ["calls with hostile numbers", f"{len(hostile):,}", str(wrong[4])],
    ]
    return f"""# Trust

lipbound gives bounds that are proved, and rounding errors are part of the proof. This page says what exactly is promised, how we searched for violations, and what we found. The searches below ended with {sum(wrong)} violations. Earlier searches, and people who tried to break the promises by hand, did find faults. They are all listed in [the last three sections](#what-the-searches-found). Each is fixed and has a test, except a few that show only when threads or streams meet at a wrong moment.

{table(["what was checked", "how many", "violations"], rows)}

All numbers come from the records in `benchmarks/records`, and `make pages` writes this page from them. σ1 is the largest singular value of a layer, which is its L2 Lipschitz constant.

## What is promised

- A **bound** is at least σ1 of the layer in real arithmetic with exactly the stored weights. It holds for every input size, or for the input size that you give. It holds whatever the precision of the weights.
- A **bracket** holds on both sides. Its upper end is such a bound. Its lower end is at most the largest singular value of the symbol at a frequency that the bracket names, or at most σ1 at the input size that you give.
- A **network's bound** is at least the L2 Lipschitz constant of the network in eval mode, for all inputs. If there is no such constant, the bound is ∞ and comes with a reason. Some operations jump by a little, as softplus does at its threshold. Then the network is within the audit's `error` of a function with that constant, and certificates subtract this error.
- A **constrained** layer in eval mode does not exceed its limit.
- **Estimates** (`lipbound.ESTIMATES`) promise nothing. They are not tested here.
- A **certificate** holds for the network in real arithmetic, or for the network as PyTorch runs it in float64 or float32, whichever you ask for. [The model of arithmetic and its assumptions](arithmetic.md) are on a page of their own.

Two things are not promised. The first is what a device computes in bfloat16, in TF32, or with kernels that are no ordinary sums. The second is anything under `torch.set_flush_denormal(True)`, which replaces subnormal weights by zeros before lipbound reads them.

## Words

- The *symbol* of a convolution is a matrix for every frequency. Its largest singular value over all frequencies is the σ1 that large inputs approach, see [theory](theory.md).
- `rtol` is the relative width that is asked of a bracket: upper/lower − 1.
- A *seed* is a number from which a random case is drawn. The same seed gives the same case.
- A *claim* is an inequality that must hold, such as "the upper end is at least σ1". Its *margin* says by how much it holds, as a share of the true value.
- A *violation* is a claim that fails by more than the rounding of the true value, a value that is not a number, or an error.
- The *floor* of a network is a number that no method can go below if it knows of each activation only its least and largest slope.
"""


def layers() -> str:
    found, total = runs("layers")
    return f"""## Random layers

**{total.count:,} random layers were checked, with {len(total.violations)} violations.**

The command is `python -m verify campaign --parts layers`. Each seed draws a geometry: 0 to 3 axes, odd and even kernels, stride, dilation, groups, four padding modes, transposed convolutions with output padding, up to 60 channels. It then draws 64 kernels (8 if they are wide) from {len(total.counts.get("families", {}))} families, in four precisions and at scales from 1e-20 to 1e18. Bounds on a grid are called with the coarsest grids they accept, with both widenings, and with one to eight Gram iterations.

The true value is always one that is attained. It comes from two dense computations in float64: σ1 of the symbol at the highest point that an ascent from a grid reaches, and σ1 of the matrix of PyTorch's own module at a small input. The margin is bound/σ1 − 1, and 1 − bound/σ1 for lower ends. A margin below −1e-12, which is the rounding of the true value, is a violation. NaN and errors are violations too.

{claims(total)}

The layers were checked on these machines:

{machines(found)}

- By kind: {listed(total.counts["kinds"])}.
- By precision: {listed(total.counts["dtypes"])}.
- By family: {listed(total.counts["families"])}.

To repeat one layer, call `random_stack(seed, 64)` in `verify.random_layers` and `claims` in `verify.layer_checks`. A violation is reduced (fewer groups, channels, taps, options and digits) as long as it remains a violation, and is recorded as a program.
"""


def levels() -> str:
    found, total = runs("levels")
    used = (
        f"lipbound uses this search on devices of the kind {' and '.join(sorted(BY_LEVELS))}, and the search cell by cell on all others."
        if BY_LEVELS
        else "No device uses this search by default."
    )
    return f"""## The search by levels

**{total.count:,} random layers were searched by levels, with {len(total.violations)} violations.**

The search by levels is written for GPUs: it treats many layers side by side and reads the device once for each *level*, in which all cells are tested and those that remain open are divided (`lipbound.bounds.supremum.levels`). The command is `python -m verify campaign --parts levels`. Its brackets are compared with the true value, as above, and with those of the search cell by cell on a processor. Both brackets contain the same true value, so they must overlap. Half of the seeds use the factorization meant for large matrices on small ones too, and half split the work into several portions. On a GPU, the CUDA graphs are captured with other weights than those tested, so an answer that is left over would be noticed. {used}

{claims(total)}

{machines(found)}
"""


def search() -> str:
    found, total = runs("search")
    return f"""## Kernels made to break the bounds

**{total.count:,} searches for a kernel that breaks a bound ended with {len(total.violations)} violations.**

The command is `python -m verify campaign --parts search`. Adam changes a kernel so that the ratio of the true value to the bound grows. For the two ends of a bracket, which follow the true value within `rtol`, random steps are kept when they help. The searches start from these kernels: {listed(total.counts["starts"])}. The table shows the margin that was left at the worst kernel.

{claims(total)}

{machines(found)}
"""


def networks() -> str:
    found, total = runs("networks")
    outcomes, modules = total.counts["outcomes"], total.counts["modules"]

    def between(first: float, last: float) -> int:
        seeds = [s for r in found for s in r["seeds"] if first <= s[0] < last]
        return sum(stop - start for start, stop in seeds)

    return f"""## Random networks

**{total.count:,} random networks were audited, with {len(total.violations)} violations. {outcomes["bounded"]:,} got a bound and {outcomes["refused"]:,} were refused, which means that the bound is infinite, with a reason.**

The command is `python -m verify campaign --parts networks`. A grammar draws networks with one to three axes: convolutions with all their options, normalization, activations, pooling, resizing, padding, residual sums, concatenation, maxima, reused modules and Linear heads, in float32, float64 and bfloat16. A third of the networks have positive weights, so that the largest directions of the layers meet. All methods are used in turn.

The bound is compared with the largest norm of a dense float64 Jacobian (at random points of many scales, then by ascent from the best point) or with the largest difference quotient. A refusal is counted. An error is a violation. A margin between −1e-12 and 0 is the rounding of the Jacobian; for the smallest such margin, of a BatchNorm that is used three times, a test computes the true value exactly, and it is below the bound.

The rules changed three times, twice because of [faults that people found](#what-people-found). Only the last {between(CURRENT, math.inf):,} networks ran under the rules of today:

- Seeds below 10,000,000 ran before the first change. From there on the grammar also has products from either side, broadcast numbers, and arguments that are activations.
- Seeds from {STRICTER:,} to {CURRENT - 1:,} ran after the second change: {between(STRICTER, CURRENT):,} networks. Their grammar also has sums along an axis, order statistics, masks, constant indices, einsum, assignments and unfolding. It also has modules that behave differently while they are captured, that keep hidden state or that change themselves. All {modules.get("Sly", 0):,} networks with such a module were refused, as they must be.
- Seeds from {CURRENT:,} on ran under the rules of today, which also bound products of activations: {between(CURRENT, math.inf):,} networks. {modules.get("Multiplied", 0):,} of them multiply or divide activations: gates, attention, powers, quotients, einsum of two activations. Three networks of four have a domain, and Jacobians are searched inside it. More of these networks are refused, because a range is not known or above the largest float64.
- A few seeds of the second kind are missing, because the search itself failed there: it confused the batch axis with another one when it unfolded. That is fixed.

{claims(total)}

{machines(found)}

Modules in these networks: {listed(modules, 30)}.
"""


def lipsdp() -> str:
    found, total = runs("lipsdp")
    lowered, floors = (total.claims[name]["count"] for name in ("lowered by LipSDP", "floor"))
    return f"""## Random networks with `effort="high"`

**{total.count:,} random networks were audited with LipSDP on symbols, with {len(total.violations)} violations. LipSDP lowered the bound of {lowered:,}.**

The command is `python -m verify campaign --parts lipsdp`. Three networks of five are chains of linear maps and activations: plain, strided, pre-activation and bottleneck blocks, pooling, dense networks, all activations. The others come from the grammar above. Few steps choose the multipliers, because any multipliers must give a valid bound. The bound is compared with the largest Jacobian norm found, and with the floor of {floors:,} networks for which one is known.

{claims(total)}

{machines(found)}
"""


def planted() -> str:
    found = record("planted")
    rows = [
        [name, f"`{fault['claim']}`" if fault["claim"] else "not found", f"{fault['layers']:,}"]
        for name, fault in found["faults"].items()
    ]
    missed = sum(not fault["claim"] for fault in found["faults"].values())
    return f"""## Planted faults

**The campaign finds {len(rows) - missed} of {len(rows)} faults that we planted in the library.**

A search that finds nothing proves little unless it would find a fault. `python -m verify planted` breaks the library on purpose, one fault at a time, and counts the layers until a claim is violated, in stacks of 64:

{table(["fault", "found by the claim", "after layers"], rows)}

({found["device"]}, torch {found["torch"]}.)
"""


def findings() -> str:
    return f"""## What the searches found

All of these faults are fixed, and each has a test.

- `Penalty.bounds()` fell below σ1 without a warning. This happened in the fused kernels when the weights of one of several groups were above 1e19: their squares overflow float32, ∞ − ∞ is NaN, and Triton's maximum ignores NaN. In plain PyTorch the result was NaN. Both now return ∞.
- `constrain(layer, 1.0).eval()` accepted σ1 = 1 + 5e-8, because it compared with the limit times 1 + 1e-7.
- `audit(model, shape, effort="high")` raised a TypeError for chains of residual blocks with one axis.
- `bound(kernel, "spectral")` of a kernel with gradients raised a LinAlgError when the symbol is largest along a line, where its second derivatives are singular (once in 22,000 such bounds).
- On a GPU, audits of x + conv(x), audits with `effort="high"`, audits of networks without parameters, and `certify` mixed CPU tensors with the network's tensors. These faults were found by reading the code.

{PEOPLE}
{CAPTURE}"""


PEOPLE = """## What people found

A grammar of random networks has blind spots. A reader was therefore asked, three times, to break the claims by hand. Layers of unusual geometry gave no violation. Networks made for the purpose gave the following. Each case is now either counted or refused, and each is a test that failed before.

- Network bounds were too low in these cases:
    - A bias, a BatchNorm's mean or the limit of a clamp depends on the input.
    - A matrix multiplies from the left (`A @ x`), and a BatchNorm, a sum or the rows of a classifier were folded into it.
    - A number that depends on the input (`x.mean()`) is broadcast.
    - Entries are repeated unequally or copied into a larger tensor.
    - An expression only looks like `x / (|x| + 1)`.
    - The rounding of a sum meets a large BatchNorm weight.
    - A slope is NaN.
    - Noise that does not depend on the input was drawn once and treated as a constant.
- `certify` without a Linear head gave radii that were 1e-8 too large, because √2 was rounded in float32.
- `Penalty.bounds()` fell up to 1 % below σ1 under autocast, or with reduced float32 products.
- `bracket`, `constrain` and `Penalty` used the weight of a convolution that has its own forward method.
- The lower end of a single BatchNorm was 1e-7 above the true value.
- `audit(..., effort="high")` confused positions with channels when a network drops its batch axis. The bound was 700 times too low.
- The rounding of a sum was lost in a second sum. Biases of normalized constants, further results of a normalization, complex outputs and buffers that a network changes as it runs were ignored.
- A number read out of a tensor (`x.sum().item()`, a count, a size) and then added was treated as a constant. A network with a counter or with Python's random numbers was treated as one function.
- A Python factor was read in float32: the bound of `0.7 * x` was 2e-8 below 0.7, and that of `1e-46 * x` was 0.
- The nearest pixels of `F.interpolate` were chosen in float64. A float32 network may choose others, and the bound was up to 1 % too low.
- `certify` accepted inputs of another size than the audit's, and inputs that change each other's outputs. The radii were up to 20 times too large. A first check looked only at the first input, and a network that treats places in a batch differently passed it.
- `bracket` and `Penalty` read the weight that the hooks of `weight_norm`, `spectral_norm` and `prune` had set in the last forward pass, not the one they will set in the next.
- A BatchNorm that has diverged (NaN or negative variance) after a convolution made `audit` run for ever.
- `audit` wrote to the caller's inputs where the network does, and raised unclear errors for arguments that a rule did not know.

The rule behind these fixes is this: a rule answers only for the activations it has looked at. Any other activation among its arguments makes the result unbounded, and so does an error inside a rule.
"""


CAPTURE = """## What the promise about networks had missed

Two million layers gave no violation, but people found these holes in `audit`, `certify` and `constrain`. Each is closed, with tests that failed before.

- **The captured graph was never compared with the network that runs.** A forward method that noticed that it was being captured was audited as something else: an upper end of 1 where the Jacobian is 50. Operations, numbers, constants, values and state are now compared (`lipbound/network/capture_check.py`). A forward method can notice the capture in many ways, and the tests refuse all of these: `is_compiling()`, `is_exporting()`, the type of a tensor or parameter, `isinstance(x, FakeTensor)`, the fake mode, a dispatch mode, the call stack, gradients on or off, inference mode, an input that requires gradients, a caught `bool`, `item`, `float`, `int`, `tolist`, `numpy` or `numpy.asarray`, the address of the data, the text of a tensor, and another number or constant in the same operation.
- **Softplus jumps.** In float64 its difference quotient reaches 580,162 at the threshold, where the bound was 1. A value now carries its distance from a function with its constant, and certificates subtract it. Other operations were checked for the same problem. `hardswish` on a GPU multiplies by float32's 1/6 (3e-8 too small). `CELU` multiplies by α·(1/α). SELU, GELU, SiLU, Mish and erf have constants in float32. A division multiplies by a rounded reciprocal, a mean by a rounded 1/n, and normalizations have ε in float32. Bilinear and bicubic weights depend on the precision as nearest pixels do. All of these are counted.
- **Squares underflow.** Rows of a classifier that differ by less than 1e-162 had distance 0, hence an infinite radius, and a product with such a vector had the bound 5e-154 where the gain is 2. Every norm in the package was checked. The search for σ1 scales its kernels. Certificates, products with vectors, the rounding of sums, weighted blocks and the comparison of outputs alone and in a batch did not. A tie between equal rows also had an infinite radius.
- **`constrain` after a change of precision** kept a rounded scale: certified lower ends of 1.0019 for the limit 1. The scale is now a Python number. A stride that changes later, another parametrization on top, and a changed limit are noticed or refused.
- **Parameters and attributes that a forward method changes** are now refused, as buffers were.
- **`bracket` read `layer.padding`** where PyTorch's forward method pads by another attribute: 1.001 where the true value is 3.
- **Casts to 8 bits** had the constant 1. They are now refused.
- **Python numbers** in `alpha=`, LeakyReLU, ELU, RReLU and ε were read in double where the network has them in float32. The bound was 2e-8 too small. Every rule that reads a number now uses the larger of the two.
- **Damaged archives** ended in a traceback with the exit code of `--fail-above`. They are now refused with one line, and a traceback has its own exit code, 3.
- **Networks without parameters** were audited in float32 although their inputs were float64.

A second reader then had half an hour with the corrected code and found more of the same kind. These are closed too:

- The comparison of operations did not look at which earlier results an operation reads, at views, at constant indices, or at the last bits of constants. Each of these could hide another network far from the inputs that were tried.
- An operation whose result nobody reads can still fail for some inputs, and a forward method can catch that: `table[x.long()]` in a `try`. Such operations are refused. The shape of a result that was counted (`nonzero`, `unique`, a mask) is treated as a value too.
- The rule for `einsum`, new at that time, gave too small a constant when an axis of size 1 is broadcast. That is refused.
- Folding a BatchNorm into the last layer rounds its rows. Two rows that became equal had an infinite radius, also with `effort="high"`. The possible effect of rounding is now part of the distance between rows.
- Folded kernels could underflow. `bracket` read layers whose `_conv_forward` or `_call_impl` was replaced, and `parametrize.cached()` kept a weight from training mode in eval mode.

When layers of known norm were added, another reader attacked their rules, before any release:

- `addmm` with `alpha=-1` was merged with the wrong sign: an upper end of 1e-15 where the gain is 2. This was an old fault.
- The new rule for x − Kᵀφ(Kx + b) overlooked a branch that is broadcast, and factors on another axis where the batch axis is dropped: upper ends of 1 where the gains are 4.2 and 9. A bias kept the activation off at all random inputs, so that no search for large Jacobians could notice.
- `MinMax` accepted an odd number of channels, for which its norm is √2. The gradient of a flat symbol went to the first group. `unconstrain` of a copied layer broke the original.

When certificates of networks as they run were added, another reader broke them, before any release:

- Class changes inside a radius: softplus with a threshold at which its exponential overflows; a mean whose sum overflows before its division; `addmm` with a small `alpha`; nearest interpolation that takes other pixels in float32 than in float64; integer buffers that are rounded; SiLU where its exponential overflows; subnormal inputs that are flushed to zero. All are bounded or refused now.
- Bounds on rounding that were too small without a class change: Python numbers and BatchNorm factors below the smallest normal number, float64 constants in a float32 network, `einsum` that sums its constant alone.
- `certify(logits, report, arithmetic="float32")` ignored the arithmetic, a function of `register_rounding` without a `return` counted as exact, and settings such as `torch.backends.mkldnn.conv.fp32_precision = "bf16"` were overlooked.
- Our own search had found two more: a factor without axes whose rounding was not counted, and an ε that float32 rounds to 0.

After all of that was mended, a third reader spent half an hour and broke it again:

- Class changes inside a radius: a Python number above the largest float32; normalizations whose γ/√ε times the mean overflows; `einsum` that sums a value before it multiplies; a network that writes to its input, which was measured afterwards; a parametrized bias that shares its parameter with another layer; a module with `module.compile()`; parametrizations that compute other weights in `model.double()`; a forward method that adds other values in float64; flushed numbers while the default type is float64.
- `certify` read the weights of a network in training mode, which changes those with spectral normalization, and changed the caller's images if the network writes to its input.
- Without a class change: a negative running variance that cancels with ε, and ε above the largest float32.
- An audit of other weights was accepted. Audits now know the weights, and `certify` refuses others.

When LipSDP on symbols was added, a reader broke it too, before any release:

- `avg_pool1d` of vectors and `avg_pool2d` of lines were read with the wrong number of axes, ELU with a negative `alpha` was taken for an activation that never falls, and operations were recognized by a part of their names. The bounds were up to 19 times too low.
- The rounding of BatchNorm's ε in float32 was left out where almost everything cancels: 6 % too low. This also concerned `effort="normal"` for differences of merged branches.
- Weights of size 1e10 ended in a traceback.

When LipSDP learned to bound the differences of two outputs, a search and a reader attacked it, before any release:

- If the last part of a network gave no such bounds, those of an earlier part were tried in its place. The random networks found it.
- Squares underflow: for a classifier with weights near 1e-306 the bound was 0, and the radius infinite. Such bounds are now refused, and every product is rounded up.
- The channels of an image that is only flattened at the end were taken for the outputs, and an activation without a channel axis ended the audit with an error.

When ranges learned to bound products of activations, a reader attacked them, before any release:

- The bias and the factor alpha of a product of two activations (`addmm`, `baddbmm`, `linear`) were left out of its range: a bound of 3 for a Jacobian of 50, and a class that changed inside its radius.
- The size of an int8 constant of −128 is −128 in int8. A quotient of numbers near 1e200 underflowed. The centre of a domain near 1e308 overflowed.
- A domain such as (0, 0.1) was compared with the inputs in float32, and numbers that a float32 network rounds were missing in some norms.

After these were mended, another reader found three more:

- An operation that fails for large inputs was accepted if only the shape of its result was used, as by `zeros_like`. The network could catch the failure and compute something else.
- The constant of attention with a scale near 5e-324 became 0, because the scale was halved first.
- Powers and norms near 1e-320 lost digits before they were multiplied by large numbers. The bound of 1e300·x^2000 for x up to 0.6888 was 300 times too small.

A third reader attacked batches of certificates and the matrices between the stages of LipSDP. He found no bound below the truth, but three holes of one kind in the batches:

- A network that mixed the inputs of a batch by less than 1 % got a radius for the class that an input has in its batch, if the rounding of an operation is not bounded. A mixing as small as the rounding was not refused either. Every radius now follows from the logits of each input alone.
- Upper ends were printed to the nearest digit: 1.00005 as 1. Those in tables, summaries and on the page are rounded up now.

When the [search by levels](#the-search-by-levels) was written, campaigns on an H200 and readers of the code attacked it, before it was used:

- CUDA graphs that are captured on one stream share a workspace of cuBLAS, and overwrite each other's numbers when they run at the same time. The upper ends of a few layers were too small. Every graph has a workspace of its own now.
- If a CUDA graph had failed to run, old answers would have been read. Every answer now carries a number that is checked. The host also checks that no cell is so large that [its bound](theory.md) does not hold.
- The next campaign stopped with errors, and showed three faults: a graph overwrote results of another one before they were read; graphs whose memory had grown could not be captured again; and a search read past the end of a tensor. All three are mended. Tests on a processor keep to the rules of CUDA graphs, and find each of them.
- After a capture that failed, PyTorch refused to draw random numbers. It can draw them again now.
- A reader of the code found that nobody waited for the streams of a search that failed, so that memory could be used twice, and that threads shared streams. A default device and autocast ended a search with an error. Graphs that were captured in inference mode could stop later ones. All of this is mended.
- PyTorch's solver for small eigenvalue problems takes about 1 MiB of GPU memory for each of them on an H200. One process took 100 GiB. The solver is given 1,024 of them at once now.

When `constrain` learned to certify all layers of a model in one search, two readers attacked it, before any release:

- Another thread could change a weight during the search, or between the comparison and the product. The new weight was then above the limit. The search and the product now use one copy.
- What was wrong with one layer stopped the certificates of others, or made every layer search again. A `constrain` or `unconstrain` that failed left the model half changed, or its parameters in another order, by which optimizers store their states.
- An export after a change of precision or of the limit used the earlier scale. It is refused now. A bound that is not a number made a search endless.

No check sees the following: values that a forward method reads in a hidden way (in another thread, through ctypes or `to_dlpack`), and a network that changes its behaviour later, by a counter in a global variable or by the clock. An audit holds for one precision: a forward method that branches on the dtype of its input is another network in each precision.
"""


def rounding() -> str:
    found, total = runs("rounding")
    return f"""## Rounding

**{total.count:,} random networks ran in float32 and float64, with {len(total.violations)} violations.**

The command is `python -m verify campaign --parts rounding`. Every value of each network is compared with arithmetic of 256 bits, at an input and at points of three balls around it. The margin is 1 − rounding/bound. [The model of arithmetic](arithmetic.md) has the bounds.

{claims(total)}

{machines(found)}

- Outcomes: {listed(total.counts["outcomes"])}.
"""


SECTIONS = (
    promises,
    layers,
    levels,
    search,
    networks,
    lipsdp,
    rounding,
    planted,
    *CHAPTERS,
    findings,
)
"""In the order of the page."""


def main(folder: Path = DOCS) -> None:
    write(folder / "trust.md", "\n".join(section() for section in SECTIONS))


if __name__ == "__main__":
    main()
