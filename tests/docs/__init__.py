"""The documentation: its site is built, its links lead somewhere, its commands run."""
