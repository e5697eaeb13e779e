"""`counterpoint serve`."""
