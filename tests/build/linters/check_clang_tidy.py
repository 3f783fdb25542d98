#!/usr/bin/env python3
"""Checks that clang-tidy finds nothing in src/: check_clang_tidy.py CHECKOUT WORK [FLOOR...]

Checks the named floors, or all floors without torch. .clang-tidy has the rules. Most of the time goes into headers, so
sources that share them are checked together as one unit; a unit that does not compile is cut in half.

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

SOURCES_OF_A_UNIT = 8
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


def units_of(sources):
    """Yields (sources, options): a few sources of one folder that are compiled with the same options."""
    alike = {}
    for source, options in sources:
        alike.setdefault((source.parent, options), []).append(source)
    for (_, options), together in alike.items():
        for begin in range(0, len(together), SOURCES_OF_A_UNIT):
            yield tuple(together[begin : begin + SOURCES_OF_A_UNIT]), options


class Linter:
    def __init__(self, checkout, work):
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
            ["clang-tidy", "--quiet", f"--config-file={self.configuration}", file, "--", *options],
            capture_output=True, text=True)
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


def main():
    checkout, work = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    units = list(units_of(sources_of(checkout, work / "clang_tidy", sys.argv[3:])))
    if not units:
        sys.exit("nothing is compiled of " + (", ".join(sys.argv[3:]) or "src"))
    linter = Linter(checkout, work)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = [text for text in pool.map(linter.findings, units) if text]
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
