"""The papers' event model of a run, one worker, one step and one layer at a time, in exact numbers.

A step of L layers is 3L - 1 pieces: L forward; then, from the last layer to the first, one for its parameters and, but
for layer 1, one for its activations. `places` has (up, down, latency, pace, outages) per worker: bits per second,
seconds, a factor on the time of a step, and the (from, to) in which its lines stand still. `groups` has the layers of
every fragment; None: a fragment leaves after the step, whole.
"""

from fractions import Fraction


def carried(begin, seconds, outages):
    """When a line that begins then has worked for so long; it stands still from `off` on until `on`."""
    now, left = begin, seconds
    for off, on in outages:
        if now < off and now + left <= off:
            return now + left
        if now < off:
            left -= off - now
            now = Fraction(on)
        elif now < on:
            now = Fraction(on)
    return now + left


def ends(steps, step_s, period, delays, payloads, places, groups=None, depth=1, copies=1, crossings=1, lost=None):
    """[steps + 1][workers]: when every step, and the waiting after it, was over. `lost(step, fragment, worker)`."""
    workers, fragments = range(len(places)), range(len(payloads))
    now, up_free, down_free = (
        [Fraction(0) for _ in workers],
        [Fraction(0) for _ in workers],
        [Fraction(0) for _ in workers],
    )
    there = {}  # (step of the send, fragment) -> [(layer, arrival per worker)]
    offsets = [f * period // len(payloads) for f in fragments]
    out = [list(now)]

    def exchange(step, fragment, layer, size, ready):
        """Everybody's part leaves when it is ready, on lines that take one thing after the other."""
        bits = 8 * Fraction(copies) * Fraction(size)
        coming = [min([ready[o] for o in workers if o != w], default=ready[w]) for w in workers]
        for w in workers:
            up, down, _, _, outages = places[w]
            up_free[w] = carried(max(up_free[w], ready[w]), bits / Fraction(up), outages)
            down_free[w] = carried(max(down_free[w], coming[w]), bits / Fraction(down), outages)
        arrival = []
        for w in workers:
            senders = [o for o in workers if o == w or not (lost and lost(step, fragment, o))]
            last = max([up_free[o] for o in senders] + [down_free[w]])
            arrival.append(last + crossings * Fraction(places[w][2]))
        there.setdefault((step, fragment), []).append((layer, arrival))

    def applied_after(step, w):
        """Rounds that worker w applies after a step."""
        return [(step - delays[w], f) for f in fragments if (step - delays[w], f) in there]

    for step in range(1, steps + 1):
        backward = [{} for _ in workers]  # layer -> when its backward is done
        for w in workers:
            piece = Fraction(step_s) * Fraction(places[w][3]) / (3 * depth - 1)
            due = [(layer, at[w]) for r in applied_after(step - 1, w) for layer, at in there[r] if layer]
            for layer in range(1, depth + 1):
                now[w] = max([now[w]] + [at for needed, at in due if needed == layer]) + piece
            for layer in range(depth, 0, -1):
                now[w] += piece if layer == 1 else 2 * piece
                backward[w][layer] = now[w]
        sends = [f for f in fragments if step - offsets[f] >= period and (step - offsets[f]) % period == 0]
        if groups is None:
            for f in sends:
                exchange(step, f, 0, payloads[f], list(now))
        for layer in range(depth, 0, -1):
            for f in sends:
                if groups is not None and layer in groups[f]:
                    exchange(
                        step, f, layer, Fraction(payloads[f], len(groups[f])), [backward[w][layer] for w in workers]
                    )
        for w in workers:
            now[w] = max([now[w]] + [at[w] for r in applied_after(step, w) for layer, at in there[r] if not layer])
        out.append(list(now))
    return out
