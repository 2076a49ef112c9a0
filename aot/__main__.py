"""`python -m aot`, the same as the command `aot`."""

from .cli import main

main()
