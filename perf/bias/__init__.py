"""Whether the update that a run makes is, in expectation, the policy gradient: enumerated in fractions, through the real code."""
