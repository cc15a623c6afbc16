"""Renders the templates of this package with Jinja2.

A page is one file without network access; only that of ratings has a script. Values of models, data and users
are hostile: every one is escaped, after ``filters.clean`` has removed invisible characters.
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
for _filter in (
    filters.text,
    filters.transcript,
    filters.as_json,
    filters.fact,
    filters.number,
    filters.percent,
    filters.points,
    filters.thousands,
    filters.data_url,
):
    _environment.filters[_filter.__name__] = _filter
_environment.globals["line_chart"] = line_chart


def render(template: str, **values: Any) -> str:
    """The document of a template. Raises jinja2.UndefinedError for a missing value."""
    return _environment.get_template(template).render(values)


def source(template: str) -> str:
    assert _environment.loader is not None
    return _environment.loader.get_source(_environment, template)[0]


def write_page(path: Path, document: str) -> Path:
    with replacing(path) as file:
        file.write(document.encode("utf-8", "replace"))
    return path
