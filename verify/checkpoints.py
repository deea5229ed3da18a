"""Audit checkpoints of every kind with the command line, beside the same network in memory.

    python -m verify checkpoints --out benchmarks/records/checkpoints.json

Each checkpoint is written to a temporary folder and audited. Its audit must have the numbers of the
audit of the same network in memory, one by one, or it must be refused with one line that says what
to do. Other numbers, another line, a traceback, and code that ran out of a file are violations.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gzip
import importlib.util
import json
import os
import pathlib
import pickle
import shutil
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from verify.command import run

SHAPE = (3, 32, 32)
FACTORIES = '''
"""The architectures that the checkpoints are audited with; their own weights are other ones."""
import torch, lipbound
from torch import nn
from torch.nn.utils import parametrizations

def build():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(1536, 5),
    )

class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        return self.net(x)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 3, 3, padding=1)
        self.b = nn.Conv2d(3, 3, 3, padding=1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).relu())

def changed(change):
    model = build()
    change(model[0])
    return model

def constrained():
    return lipbound.constrain(build())

def weight_normed():
    return changed(parametrizations.weight_norm)

def spectral_normed():
    return changed(parametrizations.spectral_norm)

def old_weight_normed():
    return changed(nn.utils.weight_norm)

def old_spectral_normed():
    return changed(nn.utils.spectral_norm)

def other():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(3600, 5))

def wider():
    model = build()
    model[0] = nn.Conv2d(3, 4, 5, padding=2)
    return model

def nothing():
    return "no module"

def broken():
    raise RuntimeError("cannot build")
'''
EXECUTED = "executed"  # the file that code in a checkpoint would write


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint, and what its audit must give.

    Attributes:
        make: Writes it to a folder, and returns the name to audit.
        model: Factory for ``--model``; empty for none.
        said: Part of the line that is said.
        network: Makes the network whose audit must be the same; ``None`` if it must be refused.
        options: Other words of the command line.
    """

    make: Callable[[Path], str]
    model: str = "build"
    said: str = ""
    network: Callable[[], nn.Module] | None = None
    options: tuple[str, ...] = ("--input", "3,32,32")


def factories() -> Any:
    """Return the module with the architectures."""
    module = sys.modules.get("checkpoint_factories")
    if module is None:
        module = type(sys)("checkpoint_factories")
        exec(FACTORIES, module.__dict__)
        sys.modules["checkpoint_factories"] = module
    return module


@functools.cache
def network(name: str = "build") -> nn.Module:
    """Return a network in eval mode whose numbers are not those of any other call."""
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(factories(), name)()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 2)
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.3, 2)  # type: ignore[union-attr]
        with torch.no_grad():
            model.train()(torch.randn(4, *SHAPE))  # the vectors of spectral norms
    return model.eval()


def state(prefix: str = "", name: str = "build") -> dict[str, Tensor]:
    return {prefix + key: tensor.clone() for key, tensor in network(name).state_dict().items()}


def in_precision(dtype: torch.dtype) -> nn.Module:
    """Return the network with its weights rounded to a type, and back."""
    model = factories().build()
    model.load_state_dict({k: rounded(t, dtype).to(t.dtype) for k, t in state().items()})
    return model.eval()


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def pt(content: Callable[[], Any], name: str = "a.pt", **how: Any) -> Callable[[Path], str]:
    """Return a function that writes a file with ``torch.save``."""

    def make(folder: Path) -> str:
        with warnings.catch_warnings(action="ignore"):
            torch.save(content(), folder / name, **how)
        return name

    return make


def safe(content: Callable[[], dict[str, Tensor]], name: str = "a.safetensors") -> Any:
    """Return a function that writes a file of safetensors."""

    def make(folder: Path) -> str:
        from safetensors.torch import save_file

        save_file(content(), folder / name)
        return name

    return make


def raw(content: bytes, name: str = "a.pt") -> Callable[[Path], str]:
    """Return a function that writes bytes."""

    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return name

    return make


def changed(
    make: Callable[[Path], str], change: Callable[[bytes], bytes], name: str = ""
) -> Callable[[Path], str]:
    """Return a function that writes a file and changes its bytes, and perhaps its name."""

    def write(folder: Path) -> str:
        made = folder / make(folder)
        content = made.read_bytes()
        made.unlink()
        (folder / (name or made.name)).write_bytes(change(content))
        return name or made.name

    return write


def parts(end: str, lost: bool = False, named: int = 0) -> Callable[[Path], str]:
    """Return a function that writes a model in two files, and names their index or one of them."""

    def make(folder: Path) -> str:
        from safetensors.torch import save_file

        tensors, stem = state(), end.partition(".")[0]
        suffix = end.removeprefix(stem)
        places = {key: f"{stem}-0000{1 + i % 2}-of-00002{suffix}" for i, key in enumerate(tensors)}
        for place in sorted(set(places.values()))[: 1 if lost else 2]:
            part = {key: tensor for key, tensor in tensors.items() if places[key] == place}
            save: Callable[..., Any] = save_file if suffix == ".safetensors" else torch.save
            save(part, folder / place)
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        (folder / f"{end}.index.json").write_text(json.dumps(index))
        return f"{stem}-0000{named}-of-00002{suffix}" if named else f"{end}.index.json"

    return make


def changed_parts(change: Callable[[dict[str, str], dict[str, Any]], Any]) -> Any:
    """Return a function that writes a model in two files, which do not agree with their index."""

    def make(folder: Path) -> str:
        from safetensors.torch import load_file, save_file

        index = folder / parts("model.safetensors")(folder)
        content = json.loads(index.read_text())
        files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
        change(content["weight_map"], files)
        for name, tensors in files.items():
            save_file(tensors, folder / name)
        index.write_text(json.dumps(content))
        return index.name

    return make


PART = "model-0000{}-of-0000{}.safetensors"  # 0.weight is in the first of two


def twice(places: dict[str, str], files: dict[str, Any]) -> None:
    files[PART.format(2, 2)]["0.weight"] = files[PART.format(1, 2)]["0.weight"] * 100


def elsewhere(places: dict[str, str], files: dict[str, Any]) -> None:
    places["0.weight"] = PART.format(2, 2)


def unlisted(places: dict[str, str], files: dict[str, Any]) -> None:
    del places["0.weight"]


def third_part(places: dict[str, str], files: dict[str, Any]) -> None:
    files[PART.format(3, 3)] = {"9.weight": torch.ones(3, 3, 3, 3)}


def program(kind: str, name: str) -> Callable[[Path], str]:
    """Return a function that writes a TorchScript or an exported program."""

    def make(folder: Path) -> str:
        example = torch.zeros(1, *SHAPE)
        with warnings.catch_warnings(action="ignore"):
            if kind == "export":
                torch.export.save(torch.export.export(network(), (example,)), folder / "a.pt2")
                (folder / "a.pt2").rename(folder / name)
            elif kind == "trace":
                torch.jit.trace(network(), example).save(folder / name)
            else:
                torch.jit.script(network()).save(folder / name)
        return name

    return make


class Code:
    """Its pickle calls a function that would write a file."""

    def __init__(self, function: Any = os.system, *words: str) -> None:
        self.call = function, words or (f"touch {EXECUTED}",)

    def __reduce__(self) -> Any:
        return self.call


class AttributeDict(dict[str, Any]):
    """As Lightning keeps hyperparameters."""


AttributeDict.__module__ = "lightning.fabric.utilities.data"


class Odd(Tensor):
    """A tensor of a class that is not PyTorch's."""


def lightning() -> dict[str, Any]:
    import types

    for name in ("lightning", "lightning.fabric", "lightning.fabric.utilities",
                 AttributeDict.__module__):  # fmt: skip
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.AttributeDict = AttributeDict  # type: ignore[attr-defined]
    return {
        "epoch": 3, "global_step": 100, "pytorch-lightning_version": "2.5.0",
        "state_dict": state("model."), "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5),
                                          "dirpath": pathlib.PurePosixPath("/x")}},
        "optimizer_states": [optimizer()], "lr_schedulers": [], "hparams_name": "hparams",
        "hyper_parameters": AttributeDict(lr=0.1, out=argparse.Namespace(width=4)),
    }  # fmt: skip


def optimizer() -> dict[str, Any]:
    model = factories().build()
    adam = torch.optim.Adam(model.parameters())
    model(torch.randn(4, *SHAPE)).sum().backward()
    adam.step()
    return adam.state_dict()


def scripted_args() -> dict[str, Any]:
    return {"model": state(), "args": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("."))}


def with_numbers() -> dict[str, Any]:
    counts: Any = collections.defaultdict(int, a=1)
    return {"state_dict": state(), "best": np.float64(0.9), "seen": np.zeros(3), "counts": counts}


def with_an_odd_tensor() -> dict[str, Any]:
    tensors: dict[str, Any] = state()
    tensors["3.weight"] = np.asarray(tensors["3.weight"])
    return {"state_dict": tensors, "epoch": 1}


def quantized() -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):
        found = torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, torch.qint8)
        return dict(found.state_dict())


def integers(quantize: bool) -> dict[str, Tensor]:
    tensors = state()
    weight = tensors["0.weight"]
    tensors["0.weight"] = (
        torch.quantize_per_tensor(weight, 0.01, 0, torch.qint8)
        if quantize
        else (weight * 100).to(torch.int8)
    )
    return tensors


def pruned() -> dict[str, Tensor]:
    from torch.nn.utils import prune

    model = factories().build()
    model.load_state_dict(state())
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model.state_dict()


class Kernel(nn.Module):
    """A layer whose weight has another name than PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(2, 3, 3, 3))


def named_kernel(norm: Callable[..., nn.Module]) -> dict[str, Tensor]:
    return dict(norm(Kernel(), "kernel").state_dict())


def untied() -> dict[str, Tensor]:
    tensors = state(name="Tied")
    return tensors | {"b.weight": tensors["b.weight"] * 100}


def endless() -> dict[str, Any]:
    content: dict[str, Any] = {"epoch": 1, "net": {"0.bias": torch.ones(4)}}
    content["model"] = content
    return content


def tied() -> dict[str, Tensor]:
    return {k: t for k, t in state(name="Tied").items() if k != "b.weight"}


def tar(folder: Path) -> str:
    torch.save(state(), folder / "a.pt")
    with tarfile.open(folder / "a.tar", "w") as archive:
        archive.add(folder / "a.pt", "a.pt")
    return "a.tar"


def zipped(folder: Path) -> str:
    (folder / "inside").mkdir()
    torch.save(state(), folder / "inside/a.pt")
    shutil.make_archive(str(folder / "a"), "zip", folder / "inside")
    (folder / "a.zip").rename(folder / "b.pt")
    return "b.pt"


def numpy_archive(folder: Path) -> str:
    arrays: dict[str, Any] = {k: t.numpy() for k, t in state().items()}
    np.savez(folder / "a.npz", **arrays)
    return "a.npz"


def a_folder(folder: Path) -> str:
    (folder / "saved").mkdir()
    torch.save(state(), folder / "saved/pytorch_model.bin")
    return "saved"


WRAPPERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "bare": lambda s: s,
    "state_dict": lambda s: {"epoch": 3, "state_dict": s, "best_acc": 0.9},
    "model": lambda s: {"model": s, "optimizer": {"state": {}, "param_groups": []}},
    "model_state_dict": lambda s: {"model_state_dict": s, "loss": torch.tensor(0.1)},
    "net": lambda s: {"net": s, "acc": 93.1, "epoch": 199},
    "OrderedDict": lambda s: collections.OrderedDict(s),
    "ema_state_dict": lambda s: {"ema_state_dict": s, "decay": 0.999},
    "params": lambda s: {"params": s},
    "unknown key": lambda s: {"my_network": s, "step": 4},
    "two deep": lambda s: {"checkpoint": 1, "model": {"state_dict": s}},
    "parameters": lambda s: {k: nn.Parameter(t, False) for k, t in s.items()},
}
"""Name → what programs save around the weights."""
PREFIXES = ("", "module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder.", "network.",
            "module._orig_mod.", "_orig_mod.module.", "model.module.", "module.model.backbone.",
            "_fsdp_wrapped_module.", "student.backbone.", "_forward_module.")  # fmt: skip
NAMES = ("a.pt", "a.pth", "a.th", "pytorch_model.bin", "last.ckpt", "checkpoint.pth.tar", "a.pkl")


def systematic() -> Iterator[tuple[str, Kind]]:
    """Every file name with every wrapper, and every prefix; every wrapper with every prefix."""

    def kind(file: str, wrapper: str, prefix: str, **how: Any) -> tuple[str, Kind]:
        def content() -> Any:
            return WRAPPERS[wrapper](state(prefix))

        make = safe(content, file) if file.endswith(".safetensors") else pt(content, file, **how)
        said = "from the names of the weights" if prefix else ""
        label = f"{file}{', before PyTorch 1.6' if how else ''}, {wrapper}, {prefix or 'no prefix'}"
        return label, Kind(make, said=said, network=network)

    for name in NAMES:
        for wrapper in WRAPPERS:
            yield kind(name, wrapper, "")
        for prefix in PREFIXES:
            yield kind(name, "bare", prefix)
    for wrapper in WRAPPERS:
        for prefix in PREFIXES:
            yield kind("a.pt", wrapper, prefix)
    for prefix in PREFIXES:
        yield kind("a.safetensors", "bare", prefix)
        yield kind("a.pth", "state_dict", prefix, _use_new_zipfile_serialization=False)


def special() -> dict[str, Kind]:
    """The kinds that are not combinations."""
    pages = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    evaluate = "builtins.eval" and eval
    write = f"open({EXECUTED!r}, 'w').close()"
    alone: dict[str, Any] = {"model": "", "network": network, "options": ()}
    return {
        # read
        "safetensors in two files with an index": Kind(
            parts("model.safetensors"), network=network
        ),
        ".bin in two files with an index": Kind(parts("pytorch_model.bin"), network=network),
        "safetensors named .bin": Kind(safe(state, "pytorch_model.bin"), network=network),
        "torch.save named .safetensors": Kind(pt(state, "a.safetensors"), network=network),
        "Lightning, with hyperparameters": Kind(
            pt(lightning, "last.ckpt"), said="removed 'model.'", network=network
        ),
        "argparse.Namespace beside the weights": Kind(
            pt(scripted_args), said="ignored objects beside the weights", network=network
        ),
        "NumPy numbers beside the weights": Kind(
            pt(with_numbers), said="none of their code was run", network=network
        ),
        "code beside the weights": Kind(
            pt(lambda: {"state_dict": state(), "x": Code(evaluate, write)}),
            said="none of their code was run", network=network,
        ),
        "averaged weights (AveragedModel)": Kind(
            pt(lambda: torch.optim.swa_utils.AveragedModel(network()).state_dict()),
            said="removed 'module.'", network=network,
        ),
        "a copy of averaged weights under 'ema'": Kind(
            pt(lambda: {"model": state(), "ema": in_precision(torch.half).state_dict()}),
            said="took the weights under 'model', not under 'ema'", network=network,
        ),
        "state_dict and state_dict_ema": Kind(
            pt(lambda: {"state_dict": state(), "state_dict_ema": state()}),
            said="took the weights under 'state_dict', not under 'state_dict_ema'",
            network=network,
        ),
        "other networks with other prefixes": Kind(
            pt(lambda: {"G": state(), "D": {"0.weight": torch.ones(2, 2, 3, 3)}}),
            said="removed 'G.' from the names of the weights, and left out 1", network=network,
        ),
        "the weights of a loss beside them": Kind(
            pt(lambda: state("model.") | {"loss.weight": torch.ones(3)}, "last.ckpt"),
            said="left out 1 other tensors such as 'loss.weight'", network=network,
        ),
        "names without the prefix of the model": Kind(
            pt(state), "Inside", "added 'net.' to the names",
            lambda: renamed_inside(),
        ),
        "no counters of BatchNorm": Kind(
            safe(lambda: {k: t for k, t in state().items() if "num_batches" not in k}),
            network=network,
        ),
        "float16": Kind(
            safe(lambda: {k: rounded(t, torch.half) for k, t in state().items()}),
            network=lambda: in_precision(torch.half),
        ),
        "bfloat16": Kind(
            pt(lambda: {k: rounded(t, torch.bfloat16) for k, t in state().items()}),
            network=lambda: in_precision(torch.bfloat16),
        ),
        "float64 that is rounded": Kind(
            pt(lambda: {k: t.double() * (1 + 1e-9) if t.is_floating_point() else t
                        for k, t in state().items()}),
            said="rounded '0.weight'", network=network,
        ),
        "tied weights, saved once": Kind(safe(tied), "Tied", "", lambda: network("Tied")),
        "views, not contiguous": Kind(
            pt(lambda: {k: t.expand(2, *t.shape)[1] for k, t in state().items()}), network=network
        ),
        "channels_last": Kind(
            pt(lambda: {k: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t
                        for k, t in state().items()}),
            network=network,
        ),
        "parametrized by constrain, with its factory": parametrized("constrained"),
        "parametrized by weight_norm, with its factory": parametrized("weight_normed"),
        "parametrized by spectral_norm, with its factory": parametrized("spectral_normed"),
        "the older weight_norm, with its factory": parametrized("old_weight_normed"),
        "the older spectral_norm, with its factory": parametrized("old_spectral_normed"),
        "half of an .onnx program": onnx_kind(),
        # read without an architecture
        "no --model, .pt": Kind(pt(state), **alone),
        "no --model, safetensors with a prefix": Kind(safe(lambda: state("module.")), **alone),
        "no --model, in two files": Kind(parts("model.safetensors"), **alone),
        "no --model, two networks": Kind(
            pt(lambda: {"G": {"0.weight": state()["0.weight"]},
                        "D": {"3.weight": state()["3.weight"]}}),
            said="joined the weights under 'G', 'D'", **alone,
        ),
        "no --model, one tensor": Kind(
            pt(lambda: state()["0.weight"]), "", "", lambda: nn.Sequential(network()[0]), ()  # type: ignore[index]
        ),
        "no --model, optimizer beside the weights": Kind(
            pt(lambda: {"model": state(), "optimizer": optimizer()}), **alone
        ),
        "no --model, a list of tensors beside the weights": Kind(
            pt(lambda: state() | {"more": [torch.ones(4, 3, 3, 3)]}),
            said="left out 1 other tensors such as 'more.0'", **alone,
        ),
        "no --model, tensors two mappings deeper": Kind(
            pt(lambda: state() | {"a": {"b": {"weight": torch.ones(4, 3, 3, 3)}}}),
            said="left out 1 other tensors such as 'a.b.weight'", **alone,
        ),
        "no --model, vectors beside 'model'": Kind(
            pt(lambda: {"model": state(), "rng_state": torch.get_rng_state()}),
            said="left out 1 other tensors such as 'rng_state'", **alone,
        ),
        "no --model, moments by name beside them": Kind(
            pt(lambda: state() | {"0.weight.exp_avg": torch.ones(4, 3, 3, 3)}), **alone
        ),
        "no --model, position embeddings beside them": Kind(
            pt(lambda: state() | {"pos_embed": torch.ones(1, 50, 16)}), **alone
        ),
        # refused
        "TorchScript, scripted": Kind(program("script", "a.pt"), said="torch.jit.load(FILE)"),
        "TorchScript, traced, .pth": Kind(program("trace", "a.pth"), said="torch.jit.load(FILE)"),
        ".pt2, an exported program": Kind(program("export", "a.pt2"), said="torch.export.load"),
        "an exported program named .pt": Kind(program("export", "a.pt"), said="torch.export.load"),
        "a pickled module": Kind(
            pt(lambda: nn.Conv2d(3, 4, 3)), said="Save model.state_dict()"
        ),
        "a pickled module under 'model'": Kind(
            pt(lambda: {"model": nn.Conv2d(3, 4, 3)}), said="Save model.state_dict()"
        ),
        "code in place of the weights": Kind(
            pt(lambda: Code(evaluate, write)), said="Save model.state_dict()"
        ),
        "code in place of one weight": Kind(
            pt(lambda: state() | {"0.weight": Code(evaluate, write)}),
            said="Save model.state_dict()",
        ),
        "code that calls the shell": Kind(
            pt(lambda: {"state_dict": state(), "x": Code()}), said="none of its code was run"
        ),
        "code in a pickle, not of PyTorch": Kind(
            raw(pickle.dumps(Code(evaluate, write)), "a.pkl"), said="write model.state_dict()"
        ),
        "a NumPy array in place of one weight": Kind(
            pt(with_an_odd_tensor), said="Save model.state_dict()"
        ),
        "NumPy arrays, pickled": Kind(
            raw(pickle.dumps({k: t.numpy() for k, t in state().items()}), "a.pkl"),
            said="write model.state_dict()",
        ),
        "NumPy arrays, .npz": Kind(numpy_archive, said="torch.from_numpy"),
        "Keras, .h5": Kind(raw(b"\x89HDF\r\n\x1a\n" + bytes(99), "a.h5"), said="supported formats"),
        "HDF5 named .bin": Kind(raw(b"\x89HDF\r\n\x1a\n" + bytes(99), "a.bin"), said="is an HDF5"),
        "TensorFlow Lite": Kind(raw(b"\x1c\0\0\0TFL3" + bytes(99), "a.tflite"), said="supported"),
        "a part of a distributed checkpoint": Kind(
            raw(bytes(99), "__0_0.distcp"), said="dcp_to_torch"
        ),
        "a text file": Kind(raw(b"conv1 0.1 0.2\n" * 9), said="is a text file (conv1"),
        "JSON": Kind(raw(b'{"error": "Not Found"}', "a.safetensors"), said="is a text file"),
        "an empty file": Kind(raw(b""), said="download or copy it again"),
        "a web page": Kind(raw(pages), said="is a web page"),
        "a web page named .safetensors": Kind(raw(pages, "a.safetensors"), said="is a web page"),
        "a Git LFS pointer": Kind(raw(pointer, "a.safetensors"), said="git lfs pull"),
        "compressed by gzip": Kind(changed(pt(state), gzip.compress), said="gunzip"),
        "a tar archive of a checkpoint": Kind(tar, said="unpack it"),
        "a zip archive of a checkpoint": Kind(zipped, said="unpack it"),
        "the first half of a .pt": Kind(
            changed(pt(state), lambda c: c[: len(c) // 2]), said="ownload or copy it again"
        ),
        "the first half of safetensors": Kind(
            changed(safe(state), lambda c: c[: len(c) // 2]), said="ownload or copy it again"
        ),
        "the first half of a file before PyTorch 1.6": Kind(
            changed(pt(state, _use_new_zipfile_serialization=False), lambda c: c[: len(c) // 2]),
            said="ownload or copy it again",
        ),
        "zeros": Kind(raw(bytes(4096)), said="ownload or copy it again"),
        "a file that is missing": Kind(lambda folder: "b.pt", said="there is no file 'b.pt'"),
        "a folder": Kind(a_folder, said="name a weights file in it: pytorch_model.bin"),
        "one part of two": Kind(parts("model.safetensors", named=2), said="name the index"),
        "a part is missing": Kind(parts("model.safetensors", lost=True), said="there is no file"),
        "a tensor in two parts": Kind(
            changed_parts(twice), said="puts it in 'model-00001-of-00002.safetensors'"
        ),
        "a tensor in another part": Kind(
            changed_parts(elsewhere), said="puts it in 'model-00002-of-00002.safetensors'"
        ),
        "a tensor that the index does not list": Kind(
            changed_parts(unlisted), "", "holds '0.weight', and 'model.safetensors.index.json' "
            "does not list it", options=(),
        ),
        "a part that the index does not name": Kind(
            changed_parts(third_part), said="which does not name it"
        ),
        "only an optimizer": Kind(pt(optimizer), said="it has only 'state', 'param_groups'"),
        "only an optimizer, no --model": Kind(pt(optimizer), "", "holds no weights", options=()),
        "only numbers": Kind(pt(lambda: {"epoch": 3, "acc": 0.9}), said="it has only 'epoch'"),
        "nothing": Kind(pt(dict), said="it has no entries"),
        "quantized by PyTorch": Kind(pt(quantized), said="give the architecture"),
        "a quantized tensor": Kind(pt(lambda: integers(True)), said="of the floating-point model"),
        "8-bit integers": Kind(pt(lambda: integers(False)), said="of the floating-point model"),
        "complex numbers": Kind(
            pt(lambda: {k: t + 0j if t.is_floating_point() else t for k, t in state().items()}),
            said="of the floating-point model",
        ),
        "NaN": Kind(
            pt(lambda: {k: t * torch.nan if k == "0.weight" else t for k, t in state().items()}),
            said="finite",
        ),
        "NaN, no --model": Kind(
            pt(lambda: {"0.weight": torch.full((4, 3, 3, 3), torch.nan)}), "", "finite", options=()
        ),
        "Flax, no --model": Kind(
            safe(lambda: {"conv.kernel": torch.ones(3, 3, 3, 4)}), "", "as in Flax", options=()
        ),
        "parametrized by constrain, no --model": refused("constrained", ""),
        "parametrized by constrain, plain factory": refused("constrained", "build"),
        "parametrized by weight_norm, no --model": refused("weight_normed", ""),
        "parametrized by weight_norm, plain factory": refused("weight_normed", "build"),
        "parametrized by spectral_norm, no --model": refused("spectral_normed", ""),
        "the older weight_norm, no --model": refused("old_weight_normed", ""),
        "the older weight_norm, plain factory": refused("old_weight_normed", "build"),
        "the older spectral_norm, no --model": refused("old_spectral_normed", ""),
        "pruned, no --model": Kind(pt(pruned), "", "give the architecture", options=()),
        "pruned, plain factory": Kind(pt(pruned), said="or prune"),
        "a spectral norm not of PyTorch, no --model": Kind(
            pt(lambda: {"0.weight_bar": state()["0.weight"]}), "", "give the architecture",
            options=(),
        ),
        "the older weight_norm of a kernel, no --model": Kind(
            pt(lambda: named_kernel(nn.utils.weight_norm)), "", "holds 'kernel_g'", options=()
        ),
        "the older spectral_norm of a kernel, no --model": Kind(
            pt(lambda: named_kernel(nn.utils.spectral_norm)), "", "holds 'kernel_orig'", options=()
        ),
        "a tensor beside 'model'": Kind(
            pt(lambda: {"model": state(), "0.weight": state()["0.weight"] * 100}),
            said="holds the tensor '0.weight' beside others under 'model'",
        ),
        "a tensor beside a mapping, no --model": Kind(
            pt(lambda: {"backbone": state(), "fc.weight": torch.ones(2, 2, 1, 1)}), "",
            "holds the tensor 'fc.weight' beside others under 'backbone'", options=(),
        ),
        "a mapping inside 'state_dict', no --model": Kind(
            pt(lambda: {"state_dict": state() | {"net": {"c.weight": torch.ones(2, 2, 1, 1)}}}),
            "", "beside others under 'net'", options=(),
        ),
        "two keys of the same name": Kind(
            pt(lambda: {0: torch.ones(2, 2, 1, 1), "0": torch.zeros(2, 2, 1, 1)}), "",
            "two tensors of the name '0'", options=(),
        ),
        "two paths of the same name": Kind(
            pt(lambda: {"a": {"b.c": torch.ones(2, 2)}, "a.b": {"c": torch.ones(2, 2)}}), "",
            "two tensors of the name 'a.b.c'", options=(),
        ),
        "a mapping inside itself": Kind(pt(endless), said="too many mappings"),
        "tied weights that differ": Kind(pt(untied), "Tied", "have different values in the file"),
        "a number under the name of a weight": Kind(
            pt(lambda: state() | {"0.weight.n_averaged": torch.tensor(9.0)}),
            said="the file has '0.weight.n_averaged' instead",
        ),
        "shapes without numbers": Kind(
            pt(lambda: {k: t.to("meta") for k, t in state().items()}), said="no numbers in the file"
        ),
        "shapes without numbers, no --model": Kind(
            pt(lambda: {k: t.to("meta") for k, t in state().items()}), "", "has no values",
            options=(),
        ),
        "sparse tensors": Kind(
            pt(lambda: {k: t.to_sparse() for k, t in state().items()}), said="dense tensor"
        ),
        "nested tensors": Kind(
            pt(lambda: state() | {"0.weight": torch.nested.nested_tensor([torch.ones(2)])}),
            said="is nested in the file",
        ),
        "plain weights, constrained factory": Kind(pt(state), "constrained", "the model needs"),
        "another model": Kind(pt(state), "other", "the file has"),
        "another shape": Kind(pt(state), "wider", "has the shape (4, 3, 5, 5) in the model and (4"),
        "a part of the weights": Kind(
            pt(lambda: {"0.weight": state()["0.weight"]}), said="the model needs '0.bias'"
        ),
        "two networks that fit": Kind(
            pt(lambda: state("G.") | state("D.")), said="several networks that fit"
        ),
        "two networks that fit, under two keys": Kind(
            pt(lambda: {"G": state(), "D": state()}), said="several networks that fit"
        ),
        "a factory that returns no module": Kind(pt(state), "nothing", "not an nn.Module"),
        "a factory that fails": Kind(pt(state), "broken", "RuntimeError: cannot build"),
        "a factory that is missing": Kind(pt(state), "absent", "has no attribute 'absent'"),
        "an input of another shape": Kind(
            pt(state), said="give the shape of one input", options=("--input", "3,9,9")
        ),
        "an input with a batch axis": Kind(
            pt(state), said="without the batch axis", options=("--input", "1,3,32,32")
        ),
    }  # fmt: skip


def renamed_inside() -> nn.Module:
    model = factories().Inside()
    model.net.load_state_dict(state())
    return model.eval()


def parametrized(name: str) -> Kind:
    """Weights of a parametrized network, with the factory that parametrizes it."""
    return Kind(pt(lambda: state(name=name)), name, "", lambda: network(name))


def refused(name: str, model: str) -> Kind:
    """Weights of a parametrized network, without that factory."""
    said = "apply the same ones in the factory" if model else "give the architecture with --model"
    return Kind(pt(lambda: state(name=name)), model, said)


def onnx_kind() -> Kind:
    """A damaged ONNX program, which is refused with or without the extra."""
    extra = importlib.util.find_spec("onnx2torch") is not None
    said = "download or copy it again" if extra else "pip install 'lipbound[onnx]'"
    return Kind(raw(b"\x08\x07\xff", "a.onnx"), "", said, options=())


KINDS: dict[str, Kind] = {**dict(systematic()), **special()}


@functools.cache
def expected(make: Callable[[], nn.Module], alone: bool) -> list[Any]:
    """Return the numbers of the audit of a network in memory."""
    from lipbound import audit, bracket

    model = make()
    if not alone:
        return numbers(json.loads(json.dumps(audit(model, SHAPE).to_dict())))
    kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    found = [bracket(kernel.detach()) for kernel in kernels]
    return [(one.lower, one.upper) for one in found]


def numbers(audit: Any) -> list[Any]:
    """List all numbers in a JSON object, in order."""
    if isinstance(audit, dict):
        return [n for key in sorted(audit) for n in numbers(audit[key])]
    if isinstance(audit, list):
        return [n for one in audit for n in numbers(one)]
    return [audit] if isinstance(audit, int | float) or audit is None else []


def outcome(kind: Kind, folder: Path) -> tuple[str, str]:
    """Return ``right``, ``refused`` or what is wrong, and the lines that were said."""
    (folder / "checkpoint_factories_.py").write_text(FACTORIES)
    before = Path.cwd()
    os.chdir(folder)
    try:
        name = kind.make(folder)
        model = ["--model", f"checkpoint_factories_.py:{kind.model}"] if kind.model else []
        given = kind.options if kind.model else ()
        with warnings.catch_warnings(action="ignore"):
            code, out, said = run(["audit", name, *model, *given, "--json"])
        if (folder / EXECUTED).exists():
            return "code was executed", said
    except Exception as error:
        return "traceback", repr(error)
    finally:
        os.chdir(before)
    lines = [line for line in said.splitlines() if line.startswith("lipbound: ")]
    if kind.said not in said:
        return f"does not say {kind.said!r} (exit code {code})", said
    if kind.network is None:
        fine = code == 2 and len(lines) == len(said.splitlines())
        return ("refused" if fine else f"exit code {code}"), lines[-1] if lines else said
    if code:
        return f"exit code {code}", said
    found = json.loads(out)
    del found["lipbound"]
    alone = not kind.model
    mine = [(r["lower"], r["upper"]) for r in found["layers"]] if alone else numbers(found)
    if mine != expected(kind.network, alone):
        return "other numbers than in memory", said
    return "right", said


def audited(name: str) -> dict[str, Any]:
    """Audit a checkpoint of one kind."""
    with tempfile.TemporaryDirectory() as folder:
        found, said = outcome(KINDS[name], Path(folder))
    wanted = "right" if KINDS[name].network else "refused"
    return {"outcome": found, "said": said.strip(), "as_expected": found == wanted}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; repeatable")


def hunt(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found = {name: audited(name) for name in chosen.kind or KINDS}
    wrong = [f"{n}: {o['outcome']}: {o['said']}" for n, o in found.items() if not o["as_expected"]]
    combined = [name for name, _ in systematic() if name in found]
    counts = collections.Counter(one["outcome"] for one in found.values())
    print(f"{len(found)} kinds: {dict(counts)}")
    return {
        "count": len(found),
        "outcomes": dict(counts),
        "combinations": {
            "count": len(combined),
            "right": sum(found[name]["outcome"] == "right" for name in combined),
            "files": list(NAMES),
            "wrappers": list(WRAPPERS),
            "prefixes": list(PREFIXES),
        },
        "kinds": {name: one for name, one in found.items() if name not in combined},
        "wrong": wrong,
    }, wrong
