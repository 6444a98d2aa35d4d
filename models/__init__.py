"""Drafters, the target, the cache and the export format."""
