"""`python -m patchloom` is the command `patchloom`."""

from patchloom.cli.main import main

if __name__ == "__main__":
    main()
