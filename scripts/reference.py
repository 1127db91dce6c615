"""Prints the options section of docs/reference.md, from the table in hvd_strategy/options.py.

    python scripts/reference.py            # prints it
    python scripts/reference.py --write    # puts it into docs/reference.md

Run it with `--write` after a change of an option; `tests/unit/test_docs.py` compares the two.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
BEGIN = "<!-- begin: python scripts/reference.py --write -->"
END = "<!-- end -->"

# Whatever takes options, in the order in which the table names them.
TAKERS = ("HvdStrategy", "open_session", "GradientReducer")
TYPES = {
    float: "number",
    int: "whole number",
    str: "text",
    bool: "true or false",
    timedelta: "`timedelta` or seconds",
}


def keyword_arguments(name: str) -> list[str]:
    """Names of the arguments of a public function, or of a class when it is made.

    Read from the sources, so that neither torch nor Lightning is needed.
    """
    for path in sorted((ROOT / "hvd_strategy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == name:
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                        return _arguments(member)[1:]
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return _arguments(node)
    raise LookupError(f"hvd_strategy has no function or class {name}")


def _arguments(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def show_default(value: Any) -> str:
    """The default as one would write it in the environment or in Python."""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, float):
        return f"{value:g}"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def options_section() -> str:
    """The table of all options, as it stands in the page between the two marks."""
    # The package of this folder, whichever is installed.
    sys.path.insert(0, str(ROOT))
    from hvd_strategy.options import OPTIONS

    takers = {name: keyword_arguments(name) for name in TAKERS}

    def rows() -> Iterator[str]:
        yield "| Option | Environment | Type | Default | Accepts | What it does | Argument of |"
        yield "|---|---|---|---|---|---|---|"
        for option in OPTIONS.values():
            taken_by = [f"`{name}`" for name in TAKERS if option.name in takers[name]]
            cells = (
                f"`{option.name}`",
                f"`{option.env}`",
                TYPES.get(option.type, option.type.__name__),
                show_default(option.default),
                option.accepts,
                option.help,
                ", ".join(taken_by) or "none: environment only",
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join(rows())


def section_of(page: str) -> str:
    """What stands between the two marks of the page."""
    return page.partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Prints the section, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.name}")
    if not parser.parse_args().write:
        print(options_section())
        return
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} lacks the lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n\n{options_section()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
