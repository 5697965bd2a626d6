"""`python -m atoll`, the same as `atoll`."""

from atoll.cli.main import main

if __name__ == "__main__":
    main()
