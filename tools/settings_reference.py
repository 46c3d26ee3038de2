"""Writes the page of `docs/reference` about the settings of `draftwood serve`: `python -m tools.settings_reference`."""

from __future__ import annotations

from draftwood_service.config import ENV_PREFIX, flag
from draftwood_service.settings import GROUPS, SettingsGroup, default_shown
from tools.protocol_reference import PAGES, table

PAGE = PAGES / "settings.md"
_HEAD = f"""# Settings

Generated from `service/draftwood_service/settings`. Each setting of `draftwood serve` is a flag, an environment
variable (`{ENV_PREFIX}` and the name in capitals, with `_` for `-`) and a key of the YAML file that `--config` names
(with `_` for `-`). A value is taken from the first of: flag, variable, file, default. Durations are in seconds, sizes
in bytes or with a suffix K, M or G. `draftwood serve --check ...` starts nothing: it prints what would start, or a line
for each reason why it would not, with exit status 1 or 2. Variables that Kubernetes makes for services, such as
`DRAFTWOOD_PORT=tcp://10.0.0.1:50051`, are ignored, and the log says so.

"""


def text() -> str:
    return _HEAD + "\n\n".join(map(_section, GROUPS)) + "\n"


def _section(group: type[SettingsGroup]) -> str:
    rows = [
        (f"`{flag(name)}`", f"`{default_shown(name)}`", str(field.description).replace("|", "\\|"))
        for name, field in group.model_fields.items()
    ]
    return f"## {group.heading()}\n\n" + table(("flag", "default", ""), rows)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
