"""What is worth an alert: once when it begins, once when it is over, and from one worker."""

import math

import pytest

from atoll.train.progress.incidents import Alert, Incidents


def kinds(alerts: list[Alert]) -> list[tuple[str, bool, int | None]]:
    return [(alert.kind, alert.recovered, alert.about) for alert in alerts]


def incidents(worker: int | None = None, now_s: float = 0.0) -> Incidents:
    return Incidents(worker, 60.0, 30.0, now_s)


def test_a_stall_is_told_once_and_that_it_is_over() -> None:
    seen = incidents(now_s=100.0)
    assert seen.look(0, 159.0) == []
    assert kinds(seen.look(0, 161.0)) == [("stalled", False, None)], "also before the first step"
    assert seen.look(0, 500.0) == []
    assert kinds(seen.look(1, 501.0)) == [("stalled", True, None)]
    assert seen.look(1, 560.0) == [] and seen.look(2, 560.5) == [] and seen.look(2, 620.0) == []
    (again,) = seen.look(2, 621.0)
    assert again.step == 2 and "1:00" in again.text and "step 2" in again.text


def test_the_end_of_a_run_may_take_its_time() -> None:
    seen = incidents()
    assert (
        seen.look(10, 1.0) == [] and seen.look(10, 1000.0, done=True) == [] and seen.look(10, 5000.0, done=True) == []
    )
    assert kinds(seen.look(10, 9000.0)) == [("stalled", False, None)]
    assert kinds(seen.look(10, 9001.0, done=True)) == [("stalled", True, None)]


@pytest.mark.parametrize(
    ("losses", "diverges"),
    [
        ([4.0, 3.0, 4.6], True),
        ([4.0, 3.0, 4.4], False),  # less than half above
        ([4.0, 0.2, 1.3], True),
        ([4.0, 0.2, 1.1], False),  # less than a nat above
        ([4.0, math.nan], True),
        ([4.0, math.inf], True),
        ([math.nan], True),
        ([20.0, 10.0, 14.0], False),
    ],
)
def test_a_loss_diverges_far_above_its_lowest(losses: list[float], diverges: bool) -> None:
    seen = incidents()
    told = [alert for step, loss in enumerate(losses) for alert in seen.measured(step, [loss, None])]
    assert kinds(told) == [("diverged", False, None)] * diverges
    assert seen.measured(9, [losses[-1]]) == [] and seen.measured(9, [None]) == []
    good = [min(x for x in (*losses, 3.0) if not math.isnan(x))]
    assert seen.measured(10, good) == seen.measured(11, good) == [], "it may jump up and down"
    assert kinds(seen.measured(12, good)) == [("diverged", True, None)] * diverges and seen.measured(13, good) == []


def test_a_loss_that_jumps_up_and_down_is_one_incident() -> None:
    seen = incidents()
    told = [alert for step in range(100) for alert in seen.measured(step, [9.0 if step % 3 == 2 else 2.0])]
    assert kinds(told) == [("diverged", False, None)]


def test_the_mean_of_the_workers_here_counts() -> None:
    seen = incidents()
    assert seen.measured(1, [2.0, 2.0]) == [] and seen.measured(2, [2.0, 3.9]) == []
    (alert,) = seen.measured(3, [3.0, 3.9])
    assert "3.450" in alert.text and "2.000" in alert.text and alert.step == 3


def test_a_worker_is_lost_after_a_time_and_comes_back() -> None:
    seen = incidents(0)
    assert seen.members([0, 1, 2], [0, 1, 2], 0.0) == []
    seen.disconnected(1, "closed its connection", 10.0)
    assert seen.members([0, 2], [0, 2], 12.0) == [] and seen.look(5, 39.0) == []
    (alert,) = seen.look(6, 41.0)
    assert kinds([alert]) == [("lost", False, 1)] and "closed its connection" in alert.text and alert.step == 6
    assert seen.look(7, 90.0) == []
    assert kinds(seen.members([0, 2], [0, 1, 2], 100.0)) == [("lost", True, 1)], "it catches up"
    assert seen.members([0, 1, 2], [0, 1, 2], 110.0) == [] and seen.look(8, 150.0) == []


def test_one_that_is_back_soon_was_not_lost() -> None:
    seen = incidents(0)
    seen.members([0, 1], [0, 1], 0.0)
    assert seen.members([0], [0], 10.0) == [], "it has not heard itself that the connection ended"
    assert seen.members([0, 1], [0, 1], 20.0) == [] and seen.look(1, 60.0) == []
    seen.members([0], [0], 70.0)
    assert "was lost by the others" in seen.look(2, 101.0)[0].text


def test_at_the_end_all_leave() -> None:
    seen = incidents(0)
    seen.members([0, 1], [0, 1], 0.0)
    seen.disconnected(1, "closed its connection", 1.0)
    seen.over()
    assert seen.look(1, 50.0) == []


def test_one_that_never_trained_is_not_missed() -> None:
    seen = incidents(0)
    seen.members([0], [0, 1], 0.0)
    seen.disconnected(1, "closed its connection", 1.0)
    assert seen.members([0], [0], 2.0) == [] and seen.look(1, 50.0) == []


def test_of_an_elastic_run_the_lowest_that_trains_tells() -> None:
    crew = {worker: incidents(worker) for worker in (0, 1, 2)}
    for seen in crew.values():
        seen.members([0, 1, 2], [0, 1, 2], 0.0)
    assert [bool(seen.look(0, 61.0)) for seen in crew.values()] == [True, False, False]
    assert [bool(seen.look(1, 62.0)) for seen in crew.values()] == [True, False, False]
    assert [bool(seen.measured(1, [math.nan])) for seen in crew.values()] == [True, False, False]
    for worker in (1, 2):  # the lowest dies, and the registry is gone: no view comes
        crew[worker].disconnected(0, "was silent for 5 s", 70.0)
    assert kinds(crew[1].look(1, 101.0)) == [("lost", False, 0)] and crew[2].look(1, 101.0) == []
    for worker in (1, 2):
        crew[worker].members([1, 2], [0, 1, 2], 110.0)
    assert kinds(crew[1].look(1, 123.0)) == [("stalled", False, None)], "one that catches up does not tell"
    assert incidents(3).look(0, 1000.0) == [], "nor does one that does not know who trains"


def test_every_process_tells_its_own_end() -> None:
    seen = incidents(2)
    seen.members([0, 1, 2], [0, 1, 2], 0.0)
    (alert,) = seen.failed(7, "no space left")
    assert (alert.kind, alert.about, alert.step) == ("failed", 2, 7) and "no space left" in alert.text
