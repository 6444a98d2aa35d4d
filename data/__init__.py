"""Conversations in, packed batches out."""
