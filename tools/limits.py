"""Checks the size of what one has to read at once: files, functions, classes, parameter lists and docstrings.

    python tools/limits.py

At most 400 lines a file, 60 a function, 12 attributes a class (fields of a dataclass or a settings model aside), 7
parameters a function outside the command line, and 20 words in a docstring's first sentence. `make check` runs it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "atoll"
FILE_LINES, FUNCTION_LINES, ATTRIBUTES, PARAMETERS, WORDS = 400, 60, 12, 7, 20
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print what is too large in the package; return 1 if anything is."""
    files = sorted(SOURCE.rglob("*.py"))
    found = [problem for file in files for problem in problems(file, in_command_line=SOURCE / "cli" in file.parents)]
    print("\n".join(found) or f"{len(files)} files are within the limits")
    return bool(found)


def problems(file: Path, *, in_command_line: bool = False) -> Iterator[str]:
    """Yield what is too large in one file."""
    text = file.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > FILE_LINES:
        yield f"{file}: {lines} lines"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 1)}: {getattr(node, 'name', '')}"
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
            if length > FUNCTION_LINES and not in_command_line:
                yield f"{where}: {length} lines without its docstring"
            count = len([a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")])
            count += len(node.args.kwonlyargs)
            if count > PARAMETERS and not in_command_line and not _is_kernel(node):
                yield f"{where}: {count} parameters"
        if isinstance(node, ast.ClassDef) and (count := len(_attributes(node))) > ATTRIBUTES:
            yield f"{where}: {count} attributes"
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (words := _first_sentence(node)) > WORDS:
            yield f"{where}: the docstring's first sentence has {words} words"


def _is_kernel(node: Function) -> bool:
    """Return whether Triton compiles a function: it takes pointers, sizes and constants one by one."""
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


def _docstring_lines(node: Function) -> int:
    first = node.body[0]
    has = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (first.end_lineno or 0) - first.lineno + 1 if has else 0


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return what methods of a class assign to self."""
    stores = [a for a in ast.walk(node) if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store)]
    return {store.attr for store in stores if isinstance(store.value, ast.Name) and store.value.id == "self"}


def _first_sentence(node: Function | ast.ClassDef | ast.Module) -> int:
    text = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
    return len(re.split(r"(?<=[.:;])\s", text)[0].split())


if __name__ == "__main__":
    sys.exit(main())
