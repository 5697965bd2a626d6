"""`atoll launch`: shares of the machine, commands, and who is named when something fails."""

from mutants.seed import Mutant

LAUNCH = "tests/unit/test_launch.py"
TESTS = [
    f"{LAUNCH}::test_the_command_of_a_worker",
    f"{LAUNCH}::test_workers_share_the_cores_unless_the_run_says_how_many_threads",
    f"{LAUNCH}::test_workers_share_the_gpus",
    f"{LAUNCH}::test_free_ports_are_all_different",
    f"{LAUNCH}::test_options_that_cannot_be",
]

MUTANTS = [
    Mutant("every rank takes its worker's cores", "cli/launch.py", "cores // (config.sync.workers * ranks)",
           "cores // config.sync.workers"),
    Mutant("threads that are given are overruled", "cli/launch.py", "if config.threads is None:", "if True:"),
    Mutant("all workers share the first GPU", "cli/launch.py", "gpus[(worker * ranks + rank) % len(gpus)]",
           "gpus[rank % len(gpus)]"),
    Mutant("workers begin anew instead of resuming", "cli/launch.py",
           '        *(["--resume"] if options.resume else []),\n', ""),
    Mutant("changes do not reach the workers", "cli/launch.py",
           '        *(part for change in options.changes for part in ("--set", change)),\n', ""),
    Mutant("every worker is worker 0", "cli/launch.py", '*("--worker", str(worker), "--address", address,',
           '*("--worker", "0", "--address", address,'),
    Mutant("a begun run is launched anew", "cli/launch.py", "        if (folder / RUN).exists():\n", "        if False:\n",
           tests=(f"{LAUNCH}::test_a_run_that_has_begun_is_only_resumed",)),
    Mutant("a peer that tells of the cause is blamed", "cli/processes.py", "own or failures", "failures",
           tests=(f"{LAUNCH}::test_a_peer_that_ends_sooner_than_the_one_it_lost_is_not_blamed",)),
    Mutant("settings that are wrong end like a crash", "cli/launch.py", "    if ended.status == 2:\n", "    if False:\n",
           tests=(f"{LAUNCH}::test_launch_names_the_worker_that_failed",)),
    Mutant("a killed worker is not told from one that failed", "cli/launch.py", "    if ended.status < 0:", "    if False:",
           tests=(f"{LAUNCH}::test_launch_tells_what_killed_a_worker",)),
]  # fmt: skip
