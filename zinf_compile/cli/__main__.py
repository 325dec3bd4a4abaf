"""`python -m zinf_compile.cli` is `zinf`: torchrun starts modules."""

import sys

from zinf_compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
