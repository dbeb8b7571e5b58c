"""`--smoke` for every MARS recipe: the embedded model, world, tools and grader, and two short steps."""

from __future__ import annotations

SMOKE = {}
