"""Renders the templates of this package with Jinja2.

A page is one file without network access; only that of ratings has a script. Values from models, datasets and
users are hostile: Jinja2 escapes every value, and ``filters.clean`` removes invisible characters first.
Templates never use ``safe``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

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
    """The document of a template. Raises jinja2.UndefinedError when it uses a value that is missing."""
    return _environment.get_template(template).render(values)


def source(template: str) -> str:
    assert _environment.loader is not None
    return _environment.loader.get_source(_environment, template)[0]


def write_page(path: Path, document: str) -> Path:
    """Replace the file ``path`` by a document; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(document.encode("utf-8", "replace"))
    temporary.replace(path)
    return path
