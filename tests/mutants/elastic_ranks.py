"""Elastic workers of several ranks: what rank 0 tells the others, whose shards travel, and how a worker comes back."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_elastic_rank_links.py"]
REPLICAS, SHARDS = "link/elastic_ranks.py", "link/elastic_shards.py"
RUNS = "tests/unit/test_elastic_ranks.py"
KILLED = f"{RUNS}::test_a_killed_rank_ends_its_worker_which_comes_back"
STOPPED = (f"{RUNS}::test_a_worker_that_is_stopped_leaves_in_order_and_comes_back",)
FIRST_SAVE = (f"{RUNS}::test_a_worker_killed_amid_its_first_save_comes_back",)

MUTANTS = [
    # links
    Mutant("only rank 0 learns that its worker is excluded", "link/ranks.py", 'ExcludedError if result["excluded"] else LinkError', "LinkError"),
    Mutant("ranks that differ join all the same", REPLICAS, "        self._rank_group.raise_on_all(lambda: self._compare(mine, of_rank_0))\n", ""),
    Mutant("the leader's link is not told that work is unfinished", REPLICAS, "            self._link.unfinished = unfinished\n", "            pass\n"),
    Mutant("weights of a round that was sent long ago are forgotten first", REPLICAS, "next(iter(self._by_step))", "min(self._by_step)"),
    Mutant("weights that were asked for before a round are believed after it", REPLICAS,
           "        self._ask_weights(max(1, round_id.step))  # final", "        self.weights(max(1, round_id.step))  # final"),
    Mutant("shards of two ranks are one round", SHARDS, "wire_id = round_id._replace(fragment=first + rank)",
           "wire_id = round_id._replace(fragment=first)"),
    Mutant("shards of two fragments are one round", SHARDS, "first = round_id.fragment * len(shards)", "first = round_id.fragment"),
    Mutant("all shards are taken to be as large as rank 0's", SHARDS, "numel=shard.numel, device=CPU", "device=CPU"),
    Mutant("a shard that cannot be sent is left out in silence", SHARDS,
           '            self._offers.send_text(json.dumps({"error": f"{type(fault).__name__}: {fault}"}), 0)\n', '            self._offers.send_text("{}", 0)\n'),
    Mutant("terms of the other ranks are not compared", SHARDS, "link.join({**terms, **others[0]}, weight", "link.join(terms, weight"),
    Mutant("the others are told of a fragment that there is not", SHARDS,
           "        states = [self._save(fragment)]  # IndexError, for a fragment that there is not, before the others are told\n"
           '        self._rank_group.broadcast_text(json.dumps({"copy": fragment}))\n',
           '        self._rank_group.broadcast_text(json.dumps({"copy": fragment}))\n        states = [self._save(fragment)]\n'),
    Mutant("a joiner gets a shard that is newer than it is said to be", SHARDS, "max(state.applied for state in states)", "states[0].applied"),
    Mutant("one rank alone decides to roll back", SHARDS, "return self._rank_group.any(value)", "return value"),
    # the trainer
    Mutant("a worker with one rank's first checkpoint cannot come back", "train/ranks/elastic.py", "common_steps(steps, required=False)", "common_steps(steps)",
           tests=FIRST_SAVE),
    Mutant("ranks restore checkpoints of different steps", "train/folder.py", "(step is None and self._agrees)", "(step is None and self.of_many)", tests=FIRST_SAVE),
    Mutant("a worker of several ranks does not leave in order", "train/ranks/elastic.py", "self.ranks.from_leader(lambda: self.elastic.leave(reason) if self.elastic else None)",
           "pass", tests=STOPPED),
    Mutant("workers of different numbers of ranks meet", "train/ranks/elastic.py", ", RANKS_THAT_EXCHANGE: str(exchange)}", "}",
           tests=(f"{RUNS}::test_another_number_of_ranks_is_refused",)),
    Mutant("every rank keeps a record", "train/run.py", "    if process.ranks.is_leader:\n        if trainer.reporter.members is not None:\n            _open_evidence",
           "    if trainer.reporter.members is not None:\n        _open_evidence", also=("train/run.py", "process.cleanup)\n        log = _open_log", "process.cleanup)\n    if process.ranks.is_leader:\n        log = _open_log"),
           tests=(f"{KILLED}[ddp-diloco]",)),
]  # fmt: skip
