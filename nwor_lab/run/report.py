# SPDX-License-Identifier: Apache-2.0
"""`results/<run>/index.html`: what a run found, its figures, lessons, claims and manifest, as a page for a browser.

Each executed notebook becomes a page beside it. The pages load nothing from outside the run's folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_lab import paths
from nwor_lab.run import claims as claim_table
from nwor_lab.run import findings, results


def write(directory: Path, varying: pd.DataFrame | None = None) -> Path:
    """Write `index.html` of a run, and a page for each of its executed notebooks; return its path.

    varying: of a grid, as `grid.varying` has it.
    """
    manifest, claims = results.read_manifest(directory), results.claims(directory)
    for name in manifest["notebooks"]:
        if (directory / f"{name}.ipynb").exists():
            results.write_text(directory / f"{name}.html", notebook_page(directory, name))
    return results.write_text(
        directory / "index.html",
        _render(
            title=f"Reproduction run {directory.name}",
            found=findings.sentences(directory),
            headline=claim_table.verdict_line(claims),
            claims=[*claims.itertuples()],
            show=claim_table,
            figures=sorted((directory / "figures").glob("*.png")),
            notebooks=sorted(manifest["notebooks"].items()),
            pages={page.stem for page in directory.glob("*.html")},
            points=manifest.get("points", []),
            grid=varying.to_html(border=0, na_rep="", float_format="{:.4g}".format)
            if varying is not None and len(varying)
            else "",
            made_by=next((one["provenance"] for one in manifest["notebooks"].values() if "provenance" in one), {}),
        ),
    )


def notebook_page(directory: Path, name: str) -> str:
    """Return an executed notebook as HTML, with a link back to `index.html`."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(directory / f"{name}.ipynb", as_version=4)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.exclude_anchor_links = True
    body, _ = exporter.from_notebook_node(notebook)
    body = re.sub(r'href="(?!https?:|#|data:)([^"#]+)', lambda found: f'href="{_link(directory, found[1])}', body)
    return _render(title=f"{name} of run {directory.name}", body=body)


def _link(directory: Path, link: str) -> str:
    """Return a link of a notebook as it is from the run's folder: to a page of the run, else to the checkout."""
    if link.endswith(".ipynb") and (directory / link).exists():
        return link.removesuffix(".ipynb") + ".html"
    return link if (directory / link).exists() else os.path.relpath(paths.NOTEBOOKS / link, directory)


def _render(**context: Any) -> str:
    import jinja2
    from pygments.formatters import HtmlFormatter

    loader = jinja2.PackageLoader("nwor_lab.run", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    highlighting = HtmlFormatter(style="default").get_style_defs(".highlight")
    return environment.get_template("report.html.j2").render(highlighting=highlighting, **context)
