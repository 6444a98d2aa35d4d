"""Entries, the loop and the teacher-forced step."""
