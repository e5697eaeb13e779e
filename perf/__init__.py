"""Floor 3: benchmarks, each runnable by anyone, each printing ratios measured in one run."""
