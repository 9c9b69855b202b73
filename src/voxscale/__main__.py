"""`python -m voxscale` is the command line."""

from voxscale.cli import main

if __name__ == "__main__":
    main()
