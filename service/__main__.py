"""`python -m service`: the same as `draftwood serve`."""

from __future__ import annotations

import sys

from service.commands import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
