"""`python -m draftwood_client` is `draftwood`."""

from draftwood_command import main

if __name__ == "__main__":
    main()
