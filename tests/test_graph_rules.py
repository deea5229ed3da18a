"""The stand-ins for graphs and streams notice what a GPU would get wrong."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from graph_rules import Pool, captured, on_streams

from lipbound import cuda_graphs


def test_a_replay_follows_its_inputs():
    given, wave = torch.ones(3), torch.ones(2, 2, dtype=torch.complex128)
    graph, (twice, product) = captured(lambda: (2 * given, (wave.mH @ wave).real.clone()), Pool())
    given.copy_(torch.arange(3.0))
    wave.mul_(2j)
    graph.replay()
    assert twice.tolist() == [0, 2, 4]
    assert product.tolist() == [[8, 8], [8, 8]]


def test_memory_that_is_freed_is_noticed():
    given = [torch.ones(3)]
    graph, _ = captured(lambda: (2 * given[0],), Pool())
    graph.replay()
    given[0] = torch.ones(3)
    with pytest.raises(AssertionError, match="freed"):
        graph.replay()


def test_what_one_graph_leaves_for_another_is_lost():
    left = []
    graph, _ = captured(lambda: (left.append(torch.ones(3)), (torch.zeros(1),))[1], Pool())
    assert left[0].isnan().all()
    other, (total,) = captured(lambda: (left[0].sum(),), Pool())
    graph.replay()
    other.replay()
    assert total.isnan()


def test_results_of_one_graph_do_not_outlast_another():
    pool = Pool()
    graph, (ones,) = captured(lambda: (torch.ones(3),), pool)
    other, (twos,) = captured(lambda: (torch.full((3,), 2.0),), pool)
    graph.replay()
    assert ones.tolist() == [1, 1, 1]
    other.replay()
    assert ones.isnan().all()
    assert twos.tolist() == [2, 2, 2]


def test_a_pool_ends_with_its_graphs():
    pool = Pool()
    graph, _ = captured(lambda: (torch.ones(3),), pool)
    other, _ = captured(lambda: (torch.ones(3),), pool)
    del graph, other
    with pytest.raises(AssertionError, match="takes no other"):
        captured(lambda: (torch.ones(3),), pool)


def test_a_value_read_on_the_host_is_noticed():
    with pytest.raises(AssertionError, match="on the host"):
        captured(lambda: (torch.zeros(int(torch.ones(()))),), Pool())


def test_streams_are_waited_for_after_a_failure(monkeypatch):
    """Memory that is freed then may still be in use there."""
    waits = []

    class Stream:
        device_index = 0

        def wait_stream(self, other):
            waits.append((self, other))

    here = Stream()
    monkeypatch.setattr(cuda_graphs, "_streams", cuda_graphs._Streams())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(ZeroDivisionError):
        cuda_graphs.on_streams([lambda: 0, lambda: 1, lambda: 1 // 0, lambda: 3])
    own = cuda_graphs._streams.work[0]
    assert waits == [(own[0], here), (own[1], here), (here, own[0]), (here, own[1])]


def test_streams_that_share_memory_are_noticed():
    shared, other = torch.zeros(3), torch.zeros(3)
    works = [lambda: shared.add_(1), lambda: other.add_(1)]
    assert [result.tolist() for result in on_streams(works)] == [[1] * 3, [1] * 3]
    with pytest.raises(AssertionError, match="share memory"):
        on_streams([*works, lambda: shared[1:] * 2])
