"""Which configurations are tried: spaces, generators of variants, and searchers that learn from results."""
