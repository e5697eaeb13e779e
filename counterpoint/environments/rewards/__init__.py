"""Rewards: a weighted rubric of mathematical, exact, regular-expression, code, judge and user-written parts."""
