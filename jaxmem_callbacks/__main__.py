"""``python -m jaxmem_callbacks`` is ``jaxmem``."""

import sys

from jaxmem_callbacks.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
