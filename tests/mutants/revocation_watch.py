"""Lists of revoked certificates that come while a run is under way: unread, or without effect."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_revocation_watch.py"]
WATCH, PEERS, EMBEDDED = "link/net/revocation_watch.py", "link/net/peers.py", "link/net/embedded.py"

MUTANTS = [
    Mutant("a shorter list counts", WATCH, "and gate.update(newest):", "and (gate.update(newest) or True):"),
    Mutant("a bad list ends the watch", WATCH, "            continue\n", "            return\n"),
    Mutant("workers do not look for lists", PEERS, "            self._watching = self._begin_task(watching,",
           "            watching.close()\n            self._watching = self._begin_task(asyncio.sleep(0),"),
    Mutant("sessions outlive their certificates", PEERS, "watch_revocations(self._own.security, self.gate, self.end_revoked)",
           "watch_revocations(self._own.security, self.gate, lambda: None)"),
    Mutant("a list ends all sessions", PEERS, "            if session.generation < self._own.least_generation(peer):\n                why",
           "            if True:\n                why"),
    Mutant("an accepted certificate is of the first generation", "link/net/reception.py", "generation = 0 if caller is None else caller.generation",
           "generation = 0"),
    Mutant("a dialled certificate is of the first generation", "link/net/dialling.py", "secrets.token_hex(16), own.least_generation(peer)",
           "secrets.token_hex(16), 0"),
    Mutant("a revoked worker is not told why", PEERS, 'revoked", f"{REFUSED}{why}")', 'revoked", "")'),
    Mutant("the registry does not look for lists", EMBEDDED, "watch_revocations(security, self._gate, self._wake)",
           "asyncio.sleep(0)"),
    Mutant("a revoked worker watches on", EMBEDDED, "                    await self._caller(context)  # says so\n",
           "                    pass\n"),
    Mutant("a stolen registry is trusted", "link/net/embedded_client.py", "list_of(security).accepted(Bearer(security.bearer.run, role))",
           "Bearer(security.bearer.run, role)"),
    Mutant("a worker starts with a revoked certificate", "link/net/worker_keys.py", "identity, _ = load_bundle(Path(keys))", "identity = Identity.load(Path(keys))"),
]  # fmt: skip
