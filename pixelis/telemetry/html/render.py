"""Renders the templates of this package with Jinja2.

A page is one file without network access; only that of ratings has a script. Values from models, datasets and
users are hostile: Jinja2 escapes every value, and ``filters.clean`` removes invisible characters first.
Templates never use ``safe``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pixelis.files import replacing
from pixelis.telemetry.html import filters
from pixelis.telemetry.html.charts import line_chart

_environment = Environment(
    loader=PackageLoader("pixelis.telemetry.html"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=filters.clean,
    trim_blocks=True,
    lstrip_blocks=True,
)
for _name in (
    "text",
    "transcript",
    "as_json",
    "fact",
    "number",
    "percent",
    "points",
    "thousands",
    "data_url",
):
    _environment.filters[_name] = getattr(filters, _name)
_environment.globals["line_chart"] = line_chart


def render(template: str, **values: Any) -> str:
    """The document of a template. Raises jinja2.UndefinedError when it uses a value that is missing."""
    return _environment.get_template(template).render(values)


def source(template: str) -> str:
    assert _environment.loader is not None
    return _environment.loader.get_source(_environment, template)[0]


def write_page(path: Path, document: str) -> Path:
    """Replace the file ``path`` by a document; returns ``path``."""
    with replacing(path) as file:
        file.write(document.encode("utf-8", "replace"))
    return path
