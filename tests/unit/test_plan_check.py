"""The line at the end of a run: what the planner would have said, beside what was measured."""

import re
from pathlib import Path
from typing import Any

import pytest

from atoll.plan.line import parse_line
from atoll.plan.method import Job
from atoll.plan.simulate import time_of
from atoll.runs.events import End, Start, read
from atoll.settings import config
from atoll.train.run import train

SLOW = {"emulate": "60Mbit/s, 5ms"}


def line_and_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], link: dict[str, Any], **sync: Any
) -> tuple[str, End]:
    settings = config.parse(
        {
            "name": "line",
            "out": str(tmp_path),
            "model": {"preset": "tiny"},
            "data": {"limit": 20, "cache": str(tmp_path / "cache")},
            "device": "cpu",
            "train": {"steps": 4, "batch": 1, "sequence": 16, "eval_tokens": 16, "eval_every": 100},
            "sync": sync,
            "link": link,
            "log": {"view": "lines"},
        }
    )
    folder = train(settings)
    (end,) = [event for event in read(folder / "metrics.jsonl") if isinstance(event, End)]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("planned")]
    return line, end


def test_the_workers_of_one_process_wait_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only one of them is ever blocked, but none computes meanwhile: the share does not depend on their number.

    How near the plan comes to what a busy machine measures is benchmarks/predicted.py's to say; here, both shares are
    those of the times that were written down.
    """
    line, end = line_and_end(tmp_path, capsys, SLOW, method="data-parallel", codec="fp32", workers=3)
    (start,) = [event for event in read(tmp_path / "line" / "metrics.jsonl") if isinstance(event, Start)]
    assert len(set(end.wait_s)) == 1
    found = re.search(r"computing ([0-9.]+) % \(measured ([0-9.]+) %\)", line)
    assert found is not None, line
    planned, measured = float(found[1]), float(found[2])
    payloads = tuple(start.payload_bytes)
    job = Job(steps=4, step_s=3 * end.step_s, period=1, payload_bytes=payloads, delay=0, workers=3, gradients=True)
    exposed_s = time_of(job, parse_line(SLOW["emulate"])).exposed_s
    busy_s = end.seconds - end.wait_s[0]
    assert measured == pytest.approx(100 * (1 - end.wait_s[0] / end.seconds), abs=0.51)
    assert planned == pytest.approx(100 * busy_s / (busy_s + exposed_s), abs=0.51)
    assert exposed_s > 0.1


def test_what_is_not_planned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = {"emulate": "100Mbit/s, 1ms", "loss": 0.1, "jitter_s": 0.001}
    line, _ = line_and_end(tmp_path, capsys, link, method="diloco", period=2, workers=2)
    assert line.startswith("planned for 100Mbit/s, 1ms without link.jitter_s and link.loss: computing ")
