"""Makes `fake_openai`, the local server of these tests, importable by its name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
