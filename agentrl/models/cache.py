"""Where prepared models live, and how a folder gets there whole or not at all."""

from __future__ import annotations

from agentrl.files import home, install_folder

__all__ = ["home", "install_folder"]
