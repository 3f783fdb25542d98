#!/usr/bin/env python3
"""Checks that clang-tidy finds nothing in src/: check_clang_tidy.py CHECKOUT WORK PYTHON [FLOOR...]

Checks the named floors, or all floors without torch. .clang-tidy has the rules. PYTHON has the clang-tidy of PyPI,
which does not look into the headers of packages, as Debian's does. Most of the time goes into headers all the same, so
the sources of a floor are checked together as one unit; a unit that does not compile is cut in half.

WORK keeps the build tree, and a mark for each unit without findings. Such a unit is checked again only when .clang-tidy
or a file that it includes has changed.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys

SOURCES_OF_A_UNIT = 24
DOES_NOT_COMPILE = "[clang-diagnostic-error]"


def output_of(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def sources_of(checkout, tree, floors):
    """[(source, options)]: the sources of the floors, and the options with which each is compiled."""
    options = ["CMAKE_CXX_COMPILER=clang++", "CMAKE_BUILD_TYPE=Debug", "ACCELMGR_TORCH=OFF", "ACCELMGR_TESTS=OFF"]
    output_of(["cmake", "-S", checkout, "-B", tree, "-G", "Ninja", *(f"-D{option}" for option in options)])
    sources = []
    for entry in json.loads((tree / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["file"])
        if not source.is_relative_to(checkout / "src"):
            continue
        if floors and source.relative_to(checkout / "src").parts[0] not in floors:
            continue
        words = shlex.split(entry["command"])
        compiler = next(place for place, word in enumerate(words) if word.endswith("clang++"))
        sources.append((source, tuple(words[compiler + 1 : words.index("-o")])))
    return sources


def units_of(checkout, sources):
    """Yields (sources, options): sources of one floor that are compiled with the same options."""
    alike = {}
    for source, options in sources:
        floor = source.relative_to(checkout / "src").parts[0]
        alike.setdefault((floor, options), []).append(source)
    for (_, options), together in alike.items():
        for begin in range(0, len(together), SOURCES_OF_A_UNIT):
            yield tuple(together[begin : begin + SOURCES_OF_A_UNIT]), options


class Linter:
    def __init__(self, checkout, work, program):
        self.program = program
        self.configuration = checkout / ".clang-tidy"
        self.marks = work / "clang_tidy_marks"
        self.marks.mkdir(parents=True, exist_ok=True)

    def findings(self, unit):
        """What clang-tidy prints about a unit; empty if it finds nothing."""
        sources, options = unit
        text = "".join(f'#include "{source}"\n' for source in sources)
        file = self.marks / f"{hashlib.sha256(text.encode()).hexdigest()}.cpp"
        file.write_text(text)
        mark = self.marks / self._digest(file, options)
        if mark.exists():
            return ""
        done = subprocess.run(
            [self.program, "--quiet", f"--config-file={self.configuration}", file, "--", *options],
            capture_output=True,
            text=True,
        )
        if DOES_NOT_COMPILE in done.stdout and len(sources) > 1:
            middle = len(sources) // 2
            halves = sources[:middle], sources[middle:]
            found = "".join(self.findings((half, options)) for half in halves)
        else:
            found = done.stdout + done.stderr if done.returncode != 0 else ""
        if not found:
            mark.touch()
        return found

    def _digest(self, file, options):
        digest = hashlib.sha256(repr(options).encode())
        # clang++ -M prints the rule also for a unit that does not compile.
        rule = subprocess.run(["clang++", *options, "-M", file], capture_output=True, text=True).stdout
        for name in [self.configuration, *shlex.split(rule.partition(":")[2].replace("\\\n", " "))]:
            digest.update(pathlib.Path(name).read_bytes())
        return digest.hexdigest()


def clang_tidy_of(python):
    find = "import clang_tidy; print(clang_tidy.get_executable('clang-tidy'))"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True)
    if found.returncode != 0:
        sys.exit(f"tools/setup installs clang-tidy into .venv; {python} has none:\n{found.stderr}")
    return found.stdout.strip()


def main():
    checkout, work = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    program, floors = clang_tidy_of(sys.argv[3]), sys.argv[4:]
    units = list(units_of(checkout, sources_of(checkout, work / "clang_tidy", floors)))
    if not units:
        sys.exit("nothing is compiled of " + (", ".join(floors) or "src"))
    linter = Linter(checkout, work, program)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = [text for text in pool.map(linter.findings, units) if text]
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
