"""`python -m drumroll` is the command line."""

from drumroll.cli import main

main()
