"""Tests of `serve`: the page, the API, and what they may not do."""
