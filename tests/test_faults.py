"""Faults: kills, full disks, folders that take no file, clocks that jump, two at a time."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import blobs, chosen, equal, run

from lipbound import files
from lipbound.files import append, read
from lipbound.robust.training import checkpoints, loop
from lipbound.robust.training.batches import CHECK, Feed
from lipbound.robust.training.loop import train
from lipbound.robust.training.networks import Networks
from lipbound.robust.training.run import Run
from lipbound.robust.training.run_folder import RunFolder, lock
from verify import kills


def forked(run) -> int:
    """A process that runs this and nothing more; no interpreter has to start."""
    process = os.fork()
    if process == 0:
        try:
            run()
        finally:
            os._exit(0)
    return process


def saving(folder: Path) -> None:
    kept = checkpoints.Folder(folder)
    found = kept.newest()
    for step in itertools.count(found[1]["step"] + 1 if found else 1):
        kept.save(step, {"a": torch.full((50,), float(step))}, {})


def appending(folder: Path) -> None:
    for step in itertools.count(len(read(folder / "records.jsonl"))):
        append(folder / "records.jsonl", {"step": step, "long": "x" * 100_000})


def newest(folder: Path) -> int:
    found = checkpoints.Folder(folder).newest()
    assert found is not None
    assert found[2] == []
    assert set(found[0]["a"].tolist()) == {found[1]["step"]}
    return found[1]["step"]


def recorded(folder: Path) -> int:
    steps = [r["step"] for r in read(folder / "records.jsonl")]
    assert steps == list(range(len(steps)))
    return len(steps)


@pytest.mark.parametrize(("run", "look"), [(saving, newest), (appending, recorded)])
def test_killed_while_writing(tmp_path, run, look):
    """A few of the hundred kills of ``verify.kills``, which take minutes."""
    draw, before = random.Random(1), 0
    for _ in range(8):
        process = forked(lambda: run(tmp_path))
        end = time.monotonic() + draw.uniform(0.005, 0.03)
        while not list(tmp_path.glob("[!.]*")) or time.monotonic() < end:  # it has begun
            pass
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        after = look(tmp_path)
        assert after >= before
        before = after


def test_the_experiment_notices_a_torn_file(tmp_path, monkeypatch):
    def torn(*_):
        (tmp_path / "step-00000001.safetensors").write_bytes(b"torn")
        checkpoints.Folder(tmp_path).save(2, {"a": torch.ones(3)}, {})
        return True

    monkeypatch.setattr(kills, "killed", torn)
    assert len(kills.checkpoint(1, random.Random(0), tmp_path)["wrong"]) == 1


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    real, link, pipe = (tmp_path / name for name in ("real", "link", "pipe"))
    link.symlink_to(real)
    files.check_writable(link)
    files.write(link, b"through")
    assert link.is_symlink()
    assert real.read_bytes() == b"through"
    os.mkfifo(pipe)
    files.check_writable(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, b"into it")
    assert os.read(end, 100) == b"into it"
    assert pipe.is_fifo()
    os.close(end)


def test_killed_in_the_middle_of_a_write(tmp_path, monkeypatch):
    """Between the bytes and the name: the file before stays, the next write cleans up."""
    path = tmp_path / "page.html"
    files.write(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        status = os.waitpid(forked(lambda: files.write(path, b"after")), 0)[1]
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert path.read_bytes() == b"before"
    assert len(list(tmp_path.glob(".page.html.*.part"))) == 1
    mine = tmp_path / f".page.html.{os.getppid()}.part"  # of a process that runs
    mine.touch()
    files.write(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(tmp_path.glob(".*.part")) == [mine]


CUT = {
    "nothing": (b"", 0),
    "whole": (b'{"a": 1}\n{"a": 2}\n', 2),
    "cut": (b'{"a": 1}\n{"a": 2}\n{"a": 3, "b', 2),
    "cut in the first": (b'{"a": 1', 0),
    "zeros": (b'{"a": 1}\n\0\0\0\0\0', 1),
    "no text": (b'{"a": 1}\n{"b": "\xff\xfe', 1),
    "by hand, without an end": (b'{"a": 1}\n{"a": 2}', 2),
    "a long line cut": (b'{"a": 1}\n{"a": "' + b"x" * 200_000, 1),
}


@pytest.mark.parametrize("name", CUT)
def test_a_line_that_was_cut_off_is_no_record(tmp_path, name):
    content, count = CUT[name]
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    before = read(path)
    assert [r["a"] for r in before] == [1, 2][:count]
    append(path, {"a": "new"})
    assert read(path) == [*before, {"a": "new"}]
    assert path.read_bytes().endswith(b'\n{"a": "new"}\n') or not count


@pytest.mark.parametrize("line", ["not json", "[1]", "[" * 100_000, '{"a": 1}}'])
def test_a_line_in_the_middle_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: .*remove the line"):
        read(path)


def test_two_processes_append_to_one_file(tmp_path):
    path = tmp_path / "records.jsonl"

    def fill(who: str) -> None:
        for _ in range(200):
            append(path, {"who": who, "x": "y" * 5000})

    for process in [forked(lambda who=who: fill(who)) for who in "ab"]:
        os.waitpid(process, 0)
    assert sorted(r["who"] for r in read(path)) == ["a"] * 200 + ["b"] * 200


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    records, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    torch.save({"conv": torch.ones(1, 1, 3)}, tmp_path / "weights.pt")
    append(records, {"a": 1})
    page.write_text("before")
    before = {p: p.read_bytes() for p in (records, page)}
    monkeypatch.setattr(os, "fsync", full)
    message = "No space left on device; its old content is unchanged"
    with pytest.raises(OSError, match=message):
        append(records, {"a": 2})
    code, _, err = run(
        monkeypatch, capsys, "audit", str(tmp_path / "weights.pt"), "--html", str(page)
    )
    assert (code, message in err) == (2, True)
    with pytest.raises(OSError, match=message):
        train(chosen("baseline", epochs=1), blobs(), tmp_path / "run", device="cpu")
    assert {p: p.read_bytes() for p in (records, page)} == before
    assert list(tmp_path.rglob(".*.part")) == []
    monkeypatch.undo()
    train(chosen("baseline", epochs=1), blobs(), tmp_path / "run", device="cpu", resume=True)


def test_a_disk_that_takes_half_a_line(tmp_path, monkeypatch):
    """What a full disk really does: it writes what fits, then refuses."""
    path = tmp_path / "r.jsonl"
    append(path, {"a": 1})
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        with pytest.raises(OSError, match="File too large; its old content is unchanged"):
            append(path, {"a": "x" * 10_000})
        with pytest.raises(OSError, match="File too large"):
            files.write(tmp_path / "page", b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert read(path) == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


COMMANDS = {
    "train": ["train", "--epochs", "1", "--device", "cpu", "--out", "{}/run"],
    "bench": ["bench", "--network", "squeezenet1_1", "--device", "cpu", "--out", "{}/x.jsonl"],
    "plot": ["bench", "--network", "squeezenet1_1", "--device", "cpu", "--plot", "{}/x.svg"],
    "audit": ["audit", "demo", "--html", "{}/x.html"],
    "attack": ["attack", ".", "--out", "{}/x.jsonl"],
    "reproduce": ["reproduce", "fig2", "--tiny", "--out", "{}/x"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("how", ["under a file", "read-only"])
def test_folders_that_take_no_file_are_refused_at_once(tmp_path, monkeypatch, capsys, name, how):
    place = tmp_path / "place"
    if how == "under a file":
        place.write_text("")
    else:  # a superuser's kernel would not refuse
        place.mkdir()
        opened, real = [], os.open

        def read_only(path, flags, *rest, **options):
            opened.append(path)
            if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(place)):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return real(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", read_only)
        monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: None)
        monkeypatch.setattr("io.open", lambda path, mode="r", *_, **__: full_open(path, mode))
        monkeypatch.setattr("pathlib.Path.touch", lambda path, *_: read_only(path, os.O_WRONLY))

        def full_open(path, mode, real_open=open):
            if set(mode) & set("wa+") and str(path).startswith(str(place)):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return real_open(path, mode)

    called = []
    monkeypatch.setattr("lipbound.robust.models.digits.network", lambda: called.append("work"))
    monkeypatch.setattr("lipbound.paper.speed.speed", lambda *_: called.append("work"))
    arguments = [word.format(place) for word in COMMANDS[name]]
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n"), "cannot write" in err) == (2, 1, True), err
    assert str(place) in err
    assert called == []


def interrupted(monkeypatch, when) -> list[int]:
    """Send this process SIGINT when an attack is about to be made that fits; list those after."""
    runs, start, sent = [], Feed.start, []

    def begin(self, images, purpose, *place):
        run = runs[-1]
        if sent:
            sent.append(run.step)
        elif when(run, purpose == CHECK):
            sent.append(run.step)
            os.kill(os.getpid(), signal.SIGINT)
        return start(self, images, purpose, *place)

    monkeypatch.setattr(loop, "Run", lambda *given: runs.append(Run(*given)) or runs[-1])
    monkeypatch.setattr(Feed, "start", begin)
    return sent


MOMENTS = {
    "in a step": lambda run, check: not check and run.step == 3,
    "in an epoch's check": lambda run, check: check and run.step == run.feed.per_epoch,
    "in the last check": lambda run, check: check and run.step == run.steps,
    "in the test": lambda run, check: check and run.record.get("step") == run.steps,
}


@pytest.mark.parametrize(
    "moment",
    [
        "in a step",
        pytest.param("in an epoch's check", marks=pytest.mark.slow),
        "in the last check",
        "in the test",
    ],
)
def test_ctrl_c_saves_and_leaves(tmp_path, monkeypatch, moment):
    wanted, data = chosen("at", epochs=2, check_attack=1, held_out=0.4), blobs(channels=3)
    whole = train(wanted, data, tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        attacks = interrupted(patch, MOMENTS[moment])
        part = train(wanted, data, tmp_path / "part", device="cpu")
    assert part["stopped"] == "interrupted"
    assert len(attacks) == 1, "it finishes the batch it is at, no more"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    saved = checkpoints.Folder(tmp_path / "part" / "checkpoints").newest()
    assert saved is not None
    again = train(wanted, data, tmp_path / "part", device="cpu", resume=True)
    for file in ("best", "final", f"checkpoints/step-{whole['steps']:08}"):
        assert equal(*(tmp_path / d / f"{file}.safetensors" for d in ("whole", "part")))
    assert (again["best"], again["final"]) == (whole["best"], whole["final"])
    drop = ("seconds", "waited")
    one, other = (
        [
            {k: v for k, v in r.items() if k not in drop}
            for r in read(tmp_path / d / "records.jsonl")
        ]
        for d in ("whole", "part")
    )
    assert one == other


def test_a_second_ctrl_c_does_not_wait(tmp_path, monkeypatch):
    attacked = Networks.attacked

    def twice(self, *rest, **options):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return attacked(self, *rest, **options)

    monkeypatch.setattr(Networks, "attacked", twice)
    with pytest.raises(KeyboardInterrupt):
        train(chosen("at"), blobs(), tmp_path, device="cpu")


def test_clocks_that_jump_decide_nothing(tmp_path, monkeypatch):
    wanted, data = chosen("baseline", epochs=2), blobs()
    whole = train(wanted, data, tmp_path / "whole", device="cpu")
    falling = itertools.count(2e9, -1e6)
    monkeypatch.setattr(time, "time", lambda: next(falling))
    part = train(wanted, data, tmp_path / "part", device="cpu", time_limit=3600, save_every=2)
    assert part["final"] == whole["final"]
    assert part["step_ms"] > 0
    steps = checkpoints.Folder(tmp_path / "part" / "checkpoints").all()
    for age, path in enumerate(steps):  # the newest by its step is the oldest by its date
        os.utime(path, (1e9 - 1e6 * age,) * 2)
    assert (
        checkpoints.Folder(tmp_path / "part" / "checkpoints").newest()[1]["step"] == part["steps"]
    )


def test_a_process_forked_off_holds_no_lock(tmp_path):
    held = lock(tmp_path / ".lock")
    assert lock(tmp_path / ".lock") is None
    (began, begin), (ended, end) = os.pipe(), os.pipe()
    process = forked(lambda: os.write(begin, b".") and os.read(ended, 1))
    os.read(began, 1)
    held.close()
    again = lock(tmp_path / ".lock")
    os.write(end, b".")
    os.waitpid(process, 0)
    assert again is not None


def test_the_second_of_two_runs_refuses(tmp_path, monkeypatch, capsys):

    with RunFolder(tmp_path / "run"):
        out = ["--epochs", "1", "--device", "cpu", "--out", str(tmp_path / "run"), "--resume"]
        pytest.importorskip("sklearn", reason="scikit-learn's digits")
        code, _, err = run(monkeypatch, capsys, "train", *out)
        assert (code, err.count("\n")) == (2, 1)
        assert f"another run is using '{tmp_path / 'run'}'; choose another" in err


@pytest.mark.parametrize("name", ["settings.json", "summary.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000])
def test_damaged_files_of_a_run_are_named(tmp_path, name, content):
    wanted = chosen("baseline", epochs=1)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(vars(wanted) | {"milestones": []}))
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}' (is not valid|does not hold a) JSON.*remove"):
        train(wanted, blobs(), folder, device="cpu", resume=True)


def test_a_checkpoint_of_every_step_is_whole_however_it_ends(tmp_path):
    """What a damaged newest one falls back to is named, and is the one before."""
    folder = checkpoints.Folder(tmp_path)
    for step in (1, 2):
        folder.save(step, {"a": torch.full((3,), float(step))}, {})
    newest = folder.all()[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    tensors, about, wrong = folder.newest()
    assert (about["step"], tensors["a"].tolist(), len(wrong)) == (1, [1.0] * 3, 1)


def test_a_check_that_is_made_again_is_recorded_once(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        for step in (5, 10):
            folder.record({"step": step})
        folder.cut_records(10)
        assert [r["step"] for r in read(folder.records)] == [5, 10]
        folder.cut_records(10, due=True)
        assert [r["step"] for r in read(folder.records)] == [5]


def test_only_what_a_dead_process_left_is_removed(tmp_path):
    kept = [".r.json.backup.part", f".r.json.{10**30}.part", f".r.json.{os.getppid()}-7.part"]
    for name in (*kept, ".r.json.4194999-1.part"):  # above the largest process number
        (tmp_path / name).write_text("x")
    (tmp_path / ".r.json.4194998.part").mkdir()
    (tmp_path / "r.json").write_text("old")
    (tmp_path / "r.json").chmod(0o600)
    files.write(tmp_path / "r.json", b"new")
    left = {p.name for p in tmp_path.iterdir() if p.is_file()}
    assert left == {*kept, "r.json"}
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o600


def test_threads_write_one_file_without_losing_it(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: files.write(tmp_path / "f", b"%d" % n), range(40)))
    assert (tmp_path / "f").read_bytes() in {b"%d" % n for n in range(40)}
