#!/usr/bin/env python3
"""Reads what ctest has written (--output-junit) and prints what a person wants to know of it.

report.py failures FILE...     of each failed test the lines that say why, and the end of its output
report.py summary FILE...      the time of each group of tests, longest first, and how many tests passed, failed and
                               were skipped; exit code 5 if there is no test. A test that is in several files of one
                               folder counts as in the last of them.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

# What GoogleTest, the sanitizers and pytest begin the report of a failure with.
REPORT = re.compile(
    r": Failure$|^\[  FAILED  \]|WARNING: ThreadSanitizer|ERROR: \w+Sanitizer|runtime error: |^E  |^FAILED "
)


def cases_of(file):
    """The tests of a file, {name: element}; none if ctest has found none and written no file."""
    if not pathlib.Path(file).exists():
        return {}
    return {case.get("name"): case for case in xml.etree.ElementTree.parse(file).getroot().iter("testcase")}


def print_failure(case):
    lines = (case.findtext("system-out") or "").splitlines()
    shown = set(range(max(0, len(lines) - 15), len(lines)))
    for number, line in enumerate(lines):
        if len(shown) < 60 and REPORT.search(line):
            shown.update(range(number, min(number + 8, len(lines))))
    print(f"== {case.get('name')} failed. What it printed of it, and at the end:")
    print("\n".join(lines[number] for number in sorted(shown)))


def group_of(name):
    """session_test -> session; system_status_test.Case -> system_status; python.data -> python."""
    return name.split(".")[0].removesuffix("_test")


def reason_of(case):
    """Why a test was skipped: what GTEST_SKIP() says, or else the last line that was printed."""
    printed = (case.findtext("system-out") or "").splitlines()
    lines = [line for line in printed if line.strip()] or ["it said nothing"]
    place = next((at for at, line in enumerate(lines[:-1]) if line.endswith(": Skipped")), len(lines) - 2)
    return lines[place + 1][:200]


def summary(files):
    cases = {}
    for file in files:
        for name, case in cases_of(file).items():
            cases[pathlib.Path(file).parent, name] = case
    seconds, count = collections.Counter(), collections.Counter()
    for (_, name), case in cases.items():
        seconds[group_of(name)] += float(case.get("time"))
        count[group_of(name)] += 1
    print("seconds  tests  group (tests run beside each other: the sum is more than the time that passed)")
    for group, taken in seconds.most_common():
        print(f"{taken:7.1f}  {count[group]:5}  {group}")
    failed = [name for (_, name), case in cases.items() if case.get("status") == "fail"]
    passed = [name for (_, name), case in cases.items() if case.get("status") == "run"]
    skipped = [case for case in cases.values() if case.get("status") not in ("fail", "run")]
    for case in skipped:
        print(f"skipped: {case.get('name')}: {reason_of(case)}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 0 if cases else 5


def main():
    what, files = sys.argv[1], sys.argv[2:]
    if what == "summary":
        sys.exit(summary(files))
    for file in files:
        for case in cases_of(file).values():
            if case.get("status") == "fail":
                print_failure(case)


if __name__ == "__main__":
    main()
