"""`python -m benchmarks NAME ...` is `draftwood bench NAME ...`, from a folder of the sources that is not installed."""

from __future__ import annotations

import sys

from benchmarks.commands import bench

if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
