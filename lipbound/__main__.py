"""Run the command line with ``python -m lipbound``."""

from lipbound.cli.main import main

if __name__ == "__main__":
    main()
