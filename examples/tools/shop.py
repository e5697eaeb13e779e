"""An agent with two tools that is paid for a right call at its turn: it asks for a thing's shelf, and then for the shelf's price.

A wrong turn is not blamed for what came before it: `job.toml` trains it by `advantage.kind = "turn_returns"`.
"""

from __future__ import annotations

from typing import Any

from counterpoint.environments import Example, Model, Rollout, ToolEnvironment, ToolResult

SHELVES = {"tea": 1, "rice": 2, "salt": 3, "soap": 4}
PRICES = {1: 7, 2: 3, 3: 2, 4: 5}
PAID = 0.25


def paid_once(state: dict[str, Any], call: str, is_right: bool) -> float:
    """Returns what a call is worth: the same right call again is worth nothing, or it would be made until the last turn."""
    if not is_right or call in state["paid"]:
        return 0.0
    state["paid"].append(call)
    return PAID


def find(thing: str, state: dict[str, Any]) -> ToolResult:
    """Says on which shelf a thing stands."""
    shelf = SHELVES.get(thing)
    told = "no such thing" if shelf is None else f"shelf {shelf}"
    return ToolResult(told, paid_once(state, "find", thing == state["wanted"]))


def price(shelf: int, state: dict[str, Any]) -> ToolResult:
    """Says what the thing on a shelf of this number costs."""
    told = f"{PRICES[shelf]} coins" if shelf in PRICES else "no such shelf"
    return ToolResult(told, paid_once(state, "price", shelf == SHELVES[state["wanted"]]))


class Shop(ToolEnvironment):
    """What does a thing cost?"""

    reward_bounds = (0.0, 1.0)

    def __init__(self) -> None:
        super().__init__(tools=["examples.tools.shop:find", "examples.tools.shop:price"], max_turns=4)

    def __len__(self) -> int:
        return len(SHELVES)

    def example(self, index: int) -> Example:
        """Returns the question after one thing."""
        thing = list(SHELVES)[index]
        return Example(index, f"What does the {thing} cost? Write the number.", str(PRICES[SHELVES[thing]]))

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Tells the tools what is wanted, and plays."""
        state |= {"wanted": list(SHELVES)[example.index], "paid": []}
        await super().rollout(example, model, state)

    async def reward(self, example: Example, rollout: Rollout, answer: str) -> float:
        """Returns the reward of the last turn: half a point for the answer."""
        return 0.5 * (answer.strip() == example.answer)
