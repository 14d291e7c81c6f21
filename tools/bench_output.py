"""Results as Markdown, CSV, JSON, JSON lines and SQL, laid out as llama-bench does."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pyggml.version import __version__

BUILD = f"build: {__version__} (0)"  # the last line below a table

R = TypeVar("R")  # a result
Value = str | int | float | bool

SQL_TYPES: Mapping[type, str] = {str: "TEXT", int: "INTEGER", bool: "INTEGER", float: "REAL"}


@dataclass(frozen=True, slots=True)
class Field(Generic[R]):
    """One named value of every format but Markdown."""

    name: str
    kind: type
    value: Callable[[R], Value]


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """One column of the Markdown table; numbers lie on the right."""

    title: str
    text: Callable[[R], str]
    width: int = 0  # 0: as wide as the title, at least 10
    left: bool = False

    def cell(self, text: str) -> str:
        n = self.width or max(len(self.title), 10)
        return f"{text:<{n}}" if self.left else f"{text:>{n}}"

    def rule(self) -> str:
        return "-" * (len(self.cell("")) - 1) + ("-" if self.left else ":")


@dataclass(frozen=True, slots=True)
class Samples(Generic[R]):
    """The single measurements, which only the JSON formats show."""

    name: str
    values: Callable[[R], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Layout(Generic[R]):
    """How the results of a run look."""

    name: str  # of the SQL table
    fields: Sequence[Field[R]]
    columns: Sequence[Column[R]]
    samples: Sequence[Samples[R]]
    footer: Callable[[], str]  # below the Markdown table


class Format(ABC, Generic[R]):
    """Turns results into text piece by piece, so that each shows as it comes."""

    def __init__(self, layout: Layout[R]) -> None:
        self.layout = layout

    def header(self) -> str:
        return ""

    @abstractmethod
    def record(self, result: R) -> str: ...

    def footer(self) -> str:
        return ""

    def plain(self, result: R) -> list[str]:
        """The fields' values as C++'s to_string writes them."""
        return [_plain(field.value(result)) for field in self.layout.fields]


class Markdown(Format[R]):
    def header(self) -> str:
        columns = self.layout.columns
        titles, rules = [c.cell(c.title) for c in columns], [c.rule() for c in columns]
        return self._row(titles) + self._row(rules)

    def record(self, result: R) -> str:
        return self._row([c.cell(c.text(result)) for c in self.layout.columns])

    def footer(self) -> str:
        return f"\n{self.layout.footer()}\n"

    @staticmethod
    def _row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |\n"


class Csv(Format[R]):
    def header(self) -> str:
        return ",".join(field.name for field in self.layout.fields) + "\n"

    def record(self, result: R) -> str:
        texts = [text.replace('"', '""') for text in self.plain(result)]
        return ",".join(f'"{text}"' for text in texts) + "\n"


class JsonLines(Format[R]):
    def record(self, result: R) -> str:
        return "{" + ", ".join(self.members(result)) + "}\n"

    def members(self, result: R) -> list[str]:
        """The "name": value pairs."""
        fields = [f'"{f.name}": {_json(f.value(result))}' for f in self.layout.fields]
        for samples in self.layout.samples:
            values = ", ".join(f"{value:.12g}" for value in samples.values(result))
            fields.append(f'"{samples.name}": [ {values} ]')
        return fields


class Json(JsonLines[R]):
    def __init__(self, layout: Layout[R]) -> None:
        super().__init__(layout)
        self._is_first = True

    def header(self) -> str:
        return "[\n"

    def record(self, result: R) -> str:
        comma = "" if self._is_first else ",\n"
        self._is_first = False
        return comma + "  {\n    " + ",\n    ".join(self.members(result)) + "\n  }"

    def footer(self) -> str:
        return "\n]\n"


class Sql(Format[R]):
    def header(self) -> str:
        rows = ",\n".join(f"  {f.name} {SQL_TYPES[f.kind]}" for f in self.layout.fields)
        return f"CREATE TABLE IF NOT EXISTS {self.layout.name} (\n{rows}\n);\n\n"

    def record(self, result: R) -> str:
        names = ", ".join(field.name for field in self.layout.fields)
        texts = [text.replace("'", "''") for text in self.plain(result)]
        values = ", ".join(f"'{text}'" for text in texts)
        return f"INSERT INTO {self.layout.name} ({names}) VALUES ({values});\n"


def make_format(name: str, layout: Layout[R]) -> Format[R]:
    """The format that -o names."""
    formats: Mapping[str, type[Format[R]]] = {
        "csv": Csv,
        "json": Json,
        "jsonl": JsonLines,
        "md": Markdown,
        "sql": Sql,
    }
    return formats[name](layout)


def _plain(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return str(int(value)) if isinstance(value, bool) else str(value)


def _json(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _plain(value)
