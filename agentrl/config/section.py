"""What every section of a recipe is: frozen, and without unknown keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section that refuses unknown keys, and numbers that are none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    def turned(self, key: str) -> bool:
        """Whether a key differs from the section's own default. A resolved recipe names every key, so that a key was
        written down tells nothing."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


def with_tuples(value: Any) -> Any:
    """Lists as tuples all the way down: past a before-validator, strict validation sees Python values, not JSON."""
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return tuple(with_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
