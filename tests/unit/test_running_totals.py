"""Sums over inner steps: means per worker, and a state that survives between two reports."""

import math

import torch

from atoll.train.progress.reporter import RunningTotals


def losses(*values: float) -> dict[int, torch.Tensor]:
    return {worker: torch.tensor(value) for worker, value in enumerate(values) if not math.isnan(value)}


def test_an_interval_is_the_mean_of_each_workers_own_steps() -> None:
    tally = RunningTotals(3)
    tally.add(losses(1.0, 2.0), losses(5.0, 6.0), tokens_each=10, seconds=2.0)
    tally.add(losses(3.0), losses(7.0), tokens_each=10, seconds=1.0)
    interval = tally.take()
    assert interval.losses == [2.0, 2.0, None] and interval.norms == [7.0, 6.0, None]
    assert interval.step_s == 1.0 and interval.tokens_per_s == 10.0 and interval.participants == 2
    assert (tally.tokens, tally.seconds, tally.step_s) == (30, 3.0, 1.0)
    assert tally.take().losses == [None, None, None]


def test_waiting_is_no_computing() -> None:
    tally = RunningTotals(2)
    tally.add(losses(1.0, 2.0), losses(1.0, 1.0), tokens_each=10, seconds=5.0, waited_s=3.0)
    assert (tally.step_s, tally.seconds) == (1.0, 5.0)
    interval = tally.take()
    assert (interval.step_s, interval.tokens_per_s) == (1.0, 4.0)


def test_an_unfinished_interval_goes_on_after_a_resume_on_the_device_of_the_losses() -> None:
    tally, again = RunningTotals(1), RunningTotals(1)
    tally.add(losses(1.0), losses(1.0), tokens_each=4, seconds=1.0)
    again.load_state_dict(tally.state_dict(), torch.device("cpu"))
    again.add(losses(3.0), losses(2.0), tokens_each=4, seconds=1.0)
    assert again.take().losses == [2.0] and again.tokens == 8
    elsewhere = RunningTotals(1)
    elsewhere.load_state_dict(tally.state_dict(), torch.device("meta"))  # any device that is not the CPU
    kept = elsewhere.state_dict()
    assert kept["losses"][0][0].device.type == kept["norms"][0].device.type == "meta"


def test_it_knows_when_a_loss_or_a_norm_is_no_number() -> None:
    tally = RunningTotals(2)
    assert tally.is_finite
    tally.add(losses(1.0, 2.0), losses(1.0, 1.0), tokens_each=1, seconds=1.0)
    assert tally.is_finite
    tally.add(losses(1.0, 2.0), losses(1.0, math.inf), tokens_each=1, seconds=1.0)
    assert not tally.is_finite
