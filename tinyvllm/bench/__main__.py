"""The command line: `python -m tinyvllm.bench --help`."""

import sys

from tinyvllm.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
