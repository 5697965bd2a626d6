"""README and docs: their code runs, their figures are those of the raw files, and they document every public name."""

import ast
import copy
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import atoll
from atoll.core.codec import Codec
from atoll.settings.model_presets import preset
from atoll.settings.study import read

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
"""Pages for users: neither decisions nor the changelog, which keep the names of their time."""
DEEPER = (
    "atoll.plan",
    "atoll.train",
    "atoll.link.ranks",
    "atoll.link.elastic_ranks",
    "atoll.link.elastic_shards",
    "atoll.integrations",
)
"""Modules below `atoll` that docs may import from: the applications, and links for workers of several processes."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code of a page in this language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def plain(page: str) -> str:
    """The text of a page on one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str, tmp_path: Path) -> None:
    if "__main__" in block:  # a script that starts processes
        (tmp_path / "example.py").write_text(block, encoding="utf-8")
        done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    exec(compile(block, "example", "exec"), {"__name__": "__main__"})


def test_the_first_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks(DOCS / "index.md", "python")[0], "index.md", "exec"), {})
    losses = [float(x) for x in capsys.readouterr().out.strip(" []\n").split(",")]
    assert len(losses) == 4
    assert max(losses) < 1.0, "the target has variance 8"


def test_readme_has_at_most_900_words_besides_code() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert 300 < len(prose.split()) <= 900


class GPT(nn.Module):
    """The interface of nanoGPT's model, small enough for a test: blocks, tied weights, logits and loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, width)
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(4))
        self.lm_head = nn.Linear(width, 16, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens)
        for block in self.h:
            x = x + block(x)
        logits = self.lm_head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_the_diff_of_the_readme_makes_a_worker_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    (diff,) = blocks(ROOT / "README.md", "diff")
    before, after = ("\n".join(line[1:] for line in diff.splitlines() if line[:1] != sign) for sign in "+-")
    compile(before, "before", "exec")
    start = GPT(8)  # made once: the workers of this test are threads, which share torch's generator
    module = ModuleType("model")
    vars(module).update(GPT=lambda config: copy.deepcopy(start), GPTConfig=dict)
    monkeypatch.setitem(sys.modules, "model", module)
    mine = threading.local()
    monkeypatch.setattr(atoll, "connect", lambda address, *, worker, workers, keys: mine.link)
    really = sys

    class Sys(ModuleType):  # the workers of this test are threads, each with a command line of its own
        def __getattr__(self, name: str) -> Any:
            return ["train.py", str(mine.link.worker)] if name == "argv" else getattr(really, name)

    monkeypatch.setitem(sys.modules, "sys", Sys("sys"))

    def train(link: Any) -> tuple[list[Tensor], int]:
        def get_batch(split: str) -> tuple[Tensor, Tensor]:
            tokens = torch.randint(16, (4, 9), generator=data)
            return tokens[:, :-1], tokens[:, 1:]

        mine.link = link
        data = torch.Generator().manual_seed(link.worker)
        names: dict[str, Any] = {"max_iters": 203, "get_batch": get_batch}
        exec(compile(after, "after", "exec"), names)
        return list(names["model"].parameters()), names["outer"].counters.rounds_applied

    (first, rounds), (second, _) = atoll.run_local(train, atoll.local(workers=2))
    assert rounds > 4 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], start.wte.weight)


def names_imported(code: str) -> Iterator[str]:
    """Dotted names that some Python code takes from atoll: by import, or as attributes of the package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "atoll":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("atoll."))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "atoll":
            yield f"atoll.{node.attr}"


def test_code_in_docs_and_examples_imports_public_names_alone() -> None:
    codes = [block for page in GUIDES for language in ("python", "py") for block in blocks(page, language)]
    codes += [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.py"))]
    names = {name for code in codes for name in names_imported(code)}
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert (module == "atoll" and attribute in atoll.__all__) or module.startswith(DEEPER), name
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_public_name_is_in_the_guides_and_in_the_reference() -> None:
    guides = {page: page.read_text(encoding="utf-8") for page in GUIDES}
    reference = re.findall(r"^::: atoll\.(\w+)$", guides.pop(DOCS / "api.md"), re.MULTILINE)
    assert sorted(reference) == sorted(atoll.__all__)
    used = set(re.findall(r"\batoll\.(\w+)", " ".join(guides.values())))
    for page in guides:
        used |= {name.rpartition(".")[2] for block in blocks(page, "python") for name in names_imported(block)}
    assert not set(atoll.__all__) - used


def test_names_below_atoll_that_guides_mention_exist() -> None:
    for page in GUIDES:
        for name in re.findall(r"`(atoll(?:\.\w+){2,})", page.read_text(encoding="utf-8")):
            if name.startswith("atoll.checkpoint."):
                continue
            assert name.startswith(DEEPER), f"{page.name}: {name}"
            module, _, attribute = name.rpartition(".")
            found = hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name)
            assert found, f"{page.name}: {name}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"(\S+\.md)$", nav, re.MULTILINE)) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    )


def test_the_map_in_the_design_has_the_rooms_that_are_there() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^src/atoll/\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source = ROOT / "src" / "atoll"
    rooms = {path.name for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == rooms
    named = {name for line in tree.splitlines() for name in re.findall(r"\b\w+\.py\b", line)}
    assert named <= {path.name for path in source.rglob("*.py")}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert f"    {' > '.join(layers).replace('atoll.', '')}\n" in page


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll", "demo", "--steps", "20", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    assert "x fewer" in done.stdout and "def main(" in done.stdout
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000


TOML = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page, "toml"))
]


@pytest.mark.parametrize("block", TOML)
def test_run_files_in_the_docs_are_good(block: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(block)
    assert read([file]).runs


def test_figures_of_the_gpu_are_those_of_the_raw_numbers() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    raw = (ROOT / "benchmarks" / "results").glob("*.json")
    results = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in raw}
    rows = [[row["kernel"], f"{100 * row['share']:.0f} %"] for row in results["gpu_sync"]["kernels"][1:]]
    rows += [row_of_rounds(name, row) for name, row in results["gpu_sync"]["rounds"].items()]
    for row in results["mfu"]["rows"]:
        share = f"{100 * row['mfu']:.1f} % of {row['matmul_flops'] / 1e12:.0f} TFLOP/s"
        rows += [[row["preset"], row["batch"], f"{row['tokens_per_s']:,.0f}", share, f"{row['memory_gib']:.1f} GiB"]]
    for row in results["cuda_graph"]["rows"]:
        taken = [f"{1e3 * row[f'{kind}_step_s']:.1f} ms" for kind in ("launched", "captured")]
        rows += [[row["preset"], row["batch"], f"{row['pass_flops']:.1e}", *taken, f"{row['faster']:.1f}"]]
    for cells in rows:
        assert f"| {' | '.join(map(str, cells))} |\n" in page
    rounds = results["gpu_sync"]["rounds"]["1B"]
    readme = plain("README.md")
    added = [f"{100 * rounds[case]['added']:.1f}" for case in ("shared", "one")]
    assert f"took {' to '.join(added)} % longer than without" in readme
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


def test_figures_of_slow_lines_are_those_of_the_raw_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed = importlib.import_module("speed")
    with Image.open(speed.IMAGE) as image:
        assert json.loads(image.info["Description"]) == speed.speeds(), "draw it again: python benchmarks/speed.py"
    rows = {
        "ddp": "DDP over gloo, fp32",
        "torchft": "torchft 0.2.0 DiLoCo, fp32, three fragments",
        "torchft-delay": "the same, delayed by 3 to 8 steps",
        "diloco": "atoll DiLoCo, fp32",
        "streaming": "atoll Streaming, e3m0, delay 3",
        "eager": "atoll Eager, e3m0",
    }
    page = (DOCS / "machines.md").read_text(encoding="utf-8")
    for method, label in rows.items():
        shares = [f"{speed.speeds(workers)[str(rate)][method]} %" for workers in (2, 4) for rate in (20, 100)]
        assert f"| {label} | {' | '.join(shares)} |" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
