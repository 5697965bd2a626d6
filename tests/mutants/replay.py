"""`atoll replay`: what workers record, how it is compared, and how a run is made again."""

from mutants.seed import Mutant

REPLAY = "tests/unit/test_replay.py"
EQUAL = (f"{REPLAY}::test_a_run_with_a_late_a_killed_and_a_stopped_worker_is_made_again",)
ALIKE = (f"{REPLAY}::test_records_that_were_changed_alike_are_found_by_training",)
WHOLE = (f"{REPLAY}::test_a_record_that_is_not_whole_is_refused",)
REFUSED = (f"{REPLAY}::test_runs_with_other_settings_or_on_a_gpu_are_refused",)
MEMBERS = "tests/unit/test_report.py"
LANES = (f"{MEMBERS}::test_the_lanes_of_members_come_from_all_views",)
TESTS = ["tests/unit/test_recorded_rounds.py"]

MUTANTS = [
    # what is recorded
    Mutant(
        "a record is cut when its worker comes back",
        "train/run.py",
        "path.stat().st_size if path.exists() else None",
        "None",
        tests=EQUAL,
    ),
    Mutant(
        "the checkpoint that was loaded is not recorded",
        "train/run.py",
        "step = restored.step if restored else None",
        "step = None",
        tests=EQUAL,
    ),
    Mutant(
        "a cut-off is not recorded",
        "train/run.py",
        "process.control.elastic.hooks.on_excluded = trainer.reporter.write_excluded",
        "pass",
        tests=EQUAL,
    ),
    Mutant(
        "views are not recorded",
        "train/progress/reporter.py",
        "is_own = isinstance(event, Members) or",
        "is_own =",
        tests=EQUAL,
    ),
    Mutant(
        "the anchor before a round is recorded",
        "outer/rounds.py",
        "        if completed.members:\n            replica.outer_step(completed, products, alpha, plain_mean=plain_mean)\n        if self._observer and products:\n            sums = DeviceValues(sums_of_pieces(replica.anchor)) if self.exchange.link.elastic else None\n",
        "        sums = DeviceValues(sums_of_pieces(replica.anchor)) if self.exchange.link.elastic else None\n        if completed.members:\n            replica.outer_step(completed, products, alpha, plain_mean=plain_mean)\n        if self._observer and products:\n",
        tests=("tests/unit/test_admission.py::test_an_elastic_round_tells_the_anchor_after_it",),
    ),
    # what is compared
    Mutant(
        "anchors are not compared between workers", "train/replay/record.py", "if mine != theirs and", "if False and"
    ),
    Mutant(
        "the last difference is told",
        "train/replay/record.py",
        "if mine != theirs and self.difference is None:",
        "if mine != theirs:",
    ),
    Mutant("members are not compared", "train/replay/record.py", " from workers {moved.members}", ""),
    Mutant("versions are not compared", "train/replay/record.py", " at version {moved.version}", ""),
    Mutant(
        "rounds of one that was cut off count as final", "train/replay/record.py", "len(later) >= IN_FLIGHT", "True"
    ),
    Mutant("a diverged worker is excused for ever", "train/replay/record.py", "len(later) >= IN_FLIGHT", "False"),
    Mutant(
        "rounds after a cut-off are not kept apart",
        "train/replay/record.py",
        "                processes[-1].stretches.append(Stretch(None))\n",
        "",
    ),
    Mutant(
        "a second attempt to come back counts as a cut-off",
        "train/replay/record.py",
        "if (cut := processes[-1].stretches[-1]).since is not None or len(processes[-1].stretches) == 1:",
        "if cut := processes[-1].stretches[-1]:",
    ),
    Mutant(
        "one that never came back is excluded",
        "train/replay/record.py",
        "            process.stretches[-1].excluded = None\n    return",
        "    return",
    ),
    Mutant(
        "rounds after the checkpoint stay when all start again",
        "train/replay/record.py",
        "if moved.applied <= step}",
        "}",
    ),
    Mutant(
        "processes after the checkpoint stay when all start again",
        "train/replay/record.py",
        "while len(processes) > 1 and processes[-1].joined > step:",
        "while False:",
    ),
    Mutant(
        "a view counts in its last step before",
        "train/replay/record.py",
        "if view.boundary < step), views[0]",
        "if view.boundary <= step), views[0]",
    ),
    Mutant(
        "the oldest view counts", "train/replay/record.py", "for view in reversed(views) if", "for view in views if"
    ),
    Mutant(
        "a worker without a record is trained from the start",
        "train/replay/record.py",
        "if not any(process.joined < round_id.step for process in processes):",
        "if False:",
        tests=(*TESTS, *WHOLE),
    ),
    # how it is made again
    Mutant(
        "a replayed anchor is not compared",
        "train/replay/run.py",
        "if outcome(event) != outcome(recorded):",
        "if False:",
        tests=ALIKE,
    ),
    Mutant(
        "all payloads count",
        "train/replay/link.py",
        "for member in made.members]",
        "for member in sorted(posted)]",
        tests=EQUAL,
    ),
    Mutant(
        "a returning process has a new optimizer",
        "train/replay/run.py",
        "            trainer.load_state_dict(copy.deepcopy(saved[process.checkpoint]))\n",
        "            pass\n",
        tests=EQUAL,
    ),
    Mutant(
        "a worker is never cut off",
        "train/replay/link.py",
        "        return in_check == (counted == self._steps)\n",
        "        return False\n",
        tests=EQUAL,
    ),
    Mutant(
        "a run on a GPU is trained again",
        "train/replay/run.py",
        '    if config.device != "cpu":',
        "    if False:",
        tests=REFUSED,
    ),
    Mutant(
        "folders of different runs are one", "train/replay/run.py", "    if differ:\n", "    if False:\n", tests=REFUSED
    ),
    Mutant(
        "a worker given twice counts twice",
        "train/replay/run.py",
        "        if worker in events:\n",
        "        if False:\n",
        tests=WHOLE,
    ),
    Mutant(
        "a difference is no failure",
        "cli/replay.py",
        "raise typer.Exit(1 if found.difference is not None or found.missed else 0)",
        "raise typer.Exit(0)",
        tests=(f"{REPLAY}::test_a_tampered_anchor_of_one_worker_is_found_without_training",),
    ),
    # the picture of members
    Mutant(
        "views of other workers are not drawn",
        "report/record.py",
        "for log in reversed(logs) for view in log.views",
        "for log in logs[:1] for view in log.views",
        tests=LANES,
    ),
    Mutant(
        "a lane goes on after an earlier view",
        "report/presence.py",
        "for view in reversed(views[1:])), min)",
        "for view in reversed(views[1:])), lambda _, earlier: earlier)",
        tests=LANES,
    ),
    Mutant(
        "the first members have joined",
        "report/presence.py",
        "(training - trained if n else set())",
        "(training - trained)",
        tests=LANES,
    ),
    Mutant(
        "a lost worker has no mark",
        "report/presence.py",
        "for worker in (trained - training) &",
        "for worker in (training - training) &",
        tests=LANES,
    ),
    Mutant(
        "members of runs that are not elastic are drawn",
        "report/figures.py",
        "    if any(row.record.views for row in rows):\n",
        "    if rows:\n",
        tests=(f"{MEMBERS}::test_pictures_without_data_are_left_out",),
    ),
]
