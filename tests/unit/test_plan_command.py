"""`atoll plan`: what it says, what it refuses, and that programs can read it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from atoll import cli, planner
from atoll.commands.asked import Options, asked_for, count, seconds
from atoll.config import load
from atoll.errors import ConfigError
from atoll.plan.link import GOODPUT, Link
from atoll.plan.method import METHODS, Model
from atoll.plan.paper import PRINTED

MAIN = ("--params", "10e9", "--layers", "48", "--step-time", "0.8", "--workers", "8", "--link", "1Gbit/s,40ms")
ONE = ("--params", "1e9", "--layers", "24", "--step-time", "0.1")


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def planned(*arguments: str | Path) -> Any:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def complaint(*arguments: str | Path, code: int = 2) -> str:
    result = plan(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


# ---------------------------------------------------------------------- for programs


def test_json_has_every_number_for_every_method() -> None:
    found = planned(*MAIN, "--steps", "1000", "--price", "20")
    assert found["workers"] == 8 and found["link"]["bits_per_s"] == 1e9 and found["link"]["latency_s"] == 0.04
    assert list(found["methods"]) == list(METHODS)
    for method in found["methods"].values():
        assert 0 < method["utilisation_with_atoll"] <= method["utilisation"] + 1e-9 <= 1 + 1e-9
        assert set(method["bandwidth_for"]) == set(method["bandwidth_needed"]) == {"50", "80", "90", "95", "99"}
        assert method["bytes_of_run"] > method["bytes_per_step"] > 0 and method["memory_bytes"] > 0
        assert method["cost"] == pytest.approx(method["run_s"] / 3600 * 8 * 20)
        assert method["run_s"] == pytest.approx(1000 * 0.8 / method["utilisation_with_atoll"])
    assert found["advice"] and found["next_level"] is not None and found["defaults"]


def test_the_published_comparison_is_what_json_says_of_its_model() -> None:
    found = planned("--params", "10e9", "--layers", "48", "--step-time", "0.8")["methods"]
    for name, row in PRINTED["10B"].items():
        ours = [rate / 1e9 for rate in found[name]["bandwidth_for"].values()]
        assert ours == pytest.approx(row, rel=0.25), "one grid point apart at most"


def test_one_method_of_a_large_model_with_the_defaults_for_the_rest() -> None:
    arguments = ("--params", "405e9", "--layers", "126", "--step-time", "26", "--method", "diloco", "--period", "50")
    found = planned(*arguments)
    assert found["workers"] == 2 and found["link"]["bits_per_s"] == 1e9
    (diloco,) = found["methods"].values()
    assert diloco["period"] == 50 and diloco["bytes_per_round"] == 2 * 405 * 10**9
    wait_s = 8 * diloco["bytes_per_round"] / (GOODPUT * 1e9)
    assert diloco["wait_s_per_period"] == pytest.approx(wait_s)
    assert diloco["utilisation_with_atoll"] == pytest.approx(50 * 26 / (50 * 26 + wait_s))
    assert diloco["bytes_of_run"] is None and diloco["run_s"] is None, "the number of steps is not known"


def test_a_rate_that_latency_forbids_is_null() -> None:
    needed = planned(*MAIN, "--method", "data-parallel")["methods"]["data-parallel"]["bandwidth_needed"]
    assert needed["50"] > 1e9 and needed["99"] is None


def test_methods_can_be_chosen_and_fragments_counted() -> None:
    found = planned(*ONE, "--method", "streaming", "--method", "eager", "--fragments", "5")["methods"]
    assert list(found) == ["streaming", "eager"]
    # 24 layers in 5 fragments: the largest has five of them, in 4 bits with a byte for every 128 values.
    assert found["streaming"]["bytes_per_round"] == pytest.approx(5 / 24 * 1e9 * (4 + 8 / 128) / 8, rel=1e-6)


# ---------------------------------------------------------------------- for people


def test_the_table_fits_and_names_what_matters() -> None:
    result = plan(*MAIN, "--steps", "24000", "--price", "20")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100
    for words in ("DiLoCo", "Eager", "busy, with atoll", "99 % busy", "with offload", "cost of the run", "8 workers"):
        assert words in result.stdout


def test_what_is_not_known_is_not_shown() -> None:
    result = plan(*ONE)
    assert "time of the run" not in result.stdout and "--steps" in result.stdout


def test_the_papers_table_side_by_side() -> None:
    result = plan("--paper")
    assert "68 of 75 on the exact grid point, all within one" in result.stdout
    rows = planned("--paper")
    assert len(rows) == 75 and all(abs(row["steps_apart"]) <= 1 for row in rows)
    assert {"model", "method", "row", "level", "paper", "ours", "steps_apart"} <= set(rows[0])


def test_a_picture_is_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "plan.png"
    result = plan(*ONE, "--plot", file, "--json")
    assert file.read_bytes().startswith(b"\x89PNG")
    json.loads(result.stdout)


# ---------------------------------------------------------------------- run files and presets


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[model]\npreset = "tiny"\n[train]\nbatch = 4\nsteps = 200\n[sync]\nworkers = 3\nperiod = 20\n'
        '[link]\naddress = "10.0.0.1:29500"\nemulate = "2Mbit/s, 30ms"\n'
    )
    return file


def test_a_run_file_is_planned_with_its_own_fragments(run_file: Path) -> None:
    from atoll.core.fragments import Blocks, split
    from atoll.train.model import Decoder

    found = planned(run_file, "--step-time", "0.1")
    assert found["workers"] == 3 and found["steps"] == 200 and found["link"]["bits_per_s"] == 2e6
    assert found["model"]["tokens_per_step"] == 4 * 128
    config = load(run_file)
    fragments = split(Decoder(config.shape(256)), Blocks())
    sync = config.synchronisation()
    assert sync is not None
    payloads = [sync.codec.payload_bytes(fragment.numel) for fragment in fragments]
    own = found["methods"][planner.OWN]
    assert own["bytes_per_round"] == 2 * max(payloads)
    assert own["bytes_per_step"] == pytest.approx(2 * sum(payloads) / 20)
    assert all(method["period"] == 20 for name, method in found["methods"].items() if name != "data-parallel")


def test_settings_of_a_run_file_can_be_changed(run_file: Path) -> None:
    found = planned(run_file, "--step-time", "0.1", "--set", "sync.method=diloco", "--workers", "2", "--period", "5")
    assert found["workers"] == 2 and found["methods"][planner.OWN]["codec"] == "fp32"
    assert found["methods"][planner.OWN]["period"] == 5


@pytest.mark.parametrize("method", ["none", "data-parallel", "eager"])
def test_every_method_of_a_run_file_can_be_planned(method: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[sync]\nmethod = "{method}"\nworkers = {1 if method == "none" else 2}\n')
    found = planned(file, "--step-time", "0.1")
    assert (planner.OWN in found["methods"]) == (method != "none")


def test_a_preset_with_a_measured_step() -> None:
    found = planned("--preset", "tiny", "--tokens", "256", "--probe", "--method", "diloco")
    assert found["model"]["parameters"] > 10**5 and found["model"]["step_from"].startswith("measured")
    assert found["model"]["tokens_per_step"] == 256 and found["steps"] is not None


def test_a_step_is_estimated_from_flops() -> None:
    asked = asked_for(Options(params="1B", layers="24", tokens="500e3", chip="H100", chips=8, mfu=0.5))
    assert asked.model.step_s == pytest.approx(6 * 1e9 * 500e3 / (8 * 989e12 * 0.5))
    assert asked.steps == math.ceil(20 * 1e9 / (2 * 500e3))
    same = asked_for(Options(params="1B", layers="24", tokens="500e3", flops="989e12", chips=8, mfu=0.5))
    assert same.model.step_s == asked.model.step_s


def test_tokens_of_the_whole_run_become_steps() -> None:
    asked = asked_for(Options(params="1B", layers="24", tokens="1M", step_time="1s", tokens_total="100B", workers=4))
    assert asked.steps == 25_000


@pytest.mark.parametrize(("text", "value"), [("10e9", 10**10), ("10B", 10**10), ("350M", 350 * 10**6), ("7", 7)])
def test_counts_are_read_as_people_write_them(text: str, value: int) -> None:
    assert count("params", text) == value


def test_times_are_read_as_people_write_them() -> None:
    assert seconds("step-time", "800ms") == pytest.approx(seconds("step-time", "0.8")) == pytest.approx(0.8)


def test_models_of_few_layers_are_one_fragment() -> None:
    model = Model(parameters=1000, layers=2, step_s=1.0)
    (streaming,) = planner.chosen_methods(["streaming"], model, None, None)
    assert streaming.layers(model) == ((1, 2),)


def test_every_option_is_explained() -> None:
    command = typer.main.get_command(cli.app).commands["plan"]  # type: ignore[attr-defined]
    assert plan("-h").exit_code == 0
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", None)] == []


# ---------------------------------------------------------------------- nonsense


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ONE, "--link=-1Gbit/s"), "rate above 0"),
        ((*ONE, "--link", "10Gb"), "say Gbit/s (bits) or GB/s (bytes)"),
        ((*ONE, "--link", "10GB"), "say Gbit/s (bits) or GB/s (bytes)"),
        ((*ONE, "--link", "10 furlongs"), "unknown unit"),
        ((*ONE, "--workers", "0"), "workers must be"),
        ((*ONE, "--workers", "-3"), "workers must be"),
        ((*ONE, "--fragments", "25"), "at most 24, the layers"),
        ((*ONE, "--fragments", "0"), "fragments must be"),
        ((*ONE, "--method", "dilco"), "method must be one of"),
        ((*ONE, "--period", "0"), "period must be"),
        ((*ONE, "--period", "1000000"), "period must be at most"),
        ((*ONE, "--target", "95"), "target must be"),
        ((*ONE, "--target", "nan"), "target must be"),
        ((*ONE, "--price", "-1"), "price must be"),
        ((*ONE, "--steps", "0"), "steps must be"),
        ((*ONE, "--tokens-total", "1B"), "tokens-total needs --tokens"),
        ((*ONE, "--plot", "plan.jpg"), "PNG"),
        ((*ONE, "--probe-link", "nowhere"), "HOST:PORT"),
        ((*ONE, "--set", "sync.period=3"), "none is given"),
        (("--params", "0", *ONE[2:]), "params must be"),
        (("--params", "nan", *ONE[2:]), "params must be"),
        (("--params", "1e400", *ONE[2:]), "params must be"),
        (("--params", "-5", *ONE[2:]), "params must be"),
        (("--params", "ten", *ONE[2:]), "params must be"),
        ((*ONE[:2], "--layers", "0", *ONE[4:]), "layers must be"),
        ((*ONE[:2], *ONE[4:]), "give --layers"),
        ((*ONE[:4], "--step-time", "0"), "step-time must be"),
        ((*ONE[:4], "--step-time", "5 parsecs"), "step-time must be"),
        (ONE[:4], "--step-time 0.8 (seconds); or --tokens"),
        ((*ONE[:4], "--chip", "h100"), "give --tokens"),
        ((*ONE[:4], "--tokens", "1e6", "--chip", "abacus"), "chip must be one of"),
        ((*ONE[:4], "--tokens", "1e6", "--chip", "h100", "--mfu", "1.5"), "mfu must be"),
        ((*ONE[:4], "--probe"), "a run file, or --preset"),
        (("--preset", "3B", "--step-time", "1"), "did you mean '4B'"),
        ((), "say what is trained"),
        ((*ONE, "--preset", "1B"), "only one of them"),
        (("--serve",), "--probe-link :29600 --serve"),
        (("missing.toml",), "no such file"),
    ],
)
def test_nonsense_gets_one_clear_line(arguments: tuple[str, ...], words: str) -> None:
    assert words in complaint(*arguments)


def test_a_plan_is_checked_without_a_command_line() -> None:
    model = Model(parameters=1000, layers=2, step_s=1.0)
    with pytest.raises(ConfigError, match="workers"):
        planner.Asked(model=model, workers=0, link=Link(1e9), methods=(), step_from="")


# ---------------------------------------------------------------------- beside what was measured


def test_a_run_on_a_slow_link_ends_with_what_had_been_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from atoll.config import parse
    from atoll.train.run import train

    settings = {"preset": "tiny", "layers": 2}, {"steps": 6, "batch": 1, "sequence": 16}
    table = {"model": settings[0], "train": settings[1], "sync": {"method": "diloco", "period": 2}, "device": "cpu"}
    here = {"out": str(tmp_path), "data": {"cache": str(tmp_path / "tokens"), "limit": 20}, "log": {"view": "lines"}}
    train(parse(table | here | {"link": {"emulate": "50Mbit/s, 20ms"}}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("planned for 50Mbit/s, 20ms")]
    shares = [float(share) for share in re.findall(r"([0-9.]+) %", line)]
    assert len(shares) == 2 and abs(shares[0] - shares[1]) < 15, line
    assert len(set(re.findall(r"[0-9.]+ [kM]B", line))) == 1, "bytes are as planned, to three digits"


# ---------------------------------------------------------------------- the page about it


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        (0, "--preset 1B --tokens 500e3 --chip h100 --chips 8 --price 20 --link 200Mbit/s,50ms"),
        (1, "--paper"),
    ],
)
def test_the_page_shows_what_is_printed(block: int, arguments: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    shown = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)[block]
    assert tidy(plan(*arguments.split()).stdout) == tidy(shown)
