"""`counterpoint eval`: what is evaluated, and a server for it. `orchestrator/evaluation/alone.py` plays the evaluations."""
