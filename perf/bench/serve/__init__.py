"""Benches of `counterpoint serve`."""
