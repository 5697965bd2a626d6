"""The outer step and its merges."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_outer_step.py",
    "tests/unit/test_laws.py",
]

MUTANTS = [
    Mutant("sign flipped", "core/flat.py", "here.sub_(part.to(vector.dtype))",
           "here.copy_(part.to(vector.dtype) - here)"),
    Mutant("the rounded start taken for work", "core/flat.py", "here.copy_(here.to(part.dtype))", "pass",
           tests=("tests/unit/test_flat.py", "tests/unit/test_loop.py")),
    Mutant("alpha swapped", "core/outer_step.py", "return (alpha * local).add_((1 - alpha) * anchor)",
           "return ((1 - alpha) * local).add_(alpha * anchor)"),
    Mutant("heavy ball for Nesterov", "core/outer_step.py",
           "includes `delta`.\"\"\"\n        return (self.momentum * own).add_(delta)",
           "includes `delta`.\"\"\"\n        return own"),
    Mutant("anchor taken from the merged value", "outer/backend.py",
           "local[piece] = blend(local[piece], anchor[piece], alpha)",
           "local[piece] = anchor[piece] = blend(local[piece], anchor[piece], alpha)"),
    Mutant("sum for mean", "core/outer_step.py", "[weight / sum(weights) for weight", "[weight for weight"),
    Mutant("weights ignored", "core/outer_step.py", "[weight / sum(weights) for weight", "[1 / len(weights) for weight"),
    Mutant("stale own share in eager", "outer/fragment.py", "remember(known, newest)", "remember(known, self.own[piece])"),
    Mutant("own share counted whole", "core/outer_step.py", "(outer.lr * share)", "outer.lr"),
    Mutant("own delta un-decoded", "outer/fragment.py", "self.merge.sent(payload)\n", "self.merge.sent(delta.clone())\n",
           ("outer/backend.py", "        values = self.codec.decode_piece(payload,",
            "        if payload.dtype != torch.uint8:\n            return payload[piece]\n"
            "        values = self.codec.decode_piece(payload,")),
]  # fmt: skip
