"""loss_curves.py counts what torch.compile has made at every step of a run."""

from support.runs import train

from loss_curves import count_graphs  # isort: skip


def test_graphs_are_reported_at_every_step():
    run = train(1, ["--metrics.log_freq", "1"], setup=count_graphs)
    assert run.of("graphs") == [(0,)] * 3
