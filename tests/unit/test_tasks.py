"""Data of evaluation tasks: rows become the harness's documents, and every mistake names its file and line."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atoll.errors import ConfigError, DataError
from atoll.evaluation.evaluate import evaluate
from atoll.evaluation.tasks import LocalTask, find_tasks, read_task, read_tasks
from atoll.report.record import EventLog, RunRecord, merge
from atoll.report.tasks import accuracy_text, comparison_table, score_table, scores_by_task
from atoll.runs.events import Start
from atoll.runs.scored import Scored
from atoll.watch.compose import scores_section
from task_files import BLIMP, made, write_data, write_rows


@pytest.fixture
def harness(tmp_path: Path) -> Path:
    """The harness's folder of tasks, as far as names are read from it."""
    for name in (*BLIMP, "_blimp"):
        write_rows(tmp_path / "harness" / "blimp" / f"{name}.yaml", [])
    return tmp_path / "harness"


def task_of(name: str, harness: Path) -> LocalTask:
    (task,) = find_tasks([name], harness)
    return task


@pytest.mark.parametrize("name", made())
def test_rows_become_the_documents_of_the_harness(tmp_path: Path, harness: Path, name: str) -> None:
    tasks = made(count=5)
    data = read_task(task_of(name, harness), write_data(tmp_path / "data", tasks))
    assert [*map(prompted, data.documents)] == [*map(prompted, tasks[name].harness)]
    guesses = {"arc_easy": 0.25, "openbookqa": 0.25, "lambada_openai": 0.0}
    assert data.chance == guesses.get(name, 0.5) and len(data.sha256) == 64


def prompted(document: dict[str, Any]) -> dict[str, Any]:
    """A document; one of WinoGrande as its two texts, for the place of the gap is free."""
    if "sentence" not in document:
        return document
    before, _, after = document["sentence"].partition("_")
    return {"texts": [before + document[f"option{n}"] + after for n in (1, 2)], "answer": document["answer"]}


def test_chance_is_the_mean_over_questions(tmp_path: Path, harness: Path) -> None:
    rows = [{"query": "q", "choices": ["a", "b", "c", "d"][:count], "gold": 0} for count in (2, 4, 4, 4)]
    write_rows(tmp_path / "arc_easy.jsonl", rows)
    assert read_task(task_of("arc_easy", harness), tmp_path).chance == 0.3125


GOOD: dict[str, dict[str, Any]] = {
    "arc_easy": {"query": "q", "choices": ["a", "b"], "gold": 0},
    "piqa": {"query": "q", "choices": ["a", "b"], "gold": 0},
    "boolq": {"query": "Passage: p\nQuestion: q?", "choices": ["no", "yes"], "gold": 0},
    "lambada_openai": {"context": "c", "continuation": "w"},
    "winogrande": {"context_options": ["a", "b"], "continuation": "c", "gold": 0},
    "blimp_wh_island": {"sentence_good": "g", "sentence_bad": "b"},
}


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("arc_easy", {"gold": 2}, "gold must be the index of a choice, 0 to 1, got 2"),
        ("arc_easy", {"gold": -1}, "gold: "),
        ("arc_easy", {"gold": "0"}, "gold: "),
        ("arc_easy", {"choices": ["a"]}, "choices: "),
        ("arc_easy", {"choices": ["a", ""]}, "choices.1: "),
        ("arc_easy", {"query": None}, "query: "),
        ("piqa", {"choices": ["a", "b", "c"]}, "choices must have 2 texts, got 3"),
        ("boolq", {"choices": ["yes", "no"]}, 'choices must be ["no", "yes"]'),
        ("boolq", {"query": "Passage: p"}, '"Question: "'),
        ("lambada_openai", {"continuation": "two words"}, "continuation must be one word, got 'two words'"),
        ("lambada_openai", {"context": " \n"}, "context: must hold more than spaces"),
        ("arc_easy", {"query": "\u00a0"}, "query: must hold more than spaces"),
        ("winogrande", {"context_options": ["a", " "]}, "context_options.1: must hold more than spaces"),
        ("winogrande", {"context_options": ["a"]}, "context_options: "),
        ("winogrande", {"gold": 2}, "gold: "),
        ("blimp_wh_island", {"sentence_bad": ""}, "sentence_bad: "),
    ],
)
def test_a_row_of_another_shape_is_told_with_file_and_line(
    tmp_path: Path, harness: Path, name: str, change: dict[str, Any], told: str
) -> None:
    task = task_of(name, harness)
    path = write_rows(tmp_path / f"{task.files[0]}.jsonl", [GOOD[name], GOOD[name] | change])
    with pytest.raises(DataError) as refused:
        read_task(task, tmp_path)
    said = str(refused.value)
    assert f"{path}, line 2: " in said and told in said and task.row.WANTED in said
    assert refused.value.path == path


@pytest.mark.parametrize("line", ["[1]", "not JSON", '{"a": NaN}', "\udcff"])
def test_a_line_that_is_no_object_is_told(tmp_path: Path, harness: Path, line: str) -> None:
    (tmp_path / "piqa.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(DataError, match="line 1: "):
        read_task(task_of("piqa", harness), tmp_path)


def test_blank_lines_are_skipped_and_a_line_that_is_no_json_is_numbered_once(tmp_path: Path, harness: Path) -> None:
    good, path = json.dumps(GOOD["piqa"]), tmp_path / "piqa.jsonl"
    path.write_text(f"\n{good}\n \r\n{good}\n\n")
    assert len(read_task(task_of("piqa", harness), tmp_path).documents) == 2
    path.write_text(f'{good}\n\n{{"query": }}\n')
    with pytest.raises(DataError) as refused:
        read_task(task_of("piqa", harness), tmp_path)
    assert f"{path}, line 3: Expecting value (column 11); a line must be" in str(refused.value)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="holds no line"):
        read_task(task_of("piqa", harness), tmp_path)


def test_a_file_may_have_either_name_but_must_be_one(tmp_path: Path, harness: Path) -> None:
    task = task_of("openbookqa", harness)
    with pytest.raises(DataError, match=r"openbookqa\.jsonl or openbook_qa\.jsonl"):
        read_task(task, tmp_path)
    row = [GOOD["arc_easy"]]
    write_rows(tmp_path / "a" / "openbookqa.jsonl", row)
    assert read_task(task, tmp_path).documents == read_task(task, tmp_path / "a").documents
    write_rows(tmp_path / "b" / "openbook_qa.jsonl", row)
    with pytest.raises(DataError, match="several files"):
        read_task(task, tmp_path)
    with pytest.raises(DataError, match="not a folder"):
        read_task(task, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "openbookqa.jsonl").touch()
    with pytest.raises(DataError, match="holds no line"):
        read_task(task, tmp_path / "empty")
    (tmp_path / "folder" / "openbookqa.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be read"):
        read_task(task, tmp_path / "folder")


def test_missing_files_of_blimp_are_counted_and_their_source_is_named(tmp_path: Path, harness: Path) -> None:
    data, tasks = tmp_path / "data", find_tasks(["blimp"], harness)
    data.mkdir()
    for there, told in (
        ([], "lack 2 of the 2 files of BLiMP, the first being adjunct_island.jsonl"),
        (["adjunct_island"], "lack 1 of the 2 files of BLiMP, the first being wh_island.jsonl"),
    ):
        for name in there:
            write_rows(data / "inner" / f"{name}.jsonl", [GOOD["blimp_wh_island"]])
        with pytest.raises(DataError, match=told) as refused:
            read_tasks(tasks, data)
        assert "folder data of https://github.com/alexwarstadt/blimp" in str(refused.value)
    write_rows(data / "wh_island.jsonl", [GOOD["blimp_wh_island"]])
    assert [each.task for each in read_tasks(tasks, data)] == tasks
    with pytest.raises(DataError, match="not a folder"):
        read_tasks(tasks, tmp_path / "none")


def test_names_are_found_once_each_and_blimp_is_all_its_pairs(harness: Path) -> None:
    found = find_tasks(["piqa", "blimp_wh_island", "blimp", "piqa"], harness)
    assert [(task.name, task.group) for task in found] == [
        ("piqa", None),
        ("blimp_wh_island", "blimp"),
        ("blimp_adjunct_island", "blimp"),
    ]
    for wrong in (["hellaswag"], ["blimp_wh"], ["blimp__blimp"], []):
        with pytest.raises(ConfigError) as refused:
            find_tasks(wrong, harness)
        assert refused.value.setting == "tasks"
    assert "arc_easy" in str(refused.value) or not wrong


def test_without_the_harness_an_evaluation_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll\[eval\]'"):
        evaluate(tmp_path, ["piqa"], tmp_path)


# ---------------------------------------------------------------------- what is shown


def scored(task: str, accuracy: float, **changes: Any) -> Scored:
    event = Scored(task=task, weights="final", documents=400, accuracy=accuracy, stderr=0.0125, chance=0.25)
    return replace(event, **changes)


def record(name: str, *scores: Scored) -> RunRecord:
    sizes: dict[str, Any] = {"parameters": 1, "tokens_per_step": 1, "period": 1, "vocabulary": 2, "threads": 1}
    lists: dict[str, Any] = {"delay": [0], "fragments": [1], "payload_bytes": [4], "weights": [1.0]}
    start = Start(name=name, method="diloco", workers=1, steps=1, codec="fp32", device="cpu", **sizes, **lists)
    return RunRecord(
        start=start, scores=scores, name=name, folder=Path(), config={}, about={}, processes=(EventLog(start=start),)
    )


def text_of(table: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return stream.getvalue()


def test_runs_are_compared_by_their_newest_scores_and_groups() -> None:
    group = scored("blimp", 0.75), scored("blimp_a", 0.1, group="blimp")
    one = record("one", scored("piqa", 0.5), scored("piqa", 0.625), *group)
    two = record("two", scored("piqa", 0.6, weights="best", stderr=None))
    assert scores_by_task([one, two]) == {
        "blimp, 400 documents, chance 25.0 %": ["75.00 ± 1.25 %", "-"],
        "piqa (best), 400 documents, chance 25.0 %": ["-", "60.00 %"],
        "piqa, 400 documents, chance 25.0 %": ["62.50 ± 1.25 %", "-"],
    }
    told = text_of(comparison_table([one, two]))
    assert "62.50 ± 1.25 %" in told and "chance" in told and "two" in told
    assert comparison_table([record("three")]) is None and scores_by_task([record("three")]) == {}


def test_scores_on_different_documents_are_not_side_by_side() -> None:
    runs = record("one", scored("piqa", 0.5, documents=1838)), record("two", scored("piqa", 0.6))
    assert scores_by_task(runs) == {
        "piqa, 1,838 documents, chance 25.0 %": ["50.00 ± 1.25 %", "-"],
        "piqa, 400 documents, chance 25.0 %": ["-", "60.00 ± 1.25 %"],
    }


def test_a_report_of_one_run_has_documents_and_chance() -> None:
    one = record("one", scored("piqa", 0.5), scored("piqa", 0.6, documents=1838, chance=0.5), scored("a", 1, group="b"))
    assert scores_section(one) == [["piqa", "1,838", "60.00 ± 1.25 %", "50.0 %"]]
    assert scores_section(None) == []


def test_one_evaluation_is_a_table() -> None:
    told = text_of(
        score_table([scored("piqa", 0.5, by_length=0.52, by_length_stderr=0.01), scored("b_a", 1, group="b")])
    )
    assert "50.00 ± 1.25 %" in told and "52.00 ± 1.00 %" in told and "25.0 %" in told and "\n   a " in told
    assert accuracy_text(None, None) == "-"


def test_scores_of_all_workers_are_those_of_the_run() -> None:
    start = replace(record("r").start, workers=2)
    logs = [EventLog(start=replace(start, worker=k), scores=(scored(str(k), 0.5),)) for k in (0, 1)]
    assert [score.task for score in merge(logs).scores] == ["0", "1"]
