"""``python -m lipbound``: the command line."""

from lipbound.cli.main import main

main()
