"""Decisions run again from what was recorded: the file that holds a record, and the comparison."""
