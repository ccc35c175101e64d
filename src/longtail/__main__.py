"""``python -m longtail`` is the ``longtail`` command."""

from longtail.cli import app

app()
