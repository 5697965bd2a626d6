"""The registry: what it loses, mixes up, lets in or never forgets."""

from mutants.seed import Mutant

CONTRACT = "tests/unit/test_registry_contract.py::TestEmbedded"
EMBEDDED = "tests/unit/test_registry_embedded.py"
JOURNALS = "tests/property/test_registry_property.py::test_a_journal_is_a_dict_that_survives"
TESTS = [CONTRACT]
JOURNAL, SERVER, CLIENT, ETCD = (f"link/net/{name}.py" for name in ("journal", "embedded", "embedded_client", "etcd"))
GATEWAY = "link/net/etcd_gateway.py"


def _in(test: str) -> tuple[str]:
    return (f"{EMBEDDED}::{test}",)


_CERTIFICATE = _in("test_a_certificate_says_what_its_bearer_may_do")
_FULL = _in("test_a_full_disk_is_an_error_to_the_caller")
_AWAY = _in("test_presences_outlast_a_registry_that_was_away_for_longer")
_KILLED = _in("test_killed_at_any_moment_it_loses_nothing")
_LATE = _in("test_a_watcher_that_was_away_for_too_long_gets_a_snapshot")

MUTANTS = [
    Mutant(
        "a stale version is accepted",
        JOURNAL,
        "        if (there.version if there else 0) != version:\n            return Outcome(False, there)\n",
        "",
    ),
    Mutant(
        "a key that exists is created again",
        JOURNAL,
        "        if (there.version if there else 0) != version:\n",
        "        if version and (there.version if there else 0) != version:\n",
    ),
    Mutant(
        "a presence that exists is announced over",
        JOURNAL,
        "        if holder is not None and if_absent:\n            return holder == lease.number\n",
        "",
    ),
    Mutant(
        "its own announcement is another process's",
        JOURNAL,
        "            return holder == lease.number\n",
        "            return False\n",
    ),
    Mutant(
        "a replaced process takes the key along",
        JOURNAL,
        "        if self._holder(key) != number:\n            return False\n",
        "",
        tests=(JOURNALS,),
    ),
    Mutant(
        "versions start again",
        JOURNAL,
        'UPDATE meta SET version = ?, forgotten = ?", (version,',
        'UPDATE meta SET version = ?, forgotten = ?", (1,',
        tests=(JOURNALS,),
    ),
    Mutant(
        "the journal is written when it is closed",
        JOURNAL,
        '            self._base.execute("COMMIT")\n        except',
        "            pass\n        except",
        also=(
            JOURNAL,
            '            self._base.execute("BEGIN IMMEDIATE")\n',
            '            self._base.in_transaction or self._base.execute("BEGIN IMMEDIATE")\n',
        ),
        tests=_KILLED,
    ),
    Mutant(
        "the version counts what was not written",
        JOURNAL,
        "        version, forgotten = self.version + 1, self._forgotten\n",
        "        self.version += 1\n        version, forgotten = self.version, self._forgotten\n",
        tests=_in("test_keys_and_bytes_are_bounded"),
    ),
    Mutant(
        "a failed change stays open",
        JOURNAL,
        '                self._base.execute("ROLLBACK")\n',
        "                pass\n",
        tests=_in("test_keys_and_bytes_are_bounded"),
    ),
    Mutant(
        "a full disk is a bug",
        JOURNAL,
        "            if not isinstance(fault, sqlite3.Error):\n                raise\n",
        "            raise\n",
        tests=_FULL,
    ),
    Mutant(
        "two processes share a journal",
        JOURNAL,
        '            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")\n',
        "",
        tests=_in("test_one_process_cannot_open_a_journal_twice"),
    ),
    Mutant(
        "a watcher is not told that changes are forgotten",
        JOURNAL,
        "since == 0 or since < self._forgotten",
        "since == 0",
        tests=_LATE,
    ),
    Mutant("the history grows for ever", JOURNAL, "version - forgotten > HISTORY or", "", tests=_LATE),
    Mutant(
        "the history has any number of bytes",
        JOURNAL,
        "or (history > HISTORY_BYTES and forgotten < version - 1)",
        "",
        tests=_in("test_the_history_is_bounded_in_bytes"),
    ),
    Mutant("a change comes twice", JOURNAL, "WHERE version > ? AND key >= ?", "WHERE version >= ? AND key >= ?"),
    Mutant("a lost journal goes unnoticed", JOURNAL, "        if since > self.version:\n", "        if False:\n"),
    Mutant(
        "watchers wait for the next beat",
        SERVER,
        "        self._changed.set()\n        self._changed = asyncio.Event()\n",
        "        self._changed = asyncio.Event()\n",
        also=(SERVER, "BEAT_S: Final = 2.0\n", "BEAT_S: Final = 200.0\n"),
    ),
    Mutant(
        "a watcher misses what happens while it is told",
        SERVER,
        "            since = page.version\n            if time",
        "            since = self._journal.version\n            if time",
        also=(
            SERVER,
            "            for reply in _cut(page):\n",
            "            await asyncio.sleep(0.01)\n            for reply in _cut(page):\n",
        ),
    ),
    Mutant(
        "a watcher hears nothing while other keys change",
        SERVER,
        "max(0.0, told_s + BEAT_S - time.monotonic())",
        "BEAT_S",
        also=(
            SERVER,
            "            if time.monotonic() >= told_s + BEAT_S:\n",
            "            if page.version == since and time.monotonic() >= told_s + BEAT_S and False:\n",
        ),
        tests=_in("test_a_watcher_is_told_that_the_registry_is_there"),
    ),
    Mutant("nothing ever lapses", SERVER, "if term.end_s < now_s]", "if False]"),
    Mutant(
        "a renewal changes nothing",
        SERVER,
        "        term.end_s = time.monotonic() + term.ttl_s\n        return",
        "        return",
    ),
    Mutant(
        "a stop of the registry ends all leases",
        SERVER,
        "            if now_s - looked_s > _STALL_S:",
        "            if False:",
        tests=_AWAY,
    ),
    Mutant(
        "leases are forgotten by a restart",
        SERVER,
        "for key, (number, ttl_s) in journal.leases().items()}",
        "for key, (number, ttl_s) in ()}",
        tests=_AWAY,
    ),
    Mutant(
        "a presence without a term",
        SERVER,
        "await asyncio.shield(self._begin(handler(bearer, asked)))",
        "await handler(bearer, asked)",
        tests=_in("test_a_presence_whose_caller_has_gone_disappears"),
    ),
    Mutant(
        "a worker announces others",
        SERVER,
        '(bearer.role == "worker" and bearer.seat == seat)',
        'bearer.role == "worker"',
        tests=_CERTIFICATE,
    ),
    Mutant(
        "an observer sets the view",
        SERVER,
        'not (bearer is None or bearer.role == "worker")',
        "False",
        tests=_CERTIFICATE,
    ),
    Mutant("an observer cannot read", SERVER, '("worker", "observer"))', '("worker",))', tests=_CERTIFICATE),
    Mutant(
        "no certificate is asked for",
        "link/net/credentials.py",
        "require_client_auth=True",
        "require_client_auth=False",
        also=(
            SERVER,
            "        if self._gate is None:\n            return None\n",
            "        if True:\n            return None\n",
        ),
        tests=_CERTIFICATE,
    ),
    Mutant(
        "one worker takes all watchers",
        SERVER,
        "most = WATCHERS if bearer is None else WATCHERS_EACH",
        "most = WATCHERS",
        tests=_in("test_watchers_of_one_certificate_are_bounded"),
    ),
    Mutant("watchers that have gone still count", SERVER, "            self._watching[bearer] -= 1\n", ""),
    Mutant(
        "two servers share a port",
        "link/net/listening.py",
        '("grpc.so_reuseport", 0)',
        '("grpc.so_reuseport", 1)',
        tests=_in("test_two_servers_do_not_share_a_port"),
    ),
    Mutant(
        "any number of connections",
        "link/net/listening.py",
        "min(connections, files // 4) if files > 0 else connections",
        "0",
        tests=_in("test_strangers_cost_few_files_and_keep_nobody_out"),
    ),
    Mutant(
        "unknown fields are ignored",
        "link/net/registry_messages.py",
        'extra="forbid"',
        'extra="ignore"',
        tests=_in("test_garbage_is_refused_and_changes_nothing"),
    ),
    Mutant(
        "any server is the registry",
        CLIENT,
        "accepted(Bearer(security.bearer.run, role)).host_name",
        'accepted(Bearer(security.bearer.run, "worker")).host_name',
        tests=_in("test_a_server_with_another_certificate_is_no_registry"),
    ),
    Mutant(
        "a watcher begins anew after a restart",
        CLIENT,
        "request = messages.WatchRequest(prefix=prefix, since=since)",
        "request = messages.WatchRequest(prefix=prefix, since=0)",
        tests=_KILLED,
    ),
    Mutant(
        "a watcher gives up with its connection",
        CLIENT,
        "                if fault.code() not in _PASSING:\n                    raise",
        "                if True:\n                    raise",
        tests=_KILLED,
    ),
    Mutant(
        "a lost change is certain",
        CLIENT,
        'uncertain=method != "Get"',
        "uncertain=False",
        tests=_in("test_a_presence_whose_caller_has_gone_disappears"),
    ),
    Mutant(
        "a replaced process announces itself again",
        "link/net/registry.py",
        "_grant(self._lease, if_absent=True)",
        "_grant(self._lease, if_absent=False)",
        also=("link/net/registry.py", "if standing is Standing.LAPSED:", "if standing is not Standing.HELD:"),
    ),
    Mutant(
        "a process that lapsed stays away",
        "link/net/registry.py",
        "                    if standing is Standing.LAPSED:\n",
        "                    if False:\n",
    ),
    Mutant(
        "a change to etcd is sent twice",
        GATEWAY,
        "(fault.uncertain and not again) or",
        "",
        tests=("tests/unit/test_registry_etcd.py::test_a_change_whose_reply_was_lost_is_uncertain_and_not_sent_again",),
    ),
    Mutant(
        "one member of etcd is asked for ever",
        GATEWAY,
        "            self._turn += 1\n",
        "            pass\n",
        tests=("tests/unit/test_registry_etcd.py::test_a_change_whose_reply_was_lost_is_uncertain_and_not_sent_again",),
    ),
]
