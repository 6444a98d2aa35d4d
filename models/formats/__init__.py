"""Checkpoints of others: one file a format. Each reads, or says in one line why it cannot."""
