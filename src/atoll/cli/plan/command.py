"""Defines `atoll plan`, which says what a run costs before it is paid for."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.errors import ConfigError
from atoll.plan.chips import CHIPS

if TYPE_CHECKING:
    from atoll.cli.plan.options import PlanOptions

_TRAINED, _TIME, _LINK, _SHOWN = "What is trained", "The time of a step", "The link", "What is shown"
_RUN_FILE = typer.Argument(metavar="RUN.toml", show_default=False, help="A run file; or give numbers.")
_SET = typer.Option("--set", metavar="KEY=VALUE", help="Another value for a setting of the run file.")
_METHODS = (
    "Only this one; may be given many times: data-parallel, diloco, streaming-blocking (waits), streaming-bf16, "
    "streaming (4 bits), eager."
)
_STEPS = "Inner steps of the run; left out: for 20 tokens a parameter."
_MEMORY = "Memory of one chip, to be warned: 80GB; left out: the --chip's."
_SPEED = (
    "What every worker has, latency one way (half of ping): 1Gbit/s,40ms; left out: the run file's link.emulate, or "
    "1Gbit/s."
)


def _option(panel: str, metavar: str | None, text: str, *names: str) -> Any:
    """Return an option shown in a panel of the help."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


def plan(
    run: Annotated[Path | None, _RUN_FILE] = None,
    changes: Annotated[list[str] | None, _SET] = None,
    params: Annotated[str | None, _option(_TRAINED, "N", "Parameters: 10e9, 10B or 350M.")] = None,
    layers: Annotated[str | None, _option(_TRAINED, "N", "Blocks of the model.")] = None,
    preset: Annotated[str | None, _option(_TRAINED, "NAME", "Both by the name of a model preset: 1B.")] = None,
    workers: Annotated[str | None, _option(_TRAINED, "N", "Number of workers; left out: the run file's, or 2.")] = None,
    methods: Annotated[list[str] | None, _option(_TRAINED, "NAME", _METHODS, "--method")] = None,
    period: Annotated[str | None, _option(_TRAINED, "H", "Inner steps between exchanges; left out: 100.")] = None,
    fragments: Annotated[
        str | None, _option(_TRAINED, "P", "Fragments of streaming; left out: one for 3 layers.")
    ] = None,
    steps: Annotated[str | None, _option(_TRAINED, "N", _STEPS)] = None,
    tokens_total: Annotated[
        str | None, _option(_TRAINED, "N", "Instead of steps: tokens of all workers, 200B.")
    ] = None,
    step_time: Annotated[str | None, _option(_TIME, "TIME", "Given: 0.8 (seconds) or 800ms.")] = None,
    tokens: Annotated[str | None, _option(_TIME, "N", "Estimated: tokens of a worker's step, 500e3.")] = None,
    chip: Annotated[str | None, _option(_TIME, "NAME", f"Estimated: {', '.join(CHIPS)}.")] = None,
    flops: Annotated[str | None, _option(_TIME, "N", "Or the peak FLOP/s of a chip: 989e12.")] = None,
    chips: Annotated[str | None, _option(_TIME, "N", "Chips of a worker; left out: 1.")] = None,
    mfu: Annotated[str | None, _option(_TIME, "SHARE", "The part of the peak that is reached: 0.4.")] = None,
    probe: Annotated[
        bool, _option(_TIME, None, "Measured: a few steps of run file or preset, here.", "--probe")
    ] = False,
    link: Annotated[str | None, _option(_LINK, "SPEED", _SPEED)] = None,
    probe_link: Annotated[str | None, _option(_LINK, "HOST:PORT", "Measure it to an end that serves there.")] = None,
    serve: Annotated[bool, _option(_LINK, None, "Be that end: --probe-link :29600 --serve.", "--serve")] = False,
    memory: Annotated[str | None, _option(_SHOWN, "SIZE", _MEMORY)] = None,
    price: Annotated[str | None, _option(_SHOWN, "X", "Price of one worker for an hour.")] = None,
    target: Annotated[str, _option(_SHOWN, "SHARE", "Share of its time in which a worker should compute.")] = "0.95",
    as_json: Annotated[bool, _option(_SHOWN, None, "Print plain JSON and nothing else.", "--json")] = False,
    plot: Annotated[Path | None, _option(_SHOWN, "FILE.png", "Also draw it.")] = None,
) -> None:
    """Say what a run costs before it is paid for.

    For every method: how busy workers are on this link, what they send, which
    bandwidth they need, memory, time and cost; then what to choose, and
    settings to start with. docs/planning.md explains the model.

    [bold]Examples:[/]
      atoll plan --params 10e9 --layers 48 --step-time 0.8 --link 1Gbit/s,40ms
      atoll plan --preset 1B --tokens 500e3 --chip h100 --chips 8 --price 20
      atoll plan run.toml --probe --link 100Mbit/s,50ms --plot plan.png
      atoll plan --probe-link :29600 --serve            (at one end; at the other:)
      atoll plan run.toml --probe --probe-link 10.0.0.1:29600
    """
    arguments: dict[str, Any] = locals() | {"changes": changes or (), "methods": methods or ()}
    from atoll.cli.plan.options import PlanOptions

    options = PlanOptions(**{field.name: arguments[field.name] for field in fields(PlanOptions)})
    if not serve:
        _show(options, as_json, plot)
        return
    if options != PlanOptions(probe_link=probe_link) or as_json or plot is not None:
        raise ConfigError("--serve only answers measurements: it takes --probe-link :29600 and nothing else")
    _serve(probe_link)


def _show(options: "PlanOptions", as_json: bool, plot: Path | None) -> None:
    from atoll.cli.plan.request import plan_request
    from atoll.cli.plan.text import show
    from atoll.plan.method import label
    from atoll.plan.planner import as_json as plan_json
    from atoll.plan.planner import make_plan

    if plot is not None:
        _check_plot(plot)
    made = make_plan(plan_request(options))
    if as_json:
        typer.echo(json.dumps(plan_json(made), indent=2, allow_nan=False))
    else:
        show(made)
    if plot is not None:
        from atoll.report.planned import write

        request = made.request
        named = {label(method): method for method in request.methods}
        write(request.model, named, request.workers, request.link, request.target, plot)
        typer.echo(f"wrote {plot}", err=as_json)


def _check_plot(file: Path) -> None:
    """Raise ConfigError, before all the work, if the picture cannot be written."""
    if file.suffix.lower() != ".png":
        raise ConfigError(f"--plot {file}: it is drawn as PNG, name it like plan.png")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}")
    new = not file.exists()
    try:
        file.open("ab").close()  # the only test that works on every system
    except OSError:
        raise ConfigError(f"--plot {file}: it cannot be written") from None
    if new:
        file.unlink()


def _serve(where: str | None) -> None:
    from atoll.cli.errors import saying
    from atoll.link.net.bandwidth import parse_end, serve

    if where is None:
        raise ConfigError("--serve needs a port to listen on: --probe-link :29600 --serve")
    with saying("stopped; nobody is served any more"):
        serve(*parse_end(where, serving=True), tell=typer.echo)
