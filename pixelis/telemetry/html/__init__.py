"""HTML pages of runs and data sets: Python prepares values, Jinja2 templates hold markup and wording."""
