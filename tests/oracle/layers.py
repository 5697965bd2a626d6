"""The papers' event model of a run, one worker, one step and one layer at a time.

A step of L layers is 3L - 1 pieces: L forward; then, from the last layer to the first, one for its parameters and,
except for layer 1, one for its inputs. All workers have lines of the same rate; `delays` has one delay per worker.
`groups` has the layers of every fragment; None: a fragment leaves after the step, whole. Given Fractions, it is exact.
"""


def ends(steps, step_s, period, delays, payloads, bits_per_s, latency_s, groups=None, depth=1, copies=1, crossings=1):
    """[steps + 1][workers]: when every step, and the waiting after it, was over."""
    workers, fragments = range(len(delays)), range(len(payloads))
    now, free = [0 for _ in workers], [0 for _ in workers]
    there = {}  # (step of the send, fragment) -> [(layer, arrival)]
    offsets = [f * period // len(payloads) for f in fragments]
    piece = step_s / (3 * depth - 1)
    out = [list(now)]

    def exchange(step, fragment, layer, size, ready):
        """Every worker's part leaves when it is ready, on lines that take one thing after the other."""
        for w in workers:
            free[w] = max(free[w], ready[w]) + 8 * copies * size / bits_per_s
        there.setdefault((step, fragment), []).append((layer, max(free) + crossings * latency_s))

    def applied_after(step, w):
        """Rounds that worker w applies after a step."""
        return [(step - delays[w], f) for f in fragments if (step - delays[w], f) in there]

    for step in range(1, steps + 1):
        backward = [{} for _ in workers]  # layer -> when its backward is done
        for w in workers:
            due = {}  # layer -> when it was there
            for round_id in applied_after(step - 1, w):
                for layer, at in there[round_id]:
                    due[layer] = max(due.get(layer, at), at)
            for layer in range(1, depth + 1):
                now[w] = max(now[w], due.get(layer, now[w])) + piece
            for layer in range(depth, 0, -1):
                now[w] += piece if layer == 1 else 2 * piece
                backward[w][layer] = now[w]
        sends = [f for f in fragments if step - offsets[f] >= period and (step - offsets[f]) % period == 0]
        if groups is None:
            for f in sends:
                exchange(step, f, 0, payloads[f], list(now))
        else:
            for layer in range(depth if sends else 0, 0, -1):
                for f in sends:
                    if layer in groups[f]:
                        exchange(step, f, layer, payloads[f] / len(groups[f]), [backward[w][layer] for w in workers])
        for w in workers:
            now[w] = max([now[w]] + [at for r in applied_after(step, w) for layer, at in there[r] if not layer])
        out.append(list(now))
    return out
