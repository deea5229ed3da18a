"""Load the model, or the weights without a model, that the command line names.

Only ``--model`` with a factory runs code from outside this package: the user's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.cli.onnx_programs import onnx_network
from lipbound.modules import check_takes
from lipbound.report.progress import bar
from lipbound.robust.data import DATA, data_set
from lipbound.robust.models import MODELS, digits
from lipbound.robust.training import checkpoints
from lipbound.robust.training.assess import networks
from lipbound.robust.training.trained import Trained, load_trained
from lipbound.runtime import first_line
from lipbound.weights import SAFE, Say, is_weights, parametrized, read_weights, silent

LIBRARIES = {"torchvision": "torchvision.models", "timm": "timm"}
WRAPPERS = re.compile(
    r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Parts of names that wrappers add: DataParallel, torch.compile, FSDP and checkpointing."""
COUNTERS = ("num_batches_tracked", "n_averaged")  # buffers that no output depends on in eval mode
SIZES = (32, 224, 28, 64, 299, 8)  # usual sizes of images, the most usual first


def network_or_weights(
    source: str, model: str | None, say: Say = silent
) -> tuple[Any, tuple[int, ...] | None, str]:
    """Return the model to audit or only its weights, its usual input shape, and a title."""
    path = Path(source)
    if source == "demo" or not (is_weights(path) or path.exists()):
        if model is not None:
            raise ValueError(
                f"--model {model} is for a weights file, not for {source!r}; leave it out"
            )
        if source == "demo":
            return digits.network(), digits.INPUT_SHAPE, "the embedded digits CNN"
        network = named_model(source, "cannot audit", "'demo', a weights file, ")
        return network, _usual(source, network), f"{source}, weights as initialised"
    if model is not None:
        network = fill(named_model(model, "--model"), read_weights(path, say), say)
        return network, _usual(model, network), f"{model}, {path.name}"
    if path.suffix == ".onnx":
        network, shape = onnx_network(path)
        say(f"onnx2torch converted {path.name}; the audit is of the network that it made")
        return network, shape, path.name
    known = trained(path)
    if known is not None:
        return known
    weights = read_weights(path, say)
    computed = parametrized(weights)
    if computed:
        raise ValueError(
            f"{source!r} holds {computed!r}, from which the model computes a weight, so its "
            f"layers cannot be bounded without it; give the architecture with --model"
        )
    return weights, None, path.name


def evaluated(
    source: str,
    model: str | None,
    data: str | None,
    folder: str | None,
    count: int,
    say: Say = silent,
) -> tuple[list[Trained], tuple[Tensor, Tensor], str]:
    """Return the networks to attack or certify, test images with labels, and the data's name.

    Args:
        source: Folder or file of a training run; or a factory, or a file of weights with a model.
        model: A model's name or a factory.
        data: The data set. Default: the one of the training run.
        folder: Folder of the image data.
        count: Number of images; 0 for all.
        say: Called with what was changed in the weights' names.
    """
    path = Path(source)
    program = model is None and path.suffix == ".onnx"
    if model is None and path.is_file() and path.suffix not in SAFE and not program:
        raise ValueError(
            f"{source!r} was not written by lipbound train; give its architecture with --model, "
            f"for example --model path/to/file.py:FACTORY"
        )
    if model is None and not program and (path.exists() or ":" not in source):
        found = networks(path)
        chosen = found[0].settings
        assert chosen is not None
        name = data or chosen.data
        split = data_set(name, folder, progress=bar).changed(chosen.size, chosen.workers)
        return found, split.test_images(count), name
    if data is None:
        raise ValueError(
            f"--data is needed, because lipbound did not train {model or source!r}; choose one of "
            f"{', '.join(DATA)}"
        )
    network, _, _ = network_or_weights(source, model, say)
    images = data_set(data, folder, progress=bar).test_images(count)
    shape = tuple(images[0].shape[1:])
    if any(p.dtype not in (torch.float32, torch.float64) for p in network.parameters()):
        say("converted the network to float32")
        network = network.float()
    example = next(network.parameters(), torch.zeros(())).new_zeros((1, *shape))
    try:
        check_takes(network, example)
    except ValueError as error:
        raise ValueError(
            f"{model or source!r} does not take the images of {data}, whose shape is {shape}: "
            f"{first_line(error.__cause__ or error)}"
        ) from None
    if not path.exists():
        say(f"there is no weights file, so {source} has the weights that its factory gives it")
    with torch.no_grad():
        logits = network.eval()(example)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 1:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{model or source!r} must return logits of shape (1, classes) for one image, got {got}"
        )
    return [Trained(path, None, network.eval(), shape, name=model or "")], images, data


def _usual(name: str, network: nn.Module) -> tuple[int, ...] | None:
    """Return the input shape of a named model: of this package, torchvision or timm."""
    if name in MODELS:
        return (3, 32, 32)
    if name.partition(":")[0] not in LIBRARIES:
        return None
    return tuple(getattr(network, "default_cfg", {}).get("input_size", (3, 224, 224)))


def guessed_shape(network: nn.Module) -> tuple[int, ...]:
    """Find an input shape that the network takes, from its first layer.

    Raises:
        ValueError: If it takes none of the usual ones.
    """
    layers = (m for m in network.modules() if isinstance(getattr(m, "weight", None), Tensor))
    first = next(layers, None)
    shapes: list[tuple[int, ...]] = []
    if isinstance(first, nn.Linear):
        shapes = [(first.in_features,)]
    elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        axes = len(first.kernel_size)
        shapes = [(first.in_channels, *[size] * axes) for size in (SIZES if axes < 3 else (16, 32))]
    for shape in shapes:
        like = next(network.parameters(), torch.zeros(()))
        try:
            check_takes(network, like.new_zeros((1, *shape)))
        except ValueError:
            continue
        return shape
    tried = ", ".join("x".join(map(str, shape)) for shape in shapes)
    first_tried = ",".join(map(str, shapes[0])) if shapes else "3,32,32"
    raise ValueError(
        f"the shape of one input is needed, for example --input {first_tried}"
        + (f"; {type(network).__name__} does not take {tried}" if tried else "")
    )


def trained(path: Path) -> tuple[nn.Module, tuple[int, ...], str] | None:
    """Return the network that ``lipbound train`` wrote to this file, its input shape, a title."""
    about = checkpoints.about(path) if path.suffix in SAFE and path.is_file() else None
    if about is None or "classes" not in about:
        return None
    found = load_trained(path)
    title = ", ".join(found.names[key] for key in ("model", "arm", "checkpoint"))
    return found.model, found.input_shape, title


def named_model(name: str, option: str, also: str = "") -> nn.Module:
    """Return a model by name, or call the factory ``module:factory`` or ``file.py:factory``.

    Args:
        name: What the user wrote.
        option: How an error begins.
        also: What else the user may write, for an error.
    """
    known = own_model(name)
    if known is not None:
        return known
    if ":" in name:
        return factory(name, option)
    if name.endswith(".py"):
        raise ValueError(
            f"{option} {name!r} is code; name the function in it that returns the network: "
            f"{name}:FUNCTION"
        )
    raise ValueError(
        f"{option} {name!r}: there is no such model; give {also}torchvision:NAME, timm:NAME, "
        f"package.module:FACTORY, path/to/file.py:FACTORY, or one of {', '.join(MODELS)}"
    )


def own_model(name: str) -> nn.Module | None:
    """Return a network of lipbound, torchvision or timm by name; ``None`` for other names."""
    if name in MODELS:
        return MODELS[name]()
    library, _, kind = name.partition(":")
    if library not in LIBRARIES or not kind:
        return None
    try:
        package = importlib.import_module(LIBRARIES[library])
    except Exception as error:
        raise ValueError(f"cannot import {library} ({error}); install it first") from None
    try:
        if library == "timm":
            return package.create_model(kind, pretrained=False)
        return package.get_model(kind, weights=None)
    except Exception as error:
        raise ValueError(f"{library} has no model {kind!r}: {error}") from None


def factory(path: str, option: str = "--model") -> nn.Module:
    """Import ``package.module:factory`` or ``path/to/file.py:factory``, and call the factory.

    An error begins with ``option``.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"{option} {path!r} is not of the form package.module:FACTORY or "
            f"path/to/file.py:FACTORY"
        )
    try:
        with _importable(Path(place).resolve().parent if place.endswith(".py") else Path.cwd()):
            module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
            model = getattr(module, name)()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option} {path!r}: {type(error).__name__}: {error}") from None
    if not isinstance(model, nn.Module):
        raise ValueError(f"{option} {path!r} returned a {type(model).__name__}, not an nn.Module")
    return model


def _from_file(place: str) -> ModuleType:
    if not Path(place).is_file():
        raise FileNotFoundError(f"there is no file {place!r}")
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def fill(model: nn.Module, weights: Mapping[str, Tensor], say: Say = silent) -> nn.Module:
    """Load the weights into the model; all names and shapes must match, but for a common prefix.

    Raises:
        ValueError: If they do not fit. The message shows names of both sides.
    """
    own = model.state_dict()
    wanted = {name: t for name, t in own.items() if not _is_counter(name, own)}
    fitting = _renamed(wanted, weights, say)
    kind = type(model).__name__
    _check_dense({name: t for name, t in fitting.items() if name in own})
    for name, tensor in wanted.items():
        if name in fitting and fitting[name].shape != tensor.shape:
            mine, given = (tuple(t.shape) for t in (tensor, fitting[name]))
            raise ValueError(
                f"the weights do not fit {kind}: {name!r} has the shape {mine} in the model and "
                f"{given} in the file; give the architecture of this file with --model"
            )
    alike = _tied(wanted, fitting)
    lost = [name for name in wanted if name not in fitting and name not in alike]
    more = [name for name in fitting if name not in own and not _is_counter(name, fitting)]
    if lost or more:
        computed = parametrized(fitting)
        if computed and not parametrized(wanted):
            raise ValueError(
                f"the weights do not fit {kind}: the file holds {computed!r}, so its model has "
                f"parametrizations; apply the same ones in the factory, for example "
                f"{_applied(computed)}"
            )
        needs = f"the model needs {_some(lost)}" if lost else "the model has all it needs"
        raise ValueError(
            f"the weights do not fit {kind}: {needs}; "
            + (f"the file has {_some(more)} instead" if more else "the file has nothing else")
            + "; give the architecture of this file with --model"
        )
    pairs = {name: (own[name], t) for name, t in fitting.items() if name in own}
    _check_types(pairs, say)
    model.load_state_dict({name: t for name, (_, t) in pairs.items()}, strict=False)
    _check_shared(kind, pairs)
    return model


def _is_counter(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a tensor is a buffer of a module, not of a weight, that only counts."""
    module, _, last = name.rpartition(".")
    return last in COUNTERS and module not in tensors and tensors[name].ndim == 0


def _check_shared(kind: str, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Check that names of one and the same tensor in the model have the same values in the file.

    Raises:
        ValueError: If not, so that the model holds only one of them after loading.
    """
    names: dict[int, list[str]] = {}
    for name, (mine, _) in pairs.items():
        names.setdefault(mine.data_ptr(), []).append(name)
    for place, same in names.items():
        for name in same if place and len(same) > 1 else ():
            loaded, given = pairs[name]
            if not torch.allclose(loaded, given.to(loaded), 0, 0, equal_nan=True):
                other = next(one for one in same if one != name)
                raise ValueError(
                    f"the weights do not fit {kind}: {name!r} and {other!r} are one tensor in the "
                    f"model and have different values in the file; give the architecture of this "
                    f"file with --model"
                )


def _tied(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> set[str]:
    """Names of the model's tensors that are another one, which the file holds.

    Safetensors files hold a tensor that two layers share only once.
    """
    places = {wanted[name].data_ptr() for name in wanted if name in given}
    return {name for name, t in wanted.items() if t.numel() and t.data_ptr() in places}


def _check_dense(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors without numbers, and those that do not store each of their entries.

    Raises:
        ValueError: If there are any; the message names the first.
    """
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} has a shape and no numbers in the file (device 'meta'); save the "
                f"state_dict() of a model that has its weights"
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(f"{name!r} is {kind} in the file; save each weight as a dense tensor")


def _check_types(pairs: Mapping[str, tuple[Tensor, Tensor]], say: Say) -> None:
    """Refuse numbers that would change their meaning when they are copied into the model.

    Raises:
        ValueError: If there are any; the message names the first.
    """
    rounded = []
    for name, (mine, given) in pairs.items():
        if mine.is_floating_point() and not given.is_floating_point():
            kind = str(given.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name!r} has numbers of the type {kind} in the file, which need a scale or a "
                f"rule to become weights; save the weights of the floating-point model"
            )
        exact, copied = given.double(), given.to(mine.dtype).double()
        if mine.is_floating_point() and not torch.allclose(exact, copied, 0, 0, equal_nan=True):
            rounded.append(name)
    if rounded:
        type_, from_ = (str(t.dtype).removeprefix("torch.") for t in pairs[rounded[0]])
        say(f"rounded {_some(rounded)} from {from_} to {type_}, the type of the model's weights")


def _applied(name: str) -> str:
    """Return an example of the call that gives a model this parametrized tensor."""
    ends = {
        "_g": "torch.nn.utils.weight_norm(layer)",
        "weight_bar": "the spectral norm of its program",
        "_orig": "torch.nn.utils.spectral_norm(layer), or prune",
        ".original0": "torch.nn.utils.parametrizations.weight_norm(layer)",
    }
    return next((call for end, call in ends.items() if name.endswith(end)),
                "lipbound.constrain(model)")  # fmt: skip


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:2]))
    return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _renamed(
    wanted: Mapping[str, Tensor], weights: Mapping[str, Tensor], say: Say
) -> dict[str, Tensor]:
    """Remove what wrappers added to the names, and a prefix that one side has and the other not."""
    named = {str(name): tensor for name, tensor in weights.items()}
    if not any(WRAPPERS.search(name) for name in wanted):
        plain = {WRAPPERS.sub("", name): tensor for name, tensor in named.items()}
        if plain.keys() != named.keys() and len(plain) == len(named):
            parts = sorted({part for name in named for part in WRAPPERS.findall(name)})
            say(f"removed {', '.join(map(repr, parts))} from the names of the weights")
            named = plain
    if wanted.keys() <= named.keys():
        return named
    first = next(iter(wanted), "")
    ends = [name for name in named if name.endswith("." + first)]
    prefixes = sorted({name.removesuffix(first) for name in ends})
    fitting = [p for p in prefixes if all(p + name in named for name in wanted)]
    if len(fitting) > 1:
        raise ValueError(
            f"the file holds several networks that fit, under {', '.join(map(repr, fitting))}; "
            f"save the tensors of one of them to a file of their own"
        )
    for prefix in fitting:
        rest = [name for name in named if not name.startswith(prefix)]
        left = f", and left out {len(rest)} other tensors such as {rest[0]!r}" if rest else ""
        say(f"removed {prefix!r} from the names of the weights{left}")
        return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
    given = next((name for name in named if not name.endswith(COUNTERS)), "")
    for whole in (name for name in wanted if name.endswith("." + given)):
        prefix = whole.removesuffix(given)
        longer = {prefix + name: tensor for name, tensor in named.items()}
        if wanted.keys() <= longer.keys():
            say(f"added {prefix!r} to the names of the weights")
            return longer
    return named
