# SPDX-License-Identifier: Apache-2.0
"""`make docs`: write README.md and the pages of `docs/` that state numbers from their templates in `docs/templates/`.

A template is Markdown with Jinja expressions over what `values.py` and `times.py` compute from `data/recorded`, for
example ``{{ step("stage", batch=16) | round3 }}``. Edit the template, never the page; its lines are filled for you.
With `--check` nothing is written, and the exit code is 1 where a page is not what its template gives.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from docs import times, values

TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 120
UNBROKEN = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")
"""Code and links, which no line break divides."""
UNSPLIT = {"break_on_hyphens": False, "break_long_words": False}
FILTERS: dict[str, Callable[[Any], str]] = {
    "whole": lambda number: f"{number:,.0f}",
    "round1": lambda number: f"{number:.1f}",
    "round2": lambda number: f"{number:.2f}",
    "round3": lambda number: f"{number:.3f}",
    "percent": lambda share: f"{100 * share:.0f} %",
    "percent1": lambda share: f"{100 * share:.1f} %",
    "percent2": lambda share: f"{100 * share:.2f} %",
    "cell": lambda text: cell(str(text)),
}


def cell(text: str) -> str:
    """A claim's value as a table shows it: four digits of a long fraction, whole numbers in groups of three."""
    try:
        number = float(text)
    except ValueError:
        return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
    return f"{number:,.0f}" if number == int(number) else f"{number:.4g}"


def wrapped(text: str) -> str:
    """The Markdown with its paragraphs and list items filled to `WIDTH`; tables, code, headings and images stay."""
    lines: list[str] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph:
            indent = "  " if paragraph[0].startswith("- ") else ""
            words = UNBROKEN.sub(lambda span: span[0].replace(" ", "\0"), " ".join(map(str.strip, paragraph)))
            filled = textwrap.fill(words, WIDTH, subsequent_indent=indent, **UNSPLIT)
            lines.append(filled.replace("\0", " "))
            paragraph.clear()

    for line in text.splitlines():
        if not line or line.startswith(("    ", "|", "#", "![", "```")):
            flush()
            lines.append(line)
            continue
        if line.startswith("- "):
            flush()
        paragraph.append(line)
    flush()
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, Path]:
    """The page that each template gives."""
    found = sorted(TEMPLATES.glob("*.md.j2"))
    folder = {"README.md": values.ROOT}
    return {template: folder.get(template.stem, values.ROOT / "docs") / template.stem for template in found}


def render(template: Path) -> str:
    """The text of a template with its numbers, its lines filled.

    Raises:
        jinja2.UndefinedError: the template names what `values` and `times` do not have.
        LookupError: a number is not in the recorded tables, or is there several times.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    public = {name: found for name, found in (vars(values) | vars(times)).items() if not name.startswith("_")}
    return wrapped(environment.get_template(template.name).render(public))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a page is out of date")
    options = parser.parse_args(argv)
    stale = []
    for template, page in pages().items():
        text = render(template)
        if page.exists() and page.read_text() == text:
            continue
        stale.append(page.relative_to(values.ROOT))
        if not options.check:
            page.write_text(text)
    print(f"{'out of date, run `make docs`' if options.check else 'written'}: {', '.join(map(str, stale)) or 'none'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
