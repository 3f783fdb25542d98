"""Checks the error for a torch that accelmgr cannot use: it names the version and the interpreter that found it."""

import pathlib
import re
import subprocess
import sys

import pytest

FOUND = {
    "too old": ("__version__ = '2.3.1+cpu'", "accelmgr needs torch 2.4 or newer; {python} imports torch 2.3.1"),
    "another thing": ("", "what {python} imports as torch, .*, has no version"),
    "broken": ("raise OSError('libc10.so: no such file')", "{python} cannot import: OSError: libc10.so: no such file"),
}


def imported(*path: str) -> str:
    program = f"import sys; sys.path[:0] = {list(path)!r}; import accelmgr"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("what", FOUND)
def test_it_is_named(what, tmp_path):
    content, message = FOUND[what]
    (tmp_path / "torch.py").write_text(content)
    python = r"\S*" + re.escape(pathlib.Path(sys.executable).name)
    assert re.match("ImportError: .*" + message.format(python=python), imported(str(tmp_path)))


def test_none_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    python = pathlib.Path(sys.executable).name
    assert f"{python} cannot import: ModuleNotFoundError: No module named 'torch'" in imported(str(tmp_path))
