"""Defines `atoll plan`, which says what a run costs before it is paid for."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.cli.plan.options import PlanOptions

_TRAINED, _TIME, _LINK, _SHOWN = "What is trained", "The time of a step", "The link", "What is shown"


def plan(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", show_default=False, help="A run file; or give numbers.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value for a setting of the run file."),
    ] = None,
    params: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_TRAINED, help="Parameters: 10e9, 10B or 350M.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_TRAINED, help="Blocks of the model.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=_TRAINED, help="Both by the name of a preset: 1B.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_TRAINED, help="Left out: the run file's, or 2.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            rich_help_panel=_TRAINED,
            help="Only this one; may be given many times: data-parallel, diloco, streaming-blocking (waits), "
            "streaming-bf16, streaming (4 bits), eager.",
        ),
    ] = None,
    period: Annotated[
        str | None,
        typer.Option(metavar="H", rich_help_panel=_TRAINED, help="Inner steps between exchanges; left out: 100."),
    ] = None,
    fragments: Annotated[
        str | None,
        typer.Option(metavar="P", rich_help_panel=_TRAINED, help="Of streaming; left out: one for 3 layers."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="N", rich_help_panel=_TRAINED, help="Of the whole run; left out: for 20 tokens a parameter."
        ),
    ] = None,
    tokens_total: Annotated[
        str | None,
        typer.Option(metavar="N", rich_help_panel=_TRAINED, help="Instead of steps: tokens of all workers, 200B."),
    ] = None,
    step_time: Annotated[
        str | None, typer.Option(metavar="TIME", rich_help_panel=_TIME, help="Given: 0.8 (seconds) or 800ms.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_TIME, help="Estimated: tokens of a worker's step.")
    ] = None,
    chip: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=_TIME, help="Estimated: h100, a100, tpu-v5e ...")
    ] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_TIME, help="Or the peak FLOP/s of a chip: 989e12.")
    ] = None,
    chips: Annotated[
        str | None, typer.Option(metavar="N", rich_help_panel=_TIME, help="Chips of a worker; left out: 1.")
    ] = None,
    mfu: Annotated[
        str | None,
        typer.Option(metavar="SHARE", rich_help_panel=_TIME, help="The part of the peak that is reached: 0.4."),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", rich_help_panel=_TIME, help="Measured: a few steps of the run file or preset, here."),
    ] = False,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED",
            rich_help_panel=_LINK,
            help="What every worker has, latency one way (half of ping): 1Gbit/s,40ms; left out: the run file's "
            "link.emulate, or 1Gbit/s.",
        ),
    ] = None,
    probe_link: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", rich_help_panel=_LINK, help="Measure it to an end that serves there."),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", rich_help_panel=_LINK, help="Be that end: --probe-link :29600 --serve.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel=_SHOWN, help="Of one chip, to be warned: 80GB; left out: the --chip's."
        ),
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="X", rich_help_panel=_SHOWN, help="Of one worker for an hour.")
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="SHARE", rich_help_panel=_SHOWN, help="Of its time that a worker is to compute.")
    ] = "0.95",
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=_SHOWN, help="Print plain JSON and nothing else.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", rich_help_panel=_SHOWN, help="Also draw it.")] = None,
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
        raise ConfigError("--serve needs the port to wait on: --probe-link :29600 --serve")
    with saying("stopped; nobody is served any more"):
        serve(*parse_end(where, serving=True), tell=typer.echo)
