"""What observers of a run are told: its lines, samples of text, its events from far away, and alerts."""

from mutants.seed import Mutant

LINES = "tests/unit/test_line_log.py"
TESTS = [LINES]
TEXT = ("tests/unit/test_text_sample.py",)
PEERS, ELASTIC = "link/net/peers.py", "link/net/elastic_link.py"
LINE_LOG = "train/progress/line_log.py"
FEED = ("tests/unit/test_log_feed.py",)
FAR = ("tests/unit/test_watch_registry.py::"
       "test_an_observer_sees_events_of_all_workers_also_of_one_that_was_killed_and_is_back",)  # fmt: skip
LOG, LOG_CLIENT, RECEPTION = (f"link/net/{name}.py" for name in ("log_feed", "log_client", "reception"))
INCIDENTS, ALARM, TARGET = (f"train/progress/{name}.py" for name in ("incidents", "alarm", "alert_target"))
PURE, SENT = ("tests/unit/test_incidents.py",), ("tests/unit/test_alarm.py",)
GRAFANA = ("tests/unit/test_grafana.py",)
SAMPLE = "train/progress/text_sample.py"
_SESSIONS = ("tests/unit/test_peers.py::test_bytes_are_counted_over_sessions",)

MUTANTS = [
    Mutant(
        "bytes sent over a connection that has ended are forgotten",
        PEERS,
        "            self.traffic.sent[session.peer.seat] += session.outbox.sent\n",
        "",
        tests=_SESSIONS,
    ),
    Mutant(
        "bytes received over a connection that has ended are forgotten",
        PEERS,
        "self.traffic.received[session.peer.seat] += session.assembly.received",
        "pass",
        tests=_SESSIONS,
    ),
    Mutant(
        "a worker that joins again counts from 0",
        ELASTIC,
        "            peers.traffic = self._member.peers.traffic\n",
        "            pass\n",
        tests=("tests/unit/test_elastic_link.py::test_an_excluded_worker_joins_again",),
    ),
    Mutant("lines are told with every step", LINE_LOG, "now_s + EVERY_S", "now_s"),
    Mutant("the last bytes of a run are not told", LINE_LOG, " or isinstance(event, End)\n", "\n"),
    Mutant("a resumed run counts its bytes from 0", LINE_LOG, "isinstance(event, Lines):", "False:"),
    Mutant("lines come after the step", LINE_LOG, "        if isinstance(event, Step | End)",
           "        self._sink.write(event)\n        if isinstance(event, Step | End)",
           also=(LINE_LOG, "(lines)\n        self._sink.write(event)\n", "(lines)\n")),
    Mutant("ranks wait for each other at times of their own", LINE_LOG, "if self._ranks.hold_whole_model and not is_due:",
           "if not is_due:"),
    # samples
    Mutant("samples draw from torch's own random numbers", SAMPLE, ", generator=generator)[0]", ")[0]", tests=TEXT),
    Mutant("no sample is asked for, and one is made", SAMPLE, "    if not tokens or", "    if", tests=TEXT),
    Mutant("the time of a sample is lost", "train/progress/reporter.py",
           '"""Write a text that was sampled since `began_s`."""\n        self.totals.seconds +=',
           '"""Write a text that was sampled since `began_s`."""\n        _ =', tests=TEXT),
    Mutant("a sample of the live parameters", SAMPLE, "with trainer.outer_model() as model, autocast(config):",
           "model = trainer.models[0]\n    with autocast(config):", tests=TEXT),
    Mutant("every length is compiled", "train/model/decoder.py", "-self.config.context :], self._body)",
           "-self.config.context :], self._compiled or self._body)", tests=TEXT),
    Mutant("numbers that are not finite end a run", "train/model/decoder.py", "scores.nan_to_num(nan=0.0).softmax(-1)",
           "scores.softmax(-1)", tests=TEXT),
    # logs for observers
    Mutant("anybody may follow a log", RECEPTION, "_tell_log(self, question: bytes, context: Context) -> bytes:\n"
           '        """Answer an observer, or a worker, that follows the log of this process."""\n'
           "        await self._check_observer(context)\n",
           "_tell_log(self, question: bytes, context: Context) -> bytes:\n", tests=FEED),
    Mutant("a log that was cut is read on", LOG, "!= question.before:", "== b'?':", tests=FEED),
    Mutant("all of a large log is told", LOG, "_LARGE = 2 * LAST_BYTES", "_LARGE = 99 * LAST_BYTES", tests=FEED),
    Mutant("a large log begins amid a line", LOG, "        offset = file.tell()\n",
           "        offset = size - LAST_BYTES\n", tests=FEED),
    Mutant("payloads wait for observers", LOG, "BYTES_PER_S[not self._foreground.messages]", "BYTES_PER_S[1]", tests=FEED),
    Mutant("any number of observers waits", LOG, "if self._waiting >= MOST_WAITING:", "if False:", tests=FEED),
    Mutant("an observer that gave up waits for ever", LOG, "            self._waiting -= 1\n", "            pass\n", tests=FEED),
    Mutant("a part may be of any size", LOG, "if len(data) > PART_BYTES or not unpacking.eof:",
           "if False:", tests=FEED),
    Mutant("half a line of the old log begins the new one", LOG_CLIENT, "self._before = self._unfinished = b\"\"",
           "self._before = b\"\"", tests=FEED),
    Mutant("a line may be of any length", LOG_CLIENT, "if len(rest) > self._most_line:", "if False:", tests=FEED),
    Mutant("an observer misses the end", PEERS, "await asyncio.sleep(self._reception.log.linger_s)", "pass", tests=FAR),
    Mutant("one that comes back is not followed", "watch/registry_source.py",
           "self._workers[seat].follow(known.addresses)", "pass", tests=FAR),
    # alerts
    Mutant("a stall is told again and again", INCIDENTS, "if self._is_stalled or quiet_s < self._stall_s:",
           "if quiet_s < self._stall_s:", tests=PURE),
    Mutant("nobody hears that a stall is over", INCIDENTS, "            if not self._is_stalled:\n", "            if True:\n", tests=PURE),
    Mutant("the export of a model is a stall", INCIDENTS, "if step != self._step or done:", "if step != self._step:", tests=PURE),
    Mutant("every worker tells", INCIDENTS, "return list(found) if self._tells else []", "return list(found)", tests=PURE),
    Mutant("one that is gone should have told", INCIDENTS, "min(self._training - self._gone.keys(), default=None)",
           "min(self._training, default=None)", tests=PURE),
    Mutant("a worker is lost at once", INCIDENTS, "now_s - absence.since_s >= self._lost_s", "True", tests=PURE),
    Mutant("one that is back stays lost", INCIDENTS, "absence = self._gone.pop(worker)", "absence = self._gone[worker]", tests=PURE),
    Mutant("those that finish are lost", INCIDENTS, "        self._gone.clear()\n", "        pass\n", tests=PURE),
    Mutant("a loss that is no number is fine", INCIDENTS, "is_good = math.isfinite(loss) and loss <= bound",
           "is_good = not loss > bound", tests=PURE),
    Mutant("half a nat is a divergence", INCIDENTS, "max(ABOVE[0], ABOVE[1] * self._lowest)", "ABOVE[1]", tests=PURE),
    Mutant("every jump of the loss is told", INCIDENTS, "or self._steady < STEADY:", "or False:", tests=PURE),
    Mutant("Ctrl-C is a failure", ALARM, "if isinstance(error, Exception):", "if error is not None:", tests=SENT),
    Mutant("the last alert is cut off", ALARM, "        self._thread.join(CLOSE_S)\n", "", tests=SENT),
    Mutant("every failure to send is told", ALARM, "                self._has_failed_to_send = True\n", "", tests=SENT),
    Mutant("a server that drips is waited for", TARGET, "posting.join(POST_S)", "posting.join()", tests=SENT),
    Mutant("a status of 500 is fine", TARGET, '            problems.append(f"it answered', '            print(f"it answered', tests=SENT),
    Mutant("a command that hangs is left behind", TARGET, "os.killpg(process.pid, 9)", "process.kill()", tests=SENT),
    Mutant("what a variable holds is told", TARGET, 'f"{setting} holds"', 'f"{target} holds"', tests=SENT),
    Mutant("secrets are printed", TARGET, "{urlsplit(target).hostname}", "{target}", tests=SENT),
    Mutant("an alert follows a redirect", TARGET, "build_opener(_Stay)", "build_opener()", tests=SENT),
    # metrics and their dashboard
    Mutant("a metric has another name than on the dashboard", "watch/prometheus.py", '_metric("held_out_loss"',
           '_metric("eval_loss"', tests=GRAFANA),
    Mutant("a line does not say where it leads", "watch/prometheus.py", '"to": str(pair["to"])', '"at": str(pair["to"])',
           tests=GRAFANA),
]  # fmt: skip
