"""Elastic runs through `atoll train` and `atoll launch`: who is compared, followed, reported and started again."""

from mutants.seed import Mutant

RUNS = "tests/unit/test_elastic_runs.py"
KILLED = (f"{RUNS}::test_a_killed_worker_is_not_waited_for_and_comes_back",)
STOPPED = (f"{RUNS}::test_a_worker_that_is_stopped_leaves_in_order_and_the_lowest_of_the_others_evaluates",)
MEMBERS = "tests/unit/test_members.py"
LAUNCH = "tests/unit/test_launch_elastic.py"
OBSERVED = (f"{LAUNCH}::test_an_observer_is_told_how_far_workers_are_and_a_stranger_is_not",)
CONFIG = "tests/unit/test_config.py"
TESTS = [
    f"{LAUNCH}::test_a_dead_worker_is_started_again_but_not_for_ever",
    f"{LAUNCH}::test_one_that_is_refused_or_was_stopped_is_not_started_again",
    f"{LAUNCH}::test_without_the_option_no_worker_is_started_again",
    f"{LAUNCH}::test_supervised_processes_are_started_again_and_the_others_go_on",
    f"{LAUNCH}::test_which_runs_are_elastic",
    f"{LAUNCH}::test_options_that_cannot_be",
    f"{LAUNCH}::test_the_status_of_a_run",
    f"{CONFIG}::test_settings_that_cannot_be_together_say_why",
    f"{CONFIG}::test_an_elastic_run_needs_a_registry",
    f"{CONFIG}::test_an_elastic_run_without_keys_is_told_how_to_make_them",
    f"{CONFIG}::test_what_is_no_address_is_refused",
]

MUTANTS = [
    # settings
    Mutant("elastic data-parallel is accepted", "settings/conflicts.py", 'if sync.method in ("none", "data-parallel"):\n        why = f\'cannot be set with sync.method = "{sync.method}": it has no anchor',
           'if sync.method == "none":\n        why = f\'cannot be set with sync.method = "{sync.method}": it has no anchor'),
    Mutant("an elastic run without keys is accepted", "settings/conflicts.py", 'if link.security == "keys" and link.keys is None:',
           "if False:"),
    Mutant("a registry is optional", "settings/conflicts.py", "    if link.registry is None:\n", "    if False:\n"),
    Mutant("more members may be wanted than there are", "settings/conflicts.py", "link.min_workers > sync.workers",
           "link.min_workers > sync.workers + 1"),
    Mutant("a registry without elastic is ignored", "settings/conflicts.py", '("registry", "min_workers",',
           '("min_workers",'),
    Mutant("an etcd address needs no name", "settings/value_types.py", "if not slash or not re.fullmatch", "if slash and not re.fullmatch"),
    # the trainer
    Mutant("settings are not compared", "train/ranks/elastic.py", "{**self.elastic.hooks.terms, **terms}",
           "self.elastic.hooks.terms", tests=(f"{RUNS}::test_one_with_other_settings_is_refused_and_the_others_go_on",)),
    Mutant("a returning worker goes on at its own step", "train/trainer.py", "self.steps = worker.draws = loop.steps",
           "worker.draws = loop.steps", tests=KILLED),
    Mutant("a worker that died needs --resume", "train/folder.py", "if not (resume or self.elastic):", "if not resume:", tests=KILLED),
    Mutant("a lost worker is not reported", "train/progress/members.py", "            yield Lost(", "            Lost(", tests=KILLED),
    Mutant("an admission is not reported", "train/progress/members.py", "before.get(worker) is False", "before.get(worker) is None", tests=KILLED),
    Mutant("worker 0 alone evaluates", "train/trainer.py", "link is not None and link.elastic else 0", "False else 0", tests=STOPPED),
    Mutant("a worker that is stopped is said to be lost", "train/run.py",
           "        process.control.leave(STOPPED)\n", "", tests=STOPPED),
    Mutant("a signal does not end a pause", "train/ranks/elastic.py", "        self._interrupts.on_first = timer.start\n", "",
           tests=(f"{RUNS}::test_too_few_pause_and_say_so_and_a_signal_ends_the_pause",)),
    Mutant("new workers outvote one that resumes", "link/net/entrance.py", "return steps[start] > 0, len(", "return True, len(",
           tests=(f"{RUNS}::test_all_are_killed_and_start_again",)),
    Mutant("those that leave at the end are reported as lost", "train/progress/members.py", "        if view.over:\n            return  # all leave, one after another\n",
           "", tests=(f"{MEMBERS}::test_who_comes_and_goes_is_told_once_and_in_order",)),
    Mutant("a pause is not said", "train/progress/members.py", "paused := training < self._min_workers and", "paused := False and",
           tests=(f"{MEMBERS}::test_a_pause_is_said_at_once_and_once",)),
    Mutant("a report has a hole where the lowest worker was away", "report/record.py", "        rounds += [r for r in log.rounds if (r.step, r.fragment) not in seen]\n",
           "        rounds += [r for r in log.rounds if not seen or (r.step, r.fragment) > max(seen)]\n",
           tests=(f"{MEMBERS}::test_a_report_has_the_rounds_that_the_lowest_worker_was_not_there_for",)),
    # launch, status
    Mutant("an observer is refused", "link/net/reception.py", '("worker", "observer")', '("worker",)', tests=OBSERVED),
    Mutant("a status has no rounds", "link/net/member.py", "self.rounds.on_their_way()[:MOST_ROUNDS]", "[]", tests=OBSERVED),
    Mutant("rates are of all that was ever counted", "cli/status.py", "return max(0, later - earlier) / over_s", "return later / over_s",
           tests=(f"{LAUNCH}::test_how_fast_workers_are_is_told_below_them",)),
    Mutant("a crashing worker is started for ever", "cli/launch_elastic.py", " and len(past) < MOST_RESTARTS", ""),
    Mutant("a worker that was stopped is started again", "cli/launch_elastic.py", "ended.status not in (2, _LEFT) and not self",
           "ended.status != 2 and not self"),
    Mutant("dead workers are started again unasked", "cli/launch_elastic.py", "may = self._restart and", "may ="),
    Mutant("nobody is started again", "cli/processes.py", "                if self._again(ended):\n", "                if False:\n"),
    Mutant("a run file alone says whether a run is elastic", "cli/launch_elastic.py", "map(runfile.Override.parse, options.changes)", "()"),
    Mutant("a seat that was taken again counts as training", "cli/status.py", "view.lives[seat] != known.life", "False"),
]  # fmt: skip
