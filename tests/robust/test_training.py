"""Training: it learns, stops and goes on exactly, alone or in company, and leaves nothing torn."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import SMALL, TINY_SHIFT, blobs, chosen, equal, torchrun

from lipbound import bound
from lipbound.constraints.layers import Centre
from lipbound.files import read
from lipbound.robust.attacks.evaluate import outcomes
from lipbound.robust.data.sets import digits
from lipbound.robust.models import MODELS
from lipbound.robust.training import batches, checkpoints
from lipbound.robust.training import run as run_module
from lipbound.robust.training.batches import START
from lipbound.robust.training.distributed import Team
from lipbound.robust.training.loop import _signals, train
from lipbound.robust.training.run import Run
from lipbound.robust.training.settings import PAPER_ARMS, as_dict, settings
from lipbound.robust.training.trained import load_model
from lipbound.robust.training.weight_perturbation import moved, uphill

SAID = "Stopping after this step. Press Ctrl-C again to stop immediately."
EXACT = {
    **{arm: {"arm": arm} for arm in PAPER_ARMS},
    "trades": {"arm": "trades"},
    "certified": {"arm": "certified", "model": "tiny", "randaugment": 0.5, "colour": 0.1},
    "certified, ema": {"arm": "certified", "model": "tiny", "ema": 0.9, "momentum": 0.8},
    "ema, dropout": {"model": "wrn-10-1", "ema": 0.9, "dropout": 0.3, "arm": "at"},
    "awp": {"model": "wrn-10-1", "awp": 0.01, "arm": "at+spectral"},
    "folded, floor": {"batchnorm": "folded", "floor": 1.0, "attack_mode": "train"},
}


LATER = {"at", "lipreg"}  # parts of other arms


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LATER else []) for n in EXACT]
)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, monkeypatch, name):
    monkeypatch.setitem(MODELS, "tiny", TINY_SHIFT)
    wanted = chosen(**EXACT[name])
    data = blobs(channels=3)
    whole = train(wanted, data, tmp_path / "whole", device="cpu")
    part = train(wanted, data, tmp_path / "part", device="cpu", time_limit=0)
    assert part["stopped"] == "time limit"
    run = Run(wanted, data, Team(torch.device("cpu")))
    for _ in range(run.feed.per_epoch + 2):  # into the second epoch
        run.advance()
    folder = checkpoints.Folder(tmp_path / "part" / "checkpoints")
    folder.save(run.step, *run.state())
    again = train(wanted, data, tmp_path / "part", device="cpu", resume=True)
    for file in ("final", f"checkpoints/step-{whole['steps']:08}"):
        assert equal(*(tmp_path / d / f"{file}.safetensors" for d in ("whole", "part")))
    assert again["final"] == whole["final"]
    assert train(wanted, data, tmp_path / "part", resume=True) == again, "a finished run is told"


def test_penalty_state_goes_on_too():
    data = blobs(channels=3)
    for arm in ("at+pm", "at+spectral"):
        run = Run(chosen(arm), data, Team(torch.device("cpu")))
        run.advance()
        state = run.penalty.state_dict()
        assert state
        other = Run(chosen(arm), data, Team(torch.device("cpu")))
        other.load(run.state()[0], {**run.state()[1], "step": 1})
        with torch.no_grad():
            assert other.penalty() == run.penalty()


WORKER = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers import blobs, chosen
from lipbound.robust.training.loop import train
train(chosen({arm!r}, **{changes!r}), blobs(channels=3), Path({out!r}), resume=True, device="cpu",
      save_every={save})
"""


def worker(tmp_path, out: Path, arm: str = "at+lipreg", save: int = 2, **changes) -> Path:
    path = tmp_path / f"{out.name}.py"
    tests = str(Path(__file__).parents[1])
    path.write_text(WORKER.format(tests=tests, arm=arm, out=str(out), save=save, changes=changes))
    return path


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    script = worker(tmp_path, tmp_path / "killed", epochs=5)
    process = subprocess.Popen([sys.executable, str(script)])
    saved = tmp_path / "killed" / "checkpoints"
    while len(list(saved.glob("step-*"))) < 2:  # it has begun to write
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    subprocess.run([sys.executable, str(script)], check=True)
    whole = worker(tmp_path, tmp_path / "whole", epochs=5)
    subprocess.run([sys.executable, str(whole)], check=True)
    assert equal(*(tmp_path / d / "final.safetensors" for d in ("killed", "whole")))
    drop = ("seconds", "step_ms", "waited")
    one, other = (
        [
            {k: v for k, v in r.items() if k not in drop}
            for r in read(tmp_path / d / "records.jsonl")
        ]
        for d in ("killed", "whole")
    )
    assert one == other
    assert len(one) == 5


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    options = {"model": "cnn-plain", "lr": 0.05, "awp": 0.05, "precision": "float64"}
    for count, name in ((1, "one"), (2, "two")):
        script = worker(tmp_path, tmp_path / name, save=0, **options)
        run = [sys.executable, str(script)] if count == 1 else torchrun(script, count)
        subprocess.run(run, check=True, capture_output=True, timeout=120)
    one, two = (read(tmp_path / d / "records.jsonl") for d in ("one", "two"))
    for mine, yours in zip(one, two, strict=True):
        for key in ("loss", "penalty", "log10_product", "train_accuracy"):
            assert mine[key] == pytest.approx(yours[key], rel=1e-6)
    mine, yours = (checkpoints.load(tmp_path / d / "final.safetensors")[0] for d in ("one", "two"))
    for name in mine:
        torch.testing.assert_close(mine[name], yours[name], rtol=1e-6, atol=1e-9)


APART = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers import blobs, chosen
from lipbound.robust.training.loop import train
rank = int(os.environ["RANK"])
changes = {changes!r} | ({other!r} if rank else {{}})
data = blobs(channels=3, seed=changes.pop("images", 0))
out = Path({out!r}) / str(rank)
try:
    train(chosen("at+lipreg", **changes), data, out, resume={resume}, device="cpu",
          save_every=2, time_limit={limit})
except ValueError as error:
    out.mkdir(parents=True, exist_ok=True)
    (out / "said").write_text(str(error))
    sys.exit(2)
"""


def apart(tmp_path, name: str, *, resume=True, limit=None, other=(), **changes) -> Path:
    """A script that trains in a folder of its own in every process."""
    path = tmp_path / f"{name}-{resume}-{limit}.py"
    path.write_text(APART.format(
        tests=str(Path(__file__).parents[1]), out=str(tmp_path / name), resume=resume,
        limit=limit, other=dict(other), changes=changes,
    ))  # fmt: skip
    return path


def with_one_killed(command: list[str], saved: Path) -> subprocess.Popen:
    """Start torchrun, and kill a process of it after the second checkpoint."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(list(saved.glob("step-*"))) < 2:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_without_a_shared_folder(tmp_path, count):
    """Stopped and resumed, they train the same network as one process."""
    options = {"model": "cnn-plain", "lr": 0.05, "precision": "float64"}
    alone = worker(tmp_path, tmp_path / "alone", **options)
    subprocess.run([sys.executable, str(alone)], check=True)
    for limit in (0, None):
        script = apart(tmp_path, "apart", limit=limit, **options)
        subprocess.run(torchrun(script, count), check=True, capture_output=True, timeout=240)
    assert [path.name for path in (tmp_path / "apart").iterdir()] == ["0"]
    mine, yours = (
        checkpoints.load(tmp_path / d / "final.safetensors")[0] for d in ("alone", "apart/0")
    )
    for name in mine:
        torch.testing.assert_close(mine[name], yours[name], rtol=1e-6, atol=1e-9)
    one, other = (read(tmp_path / d / "records.jsonl") for d in ("alone", "apart/0"))
    assert [r["step"] for r in one] == [r["step"] for r in other]


@pytest.mark.slow
def test_two_machines_with_a_folder_each(tmp_path):
    """The commands of the guide, as two launchers; only the first writes, and reports."""
    port = str(20000 + os.getpid() % 20000)
    launchers = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", rank,
            "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1", "-m",
            "lipbound", "train", "--out", "runs/b", "--arm", "lipreg", "--epochs", "1",
        ]  # fmt: skip
        launchers.append(subprocess.Popen(
            command, cwd=tmp_path / rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ))  # fmt: skip
    said = [launcher.communicate(timeout=240) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert (tmp_path / "0" / "runs" / "b" / "summary.json").exists()
    assert not list((tmp_path / "1").iterdir())
    assert "lipreg" in said[0][0]
    assert not said[1][0]
    assert "lipbound:" not in said[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"lr": 0.2}, "process 1 does not fit process 0: its lr is 0.2, not 0.05"),
        ({"images": 1}, "process 1 does not fit process 0: its data is "),
    ],
)
def test_a_process_that_does_not_fit_is_refused(tmp_path, other, said):
    script = apart(tmp_path, "apart", other=other, lr=0.05)
    assert subprocess.run(torchrun(script, 2), capture_output=True, timeout=120).returncode
    assert (tmp_path / "apart" / "1" / "said").read_text().startswith(said)
    assert "process 0" in (tmp_path / "apart" / "0" / "said").read_text()


@pytest.mark.slow
def test_the_refusal_of_the_first_process_ends_the_others(tmp_path):
    script = apart(tmp_path, "apart", resume=False, limit=0)
    subprocess.run(torchrun(script, 2), check=True, capture_output=True, timeout=120)
    assert subprocess.run(torchrun(script, 2), capture_output=True, timeout=120).returncode
    for rank in "01":
        assert "already holds a run" in (tmp_path / "apart" / rank / "said").read_text()


@pytest.mark.slow
def test_a_killed_process_is_started_again_by_torchrun(tmp_path):
    """``--max-restarts`` needs no ``--resume``, and loses nothing."""
    script = apart(tmp_path, "apart", resume=False, epochs=20)
    elastic = ["--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, str(script)]
    process = with_one_killed(command, tmp_path / "apart" / "0" / "checkpoints")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    whole = worker(tmp_path, tmp_path / "whole", epochs=20)
    subprocess.run(torchrun(whole, 2), check=True, capture_output=True, timeout=240)
    assert equal(*(tmp_path / d / "final.safetensors" for d in ("apart/0", "whole")))


TOGETHER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from helpers import blobs, chosen
from lipbound.robust.training.distributed import team
from lipbound.robust.training.run import Run
from torch import distributed as dist
with team("cpu") as who:
    wanted = chosen("at+lipreg", ema=0.5, awp=0.05, batchnorm={batchnorm!r})
    run = Run(wanted, blobs(channels=3), who)
    for step in range(6):
        run.advance()
        if step == 2:
            tensors, about = run.state()
            tensors = {{k: t.clone() for k, t in tensors.items()}}
    again = Run(wanted, blobs(channels=3), who)
    again.load(tensors, {{**about, "step": 3}})
    for _ in range(3):
        again.advance()
    for model in (run.model, run.networks.average):
        for tensor in model.state_dict().values():
            first = tensor.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, tensor), "the processes hold different networks"
    for one, other in zip(run.model.state_dict().values(), again.model.state_dict().values()):
        assert torch.equal(one, other), "a resumed run went another way"
# A thread of gloo's that outlives the team may abort the process when the interpreter ends.
left = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in left), left
"""


PARALLEL = """
import sys
from dataclasses import replace
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from helpers import blobs, chosen
from torch.nn.parallel import DistributedDataParallel
from lipbound.robust.training.distributed import team
from lipbound.robust.training.run import Run
def compare(who, arm="at+lipreg", **changes):
    found = []
    for overlaps in (False, True):
        run = Run(chosen(arm, precision="float64", accumulate=2, **changes),
                  blobs(channels=3), replace(who, overlaps=overlaps))
        assert isinstance(run.networks.trained, DistributedDataParallel) == overlaps
        for _ in range(4):
            run.advance()
        found.append(run.model.state_dict())
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-7, atol=1e-9, msg=name)
with team("cpu") as who:
    compare(who, batchnorm="folded", awp=0.05)
    compare(who, batchnorm="left out", model="wrn-10-1")
    compare(who, model="cnn-plain")
    compare(who, arm="trades")
"""


@pytest.mark.slow
def test_an_exchange_during_the_backward_pass_changes_nothing(tmp_path):
    """What NCCL does, shown with gloo."""
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL.format(tests=str(Path(__file__).parents[1])))
    done = subprocess.run(torchrun(script, 2), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_processes_hold_one_network_with_batchnorm_too(tmp_path):
    script = tmp_path / "together.py"
    script.write_text(TOGETHER.format(tests=str(Path(__file__).parents[1]), batchnorm="folded"))
    done = subprocess.run(torchrun(script, 2), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_one_of_two_dies(tmp_path):
    script = worker(tmp_path, tmp_path / "run", epochs=10_000)
    saved = tmp_path / "run" / "checkpoints"
    process = with_one_killed(torchrun(script, 2), saved)
    assert process.wait(timeout=120) != 0
    process.stdout.close()
    tensors, about, wrong = checkpoints.Folder(saved).newest()
    assert tensors
    assert about["step"] > 0
    assert not wrong


@pytest.mark.parametrize("ignored", [True, False])
def test_a_background_job_that_ignores_an_interruption_goes_on_ignoring_it(ignored):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    heard: list[str] = []
    try:
        with _signals(heard.append) as stop:
            signal.raise_signal(signal.SIGINT)
        assert stop == ([] if ignored else ["interrupted"])
        assert heard == ([] if ignored else [SAID])
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_asked_to_stop(tmp_path):
    script = worker(tmp_path, tmp_path / "run", epochs=10_000, save=0)
    process = subprocess.Popen([sys.executable, str(script)])
    while not (tmp_path / "run" / "records.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    state = checkpoints.Folder(tmp_path / "run" / "checkpoints").newest()
    assert state is not None


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    wanted, data = chosen("baseline"), blobs()
    whole = train(wanted, data, tmp_path / "run", device="cpu")
    (tmp_path / "run" / "summary.json").unlink()
    paths = checkpoints.Folder(tmp_path / "run" / "checkpoints").all()
    good = paths[-1].read_bytes()

    heard: list[str] = []

    class Ear:
        def step(self, *_):
            pass

        epoch = step

        def say(self, text):
            heard.append(text)

    flipped = bytearray(good)
    flipped[-3] ^= 1
    record = good.replace(b'\\"step\\": ', b'\\"stop\\": ', 1)
    assert record != good
    train(chosen("baseline", seed=9), data, tmp_path / "other", device="cpu")
    foreign = (tmp_path / "other" / "checkpoints" / paths[-1].name).read_bytes()
    for bad in (good[:1000], b"", bytes(flipped), record, foreign, b"not a checkpoint"):
        paths[-1].write_bytes(bad)
        heard.clear()
        again = train(wanted, data, tmp_path / "run", device="cpu", resume=True, watcher=Ear())
        assert again["final"] == whole["final"]
        assert len(heard) == 1
        assert paths[-1].name in heard[0]
        (tmp_path / "run" / "summary.json").unlink()
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no valid checkpoint"):
        train(wanted, data, tmp_path / "run", device="cpu", resume=True)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    folder = checkpoints.Folder(tmp_path)
    folder.save(1, {"a": torch.ones(3)}, {})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; its old content is unchanged"):
        folder.save(2, {"a": torch.zeros(3)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]
    assert torch.equal(folder.newest()[0]["a"], torch.ones(3))


def test_folders_that_cannot_be_used(tmp_path):
    wanted, data = chosen("baseline", epochs=1), blobs()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write in"):
        train(wanted, data, tmp_path / "file" / "run", device="cpu")
    train(wanted, data, tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match="already holds a run"):
        train(wanted, data, tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match="its epochs is 1, not 2"):
        train(chosen("baseline", epochs=2), data, tmp_path / "run", device="cpu", resume=True)
    from lipbound.robust.training.run_folder import RunFolder

    (tmp_path / "run" / "settings.json").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        train(wanted, data, tmp_path / "run", device="cpu")
    (tmp_path / "run" / "settings.json").write_text(json.dumps(as_dict(wanted)))
    with RunFolder(tmp_path / "run"), pytest.raises(ValueError, match="another run is using"):
        train(wanted, data, tmp_path / "run", device="cpu", resume=True)


def test_checkpoints_keep_every_kind_of_tensor(tmp_path):
    tensors = {"half": torch.randn(3).bfloat16(), "scalar": torch.tensor(2), "none": torch.zeros(0)}
    checkpoints.save(tmp_path / "x.safetensors", tensors, {"note": "ü"})
    found, about = checkpoints.load(tmp_path / "x.safetensors")
    assert all(torch.equal(found[k], tensors[k]) for k in tensors)
    assert about["note"] == "ü"


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_weights_build_their_network(tmp_path, precision):
    data = blobs(channels=3)
    summary = train(chosen("at", precision=precision), data, tmp_path, device="cpu")
    model, shape = load_model(tmp_path / "best.safetensors")
    assert shape == (3, 8, 8)
    stored, _ = checkpoints.load(tmp_path / "best.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    images, labels = data.test.load(torch.arange(len(data.test)))
    right = model(images.to(getattr(torch, precision)) / 255).argmax(1) == labels
    assert float(right.float().mean()) == pytest.approx(summary["best"]["test_accuracy"], abs=1e-6)
    assert torch.equal(outcomes(summary["best"]["test"]["clean"]), right)
    attacked = summary["best"]["test"]["pgd"]
    assert attacked["accuracy"] == pytest.approx(summary["best"]["test_pgd_accuracy"])
    with pytest.raises(ValueError, match="is a checkpoint"):
        load_model(next((tmp_path / "checkpoints").glob("step-*")))


@pytest.mark.slow
def test_the_product_falls_while_the_network_learns(tmp_path):
    data = blobs(400, channels=3)
    options = {"epochs": 12, "model": "cnn-plain", "lr": 0.05, "radius": 0.03}
    plain = train(chosen("at", **options), data, tmp_path / "plain", device="cpu")
    held = train(
        chosen("at+lipreg", penalty_weight=0.1, **options), data, tmp_path / "held", device="cpu"
    )
    assert held["final"]["log10_product"] < plain["final"]["log10_product"] - 0.3
    products = [r["log10_product"] for r in read(tmp_path / "held" / "records.jsonl")]
    assert products[-1] < max(products)
    assert held["final"]["test_accuracy"] > 0.9


def test_each_convolution_feels_the_same_pull():
    """⟨θ, ∇ log bound⟩ = 1 by homogeneity: λ2 for every convolution, whatever its size."""
    data = blobs(channels=3)
    run = Run(chosen("at+lipreg", penalty_weight=0.3), data, Team(torch.device("cpu")))
    run.penalty.add_grad_()
    for factor in run.penalty.factors:
        weight = factor.layer.weight
        if weight.ndim == 4:
            assert float((weight.grad * weight).sum().detach()) == pytest.approx(0.3, rel=1e-4)


@pytest.mark.slow
def test_the_log_collapses_without_batchnorm_and_the_floor_does_not(tmp_path):
    """log bound has no minimum: at λ2 = 0.12 its pull beats that of a loss that learns slowly."""
    pytest.importorskip("sklearn", reason="scikit-learn's digits")
    norms, accuracy = {}, {}
    for floor in (0.0, 1.0):
        wanted = settings(
            "at+lipreg", "digits", model="cnn-plain", penalty_weight=0.12, floor=floor, lr=0.1,
            attack=1, step=1.0, check=20, check_attack=1, epochs=8, batch=32,
        )  # fmt: skip
        found = train(wanted, digits(), tmp_path / str(floor), device="cpu")
        model, _ = load_model(tmp_path / str(floor) / "final.safetensors")
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
        norms[floor] = max(float(bound(layer).detach()) for layer in layers)
        accuracy[floor] = found["final"]["test_accuracy"]
    assert norms[0.0] < 0.2
    assert accuracy[0.0] < 0.3
    assert norms[1.0] > 1
    assert accuracy[1.0] > 0.8


def test_a_loss_that_explodes_is_said(tmp_path):
    wanted = chosen("baseline", lr=1e12, model="cnn-plain", schedule="constant")
    with pytest.raises(FloatingPointError, match="with less than lr=1e"):
        train(wanted, blobs(), tmp_path, device="cpu", save_every=1)
    for path in checkpoints.Folder(tmp_path / "checkpoints").all():
        assert all(t.isfinite().all() for t in checkpoints.load(path)[0].values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "resnet19"}, "unknown model 'resnet19'"),
        ({"batch": 1000}, "batch=1000 is more than"),
        ({"dropout": 0.3}, "model 'cnn' does not support dropout; leave it out"),
        ({"sync_batchnorm": True}, "needs GPUs"),
        ({"loss": "trades", "random_start": False}, "requires attack > 0 and random_start=True"),
    ],
)
def test_wrong_runs_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(chosen("at", **changes), blobs(), tmp_path, device="cpu")


def test_summary_and_settings_are_json(tmp_path):
    summary = train(chosen("at", epochs=1), blobs(), tmp_path, device="cpu")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert json.loads((tmp_path / "settings.json").read_text())["epochs"] == 1


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_what_an_attack_does_to_batchnorm(mode):
    run = Run(chosen("at", attack_mode=mode), blobs(channels=3), Team(torch.device("cpu")))
    run.advance()
    counts = {int(b) for n, b in run.model.named_buffers() if n.endswith("num_batches_tracked")}
    assert counts == {1 if mode == "eval" else 1 + SMALL["attack"]}


def test_averaged_weights(monkeypatch):
    """Their BatchNorm statistics are those of the images as the average sees them."""
    wanted = chosen("at", ema=0.75, model="wrn-10-1")
    run = Run(wanted, blobs(channels=3), Team(torch.device("cpu")))
    seen, attacked, average = [], run.networks.attacked, run.networks.average

    def attack(*given, **options):
        seen.append(attacked(*given, **options))
        return seen[-1]

    monkeypatch.setattr(run.networks, "attacked", attack)
    twin = copy.deepcopy(average)
    for step in range(1, 9):
        run.advance()
        with torch.no_grad():
            for mine, new in zip(twin.parameters(), run.model.parameters(), strict=True):
                mine.lerp_(new, 0.25)
            if step % 4 == 0:
                twin.train()(seen[-1])
    for name, found in average.state_dict().items():
        torch.testing.assert_close(found, twin.state_dict()[name])
    moving = dict(run.model.named_buffers())
    assert any(not torch.equal(b, moving[name]) for name, b in average.named_buffers())


@pytest.mark.parametrize("awp", [0.0, 0.1])
def test_a_step_is_sgd_on_loss_and_penalty(awp):
    """One step by hand: attack, perturbed weights, smoothed loss, decay, penalty, momentum."""
    wanted = chosen(label_smoothing=0.1, weight_decay=0.01, penalty_weight=0.2, awp=awp)
    data = blobs(channels=3)
    run, other = (Run(wanted, data, Team(torch.device("cpu"))) for _ in range(2))
    images, labels = other.feed.batch(0)
    images = other.networks.attacked(
        other.model, images, labels, other.feed.start(images, START, 0),
        iterations=wanted.attack, training=wanted.attack_mode == "train",
    )  # fmt: skip
    level, uphill = (copy.deepcopy(other.model).train() for _ in range(2))

    def slopes(model):
        loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        return torch.autograd.grad(loss, list(model.parameters()))

    for weight, slope in zip(uphill.parameters(), slopes(level), strict=True):
        if weight.ndim > 1:
            weight.data += awp * weight.norm() * slope / slope.norm()
    found = slopes(uphill)
    other.model.load_state_dict(dict(level.named_buffers()), strict=False)
    other.penalty().backward()
    rate = wanted.learning_rate(0, other.steps)
    run.advance()
    for mine, start, slope in zip(
        run.model.parameters(), other.model.parameters(), found, strict=True
    ):
        penalty = 0 if start.grad is None else start.grad
        expected = start - rate * (slope + penalty + 0.01 * start)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    for name, buffer in run.model.named_buffers():
        torch.testing.assert_close(buffer, dict(level.named_buffers())[name])


def test_a_step_of_trades_by_its_definition():
    """The attack climbs the divergence of predictions; the loss adds β times it."""
    wanted = chosen("trades", trades_weight=3.0, weight_decay=0.0, model="wrn-10-1")
    run, other = (Run(wanted, blobs(channels=3), Team(torch.device("cpu"))) for _ in range(2))
    images, labels = other.feed.batch(0)

    def divergence(model, attacked):
        before, after = (model(x).softmax(1) for x in (images, attacked))
        return (before * (before.log() - after.log())).sum(1)

    model, length = other.model.eval(), wanted.step * wanted.radius
    attacked = (images + other.feed.start(images, START, 0)).clamp(0, 1)
    for _ in range(wanted.attack):
        attacked.requires_grad_()
        (slope,) = torch.autograd.grad(divergence(model, attacked).sum(), attacked)
        moved = (attacked + length * slope.sign() - images).clamp(-wanted.radius, wanted.radius)
        attacked = (images + moved).clamp(0, 1).detach()
    assert divergence(model, attacked).mean() > 0
    model.train()
    plain = torch.nn.functional.cross_entropy(model(images), labels)
    loss = plain + 3 * divergence(model, attacked).mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    rate = wanted.learning_rate(0, other.steps)
    run.advance()
    assert float(run.sums[0]) == pytest.approx(float(loss.detach()) * len(labels), rel=1e-4)
    for mine, start, slope in zip(
        run.model.parameters(), other.model.parameters(), slopes, strict=True
    ):
        torch.testing.assert_close(mine, start - rate * slope, rtol=1e-3, atol=1e-5)


PARTS = {
    "at+lipreg": {"awp": 0.05},
    "trades": {"ball": "l2", "radius": 0.5},
    "certified": {"model": "tiny", "colour": 0.1},
}


@pytest.mark.parametrize("arm", PARTS)
def test_a_step_in_parts_is_a_step_at_once(monkeypatch, arm):
    """The attack's starts, the losses and the gradients do not depend on the number of parts."""
    monkeypatch.setitem(MODELS, "tiny", TINY_SHIFT)
    monkeypatch.setattr(Centre, "forward", lambda self, x: x + self.bias)  # without a batch's mean
    options = {"model": "cnn-plain", "precision": "float64", "lr": 0.01, **PARTS[arm]}
    runs = [
        Run(chosen(arm, accumulate=parts, **options), blobs(channels=3), Team(torch.device("cpu")))
        for parts in (1, 4)
    ]
    for run in runs:
        for _ in range(3):
            run.advance()
    torch.testing.assert_close(runs[0].sums, runs[1].sums, rtol=1e-6, atol=0)
    images = runs[0].feed.batch(3)[0]
    assert images.dtype == torch.float64
    one, other = (run.model.eval()(images) for run in runs)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("block", "ball"), [(1 << 24, "linf"), (500, "linf"), (500, "l2")])
def test_starts_of_an_attack_are_those_of_the_whole_batch(monkeypatch, block, ball):
    """Each process draws its own part; the first block has the numbers of earlier versions."""
    monkeypatch.setattr(batches, "BLOCK", block)
    wanted, data = chosen(ball=ball), blobs(channels=3)

    def drawn(rank: int, size: int) -> torch.Tensor:
        feed = batches.Feed(wanted, data, Team(torch.device("cpu"), rank, size))
        images = torch.zeros(wanted.batch // size, 3, 8, 8)
        assert not torch.equal(feed.start(images, START, 4), feed.start(images, START, 5))
        return feed.start(images, START, 5)

    whole = drawn(0, 1)
    torch.testing.assert_close(torch.cat([drawn(rank, 4) for rank in range(4)]), whole)
    assert len(whole.flatten(1).unique(dim=0)) == wanted.batch
    feed = batches.Feed(wanted, data, Team(torch.device("cpu")))
    part = feed.start(torch.zeros(3, 3, 8, 8), START, 5, first=6)
    torch.testing.assert_close(part, whole[6:9])


def test_the_rate_rises_over_the_warmup():
    """Linearly to the schedule, which then goes on as without it."""
    for schedule in ("steps", "cosine", "onecycle", "constant"):
        plain = chosen(epochs=10, schedule=schedule, milestones=(1, 5))
        warm = chosen(epochs=10, schedule=schedule, milestones=(1, 5), warmup=2)
        shares = [
            warm.learning_rate(step, 100) / plain.learning_rate(step, 100) for step in range(100)
        ]
        assert shares == pytest.approx([min(1, (step + 1) / 20) for step in range(100)])


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-24, 1.0, 1e30])
def test_weights_are_perturbed_by_their_norm_whatever_the_slope(size):
    weight, bias, still = torch.ones(4, 4), torch.ones(4), torch.ones(2, 2)
    weight.grad, bias.grad, still.grad = torch.full((4, 4), size), bias.clone(), 0 * still
    with moved(uphill([weight, bias, still], 0.01)):
        assert float((weight - 1).norm()) == pytest.approx(0.04, rel=1e-3) or size < 1e-38
        assert float((weight - 1).norm()) < 0.05
        assert torch.equal(bias, torch.ones(4))
        assert torch.equal(still, torch.ones(2, 2))
    assert torch.equal(weight, torch.ones(4, 4))


def test_a_network_without_buffers_is_perturbed():
    wanted = chosen("at", model="cnn-plain", normalize=False, awp=0.01)
    run = Run(wanted, blobs(channels=3), Team(torch.device("cpu")))
    assert not list(run.model.buffers())
    run.advance()


def test_a_run_of_a_version_with_fewer_settings_goes_on(tmp_path):
    wanted, data = chosen("at"), blobs(channels=3)
    train(wanted, data, tmp_path, device="cpu", time_limit=0)
    path = tmp_path / "settings.json"
    stored = json.loads(path.read_text())
    assert stored.pop("awp") == 0
    path.write_text(json.dumps(stored))
    assert not train(wanted, data, tmp_path, device="cpu", resume=True)["stopped"]
    with pytest.raises(ValueError, match=r"its awp is 0\.0, not 0\.1"):
        train(chosen("at", awp=0.1), data, tmp_path, device="cpu", resume=True)


def test_the_best_is_chosen_on_held_out_images_alone(tmp_path, monkeypatch):
    data = blobs(400, channels=3)
    train(chosen("at", epochs=3), data, tmp_path, device="cpu")
    records = read(tmp_path / "records.jsonl")
    best = checkpoints.about(tmp_path / "best.safetensors")["record"]
    assert best["held_out_pgd_accuracy"] == max(r["held_out_pgd_accuracy"] for r in records)
    run = Run(chosen("at"), data, Team(torch.device("cpu")))
    scores = iter(torch.tensor([[[0.9], [0.5]], [[0.6], [0.7]], [[0.9], [0.6]]]))
    monkeypatch.setattr(run_module, "measure", lambda *_: next(scores))
    assert [run.check()[1] for _ in range(3)] == [True, True, False], "by accuracy under attack"
    assert not set(run.feed.held.tolist()) & set(run.feed.kept.tolist())
    assert len(run.feed.held) + len(run.feed.kept) == len(data.train)
    seen = set()
    load = run.feed.train.load

    class Spy:
        def stream(self, batches, seed):
            for batch in batches:
                seen.update(batch.tolist())
                yield load(batch)

    run.feed.train = Spy()
    for _ in range(run.feed.per_epoch):
        run.advance()
    assert seen <= set(run.feed.kept.tolist())


def test_records_of_steps_to_be_done_again_are_dropped(tmp_path):
    from lipbound.robust.training.run_folder import RunFolder

    with RunFolder(tmp_path) as folder:
        for step in (1, 2, 3):
            folder.record({"step": step})
        with folder.records.open("a") as file:
            file.write('{"step": 4, "lo')  # cut off by a kill
        folder.cut_records(2)
        assert read(folder.records) == [{"step": 1}, {"step": 2}]
