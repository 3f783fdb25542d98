"""Medians of measurements, tables and targets as plain data, and their printed form."""

import dataclasses
import statistics
import textwrap


class Measured:
    """Medians over lines that differ only in value and round."""

    def __init__(self, lines):
        values = {}
        for line in lines:
            key = frozenset((k, v) for k, v in line.items() if k not in ("value", "round", "unit"))
            values.setdefault(key, []).append(line["value"])
        self._medians = [(dict(key), statistics.median(found)) for key, found in values.items()]

    def get(self, name, metric, **attributes):
        """The median of a measurement; None if there is none. Attributes that a measurement lacks are not compared: a
        peer that does not depend on them has one number for all."""
        wanted = {"name": name, "metric": metric, **attributes}
        for key, median in self._medians:
            if all(key.get(attribute, value) == value for attribute, value in wanted.items()):
                return median
        return None

    def values_of(self, attribute, **where):
        """All values of an attribute. Numbers are sorted; strings are in the order of the measurements."""
        found = {
            key[attribute]: None
            for key, _ in self._medians
            if attribute in key and all(key.get(k) == v for k, v in where.items())
        }
        return sorted(found) if all(isinstance(value, (int, float)) for value in found) else list(found)


def ratio(numerator, denominator):
    return None if numerator is None or not denominator else numerator / denominator


@dataclasses.dataclass
class Table:
    title: str
    columns: list
    rows: list = dataclasses.field(default_factory=list)
    is_markdown: bool = False  # printed as a table of Markdown


@dataclasses.dataclass
class Target:
    """`value` should be at most `bound`, or at least, if `is_minimum`. A `value` of None was not measured."""

    text: str
    value: float | None
    bound: float
    is_minimum: bool = False

    @property
    def reached(self):
        if self.value is None:
            return None
        return self.value >= self.bound if self.is_minimum else self.value <= self.bound

    @property
    def wanted(self):
        return f"{'at least' if self.is_minimum else 'at most'} {number(self.bound)}"

    @property
    def verdict(self):
        return {None: "not measured", True: "reached", False: "missed"}[self.reached]

    def line(self):
        return f"  {self.verdict:<12} {self.text}: {number(self.value)} ({self.wanted})"


def at_least(bound, text, value):
    return Target(text, value, bound, is_minimum=True)


def at_most(bound, text, value):
    return Target(text, value, bound)


@dataclasses.dataclass
class Report:
    tables: list
    targets: list

    def as_dict(self):
        return {
            "tables": [dataclasses.asdict(table) for table in self.tables],
            "targets": [{**dataclasses.asdict(target), "reached": target.reached} for target in self.targets],
        }


def number(value):
    """A number with about three significant digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.{digits}f}"


def as_text(report):
    parts = []
    for table in report.tables:
        if table.is_markdown:
            parts.append(f"{table.title}\n\n{markdown_table(table.columns, table.rows)}")
            continue
        cells = [table.columns] + [[number(cell) for cell in row] for row in table.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        parts.append("\n".join([table.title, lines[0], "-" * len(lines[0]), *lines[1:]]))
    if report.targets:
        parts.append("\n".join(["Targets", *(target.line() for target in report.targets)]))
    return "\n\n".join(parts)


def markdown_table(columns, rows):
    cells = [columns, ["---"] * len(columns), *([number(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def as_markdown(report):
    parts = []
    for table in report.tables:
        parts += [textwrap.fill(table.title, 120, break_on_hyphens=False), markdown_table(table.columns, table.rows)]
    if report.targets:
        rows = [[target.text, target.value, target.wanted, target.verdict] for target in report.targets]
        parts.append(markdown_table(["target", "measured", "aimed at", ""], rows))
    return "\n\n".join(parts)


def size_text(size_bytes):
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes // scale} {unit}"
    return f"{size_bytes} B"
