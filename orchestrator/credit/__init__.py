"""From rewards to advantages: pure functions of numbers, which `orchestrator/step/advantages.py` offers by name."""
