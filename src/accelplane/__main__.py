"""`python -m accelplane` is `accelplane`."""

from accelplane.cli.main import main

main()
