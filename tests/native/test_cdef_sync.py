"""The prototypes, the stub and the library say the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pykv import _native
from pykv._native import ffi, lib

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
CDEFS = sorted((NATIVE / "cdef").glob("*.h"))
STUB = (ROOT / "pykv" / "_native" / "_pykv.pyi").read_text()
TEXT = "\n".join(path.read_text() for path in CDEFS)

# told apart from ffi_builder's own way: a name before a bracket, at the start of a line, is a function
FUNCTIONS = re.findall(r"^(?!extern|typedef)[\w *]+?[ *](\w+)\((?=[^;]*\);)", TEXT, flags=re.M)


def generator(expression: str) -> str:
    """Return what native/'s own modules answer, in a process with their folder on the path."""
    code = f"import sys; sys.path.insert(0, {str(NATIVE)!r}); {expression}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_there_is_something_to_look_at():
    assert len(FUNCTIONS) > 120
    assert {"ggml_version", "gguf_get_arr_str", "ggml_rope_ext", "pykv_interrupt_restore"} <= set(FUNCTIONS)


def test_the_stub_is_what_its_generator_writes():
    code = [sys.executable, str(NATIVE / "stub_generator.py")]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout == STUB


def test_every_prototype_is_checked_against_the_headers():
    checked = generator("import ffi_builder as b; print('\\n'.join(b.prototypes(p.read_text()) for p in b.CDEFS))")
    assert sorted(re.findall(r"(\w+)\(", checked)) == sorted(FUNCTIONS)
    preamble = generator("import ffi_builder as b; print(b.preamble())")
    assert all(re.search(rf"\b{name}\(", preamble) for name in FUNCTIONS)
    assert preamble.index("#include <gguf.h>") < preamble.index("gguf_free(")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_in_the_library_and_in_the_stub(name):
    assert callable(getattr(lib, name))
    assert re.search(rf"^    def {name}\(self", STUB, flags=re.M)


def test_the_stub_knows_every_parameter():
    for node in ast.walk(ast.parse(STUB)):
        if isinstance(node, ast.FunctionDef):
            kind = ffi.typeof(getattr(lib, node.name))
            assert len(node.args.posonlyargs) - 1 == len(kind.args) or (not kind.args and len(node.args.args) == 1), (
                node.name
            )
            names = {"int": "int", "bool": "bool", "float": "float", "None": "None", "CData": "CData"}
            expected = {"void": "None", "_Bool": "bool", "float": "float", "double": "float"}.get(
                kind.result.cname, "CData" if kind.result.kind in ("pointer", "struct") else "int"
            )
            assert names[ast.unparse(node.returns)] == expected, node.name


def test_no_number_is_typed_by_hand():
    for body in re.findall(r"enum \w+ \{(.*?)\};", TEXT, flags=re.S):
        for entry in filter(None, map(str.strip, body.split(","))):
            assert re.fullmatch(r"\w+ = \.\.\.|\.\.\.", entry), entry
    for line in re.findall(r"^#define .*$", TEXT, flags=re.M):
        assert re.fullmatch(r"#define \w+ \.\.\.", line), line
    for path in (ROOT / "pykv").rglob("*.py"):
        assert not re.search(r"\b(GGML|GGUF)_[A-Z0-9_]+ *= *\d", path.read_text()), path


def test_enums_of_python_are_built_from_the_library():
    tree = ast.parse((ROOT / "pykv" / "ggml" / "types.py").read_text())
    members = [
        node
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef) and one.name == "DType"
        for node in one.body
        if isinstance(node, ast.Assign)
    ]
    assert len(members) > 30
    for node in members:
        assert ast.unparse(node) == f"{node.targets[0].id} = lib.GGML_TYPE_{node.targets[0].id}"


def test_constants_of_the_stub_are_in_the_library():
    constants = re.findall(r"^    (\w+): int$", STUB, flags=re.M)
    assert len(constants) > 60
    assert all(isinstance(getattr(lib, name), int) for name in constants)


def test_only_ggml_and_gguf_touch_the_extension():
    for path in (ROOT / "pykv").rglob("*.py"):
        if "_native" in path.read_text():
            assert path.relative_to(ROOT).parts[1] in ("ggml", "gguf", "_native"), path


def test_sizes_agree_with_the_headers_it_was_built_with():
    assert lib.pykv_built_tensor_overhead() == lib.ggml_tensor_overhead()
    assert ffi.string(lib.pykv_built_ggml_version()) == ffi.string(lib.ggml_version())
    assert Path(_native.__file__).name == "__init__.py"
