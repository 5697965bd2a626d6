"""Processes that are started together, how they end, and what of theirs reaches a terminal."""

from mutants.seed import Mutant

LAUNCH = "tests/unit/test_launch.py"
COMPARE = "tests/unit/test_compare.py"
VISIBLE = "tests/unit/test_printable.py"
TESTS = [LAUNCH]
KILLED = (f"{LAUNCH}::test_killed_itself_it_leaves_nobody_behind_and_workers_save",)
NO_TEAM = (f"{LAUNCH}::test_those_that_are_no_team_run_one_after_another_whatever_becomes_of_each",)
WAITING = (f"{LAUNCH}::test_interrupted_it_starts_none_of_those_that_wait",)
NOBODY_READS = (f"{LAUNCH}::test_when_nobody_reads_any_more_all_are_stopped",)

MUTANTS = [
    Mutant(
        "children hear nothing of the supervisor's death",
        "cli/processes.py",
        "stdin=stdin,",
        "stdin=subprocess.DEVNULL,",
        tests=KILLED,
    ),
    Mutant(
        "children hold the writing end of their pipe",
        "_util/signals.py",
        "    read, write = os.pipe()\n",
        "    read, write = os.pipe()\n    os.set_inheritable(write, True)\n",
        also=("cli/processes.py", "stdin=stdin,", "stdin=stdin,\n                close_fds=False,"),
        tests=KILLED,
    ),
    Mutant(
        "a child that cannot be asked outlives its supervisor",
        "_util/signals.py",
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
        "",
        tests=KILLED,
    ),
    Mutant(
        "a child is killed before it has saved",
        "_util/signals.py",
        "os.getpid(), signal.SIGTERM",
        "os.getpid(), signal.SIGKILL",
        tests=KILLED,
    ),
    Mutant(
        "whoever has a closed input is taken for supervised",
        "_util/signals.py",
        "if not os.environ.pop(EXIT_WITH_PARENT, None) or not",
        "if not",
        tests=(f"{LAUNCH}::test_who_has_no_supervisor_follows_nobody",),
    ),
    Mutant(
        "what a child starts follows as well",
        "_util/signals.py",
        "os.environ.pop(EXIT_WITH_PARENT, None)",
        "os.environ.get(EXIT_WITH_PARENT)",
        tests=(f"{LAUNCH}::test_who_has_no_supervisor_follows_nobody",),
    ),
    Mutant(
        "a child's output is buffered",
        "cli/processes.py",
        '"PYTHONUNBUFFERED": "1", **job.environment',
        '**job.environment, "PYTHONUNBUFFERED": ""',
        tests=(f"{LAUNCH}::test_the_first_to_fail_is_named_with_its_last_line",),
    ),
    Mutant(
        "ranks write lines in pieces",
        "cli/launch.py",
        'result["PYTHONUNBUFFERED"] = ""',
        'result["PYTHONUNBUFFERED"] = "1"',
        tests=(f"{LAUNCH}::test_ranks_write_whole_lines_and_have_time_to_save",),
    ),
    Mutant(
        "what nobody reads is printed again at the end",
        "cli/processes.py",
        "os.dup2(nowhere.fileno(), sys.stdout.fileno())",
        "pass",
        tests=NOBODY_READS,
    ),
    Mutant(
        "a launch that nobody reads says nothing",
        "cli/launch.py",
        "except BrokenPipeError",
        "except ChildProcessError",
        tests=(f"{LAUNCH}::test_launch_that_nobody_reads_any_more_stops_all_and_says_how_to_go_on",),
    ),
    Mutant("all run at once", "cli/processes.py", "len(self.running) < at_once", "True", tests=NO_TEAM),
    Mutant(
        "one run that fails ends a comparison",
        "cli/processes.py",
        "grace_s if together else math.inf",
        "grace_s",
        tests=NO_TEAM,
    ),
    Mutant(
        "those that wait are started after Ctrl-C",
        "cli/processes.py",
        "        self._waiting.clear()\n",
        "",
        tests=WAITING,
    ),
    Mutant(
        "a run that was asked to stop counts as failed",
        "cli/processes.py",
        "child.said, self._asked",
        "child.said, False",
        tests=WAITING,
    ),
    Mutant(
        "the audience does not look at what has ended",
        "cli/processes.py",
        "            self._audience.look(child.job.name)\n",
        "",
        tests=NO_TEAM,
    ),
    Mutant(
        "escape sequences of workers reach the terminal",
        "cli/processes.py",
        "printable(line).encode",
        "line.encode",
        tests=(f"{LAUNCH}::test_escape_sequences_are_shown_and_not_obeyed",),
    ),
    Mutant(
        "errors quote other machines as they are",
        "errors.py",
        "printable(super().__str__())",
        "super().__str__()",
        tests=(VISIBLE,),
    ),
    Mutant(
        "faults are shown as they come",
        "train/progress/view.py",
        "Text(printable(line), style)",
        "Text(line, style)",
        tests=(VISIBLE,),
    ),
    Mutant(
        "characters that turn others round are shown",
        "errors.py",
        '("Zs", "Cn", "Co")',
        '("Zs", "Cn", "Co", "Cf")',
        tests=(VISIBLE,),
    ),
    Mutant("a carriage return hides a line's beginning", "errors.py", r'"\n\t', r'"\r\n\t', tests=(VISIBLE,)),
    Mutant(
        "a terminal that lacks a character ends a command",
        "cli/main.py",
        ', errors="replace"',
        "",
        tests=("tests/unit/test_setup.py",),
    ),
]
