"""`python -m holdfast`: the command, where its script is not on the path."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
