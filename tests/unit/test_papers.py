"""benchmarks/papers.py: rows by name, gaps to the same seed, and a table trained from nothing."""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from atoll.settings.run_settings import DataSection
from atoll.train.data.token_files import prepare

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return __import__("papers")


def test_a_row_is_named_by_its_method_and_what_changes_it(papers: ModuleType) -> None:
    assert papers.Row.parse("eager-30").name == "eager-30"
    row = papers.Row.parse("eager-30,lr=0.7,m=0.6,seed=1")
    assert row.name == "eager-30-lr0.7-m0.6-seed1"
    assert papers.Row.named(row.name) == row and row.text == "eager-30,lr=0.7,m=0.6,seed=1"


def test_every_result_in_the_tree_is_named_by_its_row(papers: ModuleType) -> None:
    names = {path.stem for path in papers.RESULTS.glob("*/*.jsonl")}
    assert "streaming-30-fp32-seed1" in names
    for name in names:
        row = papers.Row.named(name)
        assert row.name == name and papers.Row.parse(row.text) == row


@pytest.mark.parametrize("text", ["eager", "eager-30,lr", "eager-30,lr=", "eager-30,rate=0.7", ""])
def test_what_is_no_row_is_refused(papers: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"METHOD\[,key=value"):
        papers.Row.parse(text)


def test_a_gap_is_to_data_parallel_of_the_same_seed(papers: ModuleType) -> None:
    known = papers.load(papers.RESULTS / papers.FIRST_TEXT)
    results = {name: known[name] for name in ("data-parallel", "streaming-30", "streaming-30-seed1")}
    results["data-parallel-seed1"] = known["diloco-30"]
    lines = {line.split(" | ")[0].strip("| "): line for line in papers.table(results)}
    assert known["streaming-30-seed1"].gap(known["diloco-30"]) in lines["streaming-30,seed=1"]
    assert known["streaming-30"].gap(known["data-parallel"]) in lines["streaming-30"]
    assert " | 1.6171 |  |  | " in lines["data-parallel,seed=1"]


@pytest.mark.parametrize("change", ["none", "text", "length"])
def test_rows_of_another_text_or_length_are_left_out(
    papers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    full, short = papers.RESULTS / "books-c6b298e9", papers.RESULTS / "books-c6b298e9-51.2M"
    for kept in full.glob("data-parallel.json*"):
        shutil.copy(kept, tmp_path)
    for ending in (".json", ".jsonl"):
        row = short / "data-parallel" if change == "length" else full / "diloco-30"
        shutil.copy(row.with_suffix(ending), tmp_path / f"diloco-30{ending}")
    if change == "text":
        known = tmp_path / "diloco-30.json"
        known.write_text(json.dumps(json.loads(known.read_text()) | {"text": "another"}))
    assert ("diloco-30" in papers.load(tmp_path)) is (change == "none")
    assert ("diloco-30 is left out" in capsys.readouterr().err) is (change != "none")


def test_a_text_that_is_hard_for_both_alike_adds_no_error(papers: ModuleType) -> None:
    """A gap is a ratio: where one loss is always 1.2 times the other, no other text would give another gap."""
    one = papers.load(papers.RESULTS / "books-c6b298e9")["data-parallel"]
    higher = one._replace(losses=1.2 * one.losses, end=replace(one.end, loss=1.2 * one.end.loss))
    assert higher.gap(one) == "+20.00 % ± 0.00"


def test_sequences_of_one_book_are_one_observation(papers: ModuleType) -> None:
    draw = np.random.default_rng(0)
    known = papers.load(papers.RESULTS / "books-c6b298e9")["data-parallel"]
    books = draw.integers(0, 9, 60).astype(np.uint16)
    hard = draw.normal(0, 0.1, 9)[books]  # what a book adds to one model's loss
    one = known._replace(losses=draw.uniform(3, 4, 60), books=books)
    other = known._replace(losses=one.losses + hard)._replace(books=books)
    error = float(other.gap(one).rpartition("± ")[2])
    twice = [each._replace(losses=np.repeat(each.losses, 2), books=np.repeat(books, 2)) for each in (one, other)]
    assert float(twice[1].gap(twice[0]).rpartition("± ")[2]) == error > 0  # the same books tell nothing new
    apart = [each._replace(books=np.arange(120)) for each in twice]
    assert float(apart[1].gap(apart[0]).rpartition("± ")[2]) < 0.7 * error
    kept = [books != left for left in range(9)]  # the jackknife over books: a standard error by another way
    ratios = np.array([other.losses[some].sum() / one.losses[some].sum() for some in kept])
    assert 100 * np.sqrt(8 / 9 * np.sum((ratios - ratios.mean()) ** 2)) == pytest.approx(error, rel=0.25)


@pytest.mark.slow
def test_a_table_is_trained_on_a_folder_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes longer than training here
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = tmp_path / "text.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"{i} " + " ".join(map(str, range(i, i + 200)))}) + "\n" for i in range(60))
    )
    made = prepare(
        DataSection(source=str(source), tokenizer="bpe", vocabulary=300, held_out=0.2, cache=str(tmp_path / "cache"))
    )
    tokens = made.folder.rename(tmp_path / "books")
    script, rows = [sys.executable, str(ROOT / "benchmarks" / "papers.py")], ["data-parallel", "eager-30,lr=0.7,m=0.6"]
    shape = ["--tokens", "16384", "--preset", "tiny", "--sequence", "32", "--eval-tokens", "1024", "--parallel", "2"]
    folders = ["--text", str(tokens), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    first = subprocess.run([*script, "train", *rows, *folders, *shape], capture_output=True, text=True, check=True)
    assert "eager-30-lr0.7-m0.6: begins" in first.stdout
    again = subprocess.run([*script, "train", *folders, *rows, *shape], capture_output=True, text=True, check=True)
    assert again.stdout.count("in the results already") == 2
    for name in ("data-parallel", "eager-30-lr0.7-m0.6"):
        kept = tmp_path / "results" / name
        assert json.loads(kept.with_name(f"{name}.json").read_text())["sync.workers"] == 2
        assert np.load(kept.with_name(f"{name}.npy")).shape == (32,)
    drawn = subprocess.run([*script, "table", *folders[4:]], capture_output=True, text=True, check=True).stdout
    assert "| eager-30,lr=0.7,m=0.6 | " in drawn and "±" in drawn
