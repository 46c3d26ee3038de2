"""All settings of the service, each defined once, in the group of its purpose.

Flags, environment variables, YAML keys and help are made from the fields.

A value is taken from the first of: command-line flag, environment variable, YAML file, default.
"""

from draftwood_service.settings.groups import SettingsGroup
from draftwood_service.settings.settings import GROUPS, Settings, default_shown

__all__ = ["GROUPS", "Settings", "SettingsGroup", "default_shown"]
