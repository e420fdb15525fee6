"""Offline work on a pair: its retrieval heads, recorded verification steps, and the search for its profile."""
