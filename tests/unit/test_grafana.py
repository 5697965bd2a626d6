"""The dashboard in examples/grafana.json: every metric and label in it is one that `atoll watch` serves."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

from atoll.runs.events import End, Step
from atoll.runs.lines import Lines
from atoll.watch.compose import compose
from atoll.watch.prometheus import metrics
from made_up_runs import BEGAN
from watch_fixture import elastic_events, live_run

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "examples" / "grafana.json").read_text(encoding="utf-8")
)
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def served() -> dict[str, tuple[str, set[str]]]:
    """Metric -> its type and labels, of a run between machines that is under way."""
    logs = [[event for event in log if not isinstance(event, End)] for log in elastic_events()]
    for worker, log in enumerate(logs):
        last = next(event for event in reversed(log) if isinstance(event, Step))
        sent = [0 if other == worker else 1000 for other in range(3)]
        speeds = [None if other == worker else 1e6 for other in range(3)]
        log.append(
            Lines(
                step=last.step,
                seconds=last.seconds,
                worker=worker,
                sent_bytes=sent,
                received_bytes=sent,
                capacity=speeds,
            )
        )
    text = metrics(json.loads(json.dumps(compose(live_run(logs), 1.0, BEGAN + 60.0))))
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels = {
        name: set(re.findall(r'(\w+)="', line)) for name, line in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE)
    }
    return {name: (types[name], labels[name]) for name in types}


def test_every_metric_in_it_exists_and_every_metric_is_in_it() -> None:
    used = {name for target in TARGETS for name in re.findall(r"atoll_\w+", target["expr"])}
    assert used == set(served())


def test_labels_in_it_exist_and_counters_are_shown_as_rates() -> None:
    there = served()
    for target in TARGETS:
        (name,) = re.findall(r"atoll_\w+", target["expr"])
        kind, labels = there[name]
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target
        assert "run" in labels and '{run=~"$run"}' in target["expr"]
        assert ("rate(" in target["expr"]) == (kind == "counter" and name != "atoll_faults_total"), target


def test_it_can_be_imported() -> None:
    assert not DASHBOARD.get("id") and [entry["name"] for entry in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "run",
    ]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" and panel["description"] for panel in panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = (other["x"] >= one["x"] + one["w"] or one["x"] >= other["x"] + other["w"]) or (
            other["y"] >= one["y"] + one["h"] or one["y"] >= other["y"] + other["h"]
        )
        assert apart, (one, other)
