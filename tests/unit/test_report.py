"""Reports on generated runs: numbers by hand, pages that are whole, harmless and the same every time."""

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from rich.console import Console

from atoll import report
from atoll.core.schedule import Schedule
from atoll.errors import AtollError, ConfigError, DataError
from atoll.plan.line import Line
from atoll.plan.simulate import time_of
from atoll.report.canvas import LIGHT, Draw
from atoll.report.figures import pictures
from atoll.report.lanes import clock
from atoll.report.presence import presences
from atoll.report.table import bytes_sent
from atoll.report.trace import entries
from atoll.report.words import lead, warnings_of
from atoll.runs.events import (
    End,
    Eval,
    Event,
    Fault,
    Joined,
    Jsonl,
    Lost,
    Members,
    Resumed,
    RoundApplied,
    Start,
    Step,
)
from atoll.watch.folders import MOST_EVENTS
from atoll.watch.report_page import sections_of, write

LINK = Line(1e6)
HOSTILE = "$\\bad{1}$<script>alert('x')</script>\"><img src=x onerror=alert(1)> \u65e5\u672c \u202e\x1b[31m ]]>&_"


def start(name: str, method: str, **changes: object) -> Start:
    event = Start(
        name=name,
        method=method,
        workers=4,
        steps=40,
        parameters=1000,
        tokens_per_step=32,
        period=10,
        delay=[0] * 4,
        codec="fp32",
        fragments=[600, 400],
        payload_bytes=[2400, 1600],
        vocabulary=256,
        device="cpu",
        threads=1,
        weights=[1.0] * 4,
    )
    return replace(event, **changes)  # type: ignore[arg-type]


def events(first: Start, final: float = 2.0, *, until: int | None = None, missing: int = 0) -> list[Event]:
    """A run whose loss falls to `final` and whose first `missing` rounds lack worker 3."""
    found: list[Event] = [first]
    gradients, sent = first.method == "data-parallel", 0
    schedule = Schedule(1 if gradients else first.period, len(first.payload_bytes), 0)
    rounds = 0
    for step in range(1, (until or first.steps) + 1):
        for fragment in schedule.due(step).send if first.method != "none" else ():
            sent += first.payload_bytes[fragment]
            rounds += 1
            members = [0, 1, 2] if rounds <= missing else [0, 1, 2, 3]
            if not gradients:
                found.append(
                    RoundApplied(
                        step=step, fragment=fragment, applied=step, members=members, expected=4,
                        norm=3.0 + fragment, cosine=0.5, bytes=first.payload_bytes[fragment],
                    )
                )  # fmt: skip
        loss = final + math.exp(-step / 5)
        totals: dict[str, Any] = {"bytes_sent": [sent] * 4, "bytes_received": [3 * sent] * 4, "wait_s": [0.0] * 4}
        if step % 5 == 0:
            found.append(
                Step(
                    step=step, tokens=128 * step, seconds=0.1 * step, step_s=0.02, loss=[loss, loss, None, loss + 0.01],
                    lr=1e-3, grad_norm=[1.0] * 4, tokens_per_s=1280.0, participants=4, **totals,
                )
            )  # fmt: skip
            found.append(Eval(step=step, tokens=128 * step, seconds=0.1 * step, loss=loss, best=True))
    if until is None:
        found.append(
            End(
                step=first.steps, tokens=128 * first.steps, seconds=4.0, step_s=0.02, loss=final, best_loss=final,
                outcome="finished", **totals,
            )
        )  # fmt: skip
    return found


def save(folder: Path, happened: Sequence[Event], toml: str = "") -> Path:
    folder.mkdir(parents=True)
    sink = Jsonl(folder / "metrics.jsonl")
    for event in happened:
        sink.write(event)
    sink.close()
    (folder / "run.toml").write_text(f'name = "run"\n[sync]\nworkers = 4\n{toml}')
    about = {
        "versions": {"torch": "2.13.0"},
        "seed": 7,
        "started": "2025-01-02T03:04:05+00:00",
        "command": "atoll train",
    }
    (folder / "about.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    nan = Fault(step=12, worker=2, what="loss is <b>not</b> finite; left out of its round")
    return [
        save(root / "diloco", [*events(start("diloco", "diloco"), 2.1, missing=3), nan], 'method = "diloco"\n'),
        save(root / "parallel", events(start("parallel", "data-parallel"), 2.0), 'method = "data-parallel"\n'),
        save(root / "hostile", events(start(HOSTILE, "diloco", delay=[0, 0, 5, 10])), 'method = "</style><script>"\n'),
        save(root / "unfinished", events(start("unfinished", "eager", delay=[10] * 4), until=25), 'method = "eager"\n'),
    ]


@pytest.fixture(scope="module")
def records(runs: list[Path]) -> list[report.RunRecord]:
    return report.load_all(runs)


# ---------------------------------------------------------------------- the page


class Page(HTMLParser):
    """What a browser would find."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def content_of(page: Path) -> dict[str, Any]:
    """The content that a page holds."""
    found = re.search(r'id="frozen">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def table(content: dict[str, Any], title: str) -> dict[str, list[str]]:
    """The lines of a table by label."""
    (found,) = (one for one in content["tables"] if one["title"] == title)
    return {label: cells for label, *cells in found["rows"]}


@pytest.fixture(scope="module")
def written(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("out")
    return write(runs, folder / "new" / "page.html", link=Line(1e6), png=folder / "png")


@pytest.fixture(scope="module")
def text(written: list[Path]) -> str:
    return written[0].read_text("utf-8")


def test_all_files_are_written_and_nothing_else(written: list[Path]) -> None:
    names = ["page.html", "loss-tokens.png", "loss-time.png", "bytes.png", "timeline.png", "outer.png"]
    assert [path.name for path in written] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])
    assert sorted(p.name for p in [*written[0].parent.iterdir(), *written[1].parent.iterdir()]) == sorted(names)


@pytest.fixture(scope="module")
def content(written: list[Path]) -> dict[str, Any]:
    return content_of(written[0])


def test_a_page_runs_its_own_script_and_loads_nothing(text: str, content: dict[str, Any]) -> None:
    page = Page(text)
    assert page.tags.count("script") == 2 and page.tags.count("style") == 1
    assert not {"img", "svg", "iframe", "object", "embed", "b"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("action", "src")]
    assert page.values("href") == ["data:,"]
    policy = next(value for value in page.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert content["runs"][2]["run"]["name"].startswith("$\\bad{1}$<script>alert('x')</script>"), "shown, as text"
    assert not re.search("[\x00-\x08\x1b\u202e]", text)


def test_a_page_says_what_matters(content: dict[str, Any]) -> None:
    lead = content["lead"].replace("\u00a0", " ")
    assert content["title"] == "4 runs compared"
    assert lead.startswith("4 runs of a model with 1,000 parameters: 4 workers")
    assert "The reference, parallel, ends at a held-out loss of 2.000 (perplexity 7.39)" in lead
    assert "diloco ends at 2.100 (+5.0 %) with 14.4 kB, 11x fewer" in lead
    assert content["notes"][0].startswith("unfinished is not finished: it is at step 25 of 40")
    assert content["summary"]["rows"][0][:3] == ["diloco", "2.100", "+5.0 %"]
    assert content["summary"]["tags"] == ["3 missed, 1 fault", "reference", "", "62 % done"]
    failed = {label: cells[0] for label, cells in table(content, "Faults and workers left out").items()}
    assert failed == {
        "rounds": "7",
        "incomplete rounds": "3",
        "payloads that did not arrive": "3",
        "share of rounds that a worker's payload reached": ", ".join(
            [*(f"worker {n} 100 %" for n in range(3)), "worker 3 57 %"]
        ),
        "faults": "1",
    }
    assert content["runs"][0]["faults"]["latest"][0]["words"] == "loss is <b>not</b> finite; left out of its round"
    assert [*table(content, "Settings that differ")] == ["sync.method"]
    facts = table(content, "Facts")
    assert facts["versions"][0] == "torch 2.13.0" and facts["started"][0] == "2025-01-02T03:04:05+00:00"


def test_a_page_has_the_sections_of_every_run(content: dict[str, Any]) -> None:
    first, _, _, unfinished = content["runs"]
    assert [run["run"]["name"] for run in content["runs"]][:2] == ["diloco", "parallel"]
    assert first["run"]["state"] == "finished" and unfinished["run"]["step"] == 25
    assert [row[0] for row in first["loss"]["anchor"]] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert set(first["loss"]["workers"]) == {"0", "1", "2", "3"} and first["speed"]["lr"][0] == 1e-3


def test_times_of_a_page_are_those_of_the_cost_model(content: dict[str, Any], records: list[report.RunRecord]) -> None:
    modelled = content["modelled"]
    assert modelled["link"] == "1 Mbit/s" and modelled["window_s"] > 0
    rows = report.summary(records, LINK)
    for row, clocks in zip(rows, modelled["clocks"], strict=True):
        assert clocks["step"][-1] == row.record.step
        assert clocks["seconds"] == pytest.approx([clock(row.job, LINK, step) for step in clocks["step"]], abs=1e-4)
    named = [(lane["run"], lane["workers"]) for lane in modelled["lanes"]]
    assert named == [(0, []), (1, []), (2, [0, 1]), (2, [2]), (2, [3]), (3, [])]
    parallel = modelled["lanes"][1]
    assert parallel["utilisation"] == pytest.approx(rows[1].link_time.utilisation, rel=1e-3)
    assert parallel["waits"][0] == pytest.approx([0.02, 0.068])


def test_without_a_data_parallel_run_its_bytes_are_drawn_beside(records: list[report.RunRecord]) -> None:
    rows = report.summary(records[:1], LINK)
    assert bytes_sent(rows) == [
        (0, "diloco", 14_400, "14.4 kB"),
        (None, "data-parallel", 160_000, "would have sent 160 kB"),
    ]
    bars = pictures(rows, LINK)["bytes"](LIGHT).axes[0].patches
    assert [bar.get_width() for bar in bars] == [14_400, 160_000]  # type: ignore[attr-defined]
    assert [run for run, *_ in bytes_sent(report.summary(records, LINK))] == [0, 1, 2, 3]


def test_waits_and_rounds_are_told_one_by_one_as_far_back_as_there_is_room(tmp_path: Path) -> None:
    first = start("run", "diloco", workers=1, delay=[0], weights=[1.0])
    flown = [
        replace(event, worker=0, members=[0], expected=1, opened_s=n - 0.5, done_s=float(n), waited_s=0.25)
        for n, event in enumerate((e for e in events(first) if isinstance(e, RoundApplied)), 1)
    ]
    record = report.load(save(tmp_path / "run", [first, *flown, *(e for e in events(first) if isinstance(e, Step))]))
    whole, last = (sections_of(record, most)["now"] for most in (8, 7))
    assert whole["from_s"] == 0 and whole["to_s"] == 4.0
    assert [flight[:2] for flight in whole["workers"][0]["flights"]] == [[n - 0.5, n] for n in range(1, 5)]
    assert [wait[:2] for wait in whole["workers"][0]["waits"]] == [[n - 0.25, n] for n in range(1, 5)]
    assert last["from_s"] == 2.0 and [flight[1] for flight in last["workers"][0]["flights"]] == [3.0, 4.0]


def test_the_same_runs_give_the_same_bytes(runs: list[Path], tmp_path: Path) -> None:
    once = write(runs[:1], tmp_path / "a.html", link=Line(1e6), png=tmp_path / "a")
    again = write(runs[:1], tmp_path / "b.html", link=Line(1e6), png=tmp_path / "b")
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    run = save(tmp_path / "run", [start("young", "diloco")])
    (path,) = write([run], tmp_path, link=Line(1e6))
    assert path == tmp_path / "report.html"
    content = content_of(path)
    assert "young has come to step 0 of 40 and no held-out loss and sends nothing." in content["lead"]
    assert content["modelled"] is None and content["title"] == "Run young"


def test_a_page_has_the_title_and_claims_it_is_given(runs: list[Path], tmp_path: Path) -> None:
    claims = ["holds: <b>little</b> is lost (a 2.187, b 2.090: +4.6%)", "does not hold: \x1b[31m& more"]
    (path,) = write(runs[:2], tmp_path, link=LINK, title="Drops <script>", claims=claims)
    content = content_of(path)
    assert content["title"] == "Drops <script>"
    assert content["claims"] == [claims[0], "does not hold: \ufffd[31m& more"]
    assert Page(path.read_text("utf-8")).tags.count("script") == 2


def test_facts_come_from_the_run_file_as_far_as_it_has_them(tmp_path: Path) -> None:
    toml = 'outer = "nesterov"\nouter_lr = 0.7\nouter_momentum = 0.9\n[train]\nlr = 0.002\nbatch = 4\nsequence = 64\n'
    new = save(
        tmp_path / "new", events(start("new", "diloco")), toml + '[data]\nsource = ["a", "<b>"]\ntokenizer = "bpe"\n'
    )
    once: list[Event] = [start("old", "diloco", period=1), Resumed(step=1, seconds=1.0)]
    old = save(tmp_path / "old", once, "outer_lr = 0.5\n")
    (old / "run.toml").write_text("train = 3\n[sync]\nouter_lr = 0.5\n")
    (page,) = write([new, old], tmp_path / "page.html", link=LINK)
    facts = table(content_of(page), "Facts")
    assert facts["outer optimizer"] == ["nesterov, lr 0.7, momentum 0.9", "lr 0.5"]
    assert facts["inner learning rate"] == ["0.002", "-"] and facts["batch, sequences per worker"] == ["4", "-"]
    assert facts["data"] == ["[a, <b>]", "-"] and facts["tokenizer"] == ["bpe", "-"]
    assert facts["period"] == ["10 steps", "1 step"] and facts["resumed"] == ["never", "1 time"]


def test_what_cannot_be_written_is_one_line(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AtollError, match=r"file/page\.html cannot be written: (Not a directory|File exists)"):
        write(runs[1:2], tmp_path / "file" / "page.html", link=Line(1e6))
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_refused_requests(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run"):
        write([], tmp_path / "page.html", link=Line(1e6))
    with pytest.raises(ConfigError, match="rate above 0"):
        write(runs, tmp_path / "page.html", link=Line(0))
    assert not list(tmp_path.iterdir())


def test_importing_the_report_does_not_import_matplotlib() -> None:
    code = "import sys, atoll.report, atoll.watch.report_page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# ---------------------------------------------------------------------- the table


def test_numbers_by_hand(records: list[report.RunRecord]) -> None:
    diloco, parallel, _, unfinished = report.summary(records, LINK)
    assert parallel.is_reference and not diloco.is_reference
    assert diloco.loss == 2.1
    assert diloco.against == pytest.approx(0.05)
    assert diloco.perplexity == pytest.approx(math.exp(2.1))
    assert parallel.sent_bytes == 40 * 4000
    assert diloco.sent_bytes == 4 * 2400 + 3 * 1600  # fragment 1 trails by half a period
    assert diloco.fewer == pytest.approx(160_000 / 14_400)
    assert diloco.record.tokens_per_s == 5120 / 4
    assert (len(diloco.record.rounds), diloco.record.missed, len(diloco.record.faults)) == (7, 3, 1)
    # A round is two-shot among four: 1.5 payloads. Data-parallel waits for 6000 bytes on each of 40 steps.
    assert parallel.link_time.total_s == pytest.approx(40 * (0.02 + 8 * 6000 / 1e6))
    # DiLoCo waits for the 7 rounds and, at the end, for what fragment 1 has not sent.
    assert diloco.link_time.total_s == pytest.approx(40 * 0.02 + 8 * 1.5 * (4 * 2400 + 4 * 1600) / 1e6)
    assert not unfinished.record.finished and unfinished.record.step == 25
    assert unfinished.link_time.compute_s == pytest.approx(25 * 0.02)
    assert unfinished.link_time.bytes_per_worker == 1.5 * (2 * 2400 + 2 * 1600), "no last exchange yet"


def paced(record: report.RunRecord, step_s: float, **changes: object) -> report.RunRecord:
    assert record.end is not None
    first = replace(record.start, **changes)  # type: ignore[arg-type]
    return replace(record, start=first, end=replace(record.end, step_s=step_s))


def test_the_load_of_the_machine_is_not_a_difference_between_runs(records: list[report.RunRecord]) -> None:
    diloco, parallel, _, unfinished = records
    loaded = [paced(diloco, 0.05), paced(parallel, 0.03), unfinished]  # whose step events say 0.02
    assert [row.link_time.compute_s for row in report.summary(loaded, LINK)] == pytest.approx([0.8, 0.8, 25 * 0.02])
    axes = drawn(loaded)["loss-time"](LIGHT).axes[0]
    ends = [curve[0][0] for curve in curves(axes) if len(curve) == 1]
    assert ends[:2] == pytest.approx([row.link_time.total_s for row in report.summary(loaded, LINK)][:2])
    young = replace(unfinished, steps=())
    assert [r.link_time.compute_s for r in report.summary([young, loaded[1]], LINK)] == pytest.approx([0, 1.2])


@pytest.mark.parametrize("change", [{"parameters": 7}, {"tokens_per_step": 64}, {"device": "cuda"}, {"threads": 2}])
def test_runs_that_compute_something_else_keep_their_own_time(
    records: list[report.RunRecord], change: dict[str, object]
) -> None:
    rows = report.summary([paced(records[0], 0.05, **change), paced(records[1], 0.03)], LINK)
    assert [row.link_time.compute_s for row in rows] == pytest.approx([2.0, 1.2])


def test_without_a_data_parallel_run_the_first_is_the_reference(records: list[report.RunRecord]) -> None:
    rows = report.summary([records[3], records[0]], LINK)
    assert [row.is_reference for row in rows] == [True, False]


def test_a_table_fits_a_terminal_and_names_are_not_markup(records: list[report.RunRecord]) -> None:
    tame = [replace(records[0], name="[red]diloco[/]"), records[1], records[3]]
    console = Console(width=80, file=io.StringIO())
    console.print(report.rich_table(report.summary(tame, LINK), LINK))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[red]diloco[/]" in shown and "\u2026" not in shown
    assert re.search(r"2\.100 +\+5\.0 % +8\.17 +14\.4 kB +11x fewer +1,280 +\d", shown)
    assert "3 missed, 1 fault" in shown and "62 % done" in shown and "1 Mbit/s" in shown
    assert "the quickest of the runs' own" in shown


# ---------------------------------------------------------------------- folders


def test_a_page_tells_runs_of_one_name_apart_and_reads_all_of_a_long_one(tmp_path: Path) -> None:
    happened = events(start("same", "diloco"))
    saved = [event for event in happened if isinstance(event, Eval)][:1] * (MOST_EVENTS + 1)
    folders = [save(tmp_path / "a", happened), save(tmp_path / "b", [happened[0], *saved, *happened[1:]])]
    (path,) = write(folders, tmp_path / "page.html", link=LINK)
    runs = content_of(path)["runs"]
    assert [run["run"]["name"] for run in runs] == ["same (a)", "same (b)"]
    assert [run["run"]["state"] for run in runs] == ["finished", "finished"]


def test_runs_of_one_name_are_told_apart_and_a_folder_counts_once(tmp_path: Path) -> None:
    happened = events(start("same", "diloco"))
    a, b = save(tmp_path / "a" / "run", happened), save(tmp_path / "b" / "run", happened)
    other = save(tmp_path / "c" / "run", events(start("other", "diloco")))
    names = [record.name for record in report.load_all([a, b, other, a / ".." / "run"])]
    assert names == ["same (a/run)", "same (b/run)", "other"]


def test_a_folder_of_runs_stands_for_them_in_name_order(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        save(tmp_path / "study" / name, events(start(name, "diloco")))
    (tmp_path / "study" / "pictures").mkdir()
    single = save(tmp_path / "single", events(start("single", "diloco")))
    save(single / "inside", events(start("inside", "diloco")))
    folders = [single, tmp_path / "study" / "b", tmp_path / "study"]
    assert [record.name for record in report.load_all(folders)] == ["single", "b", "a", "c"]
    with pytest.raises(DataError, match=r"pictures is not the folder of a run: it has no metrics\.jsonl"):
        report.load_all([tmp_path / "study" / "pictures"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("rm -r run", r"run does not exist, or is not the folder of a run: give the folder that holds metrics\.jsonl"),
        ("rm -r run; touch run", "run is a file, not the folder of a run"),
        ("rm run/metrics.jsonl", r"run is not the folder of a run: it has no metrics\.jsonl"),
        ("rm run/run.toml", r"it has no run\.toml"),
        (": > run/metrics.jsonl", r"metrics\.jsonl has no start event"),
        ("echo 'a = [' > run/run.toml", r"run\.toml cannot be read"),
        ("printf 'a = \"\\377\"' > run/run.toml", r"run\.toml cannot be read"),
        ("echo '{' > run/about.json", r"about\.json cannot be read"),
        ("echo '[1]' > run/about.json", r"about\.json cannot be read: it should hold one JSON object"),
        ('sed -i \'s/"workers": *4/"workers":3/\' run/metrics.jsonl', "the start event cannot be that of a run: delay"),
        (
            'sed -i \'s/"workers": *4/"workers":1000000000/\' run/metrics.jsonl',
            "workers must be between 1 and 4096, got 1000000000",
        ),
        ('sed -i \'s/"period": *10/"period":4/\' run/metrics.jsonl', "delay must be between 0 and period"),
        ("sed -i '3s/.*/{}/' run/metrics.jsonl", r"metrics\.jsonl"),
    ],
)
def test_folders_that_are_no_runs(tmp_path: Path, damage: str, message: str) -> None:
    save(tmp_path / "run", events(start("run", "diloco", delay=[0, 0, 5, 5])))
    subprocess.run(damage, shell=True, check=True, cwd=tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        report.load(tmp_path / "run")
    assert "\n" not in str(caught.value).strip()


def test_a_run_that_was_interrupted_and_went_on_is_not_at_its_end(tmp_path: Path) -> None:
    first = start("run", "diloco")
    whole = events(first)
    end = whole[-1]
    assert isinstance(end, End)
    stopped = [*events(first, until=20), replace(end, step=20, outcome="interrupted")]
    record = report.load(save(tmp_path / "stopped", stopped))
    assert record.end is not None and not record.finished and record.step == 20
    more = [e for e in whole[:-1] if isinstance(e, Step) and e.step == 25]
    record = report.load(save(tmp_path / "on", [*stopped, Resumed(step=20, seconds=2.0), *more]))
    assert record.end is None and record.step == 25 and len(record.resumes) == 1


def test_a_loss_that_is_gone_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    happened = events(start("run", "diloco"))
    end = happened[-1]
    assert isinstance(end, End)
    record = report.load(save(tmp_path / "run", [*happened[:-1], replace(end, loss=math.nan)]))
    assert record.loss is None
    assert report.summary([record], LINK)[0].perplexity is None


# ---------------------------------------------------------------------- the pictures


def drawn(records: list[report.RunRecord], link: Line = LINK) -> dict[str, Draw]:
    return pictures(report.summary(records, link), link)


def curves(axes: Axes) -> list[list[list[float]]]:
    return [np.asarray(line.get_xydata()).tolist() for line in axes.lines]


def test_loss_is_drawn_where_the_cost_model_has_it(records: list[report.RunRecord]) -> None:
    both = records[:2]
    axes = drawn(both)["loss-time"](LIGHT).axes[0]
    held_out = [curve for curve in curves(axes) if len(curve) > 1][1::2]  # training loss comes first
    for record, curve in zip(both, held_out, strict=True):
        assert curve[-1][0] == pytest.approx(time_of(record.job(), LINK).total_s)
        assert curve[0] == [pytest.approx(clock(record.job(), LINK, 5)), pytest.approx(record.evals[0].loss)]


def test_the_clock_counts_what_was_waited_up_to_a_step(records: list[report.RunRecord]) -> None:
    """Fragment 0 goes out after step 10 and 20, fragment 1 after step 15."""
    waited = [clock(records[0].job(), LINK, step) - step * 0.02 for step in (9, 10, 14, 15, 20)]
    first, second = 8 * 1.5 * 2400 / 1e6, 8 * 1.5 * 1600 / 1e6
    assert waited == pytest.approx([0, first, first, first + second, 2 * first + second])


def test_outer_gradients_are_whole_periods(records: list[report.RunRecord]) -> None:
    """Fragments of norm 3 and 4 make 5; the period whose second fragment was never sent is left out."""
    last = replace(records[0].rounds[1], step=40, norm=99.0)  # the rest of fragment 1, sent when the run finishes
    record = replace(records[0], rounds=(*records[0].rounds, last))
    norm, cosine = drawn([record])["outer"](LIGHT).axes
    assert curves(norm) == [[[15, 5.0], [25, 5.0], [35, 5.0]]]
    assert curves(cosine) == [[[15, 0.5], [25, 0.5], [35, 0.5]]]


def test_a_timeline_shows_each_kind_of_worker(records: list[report.RunRecord]) -> None:
    words = [text.get_text() for text in drawn(records[2:3])["timeline"](LIGHT).axes[0].texts]
    assert [w.rpartition(", worker")[2] for w in words[::2]] == ["s 0, 1", " 2", " 3"]


def test_bytes_are_drawn_to_scale(records: list[report.RunRecord]) -> None:
    bars = drawn(records[:2])["bytes"](LIGHT).axes[0].patches
    assert [bar.get_x() + bar.get_width() for bar in bars] == [14_400, 160_000]  # type: ignore[attr-defined]


def test_long_runs_are_thinned_but_keep_their_end(records: list[report.RunRecord]) -> None:
    one = records[0].evals[-1]
    many = tuple(replace(one, step=n, tokens=n, loss=2 + 1 / n) for n in range(1, 5001))
    axes = drawn([replace(records[0], evals=many)])["loss-tokens"](LIGHT).axes[0]
    curve = max(curves(axes), key=len)
    assert 200 < len(curve) < 400 and curve[-1] == [5000, 2 + 1 / 5000]


def test_evaluations_are_dots_unless_there_are_too_many(records: list[report.RunRecord]) -> None:
    lines = drawn(records[:1])["loss-tokens"](LIGHT).axes[0].lines
    assert [line.get_marker() for line in lines[:2]] == ["None", "o"] and len(curves(lines[1].axes)[1]) == 8  # type: ignore[arg-type]
    many = tuple(replace(records[0].evals[-1], tokens=n) for n in range(1, 100))
    lines = drawn([replace(records[0], evals=many)])["loss-tokens"](LIGHT).axes[0].lines
    assert lines[1].get_marker() == "None"


def test_the_training_loss_of_the_last_half_is_in_sight(records: list[report.RunRecord]) -> None:
    def trained(record: report.RunRecord, *late: float) -> report.RunRecord:
        values = [9.0] * (len(record.steps) - len(late)) + list(late)
        steps = tuple(replace(s, loss=[y] * 4) for s, y in zip(record.steps, values, strict=True))
        return replace(record, steps=steps)

    late = trained(records[0], 3.5, 1.1, 1.2, 1.3, 1.4)
    low, high = drawn([late, records[1]])["loss-tokens"](LIGHT).axes[0].get_ylim()
    assert low < 1.1 < 3.5 < high < 9, "not the first half"
    axes = drawn([late])["loss-tokens"](LIGHT).axes[0]
    assert axes.get_ylim()[1] > 9, "a run alone is shown from its first step"
    assert curves(axes)[0][0] == [late.steps[0].tokens, 9.0]
    assert drawn([trained(records[0], 3, 3, 3, 3, 1e9)])["loss-tokens"](LIGHT).axes[0].get_ylim()[1] < 10


def test_pictures_without_data_are_left_out(records: list[report.RunRecord]) -> None:
    silent = replace(records[0], evals=(), steps=(), rounds=(), end=None)
    assert list(drawn([silent])) == ["bytes"]


def test_times_that_differ_much_are_on_a_logarithmic_axis_with_words(records: list[report.RunRecord]) -> None:
    slow = Line(1e4)  # data-parallel takes 193 s here, DiLoCo 20 s
    axes = drawn(records[:2], slow)["loss-time"](LIGHT).axes[0]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["100 ms", "1 s", "10 s", "1 min"]
    assert drawn(records[:1], slow)["loss-time"](LIGHT).axes[0].get_xscale() == "linear"


# ---------------------------------------------------------------------- words


def test_of_many_runs_the_outstanding_are_told(records: list[report.RunRecord]) -> None:
    diloco, parallel = records[:2]
    others = [replace(diloco, name=f"run {n}", evals=(), end=replace(diloco.end, loss=2.2 - n / 100)) for n in range(6)]  # type: ignore[type-var]
    words = lead(report.summary([parallel, *others], LINK), LINK).replace("\u00a0", " ")
    assert "Among the others the lowest loss: run 5 ends at 2.150 (+7.5 %)" in words
    assert "The fewest bytes and the shortest time: run 0 ends at 2.200" in words
    assert "run 3 ends" not in words


def test_runs_that_cannot_be_compared_are_noted(records: list[report.RunRecord]) -> None:
    diloco, parallel = records[:2]
    assert not list(warnings_of([diloco, parallel]))
    alone = replace(parallel.start, method="none", workers=1, delay=[0], vocabulary=512)
    other = replace(parallel, start=alone, end=replace(parallel.end, tokens=99))  # type: ignore[type-var]
    words = " ".join(warnings_of([diloco, other]))
    assert "have not trained on the same number of tokens" in words
    assert "different vocabularies: their losses per token cannot be compared" in words
    assert "different numbers of workers" in words


# ---------------------------------------------------------------------- the picture of members


def elastic(folder: Path) -> Path:
    """Save a run of 40 steps as two of its workers have recorded it."""

    def view(number: int, training: list[int], following: list[int], boundary: int) -> Members:
        return Members(
            step=boundary, view=number, members=training, following=following, boundary=boundary, seconds=boundary / 10
        )

    of_both = [view(1, [0, 1, 2], [], 0), view(2, [0, 1], [], 10), view(3, [0, 1], [2], 16)]
    of_one = [view(4, [0, 1, 2], [], 20), view(5, [0, 1], [], 32), view(6, [1], [], 30)]
    told: list[Event] = [Lost(step=12, worker=2, why="is silent"), Joined(step=21, worker=2, at=20)]
    seen: list[list[Event]] = [[*of_both, *told], [*of_both, *of_one]]
    for worker, more in enumerate(seen):
        first, *others, end = events(start("x", "diloco", worker=worker))
        in_order = sorted([*others, *more], key=lambda event: getattr(event, "step", 0))
        save(folder / f"worker-{worker}", [first, *in_order, end])
    return folder


def test_the_lanes_of_members_come_from_all_views(tmp_path: Path) -> None:
    first, second, third, fourth = presences(report.load(elastic(tmp_path / "run")))
    assert (first.training, first.lost, first.joined) == ([(0, 30)], [30], [])
    assert (second.training, second.lost, second.joined) == ([(0, 40)], [], [])
    assert (third.training, third.following) == ([(0, 10), (20, 30)], [(16, 20)])
    assert (third.lost, third.joined, third.share(40)) == ([10, 30], [20], 0.5)
    assert not fourth.training and fourth.share(40) == 0.0


def test_a_page_has_the_members_of_an_elastic_run(tmp_path: Path) -> None:
    fixed = save(tmp_path / "fixed", events(start("fixed", "diloco")))
    (path,) = write([elastic(tmp_path / "run"), fixed], tmp_path / "page.html", link=LINK)
    content = content_of(path)
    assert table(content, "Facts")["workers that trained at the end"] == ["1 of 4", "-"]
    lanes = {lane["worker"]: lane for lane in content["runs"][0]["lanes"]["workers"]}
    assert [what for _, _, what in lanes[2]["spans"]] == ["training", "away", "catching up", "training", "away"]
    assert [kind for _, kind, _ in lanes[2]["marks"]] == ["lost", "joined", "lost"]
    assert content["runs"][0]["lanes"]["views"] and not content["runs"][1]["lanes"]["views"]


def test_a_trace_tells_of_losses_and_admissions(tmp_path: Path) -> None:
    found = [entry for entry in entries([report.load(elastic(tmp_path / "run"))]) if entry["ph"] == "i"]
    told = {entry["name"]: entry["args"] for entry in found if "worker 2" in entry["name"]}
    assert told == {
        "worker 2 is gone": {"step": 12, "why": "is silent"},
        "worker 2 has joined": {"step": 21, "at": 20},
    }
