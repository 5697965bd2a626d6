"""Defines the `atoll` command: each subcommand parses its options, calls one function and prints.

Slow imports wait for the command that needs them. Exit codes: 0 done, 1 failed (also when standard output is closed), 2
the run file or the command line is wrong, 130 interrupted.
"""

import gc
import io
import os
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from atoll._util.signals import exit_with_parent
from atoll.cli.errors import Commands, saying
from atoll.cli.evaluate import evaluate
from atoll.cli.keys import keys
from atoll.cli.plan.command import plan
from atoll.cli.registry import registry
from atoll.cli.replay import replay
from atoll.cli.status import status
from atoll.cli.watch import watch
from atoll.errors import ConfigError, printable
from atoll.runs.layout import RUN, worker_folder, worker_folders, worker_of

# ---------------------------------------------------------------------- commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _assignments(texts: list[str] | None) -> list[str] | None:
    """Refuse `--set sync.workers 4` here: the parser would only find an argument too many."""
    for text in texts or ():
        if "=" not in text:
            problem = f"--set {text}: use --set KEY=VALUE, such as --set sync.period=50"
            raise ConfigError(problem, setting="set", value=text)
    return texts


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=_assignments,
        help="Another value for a setting of the run file, such as sync.period=50; may be given many times.",
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, metavar="N", help="Runs at the same time; left out: by cores.")]
LinkSpeed = Annotated[
    str,
    typer.Option(
        metavar="SPEED",
        help="Link between workers for which times are worked out: 100Mbit/s, or with a latency 1Gbit/s,50ms.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from atoll import __version__

        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def _atoll(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train one model on workers that are far apart: DiLoCo, Streaming DiLoCo and Eager Updates.

    [bold]To begin:[/]
      atoll demo               four methods side by side, on a CPU, in minutes
      atoll init               write run.toml, with every setting explained
      atoll train run.toml     train; the run goes to runs/run
      atoll report runs/run    one page with curves, bytes and numbers
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs and the report.")] = Path("runs/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Inner steps of each worker; left out: 800.")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Four methods side by side, on a CPU in a few minutes.

    Data-parallel, DiLoCo, Streaming and Eager see equally many tokens. At the
    end: a table (loss, bytes, time at 100 Mbit/s), a report, pictures, and a
    sample of what a model writes.
    """
    with saying("stopped; the same command begins again"):
        from atoll.cli.compare import demo as run_demo

        status = run_demo(out, steps, jobs)
    raise typer.Exit(status)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write a run file, with every setting explained."""
    from atoll.settings.config import template

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        problem = f"{path}: exists already; give another path, or --force to overwrite it"
        raise ConfigError(problem, setting="path", value=path) from None
    typer.echo(f"wrote {path}; to train: atoll train {path} (as it stands, a few minutes on two cores)")


@app.command()
def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file; with --resume also a run's folder.")],
    changes: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue where the run stopped, exactly as if it never had.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of all runs, instead of the file's.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run, instead of the file's.")] = None,
    view: Annotated[
        Literal["auto", "live", "lines", "none"] | None,
        typer.Option(metavar="HOW", help="What to show: auto, live, lines or none, instead of the file's."),
    ] = None,
    worker: Annotated[
        int | None, typer.Option(min=0, metavar="K", help="Train this worker only; the others are on other machines.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where worker 0 listens, instead of the file's.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="Slow the link between workers down to this: 100Mbit/s,50ms.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Registry of an elastic run, instead of the file's.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of this worker's keys, instead of the file's.")
    ] = None,
) -> None:
    """Train the model of a run file.

    All of the run goes to its folder, OUT/NAME: the settings as used, metrics,
    checkpoints and the trained model. Ctrl-C saves and stops; --resume continues.
    All workers train in this process, unless --worker says which one to train.

    [bold]Examples:[/]
      atoll train run.toml
      atoll train run.toml --set sync.period=50 --set train.lr=0.001
      atoll train run.toml --resume
      atoll train runs/run --resume
      atoll train run.toml --worker 1 --address 10.0.0.1:29500 --keys worker-1
      atoll train run.toml --worker 1 --registry 10.0.0.1:29400 --keys worker-1
    """
    from atoll.settings.config import load

    file = run
    if run.is_dir():
        file, folder = _find_run(run, worker, resume=resume, moved=bool(out or name))
        out, name = folder.parent, folder.name
    where = {"out": out and str(out), "name": name}
    links = {"link.address": address, "link.emulate": link, "link.registry": registry, "link.keys": keys and str(keys)}
    config = load(file, changes or (), {**where, **links, "log.view": view})

    place = Path(config.out).expanduser() / config.name
    if worker is not None:
        place /= worker_folder(worker)
    try:
        from atoll.train.run import train as train_run

        gc.freeze()  # garbage collection of all imported objects would stall training
        done = train_run(config, worker=worker, resume=resume)
    except KeyboardInterrupt:  # before training, or the second one: training saves on the first
        raise KeyboardInterrupt(_how_to_continue(place, worker)) from None
    if not done.name.startswith("rank-"):  # rank 0 of a worker prints
        whole = done if worker_of(done) is None else done.parent  # a report shows all workers
        typer.echo(f"the run is in {done}; to look at it: atoll report {whole}, atoll sample {done}")


def _how_to_continue(place: Path, worker: int | None) -> str:
    """Return what to print after a stop outside training."""
    if not (place / RUN).exists():
        return "stopped before training began; the same command begins again"
    which = "" if worker is None else f" --worker {worker}"
    return f"interrupted; continue with: atoll train {quote(str(place))}{which} --resume"


def _find_run(given: Path, worker: int | None, *, resume: bool, moved: bool) -> tuple[Path, Path]:
    """Return the run file and the run's folder, given that folder or the folder of one worker."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"{given}: {problem}", setting="run", value=given)

    if not resume:
        raise refuse("is a folder; to continue the run in it, add --resume")
    if moved:
        raise refuse("is the folder of a run, which --out and --name cannot change")
    folder = given.resolve()  # `out` in the file may be relative to another folder
    called = "" if worker is None else worker_folder(worker)
    if called and (folder / called / RUN).is_file():
        return given / called / RUN, folder
    if not (given / RUN).is_file():
        there = ", ".join(place.name for place in worker_folders(given))
        if there and worker is None:
            raise refuse(f"holds workers with their own processes ({there}): add --worker and its number")
        also = f" and no {called}" if called else ""
        raise refuse(f"is not the folder of a run: it has no {RUN}{also}{there and f', only {there}'}")
    if called and folder.name != called:
        raise refuse(f"is not the folder of worker {worker}, which is called {called}")
    return given / RUN, folder.parent if called else folder


@app.command()
def launch(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file.")],
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Worker processes; left out: sync.workers of the file.")
    ] = None,
    changes: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where the workers stopped.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of all runs, instead of the file's.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run, instead of the file's.")] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="Slow the link between workers down to this, as atoll train.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="Where worker 0 listens; left out: a free one.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Processes of one worker, by torchrun.")] = 1,
    restart: Annotated[bool, typer.Option("--restart", help="Start workers of an elastic run again that die.")] = False,
) -> None:
    """Train with one process per worker, all on this machine.

    Each worker writes to OUT/NAME/worker-K, and all it says to log.txt there.
    Ctrl-C lets all save and stop, a second one kills them; --resume continues.
    On several machines, start `atoll train --worker K` on each instead.

    [bold]Examples:[/]
      atoll launch run.toml --workers 4
      atoll launch run.toml --workers 4 --resume
    """
    from atoll.cli.launch import LaunchOptions
    from atoll.cli.launch import launch as launch_workers
    from atoll.cli.launch_elastic import is_elastic, launch_elastic

    options = LaunchOptions(
        file=run,
        changes=changes or (),
        workers=workers,
        ranks=ranks,
        resume=resume,
        out=out,
        name=name,
        link=link,
        port=port,
        restart=restart,
    )
    elastic = is_elastic(options)
    if restart and not elastic:
        raise ConfigError("--restart: is for workers that come and go: set link.elastic = true", setting="restart")
    done = launch_elastic(options) if elastic else launch_workers(options)
    typer.echo(f"all workers are done; the run is in {done}")


@app.command()
def compare(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="STUDY...", help="Names or files of studies, or run files; none lists the names."),
    ] = None,
    changes: Set = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Inner steps of each worker, instead of the files'.")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs and the report.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train again what has been trained already.")] = False,
    link: LinkSpeed = "100Mbit/s",
) -> None:
    """Train several runs; ends in a table, the claims, a report and pictures.

    Runs that are finished are not repeated, and interrupted ones continue. The
    exit status is 0, also when a claim does not hold, and 1 when a run fails.

    [bold]Examples:[/]
      atoll compare drops
      atoll compare diloco.toml streaming.toml --set train.steps=500 --jobs 2
    """
    with saying(f"stopped; the same command {'begins again' if fresh else 'goes on from there'}"):
        from atoll.cli.compare import compare as compare_runs

        given = ([] if steps is None else [f"train.steps={steps}"]) + (changes or [])
        status = compare_runs(files or [], given, jobs=jobs, out=out, fresh=fresh, link=link)
    raise typer.Exit(status)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs; a folder of such folders stands for all its runs."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page to write; left out: RUN/report.html for one folder, else ./report.html."
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write the pictures there, as PNG.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write what each worker did when, for ui.perfetto.dev."),
    ] = None,
    link: LinkSpeed = "100Mbit/s",
) -> None:
    """Write a page about runs, with pictures and numbers.

    The page of atoll watch, frozen into one HTML file that needs no network.

    [bold]Examples:[/]
      atoll report runs/run
      atoll report runs/drops
      atoll report runs/diloco runs/streaming --link 1Gbit/s,50ms --out both.html
      atoll report runs/run --trace trace.json
    """
    from atoll.plan.line import parse_line
    from atoll.report import write_trace
    from atoll.watch.report_page import write

    page = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    for path in write(runs, page, link=parse_line(link), png=png):
        typer.echo(f"wrote {path}")
    if trace is not None:
        typer.echo(f"wrote {write_trace(runs, trace)}")


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an exported model.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="0: always the likeliest token; 1: as the model says.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same text.")] = 0,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="How many texts.")] = 1,
    best: Annotated[
        bool, typer.Option("--best", help="The weights with the lowest held-out loss, not the final ones.")
    ] = False,
) -> None:
    """Let a trained model write.

    [bold]Examples:[/]
      atoll sample runs/run --prompt "def main(" --tokens 100
    """
    from atoll.train.model.sample import sample as sample_texts

    texts = sample_texts(folder, prompt, tokens=tokens, temperature=temperature, seed=seed, count=count, best=best)
    text = "\n\n---\n\n".join(texts)
    typer.echo(printable(text) if sys.stdout.isatty() else text)


app.command("eval")(evaluate)
app.command()(plan)
app.add_typer(keys, name="keys")
for command in (registry, status, watch, replay):
    app.command()(command)


def main() -> None:
    """Run the `atoll` command."""
    exit_with_parent()  # if a supervisor started this process
    if isinstance(sys.stdout, io.TextIOWrapper):  # line by line, or stderr would overtake it
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if "--debug" not in sys.argv:
        # Torch's C++ prints pages about what is one line here; it reads this when it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or every stranger at a port adds lines to the log
    app(prog_name="atoll")
