"""Compiles the kernels for a GPU that is not here, and prints how each reads and writes memory, as JSON.

A process of its own, for Triton's interpreter, in which other tests run kernels, is chosen for a whole process.
"""

import json
import re
from collections import Counter
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from atoll.core.block_formats import BLOCK
from atoll.core.codec import nearest_limit
from atoll.core.flat import PIECE
from atoll.kernels import codec, cross_entropy, fingerprint, outer, products, top64

TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16}
ENCODE = {"start": "*fp32", "table": "*i64", "units": "*u8", "codes": "*u8", "worst": "*i32", "numel": "i32"}
DECODE = {"units": "*u8", "codes": "*u8", "shares": "*fp32", "mean": "*fp32"}
DECODE |= dict.fromkeys(["numel", "begin", "end", "units_stride", "codes_stride"], "i32")
OUTER = {"anchor": "*fp32", "velocity": "*fp32", "mean": "*fp32", "table": "*i64", "begin": "i32", "numel": "i32"}
OUTER |= dict.fromkeys(["lr", "momentum", "keep", "take"], "fp32")
LOGITS = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32", "log_totals": "*fp32", "stride": "i32"}
LOGITS |= {"scale": "fp32", "z_loss": "fp32"}
SECTIONS = dict.fromkeys(["heads", "low", "high", "codes"], "*u8")
HOPPER = 90


def accesses(kernel: Any, types: dict[str, str], **constants: Any) -> dict[str, int]:
    """How often each kind of global load and store stands in the code.

    Whatever can be is a multiple of 16, as for large tensors; only where units are is left to chance.
    """
    options = {key: constants.pop(key) for key in ("num_warps",) if key in constants}
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, (name, kind) in enumerate(types.items()) if kind != "fp32" and name != "units"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = compiled(source, target=GPUTarget("cuda", HOPPER, 32), options=options | {"enable_fp_fusion": False})
    return Counter(re.findall(r"\b((?:ld|st)\.global[\w.:]*)", made.asm["ptx"]))


def all_kernels() -> dict[str, dict[str, int]]:
    """By kernel and setting."""
    found = {}
    for dtype, type_ in TYPES.items():
        for grain in (16, BLOCK):
            local = {"LOCAL": type_, "GRAIN": grain}
            for form in codec.FORMATS:
                limit = nearest_limit(form)
                types = ENCODE | ({"codes": f"*{form}"} if limit is None else {})
                constants = {"FORMAT": form, "LIMIT": limit, "BLOCK": BLOCK, **local, **codec._ENCODE}
                found[f"encode {form} {dtype} {grain}"] = accesses(codec._encode, types, **constants)
            constants = {"KIND": "nesterov", "BLEND": True, "TILE": outer._TILE, **local}
            found[f"outer {dtype} {grain}"] = accesses(outer._outer_merge, OUTER, **constants)
    for form in codec.FORMATS:
        plain = nearest_limit(form) is None
        types = DECODE | ({"codes": f"*{form}"} if plain else {})
        constants = {"MEMBERS": 2, "FORMAT": "plain" if plain else form, "BLOCK": BLOCK, **codec._DECODE}
        found[f"decode {form}"] = accesses(codec._decode_mean, types, **constants)
        types = {"units": "*u8", "codes": types["codes"], "parts": "*fp64"}
        types |= dict.fromkeys(["numel", "members", "sets", "shares", "units_stride", "codes_stride"], "i32")
        constants = {"SIZE": 2, "FORMAT": constants["FORMAT"], "BLOCK": BLOCK, **products.tile(constants["FORMAT"])}
        found[f"products {form}"] = accesses(products._products, types, **constants)
    found |= sparse_kernels()
    constants = {"VOCABULARY": 32000, "GRADIENTS": True, "TILE": cross_entropy._LARGEST}
    warps = cross_entropy._LARGEST // cross_entropy._EACH // 32
    types = {"words": "*i64", "sums": "*i64", "numel": "i32"}
    found["fingerprint"] = accesses(fingerprint._sums, types, PIECE=PIECE, TILE=fingerprint._TILE)
    found["cross-entropy"] = accesses(cross_entropy._cross_entropy, LOGITS, **constants, num_warps=warps)
    return found


def sparse_kernels() -> dict[str, dict[str, int]]:
    """Those of top64."""
    types = {"vector": "*fp32", **SECTIONS, "entries": "*i16", "worst": "*i32", "numel": "i32"}
    found = {"top64 encode": accesses(top64._encode, types, num_warps=top64._ENCODE_WARPS)}
    types = {**SECTIONS, "shares": "*fp32", "mean": "*fp32"}
    types |= dict.fromkeys(["numel", "begin", "end", "stride"], "i32")
    found["top64 decode"] = accesses(top64._decode_mean, types, MEMBERS=2, num_warps=top64._DECODE_WARPS)
    types = {**SECTIONS, "parts": "*fp64", **dict.fromkeys(["numel", "shares", "stride"], "i32")}
    return found | {"top64 products": accesses(top64._products, types, MEMBERS=2, CHUNKS=top64._CHUNKS)}


if __name__ == "__main__":
    print(json.dumps(all_kernels()))
