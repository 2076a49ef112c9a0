"""The tables of operations in an archive: read and written, and which function serves which call."""
