"""`python -m mooring.cli`: the `mooring` command without an installed script."""

from mooring.cli.main import app

app()
