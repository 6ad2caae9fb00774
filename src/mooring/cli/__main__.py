"""`python -m mooring.cli`: the `mooring` command without an installed script."""

from mooring_client.cli.main import main

main()
