"""The command line as `python -m spurline`."""

from spurline.cli import main

if __name__ == "__main__":
    main()
