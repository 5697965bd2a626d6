"""Sessions between processes: two where one should be, peers that are lost late or never, frames out of place."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_peers.py"]
REFUSED, OUTBOX = "tests/unit/test_peers_refused.py", "tests/unit/test_outbox.py"
PEERS, SESSION, FRAMES, BOX, RECEPTION, DIALLING, HANDSHAKE = (
    f"link/net/{name}.py" for name in ("peers", "session", "frames", "outbox", "reception", "dialling", "handshake")
)


def _in(test: str, file: str = TESTS[0]) -> tuple[str]:
    return (f"{file}::{test}",)


_CROSSING = _in("test_dials_that_cross_make_one_session")
_WHOLE = _in("test_messages_arrive_whole_and_in_order")
_STOPPED = _in("test_a_stopped_process_is_lost_after_the_silence")
_DROPPED = _in("test_a_dropped_peer_is_told_why_and_nobody_reconnects")
_CLOSED = _in("test_who_closes_says_why_after_all_that_was_queued")
_SEATS = _in("test_another_seat_or_life_is_refused", REFUSED)
_STREAMS = _in("test_a_bulk_stream_belongs_to_a_session", REFUSED)
_BAD_FRAME = _in("test_a_frame_that_cannot_be_ends_its_session_at_both_ends", REFUSED)
_BAD_CONTROL = _in("test_a_control_message_that_cannot_be_ends_its_session", REFUSED)
_ANY_ORDER = _in("test_frames_may_come_in_any_order", OUTBOX)
_BACKGROUND = _in("test_background_messages_yield_and_take_their_share", OUTBOX)
_MEASURED = _in("test_only_time_in_which_there_was_something_to_send_is_measured", OUTBOX)
_BURST = _in("test_a_burst_in_the_background_must_arrive_before_the_next", OUTBOX)
_BURSTS = _in("test_bursts_follow_the_line", OUTBOX)
_IDLE = _in("test_background_messages_take_more_while_nothing_else_is_sent_to_anybody", OUTBOX)

MUTANTS = [
    Mutant("both ends choose a dial", HANDSHAKE, "return self.me < peer", "return True", tests=_CROSSING),
    Mutant("no end chooses a dial", HANDSHAKE, "return self.me < peer", "return False", tests=_CROSSING),
    Mutant(
        "a second session takes the place of the first",
        PEERS,
        "        if peer in self._sessions:\n            raise RefusedError",
        "        if False:\n            raise RefusedError",
        also=(PEERS, "        return peer in self._wanted\n", "        return True\n"),
        tests=_in("test_the_second_of_two_dials_that_get_through_is_refused", REFUSED),
    ),
    Mutant(
        "a session stays wanted", PEERS, "        self._forget(peer, but=asyncio.current_task())\n", "", tests=_DROPPED
    ),
    Mutant(
        "the lower end dials or nobody",
        PEERS,
        "        if addresses:\n",
        "        if addresses and peer > self._own.me:\n",
        tests=_in("test_one_end_that_can_be_reached_is_enough"),
    ),
    Mutant(
        "a dial begins anew whenever it is asked for",
        PEERS,
        " or (known is not None and known.addresses == tuple(addresses)):",
        ":",
        tests=_in("test_a_dial_is_not_begun_anew_when_it_is_asked_for_again"),
    ),
    Mutant(
        "a dial that was given up is a loss",
        PEERS,
        "            if why is not None and unheard is not None:\n",
        "            if False:\n",
        tests=_in("test_a_dial_that_is_given_up_when_it_is_taken_is_no_loss", REFUSED),
    ),
    Mutant(
        "a dial that was given up is not dialled again",
        PEERS,
        "                self.meet(session.peer, unheard[0].addresses, dial=True)\n",
        "                pass\n",
        tests=_in("test_a_dial_that_is_given_up_when_it_is_taken_is_no_loss", REFUSED),
    ),
    Mutant(
        "a session counts before the peer has it",
        PEERS,
        "        if not self._own.chooses(peer):\n            self._connected",
        "        if True:\n            self._connected",
        tests=_in("test_a_dial_that_is_given_up_when_it_is_taken_is_no_loss", REFUSED),
    ),
    Mutant(
        "a dial outlives the wish",
        PEERS,
        "            wanted.dialling.cancel()\n",
        "            pass\n",
        tests=_in("test_no_longer_wanted_is_no_longer_dialled"),
    ),
    Mutant(
        "only the first address counts",
        PEERS,
        "for address in addresses:",
        "for address in addresses[:1]:",
        tests=_in("test_the_next_address_is_tried"),
    ),
    Mutant(
        "who drops a peer loses it",
        PEERS,
        "self._sessions[peer].end(None, reason)",
        "self._sessions[peer].end(reason, reason)",
        tests=_DROPPED,
    ),
    Mutant(
        "no reason is given",
        PEERS,
        "            session.end(None, reason)\n        for peer",
        '            session.end(None, "")\n        for peer',
        tests=_CLOSED,
    ),
    Mutant("closing drops what is queued", PEERS, "_FLUSH_S = 2.0", "_FLUSH_S = 0.0", tests=_CLOSED),
    Mutant(
        "an early dial is refused",
        RECEPTION,
        "_UNMET_S = 2.0",
        "_UNMET_S = 0.0",
        tests=_in("test_an_early_dial_is_no_lost_time", REFUSED),
    ),
    Mutant(
        "meeting wakes nobody",
        PEERS,
        "        self._reception.wake()\n",
        "",
        tests=_in("test_an_early_dial_is_no_lost_time", REFUSED),
    ),
    Mutant(
        "a seat is what the hello says",
        RECEPTION,
        "if caller is not None and caller.seat != hello.seat:",
        "if False:",
        tests=_SEATS,
    ),
    Mutant(
        "an older life is dialled",
        HANDSHAKE,
        "        if wanted != self.me:\n",
        "        if wanted.seat != self.me.seat:\n",
        tests=_SEATS,
    ),
    Mutant(
        "any life may dial",
        PEERS,
        "        return peer in self._wanted\n",
        "        return any(peer.seat == one.seat for one in self._wanted)\n",
        tests=_SEATS,
    ),
    Mutant(
        "any life may answer",
        DIALLING,
        "if (hello.seat, hello.life) != peer:",
        "if hello.seat != peer.seat:",
        tests=_in("test_an_answer_of_another_process_is_refused", REFUSED),
    ),
    Mutant(
        "any worker opens another's streams",
        RECEPTION,
        "if dial is None or seat not in (None, dial.peer.seat):",
        "if dial is None:",
        tests=_STREAMS,
    ),
    Mutant("a stream is opened twice", RECEPTION, " or dial.bulks[hello.index] is not None:", ":", tests=_STREAMS),
    Mutant(
        "an observer is a peer",
        RECEPTION,
        '("worker",)',
        '("worker", "observer")',
        tests=_in("test_an_observer_is_no_peer", REFUSED),
    ),
    Mutant(
        "any number of dials",
        RECEPTION,
        "self._handshakes[seat] >= most or",
        "",
        also=(RECEPTION, "HANDSHAKES: Final = 512", "HANDSHAKES: Final = 60"),
        tests=_in("test_dials_that_never_end_keep_nobody_out", REFUSED),
    ),
    Mutant(
        "a busy process loses its peers",
        SESSION,
        "                self.pulse.heard_s += late_s\n",
        "                pass\n",
        tests=_in("test_a_busy_process_does_not_lose_its_peers"),
    ),
    Mutant(
        "silence is never noticed",
        SESSION,
        "if time.monotonic() >= self.pulse.heard_s + self._silent_s:",
        "if False:",
        tests=_STOPPED,
    ),
    Mutant(
        "silence is noticed late",
        SESSION,
        "if time.monotonic() >= self.pulse.heard_s + self._silent_s:",
        "if time.monotonic() >= self.pulse.heard_s + 2 * self._silent_s:",
        tests=_STOPPED,
    ),
    Mutant(
        "payloads count as heartbeats",
        SESSION,
        "            arrived = self.assembly.take(frame)\n",
        "            self.pulse.heard_s = time.monotonic()\n            arrived = self.assembly.take(frame)\n",
        tests=_in("test_a_peer_that_sends_payloads_and_no_heartbeats_is_silent", REFUSED),
    ),
    Mutant(
        "heartbeats are not answered",
        SESSION,
        "            self.put(pack_time(Kind.PONG, read_time(data)), first=True)\n",
        "            pass\n",
        tests=_WHOLE,
    ),
    Mutant(
        "a lost peer is told of twice",
        SESSION,
        "        if self.closing is not None:\n            return\n",
        "",
        also=(
            PEERS,
            "if self._sessions.get(session.peer) is session:\n            del self._sessions[session.peer]\n",
            "if self._sessions.pop(session.peer, None) or True:\n",
        ),
        tests=_in("test_a_killed_process_is_lost_at_once"),
    ),
    Mutant(
        "streams end before the reason is read",
        SESSION,
        "            await asyncio.wait(self._tasks[:2], timeout=_LINGER_S)\n",
        "",
        tests=_CLOSED,
    ),
    Mutant("sendings outlive their session", SESSION, "        self.outbox.close()\n", "", tests=_DROPPED),
    Mutant(
        "a failing handler stops all silently",
        SESSION,
        "        except Exception as fault:  # the handler's\n",
        "        except ArithmeticError as fault:\n",
        tests=_in("test_a_handler_that_fails_ends_that_session_only"),
    ),
    Mutant(
        "unknown control messages are ignored",
        SESSION,
        '            raise FrameError(f"a control message of kind {kind}")\n',
        "            pass\n",
        tests=_BAD_CONTROL,
    ),
    Mutant(
        "any acknowledgement is believed",
        BOX,
        "if not self._meter.acked <= ack.received <= self._meter.sent:",
        "if False:",
        tests=_BAD_CONTROL,
    ),
    Mutant("checksums are not compared", FRAMES, "if zlib.crc32(rest) != checksum:", "if False:", tests=_BAD_FRAME),
    Mutant(
        "chunks may come twice",
        FRAMES,
        "        if offset < len(self.body) or offset in self.ahead:\n",
        "        if False:\n",
        tests=_BAD_FRAME,
    ),
    Mutant(
        "chunks may overlap",
        FRAMES,
        "                if min(self.ahead) < len(self.body):\n",
        "                if False:\n",
        tests=_BAD_FRAME,
    ),
    Mutant("chunks may be outside", FRAMES, "offset + len(chunk) > total or", "", tests=_BAD_FRAME),
    Mutant(
        "a finished message is begun again",
        FRAMES,
        "if number < lane.next or number in lane.finished:",
        "if number < lane.next:",
        tests=_BAD_FRAME,
    ),
    Mutant(
        "any number of unfinished messages",
        FRAMES,
        "if number >= lane.next + UNFINISHED:",
        "if False:",
        tests=_BAD_FRAME,
    ),
    Mutant(
        "chunks are put together as they come",
        FRAMES,
        "        if offset > len(self.body):\n",
        "        if False:\n",
        tests=_ANY_ORDER,
    ),
    Mutant(
        "memory is given as claimed",
        FRAMES,
        "lane.unfinished.setdefault(number, _Unfinished(total))",
        "lane.unfinished.setdefault(number, _Unfinished(total, body=bytearray(min(total, 1 << 20))))",
        tests=(OUTBOX,),
    ),
    Mutant(
        "more messages than the peer takes",
        BOX,
        "self.waiting[0].number < self.whole + UNFINISHED",
        "True",
        tests=_in("test_a_peer_is_never_sent_more_unfinished_messages_than_it_takes", OUTBOX),
    ),
    Mutant(
        "the background takes all",
        BOX,
        "return _BUSY_SHARE if self.messages else _IDLE_SHARE",
        "return _IDLE_SHARE",
        tests=_IDLE,
    ),
    Mutant(
        "the background goes first",
        BOX,
        "            if self._lanes[0].has_next:\n",
        "            if self._lanes[0].has_next and not self._lanes[1].has_next:\n",
        also=(BOX, " and not self._lanes[0].waiting:", ":"),
        tests=_BACKGROUND,
    ),
    Mutant(
        "pauses count as slowness", BOX, "            self.is_unfair = True\n", "            pass\n", tests=_MEASURED
    ),
    Mutant(
        "a burst does not wait for the one before",
        BOX,
        "return None if self.is_out else max(0.0, self.next_s - now_s)",
        "return max(0.0, self.next_s - now_s)",
        tests=_BURST,
    ),
    Mutant("a burst is over when some of it has arrived", BOX, " or acked < self.last:", ":", tests=_BURSTS),
    Mutant("no pause follows a burst", BOX, "took_s * (1 / share - 1)", "0.0", tests=_BURSTS),
    Mutant("bursts never shrink", BOX, "max(self.size // 2, _BURSTS[0])", "self.size", tests=_BURSTS),
    Mutant(
        "messages of a lost peer count for ever",
        BOX,
        "        self._foreground.messages -= self._lanes[0].added - self._lanes[0].whole\n",
        "",
        tests=_IDLE,
    ),
    Mutant(
        "messages that have arrived still count",
        BOX,
        "        self._foreground.messages -= ack.next_number - self._lanes[0].whole\n",
        "",
        tests=_IDLE,
    ),
    Mutant(
        "the background is not acknowledged",
        SESSION,
        "            if due or is_background(frame):",
        "            if due:",
        tests=_in("test_a_large_state_arrives_in_the_background", OUTBOX),
    ),
    Mutant(
        "control waits behind payloads",
        DIALLING,
        "    bulks = [channel.stream_stream",
        "    await asyncio.sleep(0)\n    bulks = [channel.stream_stream",
        also=(
            SESSION,
            "        while (message := await self._queue.get()) is not None:\n",
            "        while (message := await self._queue.get()) is not None:\n            while self.outbox._lanes[0].waiting:\n                await asyncio.sleep(0.01)\n",
        ),
        tests=_in("test_control_does_not_wait_behind_payloads", OUTBOX),
    ),
]
