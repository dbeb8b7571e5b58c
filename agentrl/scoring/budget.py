"""The cost meter and the hard budget: what calls cost is known in whole picodollars, and never exceeds the limit.

A call reserves the most it can cost before it starts and settles what it did cost when it ends, so calls in flight
count. Sums are integers: a hundred times 0.01 is 1.00.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentrl.config.schema import PriceConfig

_PICO = 10**12


class BudgetError(Exception):
    """The call might exceed the budget, so it was not made."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call."""

    input_tokens: int
    output_tokens: int


class Meter:
    """Adds up the cost of calls under `price`, and refuses the call that might exceed `budget` (US dollars)."""

    def __init__(self, price: PriceConfig, budget: float | None = None) -> None:
        self._per_input = round(price.input_per_million * _PICO / 1_000_000)
        self._per_output = round(price.output_per_million * _PICO / 1_000_000)
        self._per_call = round(price.per_call * _PICO)
        self._limit = None if budget is None else round(budget * _PICO)
        self._spent = 0
        self._reserved = 0
        self._settled = asyncio.Event()
        self.calls = 0
        self.input_tokens = 0
        self.output_tokens = 0

    @property
    def spent_usd(self) -> float:
        return self._spent / _PICO

    def cost_usd(self, usage: Usage, calls: int = 1) -> float:
        """What `calls` calls of `usage` in all cost."""
        return self._cost(usage, calls) / _PICO

    async def reserve(self, worst: Usage) -> int:
        """Hold the most that a call can cost, waiting for others to settle where they hold the rest of the budget.

        Returns what was held, for `settle`. Raises `BudgetError` when not even all of them can make room.
        """
        amount = self._cost(worst, 1)
        while self._limit is not None and self._spent + self._reserved + amount > self._limit:
            if not self._reserved or self._spent + amount > self._limit:
                raise BudgetError(
                    f"the budget of {self._limit / _PICO:g} USD does not cover another call "
                    f"({self.spent_usd:.6g} spent, up to {amount / _PICO:.6g} more)"
                )
            self._settled.clear()
            await self._settled.wait()
        self._reserved += amount
        self.calls += 1
        return amount

    def settle(self, reserved: int, usage: Usage | None, *, free: bool = False) -> None:
        """End a call. Without `usage` it costs what was held, because a service may charge for an answer that never
        arrived, unless the call is known to be `free`."""
        self._reserved -= reserved
        if usage is not None:
            self._spent += self._cost(usage, 1)
            self.input_tokens += usage.input_tokens
            self.output_tokens += usage.output_tokens
        elif not free:
            self._spent += reserved
        self._settled.set()

    def _cost(self, usage: Usage, calls: int) -> int:
        return usage.input_tokens * self._per_input + usage.output_tokens * self._per_output + calls * self._per_call
