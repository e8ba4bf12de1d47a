# SPDX-License-Identifier: Apache-2.0
"""`make docs`: write README.md and the pages of `docs/` that state numbers from their templates in `docs/templates/`.

A template is Markdown with Jinja expressions over what `values.py` computes from `data/recorded`, for example
``{{ row("gpu_direct", over="direct") }}``. Edit the template, never the page; its lines are filled for you. What a page
has no room for is in `docs/results.csv`, which is written too.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from docs import findings, values
from nwor_lab import paths

TEMPLATES = Path(__file__).parent / "templates"
RESULTS = Path(__file__).parent / "results.csv"
WIDTH = 120
ITEM = re.compile(r"- |\d+\. ")
UNBROKEN = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")
"""Code and links, which no line break divides."""
UNSPLIT = {"break_on_hyphens": False, "break_long_words": False}
FILTERS: dict[str, Callable[[Any], str]] = {
    "whole": lambda number: f"{number:,.0f}",
    "round1": lambda number: f"{number:.1f}",
    "round2": lambda number: f"{number:.2f}",
    "round3": lambda number: f"{number:.3f}",
    "round4": lambda number: f"{number:.4f}",
    "percent": lambda share: f"{100 * share:.0f} %",
    "percent1": lambda share: f"{100 * share:.1f} %",
    "percent2": lambda share: f"{100 * share:.2f} %",
}


def wrapped(text: str) -> str:
    """The Markdown with its paragraphs and list items filled to `WIDTH`; tables, code, headings and images stay."""
    lines: list[str] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph:
            item = ITEM.match(paragraph[0])
            indent = " " * len(item[0]) if item else ""
            words = UNBROKEN.sub(lambda span: span[0].replace(" ", "\0"), " ".join(map(str.strip, paragraph)))
            filled = textwrap.fill(words, WIDTH, subsequent_indent=indent, **UNSPLIT)
            lines.append(filled.replace("\0", " "))
            paragraph.clear()

    for line in text.splitlines():
        if not line or line.startswith(("    ", "|", "#", "![", "```")):
            flush()
            lines.append(line)
            continue
        if ITEM.match(line):
            flush()
        paragraph.append(line)
    flush()
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, Path]:
    """The page that each template gives."""
    found = sorted(TEMPLATES.glob("*.md.j2"))
    folder = {"README.md": paths.ROOT}
    return {template: folder.get(template.stem, paths.ROOT / "docs") / template.stem for template in found}


def render(template: Path) -> str:
    """The text of a template with its numbers, its lines filled.

    Raises:
        jinja2.UndefinedError: the template names what `values` does not have.
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
    public = {name: found for name, found in vars(values).items() if not name.startswith("_")}
    return wrapped(environment.get_template(template.name).render(public))


def results_csv() -> str:
    """The text of `docs/results.csv`: `findings.findings`, numbers to five digits."""
    return findings.findings().to_csv(index=False, float_format="%.5g")


def main() -> None:
    """Write each page that is not what its template gives, and say which."""
    written = []
    every = {page: render(template) for template, page in pages().items()}
    for page, text in (every | {RESULTS: results_csv()}).items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            written.append(page.name)
    print(f"written: {', '.join(written) or 'none'}")


if __name__ == "__main__":
    main()
