"""Checks that the package and its extension module are typed."""

from __future__ import annotations

import ast
import fnmatch
import os
import pathlib
import subprocess
import sys

import pytest

import accelmgr
from accelmgr import _native
from accelmgr._process import torch_version

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(accelmgr.__file__).parent

# Functions that may have `Any` or `object` in their types: the extension module passes such values on.
ANYTHING = [
    "*.to_dict",
    "*.__getstate__",
    "*.__setstate__",
    "*.__exit__",
    "Handle.start",
    "Handle.while_waiting",
    "SerialExecutor.run",
    "spawn*",
    "*_multiprocess",
    "DeviceStream.__eq__",
    "digest",  # Of a tensor, or of any object with a buffer.
    "thread_dict",  # Of Python, which keeps there what it likes.
    "Snapshot.*",  # It notes objects of any class.
    "CudaTransport.*",  # Tensors of torch, which the extension module does not import.
]


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions and methods of a stub, by name. Of a property's functions the last one counts."""
    found = {}
    for node in tree.body:
        for member in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(member, ast.FunctionDef):
                found[f"{node.name}.{member.name}" if member is not node else member.name] = member
    return found


def annotations_of(function: ast.FunctionDef) -> list[ast.expr]:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    given = [argument.annotation for argument in arguments] + [function.returns]
    return [annotation for annotation in given if annotation is not None]


def test_the_stub_lies_beside_the_extension_module_and_is_exact() -> None:
    """mypy finds a list without an element type. It does not find an `object` that could be a narrower type."""
    stub = ast.parse((PACKAGE / "_native.pyi").read_text())
    functions = functions_of(stub)
    in_module = {name for name, value in vars(_native).items() if not name.startswith("_") and callable(value)}
    classes = {node.name for node in stub.body if isinstance(node, ast.ClassDef)}  # Some have no functions.
    assert {name.split(".")[0] for name in functions} | classes == in_module
    vague = set()
    for name, function in functions.items():
        nodes = [node for annotation in annotations_of(function) for node in ast.walk(annotation)]
        if any(isinstance(node, ast.Name) and node.id in ("Any", "object") for node in nodes):
            vague.add(name)
    assert {name for name in vague if not any(fnmatch.fnmatch(name, each) for each in ANYTHING)} == set()
    assert [each for each in ANYTHING if not fnmatch.filter(vague, each)] == []


@pytest.mark.skipif(torch_version.VERSION != (2, 11), reason="the types are those of torch 2.11")
def test_the_package_is_typed_strictly() -> None:
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]  # pyproject.toml has the files and options.
    environment = os.environ | {"MYPYPATH": str(PACKAGE.parent)}  # The package of this build.
    checked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
