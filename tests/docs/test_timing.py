"""Ratios of benchmarks/timing.py on a GPU whose clock moves: its events are replaced."""

import pytest
import timing


@pytest.fixture
def gpu(monkeypatch):
    """A clock that falls by half within a second of work; the ms that it has worked."""

    class Gpu:
        now = 0.0

        def work(self, ms):
            self.now += ms * (1 + self.now / 1000)

    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = gpu.now

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    return gpu


def test_neighbouring_bursts_tell_a_percent_while_the_clock_falls(gpu):
    names = {"ours": 0.4, "slower by 1%": 0.404, "long": 30.0}
    found = timing.in_bursts({name: lambda ms=ms: gpu.work(ms) for name, ms in names.items()}, 200)
    assert found["slower by 1%"].ratio == pytest.approx(1.01, abs=1e-3)
    assert found["slower by 1%"].spread < 1e-3
    assert found["long"].ratio == pytest.approx(75, rel=0.03)
    assert (found["ours"].ratio, found["ours"].spread) == (1, 0)
    assert found["ours"].ms > 0.5  # of a call, at the clock of its time


def test_short_calls_are_replayed_and_timed_one_by_one(gpu, monkeypatch):
    monkeypatch.setattr(timing, "as_graph", lambda run: lambda: [run() for _ in range(timing.REPLAYED)])
    calls = []
    runs = {"ours": lambda: (calls.append(0), gpu.work(0.05)), "other": lambda: gpu.work(0.1)}
    found = timing.in_bursts(runs, 100, can_replay=True)
    assert len(calls) % timing.REPLAYED == 1 + 3  # those that tell whether calls are short
    assert 0.05 < found["ours"].ms < 0.1
    assert found["other"].ratio == pytest.approx(2, rel=1e-2)


def test_one_alone_is_timed_too(gpu):
    assert timing.in_bursts({"ours": lambda: gpu.work(1.0)}, 100)["ours"].ratio == 1
