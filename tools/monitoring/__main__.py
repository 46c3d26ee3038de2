"""Writes the dashboards into the chart's folder."""

from __future__ import annotations

from pathlib import Path

from tools.monitoring import FOLDER, files


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        Path(FOLDER, name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
