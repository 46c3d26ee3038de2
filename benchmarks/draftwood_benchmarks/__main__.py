"""`python -m draftwood_benchmarks NAME ...` is `draftwood bench NAME ...`."""

from __future__ import annotations

import sys

from draftwood_benchmarks.commands import bench

if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
