"""What `atoll watch` shows and to whom: thinning, one clock, states, files that grow, the server's doors and streams."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_watch_sections.py"]

_THIN = ("tests/property/test_thinning.py",)
_FOLDERS = ("tests/unit/test_watch_folders.py",)
_SERVER = "tests/unit/test_watch_server.py"
_TAIL = ("tests/unit/test_metrics.py", "tests/property/test_metrics_property.py")


def _in(*names: str) -> tuple[str, ...]:
    return tuple(f"{_SERVER}::test_{name}" for name in names)


MUTANTS = [
    # thinning
    Mutant(
        "a peak is lost when buckets join", "watch/thinning.py", "max(a.high, b.high)) for", "b.high) for", tests=_THIN
    ),
    Mutant(
        "a mean of means", "watch/thinning.py", "a.known + b.known, a.total + b.total", "b.known, b.total", tests=_THIN
    ),
    Mutant("buckets have different sizes", "watch/thinning.py", "            self._size *= 2\n", "", tests=_THIN),
    Mutant(
        "the open bucket is not shown",
        "watch/thinning.py",
        "return self._full + ([_bucket(self._open)] if self._open else [])",
        "return self._full",
        tests=_THIN,
    ),
    Mutant(
        "a value that is not finite counts",
        "watch/thinning.py",
        "if value is not None and math.isfinite(value)]",
        "if value is not None]",
        tests=_THIN,
    ),
    Mutant(
        "the newest item is thinned away",
        "watch/thinning.py",
        "return self._kept + self._newest",
        "return self._kept",
        tests=_THIN,
    ),
    Mutant(
        "a span that is cut by a bucket's end counts twice",
        "watch/thinning.py",
        "sums[last] += end - last * width",
        "sums[last] += end - begin",
        tests=_THIN,
    ),
    Mutant(
        "time before the beginning counts",
        "watch/thinning.py",
        "max(span.begin_s - self._begin_s, 0.0), span.end_s",
        "span.begin_s - self._begin_s, span.end_s",
        tests=_THIN,
    ),
    Mutant(
        "the last bucket counts as over",
        "watch/thinning.py",
        "[length - (count - 1) * self.bucket_s]",
        "[self.bucket_s]",
        tests=_THIN,
    ),
    Mutant(
        "spans that join lose the longer end",
        "watch/thinning.py",
        "np.maximum.accumulate(ends)",
        "ends",
        tests=_THIN,
    ),
    Mutant("far spans join", "watch/thinning.py", "gaps > max(widest, 0.0)", "gaps > gaps.max()", tests=_THIN),
    # one clock
    Mutant(
        "a resumed worker is shown in its past",
        "watch/process.py",
        "            self.base = max(self.base, event.began - event.seconds)",
        "            self.base = max(self.base, 0.0)",
    ),
    Mutant(
        "a late worker begins with the first",
        "watch/live_run.py",
        "return time - (self.began if process.began else 0.0)",
        "return time - process.began",
    ),
    Mutant(
        "a step is when the last worker made it",
        "watch/live_run.py",
        "[(0.0, 0.0), *points], reverse=True)",
        "[(0.0, 0.0), *points])",
    ),
    # what one process tells
    Mutant("waits overlap", "watch/process.py", "            self._free = wait.end_s\n", "            pass\n"),
    Mutant(
        "an absence inside a process is not seen",
        "watch/process.py",
        "        if None in losses and at > before:\n",
        "        if False:\n",
    ),
    Mutant(
        "a run that went on has still ended", "watch/process.py", "self.last = None if self.end else self.last", "pass"
    ),
    Mutant(
        "complete rounds are faults",
        "watch/process.py",
        "(missing := event.expected - len(event.members)) > 0",
        "(missing := event.expected - len(event.members)) >= 0",
    ),
    Mutant(
        "old rounds are kept for ever",
        "watch/process.py",
        "            del self._numbers[: _WIDTH * (MOST_FLIGHTS // 2)]\n",
        "            pass\n",
    ),
    Mutant(
        "a search for rounds ends too early",
        "watch/process.py",
        "if (rows[:, 1] < window.begin_s).all():",
        "if len(rows):",
    ),
    # the whole run
    Mutant(
        "a process of another run is shown",
        "watch/live_run.py",
        "            merge([*(process.log() for process in self.processes.values()), EventLog(start=start)])\n",
        "",
    ),
    Mutant("numbers of workers are not checked", "watch/live_run.py", "            check_start(start)\n", ""),
    Mutant(
        "what a foreign process is, is forgotten",
        "watch/live_run.py",
        "(self.trouble, *self._troubles.values(), *self._foreign.values())",
        "(*self._troubles.values(),)",
    ),
    Mutant(
        "the quickest worker sets the time left",
        "watch/live_run.py",
        "left_s = max(found, default=math.nan)",
        "left_s = min(found, default=math.nan)",
    ),
    Mutant(
        "applied rounds are on their way", "watch/live_run.py", "process.tracks[worker].applied.get(fragment, 0)", "0"
    ),
    Mutant(
        "a process that writes seldom is silent",
        "watch/live_run.py",
        "return max(QUIET_S, _TIMES * process.interval_s)",
        "return QUIET_S",
    ),
    Mutant(
        "a curve shows workers in the wrong order",
        "watch/compose.py",
        "at = list(process.tracks).index(worker)",
        "at = 0",
        tests=(
            "tests/unit/test_watch_sections.py::test_absences_in_one_process_are_shown",
            "tests/unit/test_watch_sections.py::test_each_worker_of_one_process_has_its_own_curve",
        ),
    ),
    Mutant(
        "faults are told by every worker",
        "watch/fault_section.py",
        "found.setdefault(key, fault",
        "found.setdefault((*key, id(process)), fault",
    ),
    Mutant(
        "an explosion is like any other",
        "watch/fault_section.py",
        '"guarded" if "far larger" in words else "left out"',
        '"left out"',
    ),
    Mutant(
        "a rate is the whole over a moment",
        "watch/traffic_section.py",
        "max(0, sent - before) / (at - since)",
        "sent / (at - since)",
    ),
    Mutant(
        "a plan without its line",
        "watch/traffic_section.py",
        "parse_line(emulated) if isinstance(emulated, str) else None",
        "None",
    ),
    Mutant(
        "the speed of an ended run is its last reading",
        "watch/compose.py",
        "if record and how.state in ENDED",
        "if False",
    ),
    Mutant(
        "samples are the oldest",
        "watch/compose.py",
        "sorted(dict.fromkeys(found), reverse=True)[:_MOST_SAMPLES]",
        "sorted(dict.fromkeys(found))[:_MOST_SAMPLES]",
    ),
    # states
    Mutant(
        "reading is not said", "watch/state.py", "if share < 1 and (record is None or record.end is None):", "if False:"
    ),
    Mutant("a fifth trouble disappears", "watch/state.py", "run.troubles[_MOST_TROUBLES:]", "[]"),
    Mutant("an interrupted run is finished", "watch/state.py", "    if record.finished:\n", "    if True:\n"),
    Mutant("a pause is training", "watch/state.py", "len(newest.members) >= least:", "len(newest.members) >= 0:"),
    Mutant(
        "a stall is training",
        "watch/state.py",
        "if all(now - run.stepped.get(name, now) > run.patience_s(name) for name in open_):",
        "if False:",
    ),
    Mutant("nobody waits for a round", "watch/state.py", "    if len(late) < len(open_) or not", "    if True or not"),
    Mutant("a silent worker is not named", "watch/state.py", "    if not silent or not there:\n", "    if True:\n"),
    # lanes
    Mutant(
        "a silent worker's lane goes on",
        "watch/lane_times.py",
        "if name is not None and run.is_silent(name, now):",
        "if False:",
    ),
    Mutant(
        "an absence is training",
        "watch/lane_times.py",
        'found.append([free_s, begin, "away"])',
        'found.append([free_s, begin, "training"])',
    ),
    Mutant(
        "pauses are not cut out",
        "watch/lane_times.py",
        'for pause in paused if what == "training" else ():',
        "for pause in ():",
    ),
    Mutant("the reason of a loss is not told", "watch/lane_times.py", "plain_text(event.why)", 'plain_text("")'),
    # JSON
    Mutant("a name can end a script", "watch/serialise.py", '"<>&\\u2028\\u2029"', '"&\\u2028\\u2029"'),
    Mutant("infinity reaches the page", "watch/serialise.py", "if math.isfinite(value) else None", ""),
    # files
    Mutant(
        "a file is read at one go",
        "watch/folders.py",
        "events=tail.new(MOST_EVENTS), heard",
        "events=tail.new(), heard",
        tests=_FOLDERS,
    ),
    Mutant(
        "a damaged line ends the server",
        "watch/folders.py",
        "        except DataError as error:\n            return News",
        "        except KeyError as error:\n            return News",
        tests=_FOLDERS,
    ),
    Mutant(
        "a worker that begins later is not found",
        "watch/folders.py",
        "if self._polls % _RESCAN == 0:",
        "if self._polls == 0:",
        tests=_FOLDERS,
    ),
    Mutant(
        "a folder counts as often as it is given",
        "watch/folders.py",
        "found.setdefault(home.resolve(), home)",
        "found.setdefault(Path(str(len(found))), home)",
        tests=_FOLDERS,
    ),
    Mutant(
        "several runs are shown as one",
        "watch/folders.py",
        "elif not is_run(folder) and",
        "elif False and",
        tests=_FOLDERS,
    ),
    Mutant(
        "what comes before a damaged line is lost",
        "runs/tail.py",
        "        except DataError:\n            if not found:\n                raise\n",
        "        except DataError:\n            raise\n",
        tests=_TAIL,
    ),
    Mutant(
        "a part of a tail is read twice",
        "runs/tail.py",
        "        self.offset += sum(map(len, lines))\n",
        "        self.offset += sum(map(len, lines[:1]))\n",
        tests=_TAIL,
    ),
    Mutant(
        "long numbers pass",
        "runs/events.py",
        'if b"0" * 30 in line.translate(_ZEROS) and',
        'if b"0" * 30 in line and',
        tests=("tests/unit/test_hostile_files.py::test_numbers_that_no_float_holds_are_damage",),
    ),
    # who may look
    Mutant(
        "other methods are served",
        "watch/guard.py",
        'if scope["method"] != "GET":',
        "if False:",
        tests=_in("only_get_is_served"),
    ),
    Mutant(
        "any host name will do",
        "watch/guard.py",
        "if admission.hosts is not None and",
        "if False and",
        tests=_in("a_name_that_was_made_to_lead_here_is_refused"),
    ),
    Mutant(
        "a host name is compared by its beginning",
        "watch/guard.py",
        "_host(headers) not in admission.hosts:",
        "not _host(headers).startswith(tuple(admission.hosts)):",
        tests=_in("a_name_that_was_made_to_lead_here_is_refused"),
    ),
    Mutant(
        "no token will do",
        "watch/guard.py",
        "        if not known:\n",
        "        if False:\n",
        tests=_in("without_the_token_nothing_is_served"),
    ),
    Mutant(
        "any scheme carries the token",
        "watch/guard.py",
        'if scheme.lower() == "bearer" else []',
        "if scheme else []",
        tests=_in("without_the_token_nothing_is_served"),
    ),
    Mutant(
        "the token stays in the address",
        "watch/guard.py",
        "        if told is not None and admission.token is not None and admission.knows_token(told):\n",
        "        if False:\n",
        tests=_in("the_token_moves_from_the_address_into_a_cookie"),
    ),
    Mutant(
        "scripts may read the cookie",
        "watch/guard.py",
        "httponly=True",
        "httponly=False",
        tests=_in("the_token_moves_from_the_address_into_a_cookie"),
    ),
    Mutant(
        "other sites may send the cookie",
        "watch/guard.py",
        'samesite="strict"',
        'samesite="lax"',
        tests=_in("the_token_moves_from_the_address_into_a_cookie"),
    ),
    Mutant(
        "the token leads elsewhere",
        "watch/guard.py",
        '"/" + path.lstrip("/\\\\")',
        "path",
        tests=_in("the_token_moves_from_the_address_into_a_cookie"),
    ),
    Mutant(
        "refusals are not confined",
        "watch/guard.py",
        "(scope, receive, confined)",
        "(scope, receive, confined if refused is None else send)",
        tests=_in("every_answer_has_the_headers_that_confine_the_page"),
    ),
    Mutant(
        "any file of the folder is served",
        "watch/server.py",
        "if file.suffix in _TYPES}",
        "if file.is_file()}",
        also=(
            "watch/server.py",
            "media_type=_TYPES[Path(name).suffix]",
            'media_type=_TYPES.get(Path(name).suffix, "text/plain")',
        ),
        tests=_in("files_of_the_page_are_served_and_no_others"),
    ),
    Mutant(
        "a window may be anything",
        "watch/server.py",
        "if not -math.inf < window.begin_s < window.end_s < math.inf:",
        "if False:",
        tests=_in("a_window_of_time"),
    ),
    Mutant(
        "quotes break out of a metric",
        "watch/prometheus.py",
        """.replace('"', '\\\\"')""",
        "",
        tests=_in("hostile_names_do_not_break_metrics"),
    ),
    # streams
    Mutant(
        "one too many is let in",
        "watch/server.py",
        "if self.viewers >= MOST_VIEWERS:",
        "if self.viewers > MOST_VIEWERS:",
        tests=_in("viewers_are_counted_and_one_too_many_is_refused"),
    ),
    Mutant(
        "those who left still count",
        "watch/server.py",
        "            self._watch.viewers -= 1\n",
        "            pass\n",
        tests=_in("viewers_are_counted_and_one_too_many_is_refused"),
    ),
    Mutant(
        "a stuck viewer stays for ever",
        "watch/server.py",
        "async with asyncio.timeout(STUCK_S):",
        "async with asyncio.timeout(None):",
        tests=_in("a_viewer_that_takes_nothing_for_long_is_let_go"),
    ),
    Mutant(
        "all sections are sent every time",
        "watch/board.py",
        "if n > since]",
        "if n]",
        tests=_in("a_stuck_viewer_holds_one_message_and_delays_nobody"),
    ),
    Mutant(
        "a message is made for each viewer",
        "watch/board.py",
        "if since not in self._messages:",
        "if True:",
        tests=_in("viewers_that_keep_up_share_their_bytes"),
    ),
    Mutant(
        "an old message is sent again",
        "watch/board.py",
        "        self._messages.clear()\n",
        "",
        tests=_in(
            "the_first_message_has_all_and_later_ones_what_has_changed",
            "a_stuck_viewer_holds_one_message_and_delays_nobody",
        ),
    ),
    Mutant(
        "what has not changed is sent",
        "watch/board.py",
        "        if not changed:\n            return\n",
        "",
        tests=_in("viewers_that_keep_up_share_their_bytes"),
    ),
    Mutant(
        "a quiet stream is silent",
        "watch/server.py",
        'yield b": still here\\n\\n"',
        "continue",
        tests=_in("a_quiet_stream_still_beats"),
    ),
    Mutant(
        "the end of the server is not told",
        "watch/server.py",
        "            self.board.close()\n",
        "            pass\n",
        tests=_in("the_end_of_the_server_ends_streams"),
    ),
    # strangers, and what may go wrong inside
    Mutant(
        "one fault ends the reader",
        "watch/reader.py",
        "except Exception as fault:",
        "except ZeroDivisionError as fault:",
        tests=_in("a_reader_that_fails_says_so_and_goes_on"),
    ),
    Mutant(
        "a lost worker is shown when the curves are",
        "watch/reader.py",
        "(share < 1 or not self._run.has_turned)",
        "True",
        tests=_in("who_trains_is_shown_at_once_and_steps_when_there_is_time"),
    ),
    Mutant(
        "every step is shown at once",
        "watch/live_run.py",
        "_TURNS = (Start,",
        "_TURNS = (Start, Step,",
        tests=_in("who_trains_is_shown_at_once_and_steps_when_there_is_time"),
    ),
    Mutant(
        "a fault that two workers tell of counts twice",
        "watch/fault_section.py",
        "sum(max(process.faults[worker] for process in logs)",
        "sum(sum(process.faults[worker] for process in logs)",
        tests=("tests/unit/test_watch_sections.py",),
    ),
    Mutant(
        "a loss is told by each that saw it",
        "watch/fault_section.py",
        'which = _view_without(process, event) if isinstance(event, events.Lost) else fault["step"]',
        'which = fault["step"]',
        tests=("tests/unit/test_watch_sections.py",),
    ),
    Mutant(
        "a failed run is silent",
        "watch/state.py",
        "        or _failed(run, record)\n",
        "",
        tests=("tests/unit/test_watch_sections.py",),
    ),
    Mutant(
        "a failed run that goes on is failed",
        "watch/process.py",
        "self.last = None if self.end else self.last\n                self.kept[Failed].clear()\n",
        "self.last = None if self.end else self.last\n",
        tests=("tests/unit/test_watch_sections.py",),
    ),
    Mutant(
        "slow steps are silence",
        "watch/live_run.py",
        "if process.recent and not process.interval_s:",
        "if False:",
        tests=("tests/unit/test_watch_sections.py",),
    ),
    Mutant(
        "a run does not write why it failed",
        "train/run.py",
        "    if isinstance(error, Exception):  # not a signal, nor an end in order\n",
        "    if isinstance(error, KeyError):\n",
        tests=("tests/unit/test_run.py::test_a_run_that_fails_writes_why",),
    ),
    Mutant(
        "the newest loss is the mean of many",
        "watch/prometheus.py",
        'curve["newest"])',
        'curve["mean"][-1])',
        tests=_in("the_newest_loss_is_that_of_the_newest_step"),
    ),
    Mutant(
        "a page that is not followed is healthy",
        "watch/server.py",
        'PlainTextResponse(f"503: {trouble}\\n", 503) if trouble else',
        "",
        tests=_in("a_reader_that_fails_says_so_and_goes_on"),
    ),
    Mutant(
        "other sites may ask for parts",
        "watch/guard.py",
        'headers.get("sec-fetch-site") == "cross-site"',
        "False",
        tests=_in("other_sites_may_open_the_page_and_nothing_else"),
    ),
    Mutant("a worker is shown twice", "watch/live_run.py", "begun.tracks.keys() & process.tracks.keys()", "set[int]()"),
    Mutant(
        "the time left waits for those that are gone", "watch/live_run.py", "if not self.is_silent(name, now)]", "]"
    ),
    Mutant(
        "a page takes any number of connections",
        "watch/connections.py",
        "if len(self.connections) > most_connections():",
        "if False:",
        tests=("tests/unit/test_watch_command.py::test_strangers_that_only_connect_leave_the_page_to_others",),
    ),
    Mutant(
        "a connection that asks for nothing stays",
        "watch/connections.py",
        "if cycle is None or cycle.response_complete:",
        "if False:",
        tests=("tests/unit/test_watch_command.py::test_strangers_that_only_connect_leave_the_page_to_others",),
    ),
]
