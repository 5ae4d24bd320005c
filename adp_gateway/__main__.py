"""`python -m adp_gateway` is `adp-gateway`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
