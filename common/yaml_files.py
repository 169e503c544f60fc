"""Reading YAML: what every room does the same way."""

from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML has it, is several times as fast


def parsed(text: str | bytes) -> Any:
    """What a YAML document says; yaml.YAMLError where it is none."""
    return yaml.load(text, Loader=_Loader)
