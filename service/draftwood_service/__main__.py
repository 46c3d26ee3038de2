"""`python -m draftwood_service`: the same as `draftwood serve`."""

from __future__ import annotations

import sys

from draftwood_service.commands import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
