"""HTML pages of runs and data sets: Python prepares plain values, the Jinja2 templates hold all markup and
wording."""
