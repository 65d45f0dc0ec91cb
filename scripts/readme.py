"""The README's tables: each is made by a script, and lies between ``<!-- name -->`` and ``<!-- /name -->``."""

from __future__ import annotations

import pathlib

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def with_table(readme: str, name: str, table: str) -> str:
    """The README's text with a table between its marks.

    Raises:
        ValueError: the marks are not there, once each.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"{README.name} must hold {begin} and {end} once each; put them where the table belongs")
    head, rest = readme.split(begin)
    return f"{head}{begin}\n{table.strip()}\n{end}{rest.split(end)[1]}"


def put_table(name: str, table: str) -> None:
    """Writes a table into the README."""
    README.write_text(with_table(README.read_text(), name, table))
