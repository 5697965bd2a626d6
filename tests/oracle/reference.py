"""The family in plain NumPy, one function per algorithm, to be checked against the papers by eye.

They share nothing with the library and, on purpose, next to nothing with each other. All workers go in lockstep.

    x0                  starting parameters [n], fp64
    grad(m, t, x)       gradient of worker m at its inner step t, at parameters x
    there(m, t)         worker m is a member during step t
    trains(m, t)        ... and makes an inner step (a slow worker skips some)
    lost(m, t, p)       worker m's payload of the round sent after step t, fragment p, does not arrive
    wire(d)             what the codec makes of a delta: decode(encode(d))
                        and, where more than three are there, wire.mean of the mean of what arrived (`agreed`)
    weights             one per worker
    slices              one slice of [n] per fragment
    feedback            the share of what the codec lost of one delta, or of one mean, that is added to the next

Inner steps are plain SGD with rate `inner`. Each returns (per worker: live parameters, anchor, velocity).
"""

import numpy as np


def agreed(deltas, weights, present, wire, memory=None):
    """The mean of what has arrived; between more than three it crosses the wire too, whoever was lost on the way.
    With a `memory`, a share of what that lost is added to the next mean, if the same workers are present then.
    """
    mean = np.average(deltas, axis=0, weights=weights)
    if len(present) <= 3:
        return mean
    if memory is not None and memory.get("present") == present:
        mean = mean + memory["share"] * memory["lost"]
    rounded = getattr(wire, "mean", wire)(mean)
    if memory is not None:
        memory.update(present=present, lost=mean - rounded)
    return rounded


def data_parallel(x0, grad, lost, wire, weights, *, steps, inner):
    x = x0.copy()
    for t in range(1, steps + 1):
        here = [m for m in range(len(weights)) if not lost(m, t, 0)]
        if here:
            gradients = [wire(grad(m, t, x)) for m in here]
            x = x - inner * agreed(gradients, [weights[m] for m in here], range(len(weights)), wire)
    return [(x, x, np.zeros_like(x)) for _ in weights]


def diloco(x0, grad, there, trains, lost, wire, weights, *, steps, inner, period, lr, momentum):
    workers = range(len(weights))
    anchor, velocity = x0.copy(), np.zeros_like(x0)
    xs = [x0.copy() for _ in workers]
    for t in range(1, steps + 1):
        for m in workers:
            if trains(m, t):
                xs[m] = xs[m] - inner * grad(m, t, xs[m])
        if t % period == 0:
            present = [m for m in workers if there(m, t)]
            arrived = [m for m in present if not lost(m, t, 0)]
            if arrived:
                deltas = [wire(anchor - xs[m]) for m in arrived]
                delta = agreed(deltas, [weights[m] for m in arrived], present, wire)
                velocity = momentum * velocity + delta
                anchor = anchor - lr * (delta + momentum * velocity)
                for m in workers:
                    if m in arrived or m not in present:
                        xs[m] = anchor.copy()
        for m in workers:
            if there(m, t + 1) and not there(m, t):
                xs[m] = anchor.copy()
    return [(x, anchor, velocity) for x in xs]


def streaming(
    x0, grad, there, trains, lost, wire, weights,
    *, steps, inner, period, lr, momentum, slices, delays, alpha, feedback=False,
):  # fmt: skip
    workers = range(len(weights))
    xs, anchors, velocities, held = ([v.copy() for _ in workers] for v in (x0, x0, 0 * x0, 0 * x0))
    rounds, since = {}, [0 for _ in workers]
    memories = [{"share": feedback} if feedback else None for _ in slices]
    for t in range(1, steps + 1):
        for m in workers:
            if trains(m, t):
                xs[m] = xs[m] - inner * grad(m, t, xs[m])
        for p, s in enumerate(slices):
            offset = (p * period) // len(slices)
            if t - offset in range(period, steps + 1, period):
                arrived, deltas, kept = [], [], {}
                for m in (m for m in workers if there(m, t)):
                    delta = anchors[m][s] - xs[m][s] + feedback * held[m][s]
                    kept[m] = delta - wire(delta) - held[m][s]
                    held[m][s] += kept[m] * bool(feedback)
                    if not lost(m, t, p):
                        arrived, deltas = [*arrived, m], [*deltas, wire(delta)]
                mean = arrived and agreed(deltas, [weights[w] for w in arrived], list(kept), wire, memories[p])
                rounds[p, t] = arrived, mean, kept
        for m in workers:
            for p, s in enumerate(slices):
                arrived, delta, kept = rounds.get((p, t - delays[m]), ([], 0.0, {}))
                if arrived:
                    velocities[m][s] = momentum * velocities[m][s] + delta
                    anchors[m][s] -= lr * (delta + momentum * velocities[m][s])
                lost_work = m in kept and m not in arrived and since[m] <= t - delays[m]
                if lost_work:
                    held[m][s] -= kept[m] * bool(feedback)  # the parameters still hold the work
                elif arrived:  # whoever was away when it was sent, or has been since, has nothing to wait for
                    xs[m][s] = alpha * xs[m][s] + (1 - alpha) * anchors[m][s]
            if there(m, t + 1) and not there(m, t):
                xs[m], held[m], since[m] = anchors[m].copy(), 0 * x0, t
    return list(zip(xs, anchors, velocities, strict=True))


def delayed(x0, grad, there, trains, lost, wire, weights, *, steps, inner, period, lr, momentum):
    workers = range(len(weights))
    anchor, velocity = x0.copy(), np.zeros_like(x0)
    xs = [x0.copy() for _ in workers]
    travelling, losers, since = None, (), [0 for _ in workers]
    for t in range(1, steps + 1):
        for m in workers:
            if trains(m, t):
                xs[m] = xs[m] - inner * grad(m, t, xs[m])
        if t % period == 0:
            present = [m for m in workers if there(m, t)]
            arrived = [m for m in present if not lost(m, t, 0)]
            deltas = [wire(anchor - xs[m]) for m in arrived]
            if travelling is not None:
                velocity = momentum * velocity + travelling
                anchor = anchor - lr * (travelling + momentum * velocity)
                for m in workers:
                    if m not in losers or since[m] > t - period:  # what it lost is still in its parameters
                        xs[m] = anchor.copy()
            travelling, losers = None, [m for m in present if m not in arrived]
            if arrived:
                travelling = agreed(deltas, [weights[m] for m in arrived], present, wire)
        for m in workers:
            if there(m, t + 1) and not there(m, t):
                xs[m], since[m] = anchor.copy(), t
    return [(x, anchor, velocity) for x in xs]


def eager(x0, grad, wire, weights, *, steps, inner, period, lr, momentum):
    """As the paper writes it: own outer parameters and own momentum per worker, fed with
    Delta(t - H) + share * (Delta_m(t) - Delta_m(t - H)); terms not yet seen are 0. No faults.
    The anchor and velocity returned are those of the delayed means alone, which all workers share.
    """
    workers, shares = range(len(weights)), np.asarray(weights) / np.sum(weights)
    xs, starts, momenta = ([v.copy() for _ in workers] for v in (x0, x0, np.zeros_like(x0)))
    anchor, velocity = x0.copy(), np.zeros_like(x0)
    before = [np.zeros_like(x0) for _ in workers]
    seen = False
    for t in range(1, steps + 1):
        for m in workers:
            xs[m] = xs[m] - inner * grad(m, t, xs[m])
        if t % period == 0:
            now = [wire(starts[m] - xs[m]) for m in workers]
            mean_before = agreed(before, weights, workers, wire)
            for m in workers:
                delta = mean_before + shares[m] * (now[m] - before[m])
                momenta[m] = momentum * momenta[m] + delta
                starts[m] = starts[m] - lr * (delta + momentum * momenta[m])
                xs[m] = starts[m].copy()
            if seen:
                velocity = momentum * velocity + mean_before
                anchor = anchor - lr * (mean_before + momentum * velocity)
            before, seen = now, True
    return [(x, anchor, velocity) for x in xs]


def eager_with_faults(
    x0, grad, there, trains, lost, wire, weights, *, steps, inner, period, lr, momentum, slices, feedback=False
):
    """Eager per fragment, with drops and absences, by replay: a worker stands at the shared anchor plus the difference
    that its newest delta makes to a Nesterov run over its own deltas. A lost delta counts as 0 in that run and stays
    in the worker's parameters as work that is still to be sent.
    """
    workers = range(len(weights))
    xs, starts = [x0.copy() for _ in workers], [x0.copy() for _ in workers]
    anchor, velocity = x0.copy(), np.zeros_like(x0)
    history = [[[] for _ in slices] for _ in workers]
    held = [0 * x0 for _ in workers]
    rounds, memories = {}, [{"share": feedback} if feedback else None for _ in slices]

    def travelled(deltas):
        position, v = 0.0, 0.0
        for d in deltas:
            v = momentum * v + d
            position = position - lr * (d + momentum * v)
        return position

    for t in range(1, steps + 1):
        for m in workers:
            if trains(m, t):
                xs[m] = xs[m] - inner * grad(m, t, xs[m])
        for p, s in enumerate(slices):
            offset = (p * period) // len(slices)
            if t - offset not in range(period, steps + 1, period):
                continue
            full = {m: starts[m][s] - xs[m][s] + feedback * held[m][s] for m in workers if there(m, t)}
            now = {m: wire(delta) for m, delta in full.items()}
            for m in now:
                held[m][s] = (full[m] - now[m]) * bool(feedback)
            arrived = {m: d for m, d in now.items() if not lost(m, t, p)}
            rounds[p, t] = arrived, list(now)
            old, present = rounds.get((p, t - period), ({}, []))
            if old:
                delta = agreed(list(old.values()), [weights[m] for m in old], present, wire, memories[p])
                velocity[s] = momentum * velocity[s] + delta
                anchor[s] -= lr * (delta + momentum * velocity[s])
            for m, d in now.items():
                own, kept = history[m][p], 0.0
                if own and m not in old:
                    kept, own[-1] = own[-1], np.zeros_like(d)
                share = weights[m] / sum(weights[w] for w in workers if there(w, t))
                starts[m][s] = anchor[s] + share * (travelled([*own, d]) - travelled(own))
                xs[m][s] = starts[m][s] - kept
                own.append(d)
        for m in workers:
            if there(m, t + 1) and not there(m, t):
                xs[m], starts[m], held[m] = anchor.copy(), anchor.copy(), 0 * x0
                history[m] = [[] for _ in slices]
    return [(x, anchor, velocity) for x in xs]
