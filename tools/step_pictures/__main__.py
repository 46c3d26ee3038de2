"""Writes the pictures of a step into `docs/images`."""

from pathlib import Path

from tools.step_pictures.drawing import pictures
from tools.step_pictures.recording import recorded

if __name__ == "__main__":
    for name, text in pictures(recorded()).items():
        Path("docs/images", name).write_text(text, encoding="utf-8")
