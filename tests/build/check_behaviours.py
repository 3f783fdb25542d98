#!/usr/bin/env python3
"""Checks that the tests named in the tables of tests/python/README.md exist.

    check_behaviours.py README

The last cell of a row has links to files, each followed by names of tests there: `Suite.Name` of C++, `test_name` of
Python. Prints a line for each row without a test and each test that does not exist; exits with 1 if there is one.
"""

import pathlib
import re
import sys

LINK_OR_NAME = re.compile(r"\[[^\]]*\]\(([^)]*)\)|`([^`]*)`")


def exists(test: str, text: str) -> bool:
    suite, dot, name = test.partition(".")
    pattern = rf"^TEST(_F|_P)?\({suite},\s*{name}\)" if dot else rf"^ *def {test}\("
    return re.search(pattern, text, re.MULTILINE) is not None


def violations(row: str, folder: pathlib.Path) -> list[str]:
    file, text, tests, found = "", "", 0, []
    for path, test in LINK_OR_NAME.findall(row.split(" | ")[-1]):
        if path:
            file = path
            text = (folder / path).read_text() if (folder / path).is_file() else ""
            continue
        tests += 1
        if not exists(test, text):
            found.append(f"there is no test {test} in {file or 'any file: a link is missing before it'}")
    return found if tests else ["names no test"]


def main(readme: pathlib.Path) -> int:
    rows = [
        (number, line)
        for number, line in enumerate(readme.read_text().splitlines(), start=1)
        if line.startswith("| ") and not line.startswith("| behaviour |")
    ]
    found = [f"{readme.name}:{number}: {what}" for number, row in rows for what in violations(row, readme.parent)]
    for line in found if rows else [f"{readme.name}: has no table"]:
        print(line)
    return 1 if found or not rows else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
