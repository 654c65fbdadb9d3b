"""`python -m holdfast`: the command line."""

from holdfast.cli.main import main

main()
