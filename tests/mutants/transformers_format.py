"""Bugs in exports that transformers reads: names, shapes, settings, ids."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_transformers_format.py"]
ARCHITECTURE, EXPORT, TOKENIZER = (
    "train/model/transformers_format.py",
    "train/model/export.py",
    "train/data/tokenizer.py",
)
DAMAGED = ("tests/unit/test_export.py::test_a_part_of_a_matrix_that_does_not_fit",)
EITHER = ("tests/unit/test_export.py::test_a_config_that_is_neither_ours_nor_of_transformers",)
BYTES = ("tests/unit/test_tokenizer.py",)

MUTANTS = [
    Mutant("keys and values are swapped", ARCHITECTURE, '"self_attn.k_proj", "self_attn.v_proj")', '"self_attn.v_proj", "self_attn.k_proj")'),
    Mutant("the norms of query and key are swapped", ARCHITECTURE, '"query_norm": ("self_attn.q_norm",), "key_norm": ("self_attn.k_norm",)',
           '"query_norm": ("self_attn.k_norm",), "key_norm": ("self_attn.q_norm",)'),
    Mutant("the norms of a block are swapped", ARCHITECTURE, '("attention_layernorm", "feedforward_layernorm")',
           '("feedforward_layernorm", "attention_layernorm")'),
    Mutant("the norms of a block without QK-norm are swapped", ARCHITECTURE, '("input_layernorm", "post_attention_layernorm")',
           '("post_attention_layernorm", "input_layernorm")'),
    Mutant("an exact GELU", ARCHITECTURE, '"gelu_pytorch_tanh"', '"gelu"'),
    Mutant("every head as wide as its share", ARCHITECTURE, '        "head_dim": config.head_width,\n', ""),
    Mutant("the base of RoPE is transformers' own", ARCHITECTURE, '"rope_theta": config.rope_base', '"rope_theta": 10000.0'),
    Mutant("norms with another epsilon", ARCHITECTURE, '"rms_norm_eps": NORM_EPS', '"rms_norm_eps": 1e-3'),
    Mutant("a head of its own is not tied", ARCHITECTURE, '"tie_word_embeddings": config.tied', '"tie_word_embeddings": True'),
    Mutant("the token between documents pads", ARCHITECTURE, '"pad_token_id": None', '"pad_token_id": end'),
    Mutant("a decoder that no architecture fits is exported as one", ARCHITECTURE, "if not config.qk_norm and config.width % config.heads:", "if False:"),
    Mutant("parts of different dtypes are put together", ARCHITECTURE, "{(part.dtype, part.shape) for part in parts}", "{part.shape for part in parts}",
           tests=DAMAGED),
    Mutant("parts of different shapes are put together", ARCHITECTURE, "{(part.dtype, part.shape) for part in parts}", "{part.dtype for part in parts}",
           tests=DAMAGED),
    Mutant("parameters lose their dtype", ARCHITECTURE, 'str(dtype).removeprefix("torch.")', '"float32"'),
    Mutant("why no architecture fits is not said", EXPORT, ', NO_ARCHITECTURE: misfit}', "}"),
    Mutant("text is generated past the end of its document", EXPORT, '("bos_token_id", "eos_token_id", "pad_token_id"), end)',
           '("bos_token_id", "pad_token_id"), end)'),
    Mutant("a damaged atoll.json is passed over", EXPORT, 'elif described.name == CONFIG and "model_type" in config:', 'elif "model_type" in config:',
           tests=EITHER),
    Mutant("the letter of NUL is special", TOKENIZER, 'enumerate(["\\0", *spelled[1:]])', "enumerate(spelled)"),
    Mutant("letters of bytes are dealt in another order", TOKENIZER, "letters = sorted(", "letters = list("),
    Mutant("NUL ends no document", TOKENIZER, '        inner.add_special_tokens(["\\0"])\n', ""),
    Mutant("bytes are read as any BPE", TOKENIZER, "inner.get_vocab() == _byte_vocabulary():", "False:", tests=BYTES),
    Mutant("any 256 tokens are bytes", TOKENIZER, "inner.get_vocab() == _byte_vocabulary():", "True:", tests=BYTES),
    Mutant("bytes are known by the file of this version", "train/ranks/control.py", "isinstance(data.tokenizer, Bytes)", "False",
           tests=("tests/unit/test_token_files.py::test_workers_whose_tokens_are_bytes_agree_whichever_version_cached_them",)),
]  # fmt: skip
