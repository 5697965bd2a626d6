"""The examples in README and docs run as they stand."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from atoll.core.codec import Codec
from atoll.shapes import preset
from atoll.study import read
from atoll.units import bytes_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str) -> None:
    exec(compile(block, "example", "exec"), {"__name__": "__main__"})


def test_the_first_block_of_the_readme_is_a_training_loop_that_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (first,) = (block.values[0] for block in BLOCKS if block.id == "README.md-0")
    exec(compile(str(first), "README", "exec"), {})
    losses = [float(x) for x in capsys.readouterr().out.strip(" []\n").split(",")]
    assert len(losses) == 4
    assert max(losses) < 1.0, "the target has variance 8"


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll", "demo", "--steps", "20", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    assert "x fewer" in done.stdout and "def main(" in done.stdout
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


TOML = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", TOML)
def test_run_files_in_the_docs_are_good(block: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(block)
    assert read([file]).runs


def test_the_table_of_results_is_that_of_the_raw_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    papers = importlib.import_module("papers")
    results, page = papers.load(papers.RESULTS / papers.FIRST_TEXT), (ROOT / "docs" / "results.md").read_text()
    assert "\n".join(papers.table(results)) in page
    for books in ("books-c6b298e9", "books-3bf087d0-51.2M"):
        assert "\n".join(papers.table(papers.load(papers.RESULTS / books))) in page
    fresh = papers.load(papers.RESULTS / "books-c6b298e9")
    base, streaming, eager = (fresh[n] for n in ("data-parallel", "streaming-30-lr0.7-m0.6", "eager-30-lr0.8-m0.5"))
    above = [f"{100 * (one.end.loss / base.end.loss - 1):.2f}" for one in (streaming, eager)]
    fewer = mean(base.end.bytes_sent) / mean(streaming.end.bytes_sent)
    assert f"Streaming-30 ends {above[0]} % and Eager-30 {above[1]} % above" in page
    assert f"at a {fewer:.0f}th of its payload bytes" in page
    for cost in papers.costs_of_4_bits(results):
        assert cost in " ".join(page.split())
    readme = " ".join((ROOT / "README.md").read_text().split())
    both = [results[name] for name in ("streaming-30", "streaming-30-seed1")]
    gaps = [f"{100 * (one.end.loss / results['data-parallel'].end.loss - 1):.1f}" for one in both]
    sent = [bytes_text(mean(one.end.bytes_sent)) for one in (both[0], results["data-parallel"])]
    assert f"ended {gaps[0]} and {gaps[1]} % (two seeds" in readme
    assert f"payloads of {sent[0]} a worker instead of {sent[1]}" in readme


def test_figures_of_the_gpu_are_those_of_the_raw_numbers() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    results = {file.stem: json.loads(file.read_text()) for file in (ROOT / "benchmarks" / "results").glob("*.json")}
    rows = [[row["kernel"], f"{100 * row['share']:.0f} %"] for row in results["gpu_sync"]["kernels"][1:]]
    rows += [row_of_rounds(name, row) for name, row in results["gpu_sync"]["rounds"].items()]
    for row in results["mfu"]["rows"]:
        share = f"{100 * row['mfu']:.1f} % of {row['matmul_flops'] / 1e12:.0f} TFLOP/s"
        rows += [[row["preset"], row["batch"], f"{row['tokens_per_s']:,.0f}", share, f"{row['memory_gib']:.1f} GiB"]]
    for row in results["recorded"]["rows"]:
        taken = [f"{1e3 * row[f'{kind}_step_s']:.1f} ms" for kind in ("launched", "recorded")]
        rows += [[row["preset"], row["batch"], f"{row['pass_flops']:.1e}", *taken, f"{row['faster']:.1f}"]]
    for cells in rows:
        assert f"| {' | '.join(map(str, cells))} |\n" in page
    rounds = results["gpu_sync"]["rounds"]["1B"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"took {100 * rounds['shared']['added']:.1f} % longer" in readme
    outer, offload = (100 * (rounds["peaks"][mode] / rounds["peaks"]["bare"] - 1) for mode in ("outer", "offload"))
    assert f"peak memory grew by {outer:.0f} %, by {offload:.1f} % with `offload`" in readme
    kernels_s = kernels_of_a_period(results["gpu_sync"]["kernels"], preset("1B").parameters)
    share = f"{1e3 * kernels_s:.0f} ms a period at 1B (1.27 billion parameters), "
    share += f"{100 * kernels_s / (30 * rounds['one']['bare_step_s']):.2f} % of 30 steps"
    assert share in " ".join(page.split())
    rates = [row["matmul_flops"] / 1e12 for row in results["mfu"]["rows"]]
    assert f"({min(rates):.0f} to {max(rates):.0f} TFLOP/s here)" in " ".join(page.split())


def kernels_of_a_period(kernels: list[dict[str, Any]], parameters: int) -> float:
    """Seconds that one of two workers' kernels take to exchange all parameters once, by their measured rates."""
    payload = Codec("e3m0").payload_bytes(parameters)
    moved = {
        "encode e3m0, float32 parameters": 8 * parameters + payload,
        "decode e3m0 of 2 members into their mean": 4 * parameters + 2 * payload,
        "outer step and blend, float32 parameters": 28 * parameters,
        "inner products of 2 members, e3m0": 2 * payload,
        "fingerprint of an anchor": 4 * parameters,
    }
    rates = {row["kernel"]: row["bytes_per_s"] for row in kernels}
    return float(sum(moved[kernel] / rates[kernel] for kernel in moved))


def row_of_rounds(name: str, row: dict[str, Any]) -> list[str | int]:
    added = {}
    for case in ("shared", "one", "offload"):
        low, high = (100 * of(row[case]["added_in_each"]) for of in (min, max))
        added[case] = f"{100 * row[case]['added']:+.2f} % ({low:+.2f} to {high:+.2f})"
    both, one = (f"{1e3 * row[case]['bare_step_s']:.0f} ms" for case in ("shared", "one"))
    memory = ["", "", ""]
    if peaks := row.get("peaks"):
        more = [f"{100 * (peaks[mode] / peaks['bare'] - 1):+.1f} %" for mode in ("outer", "offload")]
        memory = [f"{peaks['bare'] / 2**30:.1f} GiB", *more]
    return [name, row["batch"], both, added["shared"], one, added["one"], added["offload"], *memory]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
