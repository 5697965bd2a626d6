"""Inner training in plain torch: what `atoll train` must come to, to be checked against docs/training.md by eye.

It shares the model's forward pass and the batches with the library; schedule, loss, optimizers, clipping, averaging,
roll-backs and evaluation are its own. A batch is computed whole, so accumulation must make no difference.

    model               what all workers start from
    batch(m, n)         batch n (from 0) of worker m, tokens [rows, time + 1]
    held_out            rows of held-out tokens [rows, time + 1]
    spoilt              {(t, m), ...}: the loss of worker m at inner step t is not finite
                        (under data-parallel its gradient)

Returns per step (rate, losses, gradient norms), held-out losses {t: loss}, and outer parameters {t: vector}.
"""

import copy
import math

import torch
from torch.nn.utils import parameters_to_vector as vector
from torch.nn.utils import vector_to_parameters as unpack


def rate(t, *, steps, lr, warmup, final_lr):
    if t <= warmup:
        return lr * t / warmup
    return lr * (final_lr + (1 - final_lr) * (1 + math.cos(math.pi * (t - warmup) / (steps - warmup))) / 2)


def loss(model, tokens, z_loss):
    """What is descended, and the cross-entropy in it: means over all tokens."""
    logits = model(tokens[:, :-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # what bf16 has computed
    entropies = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    return entropies.mean() + z_loss * logits.exp().sum(-1).log().pow(2).mean(), entropies.mean().item()


def orthogonal(x, a=3.4445, b=-4.7750, c=2.0315):
    """Muon's five Newton-Schulz steps, in bf16 as torch has them; by the smaller side."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    y = x.bfloat16()
    y = y / y.norm()
    for _ in range(5):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.to(x.dtype)


def descend(model, gradients, memory, lr, *, optimizer, weight_decay, betas):
    """One inner step; `memory` is empty at the start and after a roll-back. Gains of norms do not decay."""
    k = memory["steps"] = memory.get("steps", 0) + 1
    for (name, x), g in zip(model.named_parameters(), gradients, strict=True):
        m, v = memory.get(name, (0.0, 0.0))
        if optimizer == "muon" and name.startswith("blocks.") and x.dim() == 2:
            m = 0.95 * m + 0.05 * g
            update = 0.2 * max(x.shape) ** 0.5 * orthogonal(0.05 * g + 0.95 * m)
        else:
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
            update = m / (1 - betas[0] ** k) / ((v / (1 - betas[1] ** k)) ** 0.5 + 1e-8)
        memory[name] = m, v
        x.data -= lr * (update + (weight_decay if x.dim() >= 2 else 0.0) * x.data)


def clipped(gradients, limit):
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
    return [scale * g for g in gradients], norm


def train(
    model, batch, held_out, *, weights, steps, lr, warmup, final_lr, weight_decay, betas, clip, z_loss, optimizer,
    eval_every, method, period=0, delay=0, alpha=0.0, outer_lr=0.0, outer_momentum=0.0, spoilt=(),
):  # fmt: skip
    everyone = range(len(weights))
    models, memories = [copy.deepcopy(model) for _ in everyone], [{} for _ in everyone]
    anchor = vector(model.parameters()).detach().clone()
    velocity, sent, left_out = torch.zeros_like(anchor), {}, set()
    log, evals, outers = [], {}, {}

    def live(m):
        return vector(models[m].parameters()).detach()

    def mean(vectors):
        return sum(weights[m] * v for m, v in vectors.items()) / sum(weights[m] for m in vectors)

    def evaluate(t):
        outers[t] = anchor.clone() if period else live(0).clone()
        unpack(outers[t].clone(), (at := copy.deepcopy(model)).parameters())
        with torch.no_grad():
            evals[t] = loss(at, held_out, 0.0)[1]

    for t in range(1, steps + 1):
        now = rate(t, steps=steps, lr=lr, warmup=warmup, final_lr=final_lr)
        totals = [loss(models[m], batch(m, t - 1), z_loss) for m in everyone]
        gradients = [torch.autograd.grad(totals[m][0], list(models[m].parameters())) for m in everyone]
        if method == "data-parallel":
            good = [m for m in everyone if (t, m) not in spoilt]
            gradients = [[mean({m: gradients[m][i] for m in good}) for i in range(len(gradients[0]))]] * len(weights)
        norms = []
        for m in everyone:
            gradient, norm = clipped(gradients[m], clip)
            norms.append(norm)
            if (t, m) in spoilt and period:
                unpack(anchor.clone(), models[m].parameters())
                memories[m] = {}
                left_out.add(m)
            else:
                how = {"optimizer": optimizer, "weight_decay": weight_decay, "betas": betas}
                descend(models[m], gradient, memories[m], now, **how)
        log.append((now, [entropy for _, entropy in totals], norms))
        if period and t % period == 0:
            sent[t + delay] = {m: anchor - live(m) for m in everyone if m not in left_out}
            left_out.clear()
        if t in sent:
            delta = mean(sent.pop(t))
            velocity = outer_momentum * velocity + delta
            anchor = anchor - outer_lr * (delta + outer_momentum * velocity)
            for m in everyone:
                unpack(alpha * live(m) + (1 - alpha) * anchor, models[m].parameters())
        if t % eval_every == 0 and t < steps:
            evaluate(t)
    assert not sent  # nothing is under way at the end; what was trained since is plainly averaged
    if period and steps % period:
        anchor = anchor - mean({m: anchor - live(m) for m in everyone if m not in left_out})
    evaluate(steps)
    return log, evals, outers
